"""Times a training loop that reads its rows from something slow, with and without reading ahead."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxcoll as jc

ROWS, BATCH, WAIT = 1024, 64, 4e-4


class Slow:
    """Rows of a disk or a network: each takes a while, in which nobody computes."""

    rows = np.random.default_rng(0).standard_normal((ROWS, 16384)).astype("f")

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        time.sleep(WAIT)
        return self.rows[i]


def loss(w, x):
    """A line through all rows."""
    return jnp.mean((x @ w - 1) ** 2)


@jc.data_parallel
def step(w, x):
    """One step down."""
    value, gradient = jc.value_and_grad(loss, "data")(w, x)
    return w - 1e-4 * gradient, value


def seconds(source, prefetch):
    """The duration of each step of an epoch; the loop reads every loss, as a logger does."""
    w, found = np.zeros((16384, 64), "f"), []
    batches = iter(jc.batches(source, BATCH, seed=0, prefetch=prefetch))
    next(batches)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return found
        w, value = step(w, batch)
        float(value)
        found.append(time.perf_counter() - began)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    for name, source in (("slow rows", Slow()), ("rows in memory", Slow.rows)):
        seconds(source, 0)
        cases = {"prefetch=0": 0, "the same again": 0, "prefetch=2": 2}
        found = {case: [] for case in cases}
        for _ in range(6):
            for case, size in cases.items():
                found[case] += seconds(source, size)
        base = np.median(found["prefetch=0"])
        for case, times in found.items():
            median = np.median(times)
            print(f"{name}, {case}: {1e3 * median:.1f} ms a step, {median / base:.2f}")
