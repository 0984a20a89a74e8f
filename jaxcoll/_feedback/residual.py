"""What replicas still owe to a sum: kept by each as a tree of its own, and sent with the next."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._plan.packs.leaves import where
from jaxcoll._plan.packs.shard_layout import LANES, SummedLayout, first_difference, summed_layout
from jaxcoll._plan.wire_formats import PowerSGD
from jaxcoll._show.units import counted
from jaxcoll._spmd.axes import bound_axes, count, listed, named
from jaxcoll._spmd.shards import Shards, is_shards, sharded_leaves

_NO_RESIDUAL = """\
`{caller}` expects what `jc.residual(params)` returns as its residual, or what this call returned \
the last time; got {got}."""

_OTHER_WORLD = """\
`{caller}` over {axes} got a residual of {was} over {over}. Restore its sum for the replicas that \
there are: `jc.save_checkpoint` writes it, and `jc.restore_checkpoint` with a new `jc.residual` \
deals it out."""

_NOT_OWN = """\
`{caller}`: a residual has an array of shape {expected} on each replica here, and got {got}. Each \
replica has its own: `jc.data_parallel` passes it so; give `jax.shard_map` \
PartitionSpec({axes!r}) for it in `in_specs`."""

_OTHER_TREE = """\
`{caller}`: the residual is of another tree: {difference}. It belongs to the gradients of the \
parameters that `jc.residual` was given: make a new one, or bring the leaf back."""

_OTHER_FACTORS = """\
`{caller}` with `compression` {format!r}: the residual should have a right factor of shape \
{expected} for {leaf}, and has {got}. Make it with the same options: \
`jc.residual(params, options=options)`. In `in_specs` of `jax.shard_map` it has PartitionSpec()."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankResidual:
    """A residual, and the right factors with which PowerSGD begins the next call."""

    owed: Shards  # what this replica owes; *varying*
    right: dict[str, Any]  # by the paths of matrices, float32 of shape (columns, rank); *invariant*


def is_residual(x: Any) -> bool:
    """Whether `x` is the residual of a tree."""
    return is_shards(x) and isinstance(x.layout, SummedLayout)


def layout_like(tree: Any, axes: Mapping[str, int], caller: str) -> SummedLayout:
    """The layout of a residual of a tree: float32 of the shape of every leaf, on every replica."""
    treedef, leaves = sharded_leaves(tree, axes, caller)
    return summed_layout(treedef, leaves, count(axes))


def zeros(tree: Any, axis_name: str | tuple[str, ...], format: Any, caller: str) -> Any:
    """This replica's residual at the beginning, inside a program that maps the axis; *varying*."""
    axes = bound_axes(axis_name, caller)
    layout = layout_like(tree, axes, caller)
    names = tuple(axes)
    parts = [
        _compat.as_varying(jnp.zeros((layout.rows(pack), LANES), jnp.float32), names)
        for pack in layout.packs
    ]
    owed = Shards(tuple(parts), layout, names)
    if not isinstance(format, PowerSGD):
        return owed
    right = first_factors(tree, axes, format, caller)
    return LowRankResidual(owed, {path: jnp.asarray(x) for path, x in right.items()})


def first_factors(
    tree: Any, axes: Mapping[str, int], format: PowerSGD, caller: str
) -> dict[str, np.ndarray]:
    """Right factors to begin with, by path: Gaussian numbers, the same in every process."""
    found = {}
    for leaf in sharded_leaves(tree, axes, caller)[1]:
        matrix = format.matrix(leaf.shape, leaf.dtype)
        if matrix is not None:
            rng = np.random.default_rng([zlib.crc32(leaf.path.encode()), *matrix])
            found[leaf.path] = rng.standard_normal((matrix[1], format.rank)).astype(np.float32)
    return found


def right_factor(residual: Any, path: str, columns: int, format: PowerSGD, caller: str) -> Any:
    """The right factor of the matrix at `path`, of a residual that was made with these options."""
    held = residual.right if isinstance(residual, LowRankResidual) else {}
    expected = (columns, format.rank)
    if path not in held or np.shape(held[path]) != expected:
        got = f"one of shape {np.shape(held[path])}" if path in held else "none"
        words = {"caller": caller, "format": str(format), "leaf": where(path)}
        raise ValueError(_OTHER_FACTORS.format(expected=expected, got=got, **words))
    return held[path]


def opened(
    residual: Any, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = ""
) -> dict[str, jax.Array]:
    """This replica's residual of each leaf, by the leaf's path in `tree` behind `prefix`."""
    residual = residual.owed if isinstance(residual, LowRankResidual) else residual
    if not is_residual(residual):
        raise ValueError(_NO_RESIDUAL.format(caller=caller, got=type(residual).__name__))
    layout = residual.layout
    if residual.axes != tuple(axes) or layout.replicas != count(axes):
        raise ValueError(
            _OTHER_WORLD.format(
                caller=caller,
                axes=" × ".join(named({name: n}) for name, n in axes.items()),
                was=counted(layout.replicas, "replica"),
                over=listed(residual.axes),
            )
        )
    difference = first_difference(layout_like(tree, axes, caller).leaves, layout.leaves)
    if difference:
        raise ValueError(_OTHER_TREE.format(caller=caller, difference=difference))
    found = {}
    for pack, part in zip(layout.packs, residual.parts, strict=True):
        expected = (layout.rows(pack), LANES)
        if np.shape(part) != expected:
            words = {"caller": caller, "axes": residual.axes, "got": np.shape(part)}
            raise ValueError(_NOT_OWN.format(expected=expected, **words))
        leaf = layout.leaves[pack.segments[0].leaf]
        found[prefix + leaf.path] = part.reshape(-1)[: leaf.size].reshape(leaf.shape)
    return found


def closed(
    residual: Shards | LowRankResidual,
    found: Mapping[str, jax.Array],
    prefix: str = "",
    right: Mapping[str, jax.Array] = MappingProxyType({}),
) -> Shards | LowRankResidual:
    """The residual with the leaves that `found` has, by their paths, in their places.

    And with the right factors `right`, in place of those of the same paths.
    """
    if isinstance(residual, LowRankResidual):
        owed = cast(Shards, closed(residual.owed, found, prefix))
        return LowRankResidual(owed, {**residual.right, **right})
    parts = []
    for pack, part in zip(residual.layout.packs, residual.parts, strict=True):
        leaf = residual.layout.leaves[pack.segments[0].leaf]
        new = found.get(prefix + leaf.path)
        if new is not None:
            part = jnp.pad(new.reshape(-1), (0, part.size - leaf.size)).reshape(part.shape)
        parts.append(part)
    return dataclasses.replace(residual, parts=tuple(parts))
