"""What it costs that calls over several processes are watched.

    python -m tests.processes.watch_cost [N]

Four processes all-reduce 4 MiB in N rounds (50) of some calls each: of a `data_parallel` step with
a deadline and without, and of the same compiled program by itself, twice. Prints the ratios of what
a call takes to what the program takes, and that of its twin.
"""

import os
import sys
import time

import jax
import numpy as np

import jaxcoll as jc
from jaxcoll.bench.launch import RANK, join, launch
from jaxcoll.bench.timing import interleaved, ratio

PROCESSES, SIZE, CALLS = 4, 1 << 20, 20


def main(rounds):
    def total(x):
        return jc.all_reduce("sum", x[0], "data")

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(rows, np.ones((1, SIZE), "f"))
    step = jc.data_parallel(total, mesh=mesh)
    timed = jc.data_parallel(total, mesh=mesh, options=jc.CommunicationOptions(timeout_seconds=60))
    program = step.lower(x).compile()
    calls = {"program": program, "twin": program, "step": step, "with a deadline": timed}

    def seconds(call):
        start = time.perf_counter()
        for _ in range(CALLS):
            call(x).block_until_ready()
        return (time.perf_counter() - start) / CALLS

    turns = {name: lambda call=call: seconds(call) for name, call in calls.items()}
    for turn in turns.values():
        turn()
    found = list(interleaved(turns, rounds))
    taken = {name: [each[name] for each in found] for name in turns}
    ratios = "; ".join(f"{name} {ratio(taken[name], taken['program'])}" for name in [*turns][1:])
    print(
        f"a program of {SIZE * 4 >> 20} MiB takes {1e3 * np.median(taken['program']):.2f} ms; beside "
        f"it: {ratios}; {rounds} rounds of {CALLS} calls, JAX {jax.__version__}"
    )


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    if RANK in os.environ:
        assert join()
        main(rounds)
    else:
        ended = launch([sys.executable, __file__, str(rounds)], PROCESSES, timeout=600)
        print(ended[0].log.splitlines()[-1])
