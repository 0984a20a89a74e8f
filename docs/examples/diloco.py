"""Measure local updates on a slow network: one process per host, with a step that takes a while.

    python docs/examples/diloco.py [--compute 0.25] [--every 30]

Start it with a launcher, like any other job. For each loop it prints the seconds per step, the
share of that time spent computing, the bytes per step that this host sent, and the CPU time per
step.
"""

import argparse
import time

import jax
import numpy as np

import jaxcoll as jc


def data_parallel(params, options):
    """Return a step that reduces as many bytes as the parameters have."""
    step = jc.data_parallel(
        lambda tree, rows: jc.all_reduce("mean", [x + rows[0] for x in tree], "data"),
        options=options,
    )
    return lambda state: step(params, rows())


def local(params, options, every):
    """Return a step of local updates that computes nothing."""
    train = jc.diloco(lambda w, s, x: (w, s, x.sum()), every=every, options=options)
    return lambda state: train(state or train.init(params, ()), rows())[0]


def rows():
    """Return a row for each of this process's replicas."""
    return np.arange(jax.local_device_count(), dtype="f") + jax.process_index()


def sent_bytes():
    """Return the bytes that left this host through any interface but the loopback."""
    with open("/proc/self/net/dev") as file:
        lines = [line.partition(":") for line in file if ":" in line]
    return sum(int(rest.split()[8]) for name, _, rest in lines if name.strip() != "lo")


def measure(step, steps, compute):
    """Return, per step: seconds, the share spent in `compute`, bytes sent, and CPU seconds."""
    barrier = jc.data_parallel(lambda x: jc.all_reduce("sum", x, "data"))
    state = None
    for _ in range(steps):  # compile
        state = step(state)
    jax.block_until_ready((state, barrier(rows())))
    before = sent_bytes(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        time.sleep(compute)
        state = step(state)
    jax.block_until_ready((state, barrier(rows())))
    after = sent_bytes(), time.process_time(), time.perf_counter()
    moved, cpu, seconds = ((b - a) / steps for a, b in zip(before, after, strict=True))
    return seconds, compute / seconds, moved, cpu


def main():
    """Measure one loop after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compute", type=float, default=0.25, help="seconds of each step")
    parser.add_argument("--every", type=int, default=30, help="steps between exchanges")
    parser.add_argument("--size", type=int, default=2_000_000, help="number of parameters")
    parser.add_argument("--only", default="", help="part of the name of the loops to measure")
    args = parser.parse_args()
    jc.initialize()
    f32, int4 = jc.CommunicationOptions(), jc.CommunicationOptions(compression="int4")
    params = [np.zeros(args.size // 20, "f") for _ in range(20)]
    for name, loop, steps in (
        ("data parallel f32", data_parallel(params, f32), 3),
        ("the same again", data_parallel(params, f32), 3),
        ("data parallel int4", data_parallel(params, int4), 3),
        ("no exchange", local(params, f32, 1 << 30), args.every),
        ("local f32", local(params, f32, args.every), args.every),
        ("local int4", local(params, int4, args.every), args.every),
    ):
        if args.only in name:
            seconds, share, moved, cpu = measure(loop, steps, args.compute)
            if jax.process_index() == 0:
                text = f"{seconds:.4f} s  {share:.3f}  {moved:,.0f} B  {1e3 * cpu:.1f} ms CPU"
                print(f"{name:20s} {text}", flush=True)


if __name__ == "__main__":
    main()
