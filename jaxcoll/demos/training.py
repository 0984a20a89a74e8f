"""One training step, over several devices with jaxcoll and on one without it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcoll as jc
from jaxcoll.demos.network import Params, loss

Batch = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Training:
    """Trained parameters on the host, the loss before every update, and seconds with compiling."""

    params: Params
    losses: tuple[float, ...]
    seconds: float


def optimizer(steps: int) -> optax.GradientTransformation:
    """Momentum, and a learning rate that rises for 30 steps and then falls to nothing.

    Two runs that differ by rounding alone stay within 1e-5 of each other. With Adam they do
    not: it divides by the size of past gradients, which blows up the rounding of small ones.
    """

    def rate(step: Any) -> jax.Array:
        return 0.05 * jnp.minimum(1, (step + 1) / 30) * (1 + jnp.cos(jnp.pi * step / steps)) / 2

    return optax.sgd(rate, momentum=0.9, nesterov=True)


def over_devices(devices: list[jax.Device], steps: int, options: jc.CommunicationOptions) -> Any:
    """The step as a user of jaxcoll writes it: two lines more than without."""
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("data",))
    step = functools.partial(_step, jc.value_and_grad(loss, "data"), optimizer(steps))
    return jc.data_parallel(step, mesh=mesh, options=options)


def on_one_device(steps: int) -> Any:
    """The same step without jaxcoll, on the whole batch: the reference."""
    return jax.jit(functools.partial(_step, jax.value_and_grad(loss), optimizer(steps)))


def _step(
    value_and_grad: Callable[..., Any],
    update: optax.GradientTransformation,
    params: Params,
    state: optax.OptState,
    batch: Batch,
) -> tuple[Any, optax.OptState, jax.Array]:
    value, grads = value_and_grad(params, *batch)
    updates, state = update.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def train(
    step: Any,
    params: Params,
    steps: int,
    batches: Iterable[Batch],
    progress: Callable[[float], None],
) -> Training:
    """Train by `step`, of `over_devices` or `on_one_device`; `progress` gets each loss."""
    start = time.perf_counter()
    state = optimizer(steps).init(params)
    losses = []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
        progress(losses[-1])
    return Training(jax.device_get(params), tuple(losses), time.perf_counter() - start)
