r"""Train steps of stacked transformer layers whose parameters are in shards, by JAX and by jaxcoll.

    cd docs/examples
    jaxcoll inspect sharded:ahead --topology h100:8 --against sharded:in_place

The layers are those of `transformer.py`: float32 parameters, which travel and compute in bfloat16.
A device has 8 texts of 512 tokens; of 2,048 tokens where the name says `long`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from transformer import LAYERS, WIDTH, layer, through

import jaxcoll as jc

DEVICES, TEXTS, LENGTH, LONG = 8, 8, 512, 2048
ROWS = {"qkv": True, "out": True, "up": True, "down": True, "norm1": False, "norm2": False}
SPECS = {name: P(None, "data") if rows else P() for name, rows in ROWS.items()}

Example = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step, and its arguments by their shapes."""


def ahead(count: int = 1, length: int = LENGTH, **how: Any) -> Example:
    """Each layer's parameters gathered while the layer before it is computed, both ways."""

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        return jc.scan_layers(
            lambda x, each: through(each, x),
            x,
            layers,
            "data",
            sharded=ROWS,
            gather_dtype=jnp.bfloat16,
            ahead=count,
            **how,
        )[0]

    return _step(stack), _arguments(length)


def long() -> Example:
    """The same with longer texts."""
    return ahead(length=LONG)


def two_ahead() -> Example:
    """Two layers in flight."""
    return ahead(2)


def in_place() -> Example:
    """The same layers gathered where they are used, inside the scanned body."""

    def gathered(each: Any) -> Any:
        return {
            name: jax.lax.all_gather(p.astype(jnp.bfloat16), "data", tiled=True)
            if ROWS[name]
            else p
            for name, p in each.items()
        }

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x, each: (through(gathered(each), x), None))
        return jax.lax.scan(body, x, layers)[0]

    return _step(stack), _arguments(LENGTH)


def _arguments(length: int) -> tuple[Any, ...]:
    texts = jax.ShapeDtypeStruct((DEVICES * TEXTS, length, WIDTH), jnp.bfloat16)
    return layer(WIDTH, jnp.float32, LAYERS), texts


def _step(stack: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Gradient descent on every replica's rows."""

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(stack(layers, x).astype(jnp.float32) ** 2)

    def replica(layers: Any, x: jax.Array) -> Any:
        value, grads = jc.value_and_grad(loss, "data")(layers, x)
        return jax.tree.map(lambda p, g: p - jnp.float32(1e-3) * g, layers, grads), value

    def step(layers: Any, x: jax.Array, *, mesh: Any) -> Any:
        specs = {"in_specs": (SPECS, P("data")), "out_specs": (SPECS, P())}
        return jax.shard_map(replica, mesh=mesh, **specs)(layers, x)

    return step
