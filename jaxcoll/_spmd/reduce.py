"""The one in-program reduction: plan, pack, sum, unpack, and divide for a mean."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._plan.errors import AlreadyReducedError
from jaxcoll._plan.leaves import Leaf, check_reducible, where, wire_dtype
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packing import PackingRule
from jaxcoll._plan.plan import make_plan
from jaxcoll._plan.world import World
from jaxcoll._spmd import native, ring
from jaxcoll._spmd.axes import bound_axes, count
from jaxcoll._spmd.pack import pack, unpack
from jaxcoll._spmd.scope import Scope

Algorithm = Callable[[Sequence[jax.Array], tuple[str, ...]], list[jax.Array]]

ALGORITHMS: dict[str, Algorithm] = {"native": native.all_reduce, "ring": ring.all_reduce}

Invariant = Literal["error", "summed", "replicated"]

_ALREADY_REDUCED = """\
`all_reduce` over {axes}: {leaf} is already the same on every replica along {missing}, so \
reducing it again would count it {n} times. What probably happened: autodiff has summed this \
gradient already, because its parameter enters a checked `shard_map` replicated. Take the \
gradient with `jc.value_and_grad` or `jc.grad`, which keep it per replica; or say what the leaf \
is: `invariant="summed"` if it is the sum over the replicas (SUM leaves it, MEAN divides it by \
{n}), `invariant="replicated"` if every replica holds this value (SUM multiplies it by {n}, MEAN \
leaves it)."""


@dataclasses.dataclass(frozen=True)
class _Item:
    """A leaf on its way: what it is, where it still differs, and how it ends."""

    array: jax.Array
    leaf: Leaf
    over: tuple[str, ...]  # axes it is summed over; those of size one need nothing
    factor: int  # a SUM of equal values is a multiplication
    divisor: int  # what makes a mean of the sum


def all_reduce(
    reduce_op: ReduceOp,
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    scope: Scope,
    invariant: Invariant = "error",
    packing: PackingRule | None = None,
) -> Any:
    """Reduce every leaf of `value` over the replicas along `axis_name`; see `jc.all_reduce`.

    Args:
      reduce_op: SUM or MEAN.
      value: a pytree of arrays.
      axis_name: one axis, or several, outer first.
      scope: options, world, and who wants to know.
      invariant: what a leaf that is already the same everywhere is taken for.
      packing: a packing rule that stands whatever the options say.

    Returns:
      The reduced tree, *invariant* over the axes.

    Raises:
      NameError: an axis is not bound here.
      ValueError: a leaf cannot be reduced, or an argument is none of those it may be.
      AlreadyReducedError: a leaf is already reduced and nothing says how it is meant.
    """
    if invariant not in get_args(Invariant):
        raise ValueError(
            f"`invariant` must be one of {', '.join(map(repr, get_args(Invariant)))}; "
            f"got {invariant!r}."
        )
    axes = bound_axes(axis_name, "all_reduce")
    world = scope.world(axes)
    tracked = {a for a in axes if _compat.tracks_variance(a)}
    flat, treedef = jax.tree_util.tree_flatten_with_path(value)
    items = [
        _item(reduce_op, jax.tree_util.keystr(path), leaf, axes, tracked, world, scope, invariant)
        for path, leaf in flat
    ]
    plan = make_plan(reduce_op, [item.leaf for item in items], scope.options, world, packing)
    scope.record(plan)
    sums = _sum(ALGORITHMS[plan.algorithm], items, plan.packs, reduce_op)
    results = [_finish(reduce_op, item, s, axes) for item, s in zip(items, sums, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, results)


def _item(
    reduce_op: ReduceOp,
    path: str,
    value: Any,
    axes: dict[str, int],
    tracked: set[str],
    world: World,
    scope: Scope,
    invariant: Invariant,
) -> _Item:
    array = _as_array(path, value)
    array = _compat.as_varying(array, [a for a in axes if a in scope.untyped])
    varying = _compat.varying_axes(array)
    missing = {a: n for a, n in axes.items() if a in tracked and a not in varying}
    if missing and invariant == "error":
        raise AlreadyReducedError(
            _ALREADY_REDUCED.format(
                axes=_named(axes), leaf=where(path), missing=_named(missing), n=count(missing)
            )
        )
    over = tuple(a for a, n in axes.items() if n > 1 and a not in missing)
    leaf = Leaf(
        path=path,
        shape=array.shape,
        dtype=np.dtype(array.dtype),
        wire=wire_dtype(np.dtype(array.dtype), reduce_op, world),
        kind=(over, tuple(sorted(varying))),
        solid=_compat.is_partially_sharded(array),
        stays=not over,
    )
    repeated = count(missing)
    if invariant == "summed":
        return _Item(array, leaf, over, factor=1, divisor=count(axes))
    return _Item(array, leaf, over, factor=repeated, divisor=count(axes) // repeated)


def _as_array(path: str, value: Any) -> jax.Array:
    """`value` as an array that can be summed, or an error that names its place."""
    dtype = getattr(value, "dtype", None)
    if dtype is None and not isinstance(value, bool | int | float | complex):
        raise ValueError(
            f"`all_reduce` cannot reduce {where(path)}: expected an array or a number, "
            f"got {type(value).__name__}."
        )
    check_reducible(path, np.result_type(value) if dtype is None else dtype)
    return jnp.asarray(value)


def _sum(
    algorithm: Algorithm, items: Sequence[_Item], packs: Sequence[Any], reduce_op: ReduceOp
) -> list[jax.Array]:
    """Each item summed over its own axes, in the dtype it travels in."""
    leaves = [item.leaf for item in items]
    scaled = [_before(reduce_op, item) for item in items]
    packed = pack(scaled, packs)
    summed: list[jax.Array | None] = [None] * len(packs)
    for over in dict.fromkeys(items[p.segments[0].leaf].over for p in packs):
        members = [k for k, p in enumerate(packs) if items[p.segments[0].leaf].over == over]
        sums = algorithm([packed[k] for k in members], over)
        for k, s in zip(members, sums, strict=True):
            summed[k] = s
    carried = unpack([s for s in summed if s is not None], packs, leaves)
    return [x if s is None else s for s, x in zip(carried, scaled, strict=True)]


def _halvings(reduce_op: ReduceOp, item: _Item) -> int:
    """Powers of two taken off a float16 before a mean, so that no partial sum can overflow."""
    half = reduce_op is ReduceOp.MEAN and item.leaf.wire == np.float16
    return math.ceil(math.log2(item.divisor)) if half and item.over else 0


def _before(reduce_op: ReduceOp, item: _Item) -> jax.Array:
    array = item.array.astype(item.leaf.wire)
    k = _halvings(reduce_op, item)
    return array * np.float16(2.0**-k) if k else array


def _finish(
    reduce_op: ReduceOp, item: _Item, total: jax.Array, axes: dict[str, int]
) -> jax.Array:
    """The sum made the result: divided, multiplied, in its own dtype, equal for every replica."""
    total = _compat.as_invariant(total, tuple(axes))
    dtype = item.leaf.dtype
    if reduce_op is ReduceOp.SUM:
        return (total * item.factor if item.factor > 1 else total).astype(dtype)
    k = _halvings(reduce_op, item)
    if k:
        return (total.astype(np.float32) * np.float32(2.0**k / item.divisor)).astype(dtype)
    mean = jnp.true_divide(total, item.divisor)  # a float, of JAX's choice, for integers
    return mean if jnp.issubdtype(dtype, jnp.integer) else mean.astype(dtype)


def _named(axes: dict[str, int]) -> str:
    return ", ".join(f"{name!r} (size {size})" for name, size in axes.items())
