"""Gradients of what each replica has its own of: an expert, a shard, the batch. They stay there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd.arithmetic import quotient
from jaxcoll._spmd.axes import count, listed
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Scope, retyped

NO_SHARD = """\
`{caller}` with scatter=True: {leaf} differs between replicas along {axes}, so its gradient is not \
summed over them and has no shards. Differentiate it as an argument of its own in a call without \
`scatter`, and update it there. The gradients of `Shards` are Shards without `scatter`."""

_NOT_COMMON = """\
`{caller}`: {leaf} differs between replicas along {axes} by its type, and is taken here for \
something that all of them hold alike. If it is the same everywhere, pass it as it was before it \
was typed so (by `jax.lax.pcast`), or after `jc.broadcast`; if it is meant to differ (an expert, a \
part of a sharded parameter), leave it out of this tree and update it by itself."""


def watched(
    gradients: Any,
    leaves: Mapping[str, Any],
    along: Iterable[str],
    caller: str,
    own: Sequence[tuple[str, ...]] = (),
    *,
    own_too: bool = False,
) -> Any:
    """Gradients that are going to be reduced, marked with what they are those of.

    Where types do not tell replicas apart, or not truly, only who reads the whole program can see
    whether the leaves differ between replicas; `replication` and `beside_types` refuse them then.
    Along the axes of which a leaf is its replica's `own` it is not reduced. Types may be wrong in
    calling it that, so it is marked as such if a reader wants these, too.
    """
    marked, treedef = jax.tree.flatten(gradients)
    each = zip(leaves.items(), own or [()] * len(leaves), strict=True)
    for k, ((name, leaf), mine) in enumerate(each):
        for axis in sorted({*along}.difference(mine)):
            marked[k] = marks.gradient_of(leaf, marked[k], axis, caller, name)
        for axis in mine if own_too else ():
            marked[k] = marks.gradient_of(leaf, marked[k], axis, caller, name, own=True)
    return treedef.unflatten(marked)


def own_axes(
    leaves: Mapping[str, Any], axes: Iterable[str], shards: Sequence[tuple[str, ...]] = ()
) -> list[tuple[str, ...]]:
    """Of each leaf the axes along which every replica has its own.

    Its type says so, except on axes where everything is `retyped`; or that it is a part of `Shards`
    along `shards`, which need no types.
    """
    known, of_shards = frozenset(axes) - retyped(), shards or [()] * len(leaves)
    return [
        tuple(a for a in axes if a in parts or a in known & _compat.varying_axes(leaf))
        for leaf, parts in zip(leaves.values(), of_shards, strict=True)
    ]


def shared(tree: Any, own: Sequence[tuple[str, ...]]) -> Any:
    """The leaves that replicas have in common, with None in the places of their own."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([None if a else x for x, a in zip(leaves, own, strict=True)])


def with_own(
    reduced: Any,
    op: ReduceOp,
    gradients: Any,
    own: Sequence[tuple[str, ...]],
    axes: Mapping[str, int],
    *,
    scope: Scope,
) -> Any:
    """All gradients of the loss over all replicas, from those by leaves that they have in common.

    A leaf that is its own along some of the axes is reduced over the others. Along its own, the
    derivative of the mean of all losses is that of one's own loss, divided by their number; and
    that of a sum is just that.

    Returns:
      A tree like `gradients`; each leaf's own are *varying* over its own axes.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    results = treedef.flatten_up_to(reduced)
    for along in dict.fromkeys(filter(None, own)):
        rest = tuple(a for a in axes if a not in along)
        these = [x if a == along else None for x, a in zip(leaves, own, strict=True)]
        if rest:
            these = all_reduce(op, treedef.unflatten(these), rest, scope=scope)
            these = treedef.flatten_up_to(these)
        times = count({a: axes[a] for a in along}) if op is ReduceOp.MEAN else 1
        for k, x in enumerate(these):
            results[k] = results[k] if x is None else quotient(x, times) if times > 1 else x
    return scope.vouched(treedef.unflatten(results), ())


def common(tree: Any, axes: Mapping[str, int], caller: str, *, scope: Scope) -> Any:
    """A tree that every replica must hold alike, as far as can be known, and marked otherwise."""
    flat, treedef = flattened(tree)
    leaves = dict(flat)
    refuse_own(_NOT_COMMON, leaves, own_axes(leaves, axes), caller)
    along = (scope.marked | scope.watched).intersection(axes)
    return treedef.unflatten(watched(list(leaves.values()), leaves, along, caller))


def refuse_own(
    message: str, names: Iterable[str], own: Sequence[tuple[str, ...]], caller: str
) -> None:
    """Refuse a leaf of which each replica has its own, for the reason that `message` gives."""
    for name, axes in zip(names, own, strict=True):
        if axes:
            raise ValueError(message.format(caller=caller, leaf=where(name), axes=listed(axes)))
