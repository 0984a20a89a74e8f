"""The data of the programs, and the steps that they take."""

import numpy as np

STEPS = 3
_RNG = np.random.default_rng(0)
X = _RNG.standard_normal((32, 6)).astype("f")
Y = _RNG.integers(0, 3, 32)
SEQUENCES = _RNG.standard_normal((32, 5, 2)).astype("f")
BATCH = X, Y


def losses(step, *carry, batch=(BATCH,)):
    """Those of some steps, each of which returns what the next one takes, and its loss."""
    values = []
    for _ in range(STEPS):
        *carry, value = step(*carry, *batch)
        values.append(value)
    return values
