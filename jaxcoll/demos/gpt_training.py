"""The ways to train the small GPT over several devices, each the same model as on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jaxcoll as jc
from jaxcoll.demos.gpt import Params, initial, loss

AXIS = "data"
MICRO_BATCHES = 2
WARMUP = 20
PEAK = 3e-3


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to exchange the gradients.

    Attributes:
      name: as on the command line.
      says: what it does, in a few words.
      step: from the optimizer, to a step of (params, state, tokens) on one replica, which returns
        new parameters, a new state, and the loss.
      optimizer: from the plain one and the mesh, to the one that is used.
      options: what the reductions are asked for; None: nothing in particular.
    """

    name: str
    says: str
    step: Callable[[Any], Callable[..., Any]]
    optimizer: Callable[[Any, Mesh], Any] = lambda tx, mesh: tx
    options: jc.CommunicationOptions | None = None


def _by(value_and_grad: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """The usual step: a loss and gradients, an update, new parameters."""

    def of(tx: Any) -> Callable[..., Any]:
        def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
            value, grads = value_and_grad(params, tokens)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    return of


def _synced(params: Params, tokens: jax.Array) -> jax.Array:
    """The loss, with each layer's gradient reduced inside the loop of the backward pass."""
    return loss(params, tokens, lambda layer: jc.sync_in_backward(layer, AXIS))


MODES = {
    mode.name: mode
    for mode in (
        Mode("plain", "one reduction after the backward pass", _by(jc.value_and_grad(loss, AXIS))),
        Mode(
            "overlap",
            "packs apart, in the order in which gradients are ready",
            _by(jc.value_and_grad(loss, AXIS)),
            options=jc.CommunicationOptions(overlap=True, bytes_per_pack=1 << 18),
        ),
        Mode(
            "sync",
            "each layer's gradient inside the backward loop",
            _by(jc.value_and_grad(_synced, AXIS)),
        ),
        Mode(
            "accumulate",
            f"{MICRO_BATCHES} micro-batches, one reduction",
            _by(jc.accumulate(loss, AXIS, MICRO_BATCHES)),
        ),
        Mode(
            "sharded",
            "each device keeps its part of the optimizer's state",
            _by(jc.value_and_grad(loss, AXIS, scatter=True)),
            optimizer=lambda tx, mesh: jc.sharded_optimizer(tx, AXIS, mesh=mesh),
        ),
    )
}


def modes_of(names: str | None) -> dict[str, Mode]:
    """Some modes by name, in their order here; None: all.

    Raises:
      ValueError: there is no such mode.
    """
    asked = MODES if names is None else [x.strip() for x in names.split(",") if x.strip()]
    for name in asked:
        if name not in MODES:
            raise ValueError(f"--modes: no {name!r}; choose from {', '.join(MODES)}.")
    return {name: mode for name, mode in MODES.items() if name in asked}


def optimizer(steps: int) -> optax.GradientTransformation:
    """Adam, whose rate rises for `WARMUP` steps and then falls to nothing."""
    warmup = min(WARMUP, steps // 2)
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, PEAK, warmup, steps))


@dataclasses.dataclass(frozen=True)
class Trained:
    """How one training went.

    Attributes:
      losses: of every step, before its update.
      state_bytes: of the optimizer's state, on each device.
      report: what the step sends; None on one device.
    """

    losses: tuple[float, ...]
    state_bytes: int
    report: jc.Report | None


def train(
    mode: Mode | None,
    devices: list[jax.Device],
    steps: int,
    seed: int,
    batches: Iterable[np.ndarray],
    progress: Callable[[float], None],
) -> Trained:
    """Train from new parameters.

    Args:
      mode: how to exchange; None: on the first device alone, without jaxcoll.
      devices: of one platform.
      steps: that the learning rate is planned for.
      seed: of the parameters.
      batches: tokens, one array a step.
      progress: told each loss.
    """
    tx, params = optimizer(steps), initial(seed)
    if mode is None:
        step = jax.jit(_by(jax.value_and_grad(loss))(tx))
    else:
        mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
        tx = mode.optimizer(tx, mesh)
        step = jc.data_parallel(mode.step(tx), mesh=mesh, options=mode.options)
    state = tx.init(params)
    losses: list[float] = []
    report = None
    for tokens in batches:
        if mode is not None and report is None:
            report = jc.inspect(step, params, state, tokens)
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
        progress(losses[-1])
    return Trained(tuple(losses), _bytes_on(devices[0], state), report)


def _bytes_on(device: jax.Device, tree: Any) -> int:
    shards = (x.addressable_shards for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return sum(s.data.nbytes for each in shards for s in each if s.device == device)
