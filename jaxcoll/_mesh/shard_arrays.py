"""Shards between programs: global arrays of all replicas' parts, made of whole trees and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._mesh.placement import place
from jaxcoll._plan.packs.shard_layout import LANES, ShardLayout, padded
from jaxcoll._spmd.shards import Shards, is_shards


def specs_of(tree: Any) -> Any:
    """A `PartitionSpec` for each leaf and each `Shards` of a tree: copies of all but the latter.

    What `jax.shard_map` takes as `in_specs` and `out_specs`.
    """
    return jax.tree.map(
        lambda x: PartitionSpec(x.axes) if is_shards(x) else PartitionSpec(),
        tree,
        is_leaf=is_shards,
    )


def place_shards(shards: Shards, mesh: Mesh) -> Shards:
    """The parts where they belong on `mesh`, without a copy if they are there.

    Raises:
      ValueError: the mesh lacks an axis of theirs, or has another number of replicas along them.
    """
    missing = [a for a in shards.axes if a not in mesh.axis_names]
    n = 0 if missing else int(np.prod([mesh.shape[a] for a in shards.axes]))
    if n != shards.layout.replicas:
        had = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"`data_parallel`: Shards of {shards.layout.replicas} replicas along "
            f"{', '.join(map(repr, shards.axes))} do not fit the mesh ({had}). Bring an "
            "optimizer's state to it with `unshard`, and then `shard` of an optimizer made for it."
        )
    for pack, part in zip(shards.layout.packs, shards.parts, strict=True):
        expected = (n * shards.layout.rows(pack), LANES)
        if np.shape(part) != expected:
            raise ValueError(
                "`data_parallel`: the parts of Shards between programs are global arrays, here of "
                f"shape {expected}; got {np.shape(part)}. What `pmap` returns stays with `pmap`."
            )
    return place(shards, NamedSharding(mesh, PartitionSpec(shards.axes)))


def cut(
    leaves: Sequence[Any], layout: ShardLayout, mesh: Mesh | None, axes: tuple[str, ...]
) -> Shards:
    """The parts of whole leaves, each on its device: no device ever holds more than its own.

    Args:
      leaves: numpy arrays, numbers or `jax.Array`s that this process can read whole.
      layout: where the elements go.
      mesh: devices; None: nowhere yet, as numpy arrays.
      axes: its axes, outer first.

    Returns:
      Global arrays, or numpy arrays. Cost: one pack at a time in host memory.
    """
    parts = []
    for pack in layout.packs:
        pieces = [np.asarray(leaves[s.leaf]).reshape(-1) for s in pack.segments]
        whole = np.zeros(padded(pack.size, layout.replicas), pieces[0].dtype)
        np.concatenate(pieces, out=whole[: pack.size])
        rows = whole.reshape(-1, LANES)
        if mesh is not None:
            sharding = NamedSharding(mesh, PartitionSpec(axes))
            rows = jax.make_array_from_callback(rows.shape, sharding, lambda at, r=rows: r[at])
        parts.append(rows)
    return Shards(tuple(parts), layout, axes)


def abstract(layout: ShardLayout, axes: tuple[str, ...]) -> Shards:
    """The shapes of all replicas' parts together."""
    n = layout.replicas
    shapes = [jax.ShapeDtypeStruct((n * layout.rows(p), LANES), p.dtype) for p in layout.packs]
    return Shards(tuple(shapes), layout, axes)


def own_shapes(shards: Shards) -> Shards:
    """The shapes of one replica's parts, from those of all."""
    n = shards.layout.replicas
    return shards.replace(
        [jax.ShapeDtypeStruct((x.shape[0] // n, LANES), x.dtype) for x in shards.parts]
    )


def joined(shards: Shards) -> Any:
    """The whole tree that global arrays are the parts of, as numpy arrays of the parts' types.

    Cost: one pack at a time is brought here; where processes hold parts, every device gets a copy
    of that pack on the way.
    """
    layout = shards.layout
    found: list[np.ndarray] = [np.zeros(leaf.shape, leaf.dtype) for leaf in layout.leaves]
    for pack, part in zip(layout.packs, shards.parts, strict=True):
        flat, start = read(part).reshape(-1), 0
        for s in pack.segments:
            # A copy, so that no leaf keeps a whole pack alive.
            piece = flat[start : start + s.size].copy()
            found[s.leaf] = piece.reshape(layout.leaves[s.leaf].shape)
            start += s.size
    return jax.tree_util.tree_unflatten(layout.treedef, found)  # pyright: ignore[reportArgumentType]


def read(x: Any) -> np.ndarray:
    """`x` as a numpy array, wherever its parts are; all processes that hold some must call."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
