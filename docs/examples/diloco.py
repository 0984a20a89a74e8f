"""What local updates cost on a slow network: one process per host, a step that takes a while.

    python docs/examples/diloco.py [--compute 0.25] [--every 30]

To be started by a launcher, as any other job. Of each loop it prints the seconds of a step, the
share of them that the step itself takes, the bytes that this host sent for it, and the seconds of
CPU beside it.
"""

import argparse
import time

import jax
import numpy as np

import jaxcoll as jc


def data_parallel(params, options):
    """A loop that reduces as much as a gradient has in every step."""
    step = jc.data_parallel(
        lambda tree, rows: jc.all_reduce("mean", [x + rows[0] for x in tree], "data"),
        options=options,
    )
    return lambda state: step(params, rows())


def local(params, options, every):
    """A loop of local updates whose step does nothing."""
    train = jc.diloco(lambda w, s, x: (w, s, x.sum()), every=every, options=options)
    return lambda state: train(state or train.init(params, ()), rows())[0]


def rows():
    """A row for each replica, of which none is like another's."""
    return np.arange(jax.local_device_count(), dtype="f") + jax.process_index()


def sent():
    """Bytes that left this host by any interface but the loopback."""
    with open("/proc/self/net/dev") as file:
        lines = [line.partition(":") for line in file if ":" in line]
    return sum(int(rest.split()[8]) for name, _, rest in lines if name.strip() != "lo")


def measured(step, steps, compute):
    """Of a step: seconds, the share of `compute`, bytes, and seconds of CPU."""
    meet = jc.data_parallel(lambda x: jc.all_reduce("sum", x, "data"))
    state = None
    for _ in range(steps):  # what there is to compile
        state = step(state)
    jax.block_until_ready((state, meet(rows())))
    before = sent(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        time.sleep(compute)
        state = step(state)
    jax.block_until_ready((state, meet(rows())))
    after = sent(), time.process_time(), time.perf_counter()
    moved, cpu, seconds = ((b - a) / steps for a, b in zip(before, after, strict=True))
    return seconds, compute / seconds, moved, cpu


def main():
    """Measure one loop after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compute", type=float, default=0.25)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--size", type=int, default=2_000_000)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    jc.initialize()
    f32, int4 = jc.CommunicationOptions(), jc.CommunicationOptions(compression="int4")
    params = [np.zeros(given.size // 20, "f") for _ in range(20)]
    for name, loop, steps in (
        ("data parallel f32", data_parallel(params, f32), 3),
        ("the same again", data_parallel(params, f32), 3),
        ("data parallel int4", data_parallel(params, int4), 3),
        ("no exchange", local(params, f32, 1 << 30), given.every),
        ("local f32", local(params, f32, given.every), given.every),
        ("local int4", local(params, int4, given.every), given.every),
    ):
        if given.only in name:
            seconds, share, moved, cpu = measured(loop, steps, given.compute)
            if jax.process_index() == 0:
                text = f"{seconds:.4f} s  {share:.3f}  {moved:,.0f} B  {1e3 * cpu:.1f} ms CPU"
                print(f"{name:20s} {text}", flush=True)


if __name__ == "__main__":
    main()
