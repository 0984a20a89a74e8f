"""Checks that parameters are equal on all replicas, and the reduction of gradients of `Shards`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll import _compat
from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.pipeline import divide_wide
from jaxcoll._collectives.scope import Scope, count, loss_axes, show_axes
from jaxcoll._compat import marks
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import flatten_with_paths, where

_DIFFERS = """\
`{caller}` over {axes}: {leaf} must be the same on every replica, and differs between them by its \
type. If it is the same, say so with `jc.same`, or make it so with `jc.broadcast`; if it is meant \
to differ (an expert, the batch), take its gradient with `jax.grad`, or pass it as `Shards`."""


def check_same(x: Any, leaves: Mapping[str, Any], axes: Iterable[str], caller: str) -> Any:
    """Return `x`; raise an error if one of `leaves` differs between replicas by its type."""
    if not leaves:
        return x
    if not _compat.types_tracked():  # leave the check to the proof that reads the whole program
        return marks.require(x, {where(name): y for name, y in leaves.items()}, tuple(axes), caller)
    typed = frozenset(axes) - loss_axes()
    for name, leaf in leaves.items():
        if varying := typed & _compat.varying_axes(leaf):
            over = show_axes(sorted(varying))
            raise ValueError(_DIFFERS.format(caller=caller, leaf=where(name), axes=over))
    return x


def check_same_tree(tree: Any, axes: Iterable[str], caller: str) -> Any:
    """Return a tree as arrays, after `check_same` of all its leaves."""
    flat, treedef = flatten_with_paths(tree)
    named = {path: jnp.asarray(leaf) for path, leaf in flat}
    arrays = [*named.values()]
    if arrays:
        arrays[0] = check_same(arrays[0], named, axes, caller)
    return treedef.unflatten(arrays)


def drop_shards(tree: Any, sharded: Sequence[tuple[str, ...]]) -> Any:
    """Replace the leaves inside `Shards` by None; `sharded` has the axes of each, () if outside."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([None if a else x for x, a in zip(leaves, sharded, strict=True)])


def insert_shard_gradients(
    reduced: Any,
    op: ReduceOp,
    gradients: Any,
    sharded: Sequence[tuple[str, ...]],
    axes: Mapping[str, int],
    *,
    scope: Scope,
) -> Any:
    """Fill the gradients of leaves inside `Shards` into `reduced`, which has all the others.

    These are already summed over the axes of the Shards. They are divided for a mean, and reduced
    over the other axes.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    results = treedef.flatten_up_to(reduced)
    for along in dict.fromkeys(filter(None, sharded)):
        other_axes = {a: n for a, n in axes.items() if a not in along}
        parts = [x if a == along else None for x, a in zip(leaves, sharded, strict=True)]
        if other_axes:
            parts = AllReduce(op, other_axes, scope).reduce(treedef.unflatten(parts))
            parts = treedef.flatten_up_to(parts)
        n = count({a: axes[a] for a in along if a in axes}) if op is ReduceOp.MEAN else 1
        for k, x in enumerate(parts):
            results[k] = results[k] if x is None else divide_wide(x, n) if n > 1 else x
    return treedef.unflatten(results)
