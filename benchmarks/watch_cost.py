"""What it costs that calls over several processes are watched.

    python -m benchmarks.watch_cost [ROUNDS [PROCESSES [KIB ...]]]

So many processes (2) all-reduce so many KiB (4, 64, 1024, 4096) by a `data_parallel` step, in
ROUNDS (50) of some calls each: with a deadline, without, and as if there were no other processes to
watch, which is measured twice. Prints the ratios of what a call takes to what it takes unwatched,
and that of the twin; and that of the compiled program, called by itself.
"""

import functools
import sys
import time

import cloudpickle
import jax
import numpy as np

import jaxcoll as jc
from jaxcoll._runtime import dispatch
from jaxcoll.cli.bench import interleave, ratio

WATCHED = dispatch.find_group
ROUND_SECONDS = 0.04
"""About how long the calls of one round take."""


def measure(kib, rounds):
    """Measure one size, and describe it in a line."""

    def total(x):
        return jc.all_reduce("sum", x[0], "data")

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(rows, np.ones((1, kib << 8), "f"))
    step = jc.data_parallel(total, mesh=mesh)
    timed = jc.data_parallel(total, mesh=mesh, options=jc.CommunicationOptions(timeout_seconds=60))
    program = step.lower(x).compile()
    calls = 10

    def find_none(devices):
        return None

    def seconds(call, find_group=WATCHED):
        dispatch.find_group = find_group
        start = time.perf_counter()
        for _ in range(calls):
            call(x).block_until_ready()
        return (time.perf_counter() - start) / calls

    turns = {
        "unwatched": lambda: seconds(step, find_none),
        "twin": lambda: seconds(step, find_none),
        "watched": lambda: seconds(step),
        "with a deadline": lambda: seconds(timed),
        "the program alone": lambda: seconds(program),
    }
    for turn in turns.values():
        turn()
    guess = jax.make_array_from_process_local_data(
        rows, np.full((1, kib << 8), turns["twin"](), "f")
    )
    mean = float(step(guess).addressable_data(0)[0]) / jax.process_count()  # the same on all
    calls = max(5, round(ROUND_SECONDS / mean))
    found = list(interleave(turns, rounds))
    taken = {name: [each[name] for each in found] for name in turns}
    ratios = [f"{name} {ratio(taken[name], taken['unwatched'])}" for name in [*turns][1:]]
    return (
        f"a call of {kib} KiB over {jax.process_count()} processes takes "
        f"{1e3 * np.median(taken['unwatched']):.2f} ms unwatched; beside it: {'; '.join(ratios)}; "
        f"{rounds} rounds of {calls} calls, JAX {jax.__version__}"
    )


def measure_all(sizes, rounds):
    """Measure on every process of a job, which all call this."""
    return [measure(kib, rounds) for kib in sizes]


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    rounds, processes = [*given, *(50, 2)[len(given) :]][:2]
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    work = functools.partial(measure_all, given[2:] or (4, 64, 1024, 4096), rounds)
    print(*jc.launch(work, processes)[0], sep="\n")
