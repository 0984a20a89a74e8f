"""What it costs to watch for hangs: CPU time of a loop of short steps, with and without.

    python -m benchmarks.hang_cost [TURNS]

Process 0 of two, on a core of its own, calls a program of some 200 µs, and sums over the processes
now and then. In each turn (300) it runs a block of calls watched and two unwatched, in changing
order, so that a machine whose speed drifts slows all three alike. Prints the geometric mean of the
ratios of CPU times, user and system, with its 95 % interval; of the two unwatched blocks as well,
where it should be 1.
"""

import itertools
import math
import os
import statistics
import subprocess
import sys
import time

STEPS = 500  # of a block
VARIABLES = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}
ORDERS = [*itertools.permutations(("watched", "plain", "again"))]


def loop(turns):
    """Time the blocks on one of the two processes."""
    rank = int(os.environ["JAXCOLL_RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import jax

    import jaxcoll as jc
    from jaxcoll._report.hang.process import HangProcess

    jc.initialize()
    is_watched, beat = True, HangProcess.beat

    def beat_if_watched(self, now):
        return is_watched and beat(self, now)

    HangProcess.beat = beat_if_watched  # before the program makes devices: nothing looked yet
    import jax.numpy as jnp
    import numpy as np

    step = jax.jit(lambda x: jnp.tanh(x @ x) * 0.1)
    mesh = jax.make_mesh((2,), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    shared = jax.make_array_from_process_local_data(rows, np.ones((1, 4), "f"))
    total = jax.jit(lambda x: x.sum())
    x = step(jnp.ones((200, 200)))

    def block(name):
        nonlocal is_watched, x
        is_watched = name == "watched"
        if tool is not None:
            # Events stay on: Python would instrument all code anew, also that of the watch.
            register = sys.monitoring.register_callback
            register(tool, sys.monitoring.events.CALL, callback if is_watched else None)
        total(shared).block_until_ready()
        before = time.process_time()
        for _ in range(STEPS * (rank == 0)):
            x = step(x)
            x.block_until_ready()
        return time.process_time() - before

    time.sleep(3)  # until the watch has imported what it needs
    tool = callback = None
    if hasattr(sys, "monitoring"):
        tool = next(tool for tool in range(6) if sys.monitoring.get_tool(tool) == "jaxcoll")
        callback = sys.monitoring.register_callback(tool, sys.monitoring.events.CALL, None)
    for name in ORDERS[0]:
        block(name)
    for turn in range(turns):
        seconds = {name: block(name) for name in ORDERS[turn % len(ORDERS)]}
        if rank == 0:
            print("CPU", *(seconds[name] for name in ORDERS[0]), flush=True)


def show_ratio(above, below):
    """Show the geometric mean of the paired ratios, and two standard errors."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    error = statistics.stdev(logs) / len(logs) ** 0.5
    return f"{math.exp(statistics.mean(logs)):.4f} ± {2 * error:.4f}"


def main(turns):
    """Start the processes and print the ratios."""
    command = [sys.executable, "-m", "jaxcoll", "launch", "-n", "2", "--hang-seconds", "60"]
    done = subprocess.run(
        [*command, __file__, "loop", str(turns)], env={**os.environ, **VARIABLES},
        capture_output=True, text=True,
    )  # fmt: skip
    lines = [line.split()[2:] for line in done.stdout.splitlines() if " CPU " in line]
    assert len(lines) == turns, done.stdout + done.stderr
    watched, plain, again = zip(*(map(float, line) for line in lines), strict=True)
    each = 1e6 * statistics.median(plain) / STEPS
    print(
        f"watched ÷ unwatched {show_ratio(watched, plain)}; unwatched ÷ unwatched "
        f"{show_ratio(again, plain)}; {each:.0f} µs of CPU a step"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        loop(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 300)
