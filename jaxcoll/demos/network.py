"""A small convolutional network, and its training step with jaxcoll and without."""

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

Params = dict[str, dict[str, Any]]
Batch = tuple[np.ndarray, ...]

_SHAPES = {"conv1": (9, 16), "conv2": (9 * 16, 32), "hidden": (4 * 4 * 32, 64), "scores": (64, 10)}
_GAIN = 1.6  # keeps the size of activations from layer to layer; gelu would shrink them


def initial(seed: int) -> Params:
    """New parameters, float32, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    return {
        layer: {
            "bias": np.zeros(width, np.float32),
            "kernel": (rng.standard_normal((fan_in, width)) * (_GAIN / np.sqrt(fan_in))).astype(
                np.float32
            ),
        }
        for layer, (fan_in, width) in _SHAPES.items()
    }


def scores(params: Params, images: jax.Array) -> jax.Array:
    """Logits of shape (n, 10) for images of shape (n, 8, 8)."""
    x = images[..., None]
    x = jax.nn.gelu(_dense(_neighbourhoods(x), params["conv1"]))
    x = jax.nn.gelu(_dense(_neighbourhoods(x)[:, ::2, ::2], params["conv2"]))
    x = jax.nn.gelu(_dense(x.reshape(x.shape[0], -1), params["hidden"]))
    return _dense(x, params["scores"])


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of the images given: all of them, or one replica's share."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores(params, images), labels))


def accuracy(params: Params, images: np.ndarray, labels: np.ndarray) -> float:
    """The part of the images whose highest score is the right one."""
    found = np.argmax(np.asarray(jax.jit(scores)(params, images)), axis=1)
    return float(np.mean(found == labels))


def _dense(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _neighbourhoods(x: jax.Array) -> jax.Array:
    """Each pixel's 3 × 3 neighbourhood in one row: a convolution is a matrix product of these."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate(
        [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=-1
    )


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
        losses.append(float(value))  # waits: simulated devices share few cores
        progress(losses[-1])
    return Training(jax.device_get(params), tuple(losses), time.perf_counter() - start)
