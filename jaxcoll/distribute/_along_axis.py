"""Reductions and gathers over the replicas and along dimensions of each replica's value."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._collectives.all_gather import find_dimension, gather_tree
from jaxcoll._collectives.scope import Scope
from jaxcoll._collectives.sparse import check_dense
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import (
    accumulation_dtype,
    check_reducible,
    flatten_with_paths,
    is_key,
    where,
)
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.dispatch import run
from jaxcoll._step.mesh.mesh import make_line, no_mesh
from jaxcoll.distribute._arguments import deliver, distribute_value
from jaxcoll.distribute._assemble import check_alike, describe
from jaxcoll.distribute._cross_device_ops import CrossDeviceOps
from jaxcoll.distribute._per_replica import DistributedValues, Mirrored, Uneven, is_distributed
from jaxcoll.distribute._replica_axis import (
    AXIS,
    Shape,
    drop_deadline,
    make_program,
    shapes_of_all,
)

_SPARSE = {
    "reduce": "`reduce` along an axis expects dense arrays; {leaf} is an IndexedSlices. Reduce it "
    "with axis None, or make it an array with `to_dense` first.",
    "gather": "`gather` expects dense arrays; {leaf} is an IndexedSlices. `reduce` gathers the "
    "rows of all replicas, which is their sum; `to_dense` makes it an array.",
}


class _Parts(NamedTuple):
    """A value, and the dimensions along which a call reduces or joins it."""

    value: DistributedValues  # shorter parts are padded with zeros along these dimensions
    axes: list[tuple[int, ...]]  # the dimensions of each array, none of them negative
    shapes: list[Mapping[int, Shape]]  # of each array on every replica, without the padding


def _check_parts(
    ops: CrossDeviceOps, caller: str, path: str, value: Any, axis: Any, first: jax.Device,
    options: CommunicationOptions,
) -> _Parts:  # fmt: skip
    """Make the same checks of a strategy's argument on all processes."""
    tree = value.tree if is_distributed(value) else value
    check_dense(tree, _SPARSE[caller], NotImplementedError if caller == "gather" else ValueError)
    whole = distribute_value(caller + path, type(ops).__name__, value, ops._group, first)
    shapes: list[Mapping[int, Shape]]
    if isinstance(whole, Uneven):
        like, shift = next(iter(whole.tree.values())), 0
        rows = {i: jax.tree.leaves(part) for i, part in whole.tree.items()}
        structure, seconds = f"{path} along {axis} of {describe(like)}", options.timeout_seconds
        of_all = shapes_of_all(caller, rows, whole.devices, structure, timeout_seconds=seconds)
        shapes = [*of_all]
    else:
        like, shift = whole.tree, int(whole._rows)
        shapes = [
            dict.fromkeys(range(len(whole)), Shape(leaf.shape[shift:], leaf.dtype.name))
            for leaf in jax.tree.leaves(like)
        ]
    axes = []
    for (name, leaf), by_replica in zip(flatten_with_paths(like)[0], shapes, strict=True):
        name = path + name
        what = f"`{caller}`: {where(name)}"
        if is_key(leaf) and caller == "gather":
            what = "a part is a typed PRNG key. Pass its `jax.random.key_data`"
            raise ValueError(f"`gather` expects arrays; {what}.")
        named = axis if caller == "reduce" and isinstance(axis, tuple | list) else [axis]
        shape = by_replica[min(by_replica)].shape
        dimensions = tuple(find_dimension(k, shape, what) for k in named)
        if len(set(dimensions)) < len(dimensions) or not dimensions:
            raise ValueError(f"{what}: expected different axes, at least one; got {axis!r}.")
        check_alike(caller, name, by_replica, dimensions)
        if caller == "reduce":
            check_reducible(name, leaf.dtype)
        axes.append(dimensions)
    if isinstance(whole, Uneven):
        whole = _pad(whole, shapes)
    return _Parts(whole, axes, shapes)


def _pad(value: Uneven, shapes: Sequence[Mapping[int, Shape]]) -> DistributedValues:
    """Pad uneven parts to the longest along each dimension: rows of one shape."""
    longest = [np.max([x.shape for x in by_replica.values()], axis=0) for by_replica in shapes]

    def pad_one(array: Any, sizes: np.ndarray) -> Any:
        widths = [(0, int(size)) for size in sizes - array.shape]
        if not any(width for _, width in widths):
            return array
        return (jnp if isinstance(array, jax.Array) else np).pad(array, widths)

    rows = {}
    for i, part in value.tree.items():
        leaves, treedef = jax.tree.flatten(part)
        rows[i] = treedef.unflatten(map(pad_one, leaves, longest))
    return Uneven._wrap(rows, value.devices)._make_global()


def reduce_along(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    values: Sequence[tuple[str, Any]],
    axis: Any,
    first: jax.Device,
    options: CommunicationOptions,
    structure: str,
) -> list[Any]:
    """Reduce the parts of each value along `axis`, then the results over the replicas with `ops`.

    `values` are pairs of a path and a value from `Strategy.reduce`; results lie on `first`.
    """
    with no_mesh():
        parts = [_check_parts(ops, "reduce", *value, axis, first, options) for value in values]
        # A mean of means would weigh small parts like large ones, so divide only the total.
        pairs = [(_sums(reduce_op, parts_of_one), first) for parts_of_one in parts]
        totals = ops._reduce_pairs("reduce", ReduceOp.SUM, pairs, options, structure)
        if reduce_op is ReduceOp.SUM:
            return totals
        return [_mean(*total_and_parts) for total_and_parts in zip(totals, parts, strict=True)]


def _sums(reduce_op: ReduceOp, parts: _Parts) -> Any:
    """Sum each replica's value, on its device, in the dtype that a mean is computed in."""
    value, shift = parts.value, int(parts.value._rows)  # rows have the replicas first
    leaves, treedef = jax.tree.flatten(value.tree)
    sums = []
    for x, axes in zip(leaves, parts.axes, strict=True):
        dtype = accumulation_dtype(_mean_dtype(x)) if reduce_op is ReduceOp.MEAN else None
        sums.append(jnp.sum(x, tuple(k + shift for k in axes), dtype))
    tree = treedef.unflatten(sums)
    if not shift and len(value) == 1 and isinstance(value.tree, jax.Array):
        return tree  # of a plain value, which belongs to no group of devices
    # XLA replicates a sum of no elements, whatever the layout of its argument.
    tree = jax.device_put(tree, value._sharding_over(value.devices))
    return type(value)._wrap(tree, value.devices)


def _mean(total: Any, parts: _Parts) -> Any:
    """Divide the sum of all elements by their number."""
    leaves, treedef = jax.tree.flatten(total)
    arrays, means = jax.tree.leaves(parts.value.tree), []
    for x, array, axes, shapes in zip(leaves, arrays, parts.axes, parts.shapes, strict=True):
        count = sum(math.prod(part.shape[k] for k in axes) for part in shapes.values())
        means.append((x / count).astype(_mean_dtype(array)))
    return treedef.unflatten(means)


def _mean_dtype(array: Any) -> np.dtype:
    """A mean has its array's dtype; of integers it is a float."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else accumulation_dtype(dtype)


def gather_along(
    ops: CrossDeviceOps,
    name: str,
    values: Sequence[tuple[str, Any]],
    axis: int,
    first: jax.Device,
    options: CommunicationOptions,
) -> list[Any]:
    """Join the parts of each value along `axis`, on `first`, in one program for all of them.

    `values` are pairs of a path and a value from `Strategy.gather`.
    """
    with no_mesh():
        parts = [_check_parts(ops, "gather", *value, axis, first, options) for value in values]
        compiled_with, joined = drop_deadline(options), {}
        for devices in dict.fromkeys(x.value.devices for x in parts):
            ks = [k for k, x in enumerate(parts) if x.value.devices == devices]
            replicated, mesh = tuple(not parts[k].value._rows for k in ks), make_line(devices, AXIS)
            given = "gathered", mesh, _gather, replicated, axis
            program = make_program(*given, options=compiled_with)
            trees = tuple(parts[k].value.tree for k in ks)
            settings = (tuple(values[k][0] for k in ks), axis, compiled_with)
            call = Call(program, trees, devices, f"`{name}.gather`", options, settings=settings)
            results = deliver(Mirrored._wrap(run(call), devices), (first,))
            joined |= zip(ks, results, strict=True)
        return [_drop_padding(joined[k], x) for k, x in enumerate(parts)]


def _gather(trees: Sequence[Any], scope: Scope, axis: int) -> Any:
    return gather_tree(trees, AXIS, axis=axis, scope=scope)


def _drop_padding(tree: Any, parts: _Parts) -> Any:
    """Remove the padding between parts that are joined along one dimension of each array."""
    leaves, treedef = jax.tree.flatten(tree)
    for k, ((axis,), shapes) in enumerate(zip(parts.axes, parts.shapes, strict=True)):
        sizes = [shapes[i].shape[axis] for i in range(len(shapes))]
        if min(sizes) < (longest := max(sizes)):
            cut = functools.partial(jax.lax.slice_in_dim, leaves[k], axis=axis)
            pieces = [cut(i * longest, i * longest + size) for i, size in enumerate(sizes)]
            leaves[k] = jnp.concatenate(pieces, axis)
    return treedef.unflatten(leaves)
