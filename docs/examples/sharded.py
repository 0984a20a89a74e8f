r"""Train steps of stacked transformer layers with sharded parameters, by JAX and by jaxcoll.

    cd docs/examples
    jaxcoll inspect sharded:ahead --topology h100:8 --against sharded:in_place

The layers are those of `transformer.py`: 604 MB of float32 parameters, sent and computed in
bfloat16. Each device has 8 texts of 512 tokens, or of 2,048 tokens in `long`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformer import LAYERS, WIDTH, layer, through

import jaxcoll as jc

TEXTS, LENGTH, LONG = 8, 512, 2048

AnyMesh = Mesh | AbstractMesh
Example = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step, and the shapes of its arguments."""


def ahead(mesh: AnyMesh, count: int = 1, length: int = LENGTH) -> Example:
    """Gather each layer while the one before it is computed, in both passes."""

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        x, _ = jc.scan_layers(_layer, x, layers, "data", ahead=count, gather_dtype=jnp.bfloat16)
        return x

    shards = jc.shard(layer(WIDTH, jnp.float32, LAYERS), "data", stacked=True, mesh=mesh)
    return jc.data_parallel(_step(stack)), (shards, _texts(mesh, length))


def long(mesh: AnyMesh) -> Example:
    """Use longer texts."""
    return ahead(mesh, length=LONG)


def two_ahead(mesh: AnyMesh) -> Example:
    """Gather two layers ahead."""
    return ahead(mesh, 2)


def none_ahead(mesh: AnyMesh) -> Example:
    """Gather each layer when it is used."""
    return ahead(mesh, 0)


def in_place(mesh: AnyMesh) -> Example:
    """Gather each layer inside the scanned body, with JAX alone."""

    def gathered(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
        cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), each)
        return _layer(x, jax.lax.all_gather(cast, "data", tiled=True)), None

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(gathered), x, layers)[0]

    def step(layers: Any, x: jax.Array, *, mesh: AnyMesh) -> Any:
        rows = P(None, "data")
        specs = {"in_specs": (rows, P("data")), "out_specs": (rows, P())}
        return jax.shard_map(_step(stack, _by_jax), mesh=mesh, **specs)(layers, x)

    return step, (layer(WIDTH, jnp.float32, LAYERS), _texts(mesh, LENGTH))


def by_jit(mesh: AnyMesh) -> Example:
    """Let `jax.jit` insert all collectives, from shardings alone."""
    rows, whole = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P())

    def cast(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
        def gather(p: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(p.astype(jnp.bfloat16), whole)

        return _layer(x, jax.tree.map(gather, each)), None

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(cast), x, layers)[0]

    shards = layer(WIDTH, jnp.float32, LAYERS)
    shards = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=rows), shards)
    texts = _texts(mesh, LENGTH)
    texts = jax.ShapeDtypeStruct(texts.shape, texts.dtype, sharding=NamedSharding(mesh, P("data")))
    step = jax.jit(
        _step(stack, lambda loss, axis: jax.value_and_grad(loss)),
        out_shardings=(jax.tree.map(lambda _: rows, shards), whole),
    )
    return step, (shards, texts)


def _layer(x: jax.Array, each: Any) -> jax.Array:
    return through(each, x)


def _texts(mesh: AnyMesh, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((mesh.size * TEXTS, length, WIDTH), jnp.bfloat16)


def _by_jax(loss: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """Average the loss and the gradient, which the gather's derivative has already summed."""

    def of(layers: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(layers, x)
        return jax.lax.pmean(value, axis), jax.tree.map(
            lambda g: g / jax.lax.axis_size(axis), grads
        )

    return of


def _step(
    stack: Callable[..., jax.Array], value_and_grad: Callable[..., Any] = jc.value_and_grad
) -> Callable[..., Any]:
    """Return a step of gradient descent."""

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(stack(layers, x).astype(jnp.float32) ** 2)

    def step(layers: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(loss, "data")(layers, x)
        return jax.tree.map(lambda p, g: p - jnp.float32(1e-3) * g, layers, grads), value

    return step
