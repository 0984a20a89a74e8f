"""What it costs to watch for hangs: CPU time of a loop of short steps, with and without.

    python -m tests.hang.cost [TIMES]

Two processes call a program of about 200 µs, 60,000 times, and sum over the processes now and then.
Runs it watched, unwatched and unwatched again, TIMES (3) times in turn, and prints the ratios of the
medians of their CPU times.
"""

import os
import statistics
import subprocess
import sys
import time

STEPS = 60_000
VARIABLES = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}


def loop():
    import jax

    import jaxcoll as jc

    jc.initialize()
    import jax.numpy as jnp
    import numpy as np

    step = jax.jit(lambda x: jnp.tanh(x @ x) * 0.1)
    mesh = jax.make_mesh((2,), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    shared = jax.make_array_from_process_local_data(rows, np.ones((1, 4), "f"))
    total = jax.jit(lambda x: x.sum())
    x = step(jnp.ones((160, 160)))
    total(shared).block_until_ready()
    time.sleep(3)  # until the watch has imported what it needs
    before = os.times()
    for k in range(STEPS):
        x = step(x)
        x.block_until_ready()
        if k % 500 == 0:
            total(shared).block_until_ready()
    after = os.times()
    print("CPU", after.user + after.system - before.user - before.system, flush=True)


def seconds(*flags):
    command = [sys.executable, "-m", "jaxcoll", "launch", *flags, __file__, "loop"]
    done = subprocess.run(command, env={**os.environ, **VARIABLES}, capture_output=True, text=True)
    times = [float(line.split()[-1]) for line in done.stdout.splitlines() if " CPU " in line]
    assert len(times) == 2, done.stdout + done.stderr
    return sum(times)


def main():
    rows = [
        (seconds("--hang-seconds", "60"), seconds(), seconds())
        for _ in range(int(sys.argv[1]) if sys.argv[1:] else 3)
    ]
    watched, plain, again = map(statistics.median, zip(*rows, strict=True))
    each = 1e6 * plain / 2 / STEPS
    print(
        f"watched ÷ unwatched {watched / plain:.3f}; again {again / plain:.3f}; {each:.0f} µs a step"
    )


if __name__ == "__main__":
    loop() if sys.argv[1:] == ["loop"] else main()
