r"""Train steps of stacked transformer layers whose parameters are in shards, by JAX and by jaxcoll.

    cd docs/examples
    jaxcoll inspect sharded:ahead --topology h100:8 --against sharded:in_place

The layers are those of `transformer.py`, 604 MB of float32 parameters, which travel and compute in
bfloat16. A device has 8 texts of 512 tokens; of 2,048 tokens where the name says `long`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from transformer import LAYERS, WIDTH, layer, through

import jaxcoll as jc

TEXTS, LENGTH, LONG = 8, 512, 2048

AnyMesh = Mesh | AbstractMesh
Example = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step, and its arguments by their shapes."""


def ahead(mesh: AnyMesh, count: int = 1, length: int = LENGTH) -> Example:
    """Each layer's parameters gathered while the layer before it is computed, both ways."""

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        x, _ = jc.scan_layers(_layer, x, layers, "data", ahead=count, gather_dtype=jnp.bfloat16)
        return x

    shards = jc.shard(layer(WIDTH, jnp.float32, LAYERS), "data", stacked=True, mesh=mesh)
    return jc.data_parallel(_step(stack)), (shards, _texts(mesh, length))


def long(mesh: AnyMesh) -> Example:
    """The same with longer texts."""
    return ahead(mesh, length=LONG)


def two_ahead(mesh: AnyMesh) -> Example:
    """Two layers in flight."""
    return ahead(mesh, 2)


def none_ahead(mesh: AnyMesh) -> Example:
    """Each layer gathered where it is used."""
    return ahead(mesh, 0)


def in_place(mesh: AnyMesh) -> Example:
    """The same layers by JAX alone, gathered inside the scanned body."""

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


def _layer(x: jax.Array, each: Any) -> jax.Array:
    return through(each, x)


def _texts(mesh: AnyMesh, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((mesh.size * TEXTS, length, WIDTH), jnp.bfloat16)


def _by_jax(loss: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """A replica's own loss and gradient, of which the derivative of the gather makes the sum."""

    def of(layers: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(layers, x)
        return jax.lax.pmean(value, axis), jax.tree.map(
            lambda g: g / jax.lax.axis_size(axis), grads
        )

    return of


def _step(
    stack: Callable[..., jax.Array], value_and_grad: Callable[..., Any] = jc.value_and_grad
) -> Callable[..., Any]:
    """Gradient descent on every replica's rows."""

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(stack(layers, x).astype(jnp.float32) ** 2)

    def step(layers: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(loss, "data")(layers, x)
        return jax.tree.map(lambda p, g: p - jnp.float32(1e-3) * g, layers, grads), value

    return step
