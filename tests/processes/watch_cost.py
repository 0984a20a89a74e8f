"""What it costs that calls over several processes are watched.

    python -m tests.processes.watch_cost [N]

Four processes all-reduce 4 MiB by a `data_parallel` step, in N rounds (50) of some calls each: with
a deadline, without, and as if there were no other processes to watch, which is measured twice.
Prints the ratios of what a call takes to what it takes unwatched, and that of the twin; and that of
the compiled program, called by itself.
"""

import os
import sys
import time

import jax
import numpy as np

import jaxcoll as jc
from jaxcoll._host import deadline
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
    watched = deadline.team_of
    alone = lambda devices: None

    def seconds(call, team_of=watched):
        deadline.team_of = team_of
        start = time.perf_counter()
        for _ in range(CALLS):
            call(x).block_until_ready()
        return (time.perf_counter() - start) / CALLS

    turns = {
        "unwatched": lambda: seconds(step, alone),
        "twin": lambda: seconds(step, alone),
        "watched": lambda: seconds(step),
        "with a deadline": lambda: seconds(timed),
        "the program alone": lambda: seconds(program),
    }
    for turn in turns.values():
        turn()
    found = list(interleaved(turns, rounds))
    taken = {name: [each[name] for each in found] for name in turns}
    ratios = [f"{name} {ratio(taken[name], taken['unwatched'])}" for name in [*turns][1:]]
    print(
        f"a call of {SIZE * 4 >> 20} MiB takes {1e3 * np.median(taken['unwatched']):.2f} ms "
        f"unwatched; beside it: {'; '.join(ratios)}; {rounds} rounds of {CALLS} calls, "
        f"JAX {jax.__version__}"
    )


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    if RANK in os.environ:
        assert join()
        main(rounds)
    else:
        ended = launch([sys.executable, __file__, str(rounds)], PROCESSES, timeout=600)
        print(ended[0].log.splitlines()[-1])
