"""Checks of what gradients are taken by, and gradients of parts in `Shards`, which stay apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd.pipeline import quotient
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Scope, count, listed, retyped

_DIFFERS = """\
`{caller}` over {axes}: {leaf} must be the same on every replica, and differs between them by its \
type. Its gradients would be those of different values. If it is the same, say so with `jc.same`, \
or make it so with `jc.broadcast`; if it is meant to differ (an expert, the batch), take its \
gradient with `jax.grad`, or pass it as `Shards`."""


def checked_same(x: Any, leaves: Mapping[str, Any], axes: Iterable[str], caller: str) -> Any:
    """`x`, made with gradients that are going to be reduced; refuse `leaves` that differ."""
    if not leaves:
        return x
    if not _compat.types_tell():  # then who reads the whole program finds them beside `x`
        return marks.checked(x, {where(name): y for name, y in leaves.items()}, tuple(axes), caller)
    typed = frozenset(axes) - retyped()
    for name, leaf in leaves.items():
        if varying := typed & _compat.varying_axes(leaf):
            over = listed(sorted(varying))
            raise ValueError(_DIFFERS.format(caller=caller, leaf=where(name), axes=over))
    return x


def common(tree: Any, axes: Iterable[str], caller: str) -> Any:
    """A tree of arrays whose leaves must be the same on every replica."""
    flat, treedef = flattened(tree)
    named = {path: jnp.asarray(leaf) for path, leaf in flat}
    arrays = [*named.values()]
    if arrays:
        arrays[0] = checked_same(arrays[0], named, axes, caller)
    return treedef.unflatten(arrays)


def without_shards(tree: Any, own: Sequence[tuple[str, ...]]) -> Any:
    """The leaves that replicas have in common, with None in the places of parts of `Shards`."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([None if a else x for x, a in zip(leaves, own, strict=True)])


def with_shard_gradients(
    reduced: Any,
    op: ReduceOp,
    gradients: Any,
    own: Sequence[tuple[str, ...]],
    axes: Mapping[str, int],
    *,
    scope: Scope,
) -> Any:
    """All gradients of the loss over all replicas, from those by leaves that they have in common.

    The gradient of a part of `Shards` is the sum over their axes already: it is divided for a mean,
    and reduced over the other axes.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    results = treedef.flatten_up_to(reduced)
    for along in dict.fromkeys(filter(None, own)):
        rest = tuple(a for a in axes if a not in along)
        these = [x if a == along else None for x, a in zip(leaves, own, strict=True)]
        if rest:
            these = all_reduce(op, treedef.unflatten(these), rest, scope=scope)
            these = treedef.flatten_up_to(these)
        times = count({a: axes[a] for a in along if a in axes}) if op is ReduceOp.MEAN else 1
        for k, x in enumerate(these):
            results[k] = results[k] if x is None else quotient(x, times) if times > 1 else x
    return treedef.unflatten(results)
