"""What a call costs beside the bare jitted call of the same program, in one process.

    python -m tests.dispatch.call_cost [ROUNDS [DEVICES [LEAVES ...]]]

`data_parallel`, `strategy.run` and `NcclAllReduce.batch_reduce` with all arrays in place, for trees
of so many LEAVES (10, 100, 1000) of 4 floats over so many DEVICES (2; two or more), in ROUNDS (200)
of one call each. Prints the microseconds until the bare call and ours return, without waiting for
results (the fastest of each, which other work on the machine disturbs least), what ours adds, the
ratio of the rounds with its interval, that of the bare call's twin, and how much more Python
allocates.
"""

import gc
import os
import sys
import time
import tracemalloc

DEVICES = int([*sys.argv, 2][2]) if len(sys.argv) > 2 else 2
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxcoll as jc  # noqa: E402
from jaxcoll._dispatch import dispatch  # noqa: E402
from jaxcoll._distribute import replica_program  # noqa: E402
from jaxcoll._step import data_parallel  # noqa: E402
from jaxcoll.cli.bench import interleaved, ratio  # noqa: E402


def by_data_parallel(tree):
    step = jc.data_parallel(lambda w, x: jax.tree.map(lambda a: a + 1, w))
    rows = jax.NamedSharding(step.mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(np.ones((DEVICES, 2), "f"), rows)
    whole = jax.NamedSharding(step.mesh, jax.sharding.PartitionSpec())
    w = jax.device_put(tree, whole)
    return bare_of(lambda: step(w, x))


def by_strategy(tree):
    strategy = jc.MirroredStrategy()
    w = jc.distribute.Mirrored([tree] * DEVICES)

    def step(w):
        return jax.tree.map(lambda a: a + 1, w)

    w = strategy.run(step, args=(w,))
    return bare_of(lambda: strategy.run(step, args=(w,)))


def by_batch_reduce(tree):
    ops = jc.NcclAllReduce()
    value = jc.PerReplica([tree] * DEVICES)
    pairs = [(value, value)]
    return bare_of(lambda: ops.batch_reduce("sum", pairs))


def bare_of(call):
    """The call, and the jitted call that it comes to."""
    made, modules = [], (data_parallel, replica_program, dispatch)
    run = dispatch.run
    for module in modules:
        module.run = lambda one, *until: (made.append(one), run(one, *until))[1]
    call()
    for module in modules:
        module.run = run
    (found,) = made
    return call, lambda: found.program(*found.args, **found.kwargs)


def row(name, make, leaves, rounds):
    tree = {f"leaf{i:04d}": jnp.full(4, i, "f") for i in range(leaves)}
    call, bare = make(tree)

    def seconds(call):
        start = time.perf_counter()
        result = call()
        taken = time.perf_counter() - start
        jax.block_until_ready(result)
        return taken

    turns = {
        "bare": lambda: seconds(bare),
        "twin": lambda: seconds(bare),
        "ours": lambda: seconds(call),
    }
    for turn in [*turns.values()] * 5:
        turn()
    gc.disable()
    found = list(interleaved(turns, rounds))
    gc.enable()
    taken = {name: [each[name] for each in found] for name in turns}
    us = {name: 1e6 * min(times) for name, times in taken.items()}
    more = peak(call) - peak(bare)
    return (
        f"| `{name}` | {leaves:,} | {us['bare']:.0f} | {us['ours']:.0f} | "
        f"{us['ours'] - us['bare']:.0f} | {ratio(taken['ours'], taken['bare'])} | "
        f"{ratio(taken['twin'], taken['bare'])} | {more / 1000:.1f} |"
    )


def peak(call):
    tracemalloc.start()
    call()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    print("| call | leaves | bare µs | ours µs | added µs | ours ÷ bare | twin | kB more |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for leaves in given[2:] or (10, 100, 1000):
        for name, make in {
            "data_parallel": by_data_parallel,
            "strategy.run": by_strategy,
            "batch_reduce": by_batch_reduce,
        }.items():
            print(row(name, make, leaves, [*given, 200][0]), flush=True)
