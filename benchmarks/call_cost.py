"""Cost of a call of a `data_parallel` step beside the bare jitted call of the same program.

    python -m benchmarks.call_cost [ROUNDS [DEVICES [LEAVES ...]]]

In one process, for trees of so many LEAVES (10, 100, 1000) of 4 floats over so many DEVICES (2), in
ROUNDS (200) of one call each. Prints the microseconds until the bare call and ours return, without
waiting for results (the fastest of each, which other work on the machine disturbs least), the ratio
of the rounds with its interval, and that of the bare call measured again.
"""

import gc
import os
import sys
import time

GIVEN = [int(word) for word in sys.argv[1:]]
ROUNDS, DEVICES = [*GIVEN, *(200, 2)[len(GIVEN) :]][:2]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxcoll as jc  # noqa: E402
from jaxcoll.cli.bench import interleave, ratio  # noqa: E402


def measure(leaves):
    """Measure a tree of so many leaves, and return a row of the table."""
    tree = {f"leaf{i:04d}": jnp.full(4, i, "f") for i in range(leaves)}
    step = jc.data_parallel(lambda w, x: jax.tree.map(lambda a: a + 1, w))
    whole, rows = (jax.NamedSharding(step.mesh, jax.P(*axes)) for axes in ((), ("data",)))
    w, x = jax.device_put((tree, np.ones((DEVICES, 2), "f")), (whole, rows))
    made, _ = step.prepare(w, x)

    def seconds(call):
        start = time.perf_counter()
        result = call()
        taken = time.perf_counter() - start
        jax.block_until_ready(result)
        return taken

    def bare():
        return seconds(lambda: made.program(*made.args, **made.kwargs))

    turns = {"bare": bare, "bare again": bare, "ours": lambda: seconds(lambda: step(w, x))}
    for turn in [*turns.values()] * 5:
        turn()
    gc.disable()
    found = list(interleave(turns, ROUNDS))
    gc.enable()
    taken = {name: [each[name] for each in found] for name in turns}
    bare, ours = (1e6 * min(taken[name]) for name in ("bare", "ours"))
    ratios = [ratio(taken[name], taken["bare"]) for name in ("ours", "bare again")]
    return f"| {leaves:,} | {bare:.0f} | {ours:.0f} | {ratios[0]} | {ratios[1]} |"


if __name__ == "__main__":
    print(
        "| leaves | bare µs | ours µs | ours ÷ bare | bare again |",
        "| --- | --- | --- | --- | --- |",
        sep="\n",
    )
    for leaves in GIVEN[2:] or (10, 100, 1000):
        print(measure(leaves), flush=True)
