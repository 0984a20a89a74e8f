r"""Measure the bytes and seconds of a train step with sharded parameters over Gloo.

    jaxcoll launch -n 4 docs/examples/gloo_shards.py

Run it where nothing else uses the loopback interface, such as in a network namespace
(`unshare --net`), because the bytes are the kernel's counter of that interface. Wall times are
medians of interleaved steps; one step is measured twice, which shows the noise of the ratios.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcoll as jc

LAYERS, WIDTH, TEXTS, ROUNDS = 4, 512, 32, 5


def initial() -> Any:
    """Return the stacked parameters of all layers, with sizes that divide among four devices."""
    keys = jax.random.split(jax.random.key(0), 2)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)) / WIDTH
    return {"up": up, "down": jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)) / WIDTH}


def step_of(ahead: int) -> Any:
    """Return a step of gradient descent on a stack of layers gathered `ahead` layers early."""

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jc.scan_layers(layer, x, params, "data", ahead=ahead)[0] ** 2)

    @jc.data_parallel
    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jc.value_and_grad(loss, "data")(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def loopback_bytes() -> int | None:
    """Return the bytes sent through the loopback interface, or None if they are not counted."""
    counters = Path("/proc/net/dev")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(line.split()[9]) for line in lines if line.split()[0] == "lo:"), None)


def main() -> None:
    """Measure, and print the results on process 0."""
    jc.initialize()
    n = jax.process_count()
    if n == 1:
        raise SystemExit("one process sends nothing: start it with `jaxcoll launch -n 4`")
    params = jc.shard(initial, "data", stacked=True)
    x = np.random.default_rng(0).standard_normal((TEXTS, WIDTH)).astype("f")
    steps = {name: step_of(a) for name, a in (("0", 0), ("1", 1), ("1 again", 1))}
    report = jc.inspect(steps["1"], params, x)
    run = functools.partial(timed, params=params, x=x)
    for step in steps.values():
        run(step)
    before = loopback_bytes()
    for _ in range(ROUNDS):
        run(steps["1"])
    after = loopback_bytes()
    seconds = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            seconds[name].append(run(step))
    if jax.process_index():
        return
    tree = sum(x.nbytes for x in jax.tree.leaves(params))
    bound = 3 * (n - 1) * tree  # two gathers and a reduce-scatter, over all processes
    print(f"compiled: {report.wire_bytes * n / bound:.4f} of two gathers and a reduce-scatter")
    if before is not None and after is not None:
        print(f"the kernel's counter: {(after - before) / ROUNDS / bound:.4f}")
    medians = {name: float(np.median(each)) for name, each in seconds.items()}
    for name in ("1", "1 again"):
        ratio = np.median(np.array(seconds[name]) / np.array(seconds["0"]))
        print(f"wall time, ahead={name} ÷ ahead=0: {ratio:.3f} ({medians['0']:.3f} s)")


def timed(step: Any, params: Any, x: np.ndarray) -> float:
    """Return the seconds of one step."""
    start = time.perf_counter()
    jax.block_until_ready(step(params, x))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
