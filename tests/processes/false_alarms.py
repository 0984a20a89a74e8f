"""Is anybody alarmed where nothing is wrong? Many collectives, with a straggler and short programs.

    python -m tests.processes.false_alarms [N]

Four processes make calls until N packs were all-reduced: of steps with and without a deadline, of a
step over another mesh and of `strategy.run`, in an order that changes all the time and is the same on
all. At every twentieth call the last process comes later by ten times what a call takes. Ends with status 0
if nobody raised anything and all sums were right.
"""

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

import jaxcoll as jc
from jaxcoll._cluster.launch.local import RANK, join

PROCESSES, SIZE = 4, 64


def programs():
    """(call, how many packs it reduces, the sum that it is to give) for each kind of call."""
    rank, devices = jax.process_index(), jax.devices()
    pair = devices[:2] if rank < 2 else devices[2:]
    world, near = (jax.sharding.Mesh(np.array(d), ("data",)) for d in (devices, pair))
    in_time = jc.CommunicationOptions(timeout_seconds=20)
    apart = in_time.replace(bytes_per_pack=1)
    total = lambda x: jc.all_reduce("sum", x[0], "data")
    parts = lambda x: jc.all_reduce("sum", [x[0, i::4] for i in range(4)], "data")

    def of_step(function, mesh, options):
        step = jc.data_parallel(function, mesh=mesh, options=options)
        mine = np.full((1, SIZE), rank + 1.0, "f")
        sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        x = jax.make_array_from_process_local_data(sharding, mine)
        packs = sum(len(plan.packs) for plan in jc.inspect(step, x).plans)
        return lambda: step(x), packs, sum(d.process_index + 1.0 for d in mesh.devices.flat)

    strategy = jc.MultiWorkerMirroredStrategy(communication_options=in_time)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group + 1)
    )

    def twice(x):
        return [jc.all_reduce("sum", x, "replica"), jc.all_reduce("sum", 2 * x, "replica")]

    return [
        of_step(total, world, in_time),
        of_step(total, world, jc.CommunicationOptions()),
        of_step(parts, world, apart),
        of_step(total, near, in_time),
        (lambda: strategy.run(twice, (value,)), 2, 10.0),
    ]


def main(wanted):
    known = programs()
    straggles = jax.process_index() == PROCESSES - 1
    order = np.random.default_rng(0)  # the same on all
    taken, lag, calls, packs, began = [], 0.0, 0, 0, time.monotonic()
    while packs < wanted:
        call, some, right = known[order.integers(len(known))]
        waits = calls % 20 == 19
        if straggles and waits:
            time.sleep(lag)
        start = time.perf_counter()
        result = call()
        if not waits:
            taken.append(time.perf_counter() - start)
        calls, packs = calls + 1, packs + some
        if calls % 100 == 0:
            lag = 10 * float(np.median(taken[-500:]))
            leaf = jax.tree.leaves(jax.tree.map(np.asarray, _local(result)))[0]
            assert np.all(leaf == right), (leaf, right)
    print(
        f"no alarm in {calls} calls with {packs} all-reduced packs; a call took "
        f"{1e3 * np.median(taken):.1f} ms, and one in twenty came {1e3 * lag:.0f} ms late; "
        f"{time.monotonic() - began:.0f} s, JAX {jax.__version__}"
    )


def _local(result):
    return jax.tree.map(
        lambda x: x.addressable_data(0), jax.tree.leaves(getattr(result, "tree", result))
    )


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    if RANK in os.environ:
        assert join()
        main(wanted)
    else:
        sys.path.append(str(Path(__file__).parents[1]))
        from processes.ranks import launch

        *_, last = launch([sys.executable, __file__, str(wanted)], PROCESSES, timeout=1800)
        print(last.splitlines()[-1])
