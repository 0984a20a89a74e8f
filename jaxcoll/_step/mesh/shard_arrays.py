"""Conversion between whole trees and `Shards`, between programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxcoll._collectives.shards import Shards
from jaxcoll._plan.packs.packing import LANES, pad_size
from jaxcoll._plan.packs.shard_layout import ShardLayout, SummedLayout
from jaxcoll._step.mesh.mesh import no_mesh
from jaxcoll._step.mesh.placement import host_array, make_spec


def cut(
    leaves: Sequence[Any],
    layout: ShardLayout,
    mesh: Mesh | None,
    axes: tuple[str, ...],
    stack: tuple[int, ...] = (),
) -> Shards:
    """Split whole leaves into Shards on a mesh. No device ever holds more than its part.

    The process must be able to read the leaves whole. Without a mesh the parts are numpy arrays.
    For stacked layers, `stack` is (number of layers,) and the layout is that of one layer. Cost:
    host memory of one pack at a time.
    """
    parts = []
    for pack in layout.packs:
        pieces = [np.asarray(host_array(leaves[s.leaf])).reshape(*stack, -1) for s in pack.segments]
        summed = isinstance(layout, SummedLayout)
        replicas = 1 if summed else layout.replicas
        whole = np.zeros((*stack, pad_size(pack.size, replicas)), pieces[0].dtype)
        np.concatenate(pieces, axis=-1, out=whole[..., : pack.size])
        if summed:  # all replicas get the same summand
            whole = np.tile(whole / np.float32(layout.replicas), layout.replicas)
        rows = whole.reshape(*stack, -1, LANES)
        if mesh is not None:
            sharding = NamedSharding(mesh, make_spec(axes, stack))
            rows = jax.make_array_from_callback(rows.shape, sharding, lambda at, r=rows: r[at])
        parts.append(rows)
    return Shards(tuple(parts), layout, axes)


def abstract(layout: ShardLayout, axes: tuple[str, ...], stack: tuple[int, ...] = ()) -> Shards:
    """Make Shards of shapes, of all replicas' parts together."""
    n = layout.replicas
    shapes = [
        jax.ShapeDtypeStruct((*stack, n * layout.rows(p), LANES), p.dtype) for p in layout.packs
    ]
    return Shards(tuple(shapes), layout, axes)


def make_shards(
    leaves: Sequence[Any],
    layout: ShardLayout,
    mesh: Mesh | AbstractMesh,
    axes: tuple[str, ...],
    stack: tuple[int, ...] = (),
) -> Shards:
    """Split whole leaves, as `cut`; if these are shapes, or the mesh is abstract, make shapes."""
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    if shapes or isinstance(mesh, AbstractMesh):
        return abstract(layout, axes, stack)
    with no_mesh():
        return cut(leaves, layout, mesh, axes, stack)


def part_shapes(shards: Shards) -> Shards:
    """Infer the shapes of one replica's parts from those of all replicas."""
    n, parts = shards.layout.replicas, []
    for x in shards.parts:
        *stack, rows, lanes = x.shape
        parts.append(jax.ShapeDtypeStruct((*stack, rows // n, lanes), x.dtype))
    return shards.replace(parts)


def whole_shapes(shards: Shards) -> Any:
    """Infer the whole tree as shapes, with the dtypes of the parts."""
    shapes = [jax.ShapeDtypeStruct((*shards.stack, *x.shape), x.dtype) for x in shards.leaves]
    return jax.tree_util.tree_unflatten(shards.layout.treedef, shapes)  # pyright: ignore[reportArgumentType]


def cut_like(leaves: Sequence[Any], shards: Shards) -> Shards:
    """Split whole leaves with the layout and on the mesh of `shards`; numpy arrays without one."""
    part = shards.parts[0]
    mesh = getattr(part.sharding, "mesh", None) if isinstance(part, jax.Array) else None
    return shards.replace(cut(leaves, shards.layout, mesh, shards.axes, shards.stack).parts)


def join_shards(shards: Shards) -> Any:
    """Join Shards to the whole tree, as numpy arrays with the dtypes of the parts.

    Cost: one pack at a time is copied to the host; if other processes hold parts, every device
    temporarily holds a copy of that pack.
    """
    layout, stack = shards.layout, shards.stack
    leaves = [np.zeros((*stack, *leaf.shape), leaf.dtype) for leaf in layout.leaves]
    for pack, part in zip(layout.packs, shards.parts, strict=True):
        flat, start = read(part).reshape(*stack, -1), 0
        if isinstance(layout, SummedLayout):
            flat = flat.reshape(layout.replicas, -1).sum(0, dtype=np.float64).astype(flat.dtype)
        for s in pack.segments:
            # A copy, so that no leaf keeps a whole pack alive
            piece = flat[..., start : start + s.size].copy()
            leaves[s.leaf] = piece.reshape((*stack, *layout.leaves[s.leaf].shape))
            start += s.size
    return jax.tree_util.tree_unflatten(layout.treedef, leaves)  # pyright: ignore[reportArgumentType]


def read(x: Any) -> np.ndarray:
    """Read `x` into a numpy array; all processes that hold parts of it must call."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
