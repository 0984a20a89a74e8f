r"""Train steps of stacked transformer layers, each with plain JAX and with jaxcoll.

    cd docs/examples
    jaxcoll inspect stacks:scanned --topology h100:8 --against stacks:scanned_plain

Parameters and gradients are float32; the layers compute in bfloat16. A stack has no embedding,
because an embedding's gradient becomes ready last and has nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from transformer import LAYERS, WIDTH, layer, through

import jaxcoll as jc

Example = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step, and the shapes of its arguments."""

TEXTS, LENGTH = 96, 1024
"""12 texts of 1,024 tokens on each of eight devices: nanoGPT's default for GPT-2."""

HALVES = (("down", "norm2"), ("up", "out", "qkv", "norm1"))
"""The parameters of a layer that are differentiated first, and the rest; XLA merges neither."""

SMALL_LAYERS, SMALL_WIDTH = 2, 512
"""25 MB of gradients, which XLA for GPUs merges into one collective."""


def scanned() -> Example:
    """Reduce the gradients of 12 layers in a `lax.scan` inside the backward loop.

    `data_parallel` sets the compiler options that allow several collectives in flight.
    """

    def body(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
        return through(jc.sync_in_backward(each, "data"), x), None

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, layers)[0]

    return _by_jaxcoll(stack), _arguments(layer(WIDTH, jnp.float32, LAYERS), WIDTH)


def scanned_by_sixes() -> Example:
    """Use six layers per iteration of the loop, and two packs per layer.

    A collective ends in the iteration in which it started, so only the last of six layers has
    little to hide behind. With six layers per iteration, XLA's default of one collective at a time
    works best.
    """
    options = jc.CommunicationOptions(overlap=False, bytes_per_pack=64 << 20)

    def body(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
        for half in HALVES:
            part = {name: each[name] for name in half}
            each = {**each, **jc.sync_in_backward(part, "data", options=options)}
        return through(each, x), None

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, layers, unroll=6)[0]

    return _by_jaxcoll(stack), _arguments(layer(WIDTH, jnp.float32, LAYERS), WIDTH)


def scanned_plain() -> Example:
    """Average the 604 MB of gradients after the `lax.scan`."""
    return _plainly(_scan), _arguments(layer(WIDTH, jnp.float32, LAYERS), WIDTH)


def unrolled() -> Example:
    """Reduce packs of gradients of 12 layers in a Python loop as they become ready.

    A pack holds one of a layer's large matrices, or its two smaller ones.
    """
    overlap = jc.CommunicationOptions(overlap=True)
    return _by_jaxcoll(_loop, overlap), _arguments([layer(WIDTH, jnp.float32)] * LAYERS, WIDTH)


def unrolled_plain() -> Example:
    """Average the gradients of 12 layers in a Python loop leaf by leaf."""
    return _plainly(_loop), _arguments([layer(WIDTH, jnp.float32)] * LAYERS, WIDTH)


def small() -> Example:
    """Reduce packs of 25 MB of gradients, of two layers, as they become ready."""
    return _by_jaxcoll(_loop, jc.CommunicationOptions(overlap=True)), _arguments(
        _small(), SMALL_WIDTH
    )


def small_plain() -> Example:
    """Average the gradients of the two layers leaf by leaf."""
    return _plainly(_loop), _arguments(_small(), SMALL_WIDTH)


def _small() -> Any:
    return [layer(SMALL_WIDTH, jnp.float32)] * SMALL_LAYERS


def _arguments(layers: Any, width: int) -> tuple[Any, ...]:
    return layers, jax.ShapeDtypeStruct((TEXTS, LENGTH, width), jnp.bfloat16)


def _by_jaxcoll(
    stack: Callable[..., jax.Array], options: jc.CommunicationOptions | None = None
) -> Callable[..., Any]:
    """Return the step with jaxcoll."""

    def step(layers: Any, x: jax.Array) -> Any:
        value, grads = jc.value_and_grad(_loss(stack), "data")(layers, x)
        return _descend(layers, grads), value

    return jc.data_parallel(step, options=options)


def _plainly(stack: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return the step with JAX alone: `pmean` of the gradients, without `shard_map`'s checks."""

    def step(layers: Any, x: jax.Array, *, mesh: Any) -> Any:
        def replica(layers: Any, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(_loss(stack))(layers, x)
            grads = jax.lax.pmean(grads, "data")
            return _descend(layers, grads), jax.lax.pmean(value, "data")

        return jax.shard_map(
            replica, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )(layers, x)

    return step


def _loss(stack: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda layers, x: jnp.mean(stack(layers, x).astype(jnp.float32) ** 2)


def _scan(layers: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, each: (through(each, x), None), x, layers)[0]


def _loop(layers: Any, x: jax.Array) -> jax.Array:
    for each in layers:
        x = through(each, x)
    return x


def _descend(layers: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - jnp.float32(1e-3) * g, layers, grads)
