"""Train a small GPT with six ways to exchange gradients, and compare each with one device.

    python docs/examples/gpt.py [--devices 8] [--steps 100] [--modes plain,sharded]

The text is the source of Python's standard library, which every machine with Python has. The exit
status is 1 if any loss differs from that of one device by more than 1e-4.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcoll as jc

Params = dict[str, Any]

AXIS = "data"
LAYERS, WIDTH, HEADS, LENGTH = 4, 64, 4, 64
VOCABULARY = 256  # a token is a byte
TEXTS, MICROBATCHES = 32, 2
WARMUP, PEAK = 20, 3e-3
TEXT_BYTES = 1 << 20
TOLERANCE = 1e-4


def initial(seed: int) -> Params:
    """Return initial float32 parameters, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float) -> np.ndarray:
        return (rng.standard_normal(shape) * deviation).astype(np.float32)

    def layers(fan_in: int, fan_out: int, scale: float = 1.0) -> np.ndarray:
        return normal(LAYERS, fan_in, fan_out, deviation=scale / math.sqrt(fan_in))

    # Projections into the residual stream start smaller, as in GPT-2.
    residual = 1 / math.sqrt(2 * LAYERS)
    return {
        "embedding": normal(VOCABULARY, WIDTH, deviation=0.02),
        "positions": normal(LENGTH, WIDTH, deviation=0.02),
        "layers": {
            "norm1": np.ones((LAYERS, WIDTH), np.float32),
            "qkv": layers(WIDTH, 3 * WIDTH),
            "out": layers(WIDTH, WIDTH, residual),
            "norm2": np.ones((LAYERS, WIDTH), np.float32),
            "up": layers(WIDTH, 4 * WIDTH),
            "down": layers(4 * WIDTH, WIDTH, residual),
        },
        "norm": np.ones(WIDTH, np.float32),
    }


def loss(params: Params, tokens: jax.Array, scan: Callable[..., Any] = jax.lax.scan) -> jax.Array:
    """Return the mean cross-entropy of the next byte in `tokens`, int32 (texts, LENGTH + 1).

    `scan` applies the layers, with the signature of `jax.lax.scan`.
    """
    x = params["embedding"][tokens[:, :-1]] + params["positions"]

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        x = x + _attention(weights, _norm(x, weights["norm1"]))
        hidden = jax.nn.gelu(_norm(x, weights["norm2"]) @ weights["up"])
        return x + hidden @ weights["down"], None

    x, _ = scan(layer, x, params["layers"])
    logits = _norm(x, params["norm"]) @ params["embedding"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def _attention(weights: Params, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (a.reshape(heads) for a in jnp.split(x @ weights["qkv"], 3, -1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _synced(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the loss; each layer's gradient is reduced inside the backward loop."""

    def scan(layer: Callable[..., Any], x: jax.Array, layers: Params) -> Any:
        return jax.lax.scan(lambda x, w: layer(x, jc.sync_in_backward(w, AXIS)), x, layers)

    return loss(params, tokens, scan)


def of_shards(params: Params, tokens: jax.Array, **how: Any) -> jax.Array:
    """Return the loss of parameters from `in_shards`; each layer is gathered when it is used."""
    rest = jc.all_gather(params["rest"], AXIS)
    scan = functools.partial(jc.scan_layers, axis_name=AXIS, **how)
    return loss({**rest, "layers": params["layers"]}, tokens, scan)


def in_shards(params: Params, mesh: jax.sharding.Mesh) -> Params:
    """Shard the parameters over the devices: the stacked layers, and all others."""
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    return {
        "layers": jc.shard(params["layers"], AXIS, stacked=True, mesh=mesh),
        "rest": jc.shard(rest, AXIS, mesh=mesh),
    }


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to exchange gradients.

    Attributes:
      summary: a description for the table.
      value_and_grad: computes the loss and the reduced gradients.
      options: options of the reductions.
      sharded: each device keeps only its part of the optimizer state.
      parameters: each device also keeps only its part of the parameters.
    """

    summary: str
    value_and_grad: Callable[..., Any]
    options: jc.CommunicationOptions | None = None
    sharded: bool = False
    parameters: bool = False


MODES = {
    "plain": Mode("one reduction after the backward pass", jc.value_and_grad(loss, AXIS)),
    "overlap": Mode(
        "separate packs, in the order in which gradients become ready",
        jc.value_and_grad(loss, AXIS),
        options=jc.CommunicationOptions(overlap=True, bytes_per_pack=1 << 18),
    ),
    "sync": Mode(
        "each layer's gradient inside the backward loop", jc.value_and_grad(_synced, AXIS)
    ),
    "accumulate": Mode(
        f"{MICROBATCHES} microbatches, one reduction", jc.accumulate(loss, AXIS, MICROBATCHES)
    ),
    "sharded": Mode(
        "each device keeps its part of the optimizer state",
        jc.value_and_grad(loss, AXIS, scatter=True),
        sharded=True,
    ),
    "parameters": Mode(
        "also its part of the parameters, gathered layer by layer",
        jc.value_and_grad(of_shards, AXIS),
        sharded=True,
        parameters=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """The loss of every step, bytes on each device between steps, and the report of a step."""

    losses: np.ndarray
    params_bytes: int
    state_bytes: int
    report: Any


def train(mode: Mode | None, devices: list[jax.Device], steps: int, seed: int) -> Trained:
    """Train from initial parameters; mode None uses only the first device, without jaxcoll."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK, min(WARMUP, steps // 2), steps)
    tx, params = optax.adam(schedule), initial(seed)
    if mode is None:
        step = jax.jit(_step(jax.value_and_grad(loss), tx))
    else:
        mesh = jax.sharding.Mesh(np.array(devices, dtype=object), (AXIS,))
        if mode.sharded:
            tx = jc.sharded_optimizer(tx, AXIS, mesh=mesh)
        if mode.parameters:
            params = in_shards(params, mesh)
        step = _step(mode.value_and_grad, tx)
        step = jc.data_parallel(step, mesh=mesh, batch_argnums="tokens", options=mode.options)
    state, report, losses = tx.init(params), None, []
    for tokens in batches(batch_size(len(devices)), steps, seed):
        if mode is not None and report is None:
            report = jc.inspect(step, params, state, tokens)
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
    params_bytes, state_bytes = (_bytes_on(devices[0], tree) for tree in (params, state))
    return Trained(np.array(losses), params_bytes, state_bytes, report)


def _step(value_and_grad: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = value_and_grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _bytes_on(device: jax.Device, tree: Any) -> int:
    shards = (x.addressable_shards for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return sum(s.data.nbytes for each in shards for s in each if s.device == device)


def batch_size(replicas: int) -> int:
    """Return about `TEXTS`, rounded to a whole number per replica and microbatch."""
    share = MICROBATCHES * replicas
    return share * max(1, round(TEXTS / share))


def load() -> np.ndarray:
    """Return the first `TEXT_BYTES` bytes of the standard library's modules, sorted by name."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return np.frombuffer(bytes(text[:TEXT_BYTES]), np.uint8)


def batches(size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random pieces of the text, int32 (size, LENGTH + 1), the same for the same seed."""
    text, rng = load(), np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - LENGTH, (size, 1))
        yield text[starts + np.arange(LENGTH + 1)].astype(np.int32)


def difference(one: Trained, many: Trained) -> float:
    """Return the largest relative difference between the losses of a step."""
    return float(np.max(np.abs(many.losses - one.losses) / one.losses))


def main() -> int:
    """Train on one device and in every mode, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices (default: 8)")
    parser.add_argument("--steps", type=int, default=100, help="updates (default: 100)")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    args = parser.parse_args()
    names = args.modes.split(",")
    if unknown := [name for name in names if name not in MODES]:
        parser.error(f"--modes: no {unknown[0]!r}; choose from {', '.join(MODES)}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    devices = jax.devices()
    with jax.default_device(devices[0]):
        one = train(None, devices, args.steps, args.seed)
    print(f"one device: last loss {one.losses[-1]:.4f}, {one.state_bytes:,} bytes of state")
    print("mode         last loss  differs by  collectives  wire bytes  state bytes  parameters")
    worst = 0.0
    for name in names:
        many = train(MODES[name], devices, args.steps, args.seed)
        assert many.report is not None
        off = difference(one, many)
        worst = max(worst, off)
        print(
            f"{name:12} {many.losses[-1]:9.4f}  {off:10.0e}  {many.report.runs:11}"
            f"  {many.report.wire_bytes:10,}  {many.state_bytes:11,}  {many.params_bytes:10,}"
            f"  {MODES[name].summary}",
            flush=True,
        )
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
