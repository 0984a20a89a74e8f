"""Shards between programs: made of whole trees, and whole trees made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jaxcoll._mesh.placement import host_array, spec_of
from jaxcoll._plan.packs.packing import LANES, padded
from jaxcoll._plan.packs.shard_layout import ShardLayout, SummedLayout
from jaxcoll._spmd.shards import Shards


def cut(
    leaves: Sequence[Any],
    layout: ShardLayout,
    mesh: Mesh | None,
    axes: tuple[str, ...],
    stack: tuple[int, ...] = (),
) -> Shards:
    """The parts of whole leaves, each on its device: no device ever holds more than its own.

    The process must be able to read the leaves whole. Without a mesh they lie nowhere yet, as
    numpy arrays. `stack` is (number of layers,) if every leaf has the layers first, and the layout
    is one layer's. Cost: one pack at a time in host memory.
    """
    parts = []
    for pack in layout.packs:
        pieces = [np.asarray(host_array(leaves[s.leaf])).reshape(*stack, -1) for s in pack.segments]
        summed = isinstance(layout, SummedLayout)
        replicas = 1 if summed else layout.replicas
        whole = np.zeros((*stack, padded(pack.size, replicas)), pieces[0].dtype)
        np.concatenate(pieces, axis=-1, out=whole[..., : pack.size])
        if summed:  # each replica has an equal summand
            whole = np.tile(whole / np.float32(layout.replicas), layout.replicas)
        rows = whole.reshape(*stack, -1, LANES)
        if mesh is not None:
            sharding = NamedSharding(mesh, spec_of(axes, stack))
            rows = jax.make_array_from_callback(rows.shape, sharding, lambda at, r=rows: r[at])
        parts.append(rows)
    return Shards(tuple(parts), layout, axes)


def abstract(layout: ShardLayout, axes: tuple[str, ...], stack: tuple[int, ...] = ()) -> Shards:
    """The shapes of all replicas' parts together."""
    n = layout.replicas
    shapes = [
        jax.ShapeDtypeStruct((*stack, n * layout.rows(p), LANES), p.dtype) for p in layout.packs
    ]
    return Shards(tuple(shapes), layout, axes)


def own_shapes(shards: Shards) -> Shards:
    """The shapes of one replica's parts, from those of all."""
    n, own = shards.layout.replicas, []
    for x in shards.parts:
        *stack, rows, lanes = x.shape
        own.append(jax.ShapeDtypeStruct((*stack, rows // n, lanes), x.dtype))
    return shards.replace(own)


def whole_shapes(shards: Shards) -> Any:
    """The tree that shards are the parts of, as shapes, in the types of the parts."""
    shapes = [jax.ShapeDtypeStruct((*shards.stack, *x.shape), x.dtype) for x in shards.leaves]
    return jax.tree_util.tree_unflatten(shards.layout.treedef, shapes)  # pyright: ignore[reportArgumentType]


def cut_like(leaves: Sequence[Any], shards: Shards) -> Shards:
    """The parts of whole leaves, laid out and placed as those of `shards` are; or numpy arrays."""
    part = shards.parts[0]
    mesh = getattr(part.sharding, "mesh", None) if isinstance(part, jax.Array) else None
    return shards.replace(cut(leaves, shards.layout, mesh, shards.axes, shards.stack).parts)


def joined(shards: Shards) -> Any:
    """The whole tree that global arrays are the parts of, as numpy arrays of the parts' types.

    Cost: one pack at a time is brought here; where processes hold parts, every device gets a copy
    of that pack on the way.
    """
    layout, stack = shards.layout, shards.stack
    found = [np.zeros((*stack, *leaf.shape), leaf.dtype) for leaf in layout.leaves]
    for pack, part in zip(layout.packs, shards.parts, strict=True):
        flat, start = read(part).reshape(*stack, -1), 0
        if isinstance(layout, SummedLayout):
            flat = flat.reshape(layout.replicas, -1).sum(0, dtype=np.float64).astype(flat.dtype)
        for s in pack.segments:
            # A copy, so that no leaf keeps a whole pack alive.
            piece = flat[..., start : start + s.size].copy()
            found[s.leaf] = piece.reshape((*stack, *layout.leaves[s.leaf].shape))
            start += s.size
    return jax.tree_util.tree_unflatten(layout.treedef, found)  # pyright: ignore[reportArgumentType]


def read(x: Any) -> np.ndarray:
    """`x` as a numpy array, wherever its parts are; all processes that hold some must call."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
