"""Conversion between trees and their shards: checks, layouts, and packs as blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._collectives.pipeline import pack, unpack
from jaxcoll._collectives.shards import Shards
from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._plan.packs.leaves import (
    Leaf,
    Whole,
    dtype_or_none,
    flatten_with_paths,
    make_leaf,
    no_array,
    where,
)
from jaxcoll._plan.packs.packing import LANES, Pack, pad_size
from jaxcoll._plan.packs.shard_layout import ShardLayout, first_difference


def describe_tree(tree: Any, axes: Mapping[str, int], caller: str) -> tuple[Any, tuple[Leaf, ...]]:
    """Return the structure of a tree to be cut over `axes`, and the leaves of its layout."""
    flat, treedef = flatten_with_paths(tree, lambda x: isinstance(x, Whole))
    leaves = []
    for name, leaf in flat:
        if obstacle := _obstacle(leaf):
            raise ValueError(f"`{caller}` cannot cut {where(name)} in shards: {obstacle}")
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype_or_none(leaf)))
        shape = jax.ShapeDtypeStruct(np.shape(leaf), dtype)
        leaves.append(describe_part(name, shape, leaf, axes))
    return treedef, tuple(leaves)


def describe_part(name: str, shape: jax.ShapeDtypeStruct, x: Any, axes: Mapping[str, int]) -> Leaf:
    """Describe what is cut over `axes`: leaves of one type that vary alike may share a pack."""
    varying = _compat.varying_axes(x) if isinstance(x, jax.Array) else frozenset()
    kind = (shape.dtype.name, *sorted(varying - set(axes)))
    return make_leaf(name, shape, tuple(axes.values()), kind=kind, in_shards=True)


def _obstacle(leaf: Any) -> str:
    """Return the reason why a leaf cannot be cut into shards; "" if it can."""
    if isinstance(leaf, Whole):
        more = " Call its `to_dense()`." if is_sparse(leaf) else ""
        return f"expected an array, got {type(leaf).__name__}.{more}"
    if not isinstance(leaf, jax.ShapeDtypeStruct) and (got := no_array(leaf)):
        return f"expected an array or a number, got {got}."
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return f"{dtype} holds no numbers; put None in its place."
    if isinstance(leaf, jax.Array) and _compat.is_partially_sharded(leaf):
        return "it is sharded over another axis of the mesh. Map that, too, in `jax.shard_map`."
    return ""


def all_parts(
    value: Any, layout: ShardLayout, axes: tuple[str, ...], stack: tuple[int, ...] = ()
) -> Shards:
    """Return the parts of all replicas of a whole tree, in a program that maps no axis."""

    def rows(*arrays: jax.Array) -> list[jax.Array]:
        packed = zip(layout.packs, pack(arrays, layout.packs, layout.leaves), strict=True)
        return [split_in_blocks(x, layout, p).reshape(-1, LANES) for p, x in packed]

    arrays = [jnp.asarray(x) for x in jax.tree.leaves(value)]
    return Shards(tuple((jax.vmap(rows) if stack else rows)(*arrays)), layout, axes)


def check_fits(
    layout: ShardLayout, treedef: Any, leaves: Sequence[Leaf], replicas: int, caller: str
) -> None:
    """Raise an error if `layout` was made for another tree or another number of replicas."""
    if layout.replicas != replicas:
        raise ValueError(
            f"`{caller}`: these shards were made for {layout.replicas} replicas, but there are "
            f"{replicas} here. Convert them between programs: an optimizer's state with its "
            "`unshard` and the new one's `shard`; parameters with `jc.unshard` and `jc.shard`."
        )
    difference = first_difference(leaves, layout.leaves)
    if not difference and treedef != layout.treedef:
        difference = f"its structure is {treedef}, and was {layout.treedef}"
    if difference:
        raise ValueError(
            f"`{caller}`: the tree is not the one that the shards were made of: {difference}. An "
            "optimizer's state belongs to the parameters that `init` got: call `init` again, or "
            "restore the leaf's shape and type."
        )


def split_in_blocks(packed: jax.Array, layout: ShardLayout, pack: Pack) -> jax.Array:
    """Split a whole pack into one block for each replica, of rows of 128 elements."""
    flat = packed.reshape(-1)
    filled = jnp.pad(flat, (0, pad_size(pack.size, layout.replicas) - flat.size))
    return filled.reshape(layout.replicas, layout.rows(pack), LANES)


def join_blocks(blocks: jax.Array, pack: Pack) -> jax.Array:
    """Undo `split_in_blocks`: return the pack, flat and without padding."""
    return blocks.reshape(-1)[: pack.size]


def unpack_leaves(
    wholes: Sequence[jax.Array], layout: ShardLayout, on_cpus: bool = False
) -> list[jax.Array]:
    """Return the leaves from packs that `join_blocks` returned; see `unpack`."""
    arrays = unpack(wholes, layout.packs, layout.leaves, on_cpus)
    return [
        jnp.zeros(leaf.shape, leaf.dtype) if array is None else array
        for array, leaf in zip(arrays, layout.leaves, strict=True)
    ]
