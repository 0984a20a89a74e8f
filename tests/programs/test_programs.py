"""Ten programs of other libraries' users, over replicas: how many lines change, and equal losses.

Each is written as the guide of its library writes it, once plain and once with jaxcoll.
"""

import difflib
import inspect

import numpy as np
import pytest
from programs import with_equinox, with_flax, with_haiku_and_optax

pytestmark = pytest.mark.usefixtures("types_may_mix")

PROGRAMS = {  # module and name: lines of the plain program that change or go, and lines that come
    (with_flax, "train_state"): (2, 2),
    (with_flax, "batch_norm"): (3, 3),
    (with_flax, "nnx_in_place"): (4, 4),
    (with_flax, "nnx_functional"): (3, 3),
    (with_equinox, "filtered"): (7, 11),
    (with_equinox, "recurrent"): (2, 2),
    (with_haiku_and_optax, "averaged"): (2, 2),
    (with_haiku_and_optax, "clipped"): (2, 2),
    (with_haiku_and_optax, "accumulated"): (9, 6),
    (with_haiku_and_optax, "lookahead"): (2, 2),
}


@pytest.mark.parametrize(("module", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])
def test_a_program_gives_the_same_losses_over_eight_replicas(module, name):
    plain, parallel = (getattr(module, f"{name}_{kind}") for kind in ("plain", "parallel"))
    want = np.array(plain(), np.float64)
    assert len(set(want)) > 1
    np.testing.assert_allclose(np.array(parallel(), np.float64), want, rtol=2e-5)


@pytest.mark.parametrize(("module", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])
def test_so_many_lines_of_a_program_change(module, name):
    before, after = (
        inspect.getsource(getattr(module, f"{name}_{kind}")).splitlines()[1:]
        for kind in ("plain", "parallel")
    )
    changes = [line[0] for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert (changes.count("-"), changes.count("+")) == PROGRAMS[module, name]
