"""Train with compressed gradient sums, and compare the final loss with that of float32 sums.

    python docs/examples/compressed_training.py [--task digits|gpt] [--seeds 3] [--steps 200]

Handwritten digits (SGD with momentum) and a small GPT on the source of Python's standard library
(Adam), on simulated devices. Every format gets the same batches and the same initial parameters.
The loss is the mean over the last 13 updates. The exit status is 1 if, for any seed, the loss with
int8 or int4 and feedback differs from float32's by more than 0.5 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gpt
import jax
import numpy as np
import optax

import jaxcoll as jc
from jaxcoll.cli import demo

LAST = 13
TOLERANCE = 0.005

FORMATS: dict[str, jc.CommunicationOptions] = {
    name: jc.CommunicationOptions(compression=compression)
    for name, compression in {
        "float32": None,
        "int8": "int8",
        "int4": "int4",
    }.items()
}


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to train: initial parameters, loss, optimizer and batches."""

    initial: Callable[[int], Any]
    loss: Callable[..., jax.Array]
    optimizer: Callable[[int], optax.GradientTransformation]
    batches: Callable[[int, int], Iterator[Any]]


def _momentum(steps: int) -> optax.GradientTransformation:
    return optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9)


def _adam(steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(20, steps // 2), steps))


TASKS = {
    "digits": Task(
        demo.initial,
        lambda params, batch: demo.loss(params, *batch),
        _momentum,
        lambda steps, seed: demo.batches(demo.load(), 128, steps, seed),
    ),
    "gpt": Task(gpt.initial, gpt.loss, _adam, lambda steps, seed: gpt.batches(8, steps, seed)),
}


def train(
    task: Task, name: str, mesh: jax.sharding.Mesh, steps: int, seeds: int
) -> tuple[np.ndarray, int]:
    """Return the final loss for each seed, and the wire bytes of one gradient reduction."""
    options, tx = FORMATS[name], task.optimizer(steps)
    value_and_grad = jc.value_and_grad(task.loss, "data", options=options, feedback=True)

    @jc.data_parallel(mesh=mesh, batch_argnums="batch")
    def step(params: Any, state: Any, residual: Any, batch: Any) -> Any:
        value, grads, residual = value_and_grad(params, batch, residual=residual)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, residual, value

    ends = []
    for seed in range(seeds):
        params = task.initial(seed)
        residual = jc.compression.residual(params, mesh=mesh)
        state, losses = tx.init(params), []
        for batch in task.batches(steps, seed):
            params, state, residual, value = step(params, state, residual, batch)
            losses.append(float(value))
        ends.append(np.mean(losses[-LAST:]))
    sent = jc.plan(task.initial(0), mesh=mesh, options=options).wire_bytes
    return np.array(ends), sent


def main() -> int:
    """Train with every format and seed, and print a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, default="digits", help="(default: digits)")
    parser.add_argument("--devices", type=int, default=4, help="simulated devices (default: 4)")
    parser.add_argument("--steps", type=int, default=200, help="updates (default: 200)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((args.devices,), ("data",))
    print(f"{args.task}, {args.devices} replicas, {args.steps} steps, {args.seeds} seeds")
    print("format       bytes   loss  relative to float32, each seed")
    exact, all_bytes, failed = np.zeros(0), 1, False
    for name in FORMATS:
        ends, sent = train(TASKS[args.task], name, mesh, args.steps, args.seeds)
        if name == "float32":
            exact, all_bytes = ends, sent
        off = ends / exact - 1
        failed |= bool((abs(off) > TOLERANCE).any())
        each = "  ".join(f"{x:+8.2%}" for x in off)
        print(f"{name:10}  {sent / all_bytes:6.3f}  {ends.mean():.4f}  {each}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
