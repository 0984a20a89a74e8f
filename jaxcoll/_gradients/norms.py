"""Properties of a whole gradient: its norm, clipping by the norm, and whether it is finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.common_over_replicas import check_same
from jaxcoll._collectives.scope import Scope, resolve_axes, scope_here, show_axes
from jaxcoll._collectives.shards import axes_of_shards, is_shards
from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._compression.formats import finite
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import accumulation_dtype, dtype_or_none, flatten_with_paths, where

_PART = """\
`{caller}`: {leaf} is `Shards` along {axes}. Only this replica's part would count, and each \
replica would get another result. Name these axes: `{caller}(tree, axis_name)`."""


def global_norm(
    tree: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """Return the Euclidean norm of all leaves, as for clipping; for shards, over all replicas.

    Guarantee: the result is the sqrt of the sum of |x|² over every element, computed in float32. It
    is finite if and only if every element is and no square overflows (elements up to 1.8·10¹⁹). So
    one pass over memory gives the norm and tells whether to take the step.

    Args:
      tree: a pytree of numeric arrays.
      axis_name: None if every replica holds the whole tree, as after a reduction: nothing is sent.
        Otherwise the axes over which leaves are sharded. A leaf that a checked `shard_map` knows to
        be the same on every replica is counted once. Without such types every leaf is a shard; but
        if the tree has `Shards`, only these are, and every replica holds the other leaves.
      options: as in `all_reduce`, for the one scalar that travels.

    Returns:
      A float32 scalar (float64 if a leaf is), *invariant* over the axes; 0 for an empty tree.
      Without axes it is *varying* if a leaf is.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is not numeric or is an `IndexedSlices`; or `Shards` are along an axis
        that is mapped here but not in `axis_name`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> float(global_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}))
      5.0
      >>> shards = jax.vmap(lambda x: global_norm(x, "data"), axis_name="data")
      >>> shards(jnp.array([3.0, 4.0])).tolist()
      [5.0, 5.0]
    """
    scope = scope_here().merge(check_options(options, exactly="global_norm"))
    return _norm(tree, axis_name, scope)


def _norm(tree: Any, axis_name: Any, scope: Scope) -> jax.Array:
    caller = "jc.global_norm"
    axes = {} if axis_name is None else resolve_axes(axis_name, caller)
    _check_axes_of_shards(tree, axes, caller)
    leaves, in_shards = _arrays(tree, caller), axes_of_shards(tree)
    # Types say along which axes replicas hold different parts of a leaf. Where JAX tracks none, the
    # parts of `Shards` are sharded if the tree has any; otherwise every leaf counts as sharded.
    untyped = [a for a in axes if not _compat.tracks_variance(a)]
    over = []
    for (_, x), along in zip(leaves, in_shards, strict=True):
        assumed, varying = along if any(in_shards) else untyped, _compat.varying_axes(x)
        over.append([a for a in axes if a in varying or a in assumed])
    arrays = [x for _, x in leaves]
    if any(in_shards):
        # That whole leaves are the same on all replicas is marked on a leaf that the norm reads.
        whole = {name: x for (name, x), cut in zip(leaves, over, strict=True) if not cut}
        arrays[0] = check_same(arrays[0], whole, axes, caller)
    squares = []
    for x, cut in zip(arrays, over, strict=True):
        square = jnp.sum(jnp.square(jnp.abs(x.astype(accumulation_dtype(x.dtype)))))
        # Of the replicas that hold the same leaf, the first one counts it.
        same = tuple(a for a in axes if a not in cut) if any(over) else ()
        squares.append(jnp.where(lax.axis_index(same) == 0, square, 0) if same else square)
    widest = np.result_type(np.float32, *(x.dtype for x in squares))
    total = sum((x.astype(widest) for x in squares), jnp.zeros((), widest))
    return jnp.sqrt(_sum_over_replicas(total, axes, scope) if any(over) else total)


def clip_shards(shards: Any, axes: tuple[str, ...], max_norm: float, *, scope: Scope) -> Any:
    """Scale shards so that the norm of the whole tree is at most `max_norm`.

    Equals `optax.clip_by_global_norm` of the whole tree, up to rounding. Squares are summed, and
    shards scaled, in float32 or a leaf's wider type, so the norm need not fit into float16.
    """
    if not jax.tree.leaves(shards):
        return shards
    norm = _norm(shards, axes, scope)
    within = norm < max_norm

    def clip(x: jax.Array) -> jax.Array:
        # In the order of optax, for its rounding.
        exact = x.astype(accumulation_dtype(x.dtype))
        scaled = (exact / norm.astype(exact.dtype) * max_norm).astype(x.dtype)
        return lax.select(jnp.broadcast_to(within, x.shape), x, scaled)

    return jax.tree.map(clip, shards)


def all_finite(
    tree: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """Return True if every element of every leaf is finite; with axes, on every replica.

    Reduced gradients need no axes: a sum or mean of floats is infinite or NaN if a summand is,
    with every algorithm and packing, so all replicas get the same answer without communication.

    Args:
      tree: a pytree of numeric arrays; integers are finite.
      axis_name: None if every replica holds the whole tree. Otherwise the axes over which replicas
        must agree, for shards or for gradients before their reduction.
      options: as in `all_reduce`, for the one scalar that travels.

    Returns:
      A boolean scalar, *invariant* over the axes.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is not numeric or is an `IndexedSlices`; or `Shards` are along an axis
        that is mapped here but not in `axis_name`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> bool(all_finite([jnp.ones(3), jnp.array(jnp.inf)]))
      False
      >>> everywhere = jax.vmap(lambda x: all_finite(x, "data"), axis_name="data")
      >>> everywhere(jnp.array([1.0, jnp.nan])).tolist()
      [False, False]
    """
    scope = scope_here().merge(check_options(options, exactly="all_finite"))
    caller = "jc.all_finite"
    axes = {} if axis_name is None else resolve_axes(axis_name, caller)
    _check_axes_of_shards(tree, axes, caller)
    leaves = [x for _, x in _arrays(tree, caller) if jnp.issubdtype(x.dtype, np.inexact)]
    bad = (~finite(leaves)).astype(np.float32)
    # Ask the other replicas if they hold other elements, or may: types do not always tell.
    varying = (_compat.varying_axes(x) for x in leaves)
    if any(a in over or not _compat.tracks_variance(a) for over in varying for a in axes):
        # Where replicas hold the same elements, the count is too large, but zero only if it should
        # be.
        bad = _sum_over_replicas(bad, axes, scope, repeats=True)
    return bad == 0


def _sum_over_replicas(
    total: jax.Array, axes: dict[str, int], scope: Scope, repeats: bool = False
) -> jax.Array:
    total = _compat.cast_varying(total, tuple(axes))
    return AllReduce(ReduceOp.SUM, axes, scope.exactly, repeats=repeats).reduce(total)


def _check_axes_of_shards(tree: Any, axes: dict[str, int], caller: str) -> None:
    """Raise an error for Shards along mapped axes that the call does not name."""
    for path, x in flatten_with_paths(tree, is_shards)[0]:
        if is_shards(x) and x.parts and set(x.axes) & set(_compat.axes_in_scope()) - set(axes):
            raise ValueError(_PART.format(caller=caller, leaf=where(path), axes=show_axes(x.axes)))


def _arrays(tree: Any, caller: str) -> list[tuple[str, jax.Array]]:
    """Check that leaves are arrays of numbers; list them with their paths."""
    arrays = []
    for path, leaf in flatten_with_paths(tree, is_sparse)[0]:
        if is_sparse(leaf):
            raise ValueError(
                f"`{caller}`: {where(path)} is an IndexedSlices, in which several rows may be "
                "parts of one row; pass its `to_dense()`."
            )
        dtype = dtype_or_none(leaf)
        if dtype is None or not jnp.issubdtype(dtype, np.number):
            got = type(leaf).__name__ if dtype is None else dtype
            raise ValueError(f"`{caller}`: {where(path)}: expected numbers, got {got}.")
        arrays.append((path, jnp.asarray(leaf)))
    return arrays
