"""Reductions and gathers over the replicas and along dimensions of each one's value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._distribute.ops.cross_device_ops import CrossDeviceOps
from jaxcoll._distribute.values.assemble import check_alike, described
from jaxcoll._distribute.values.destinations import copy_near
from jaxcoll._distribute.values.parts import Uneven, listed, taken
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica
from jaxcoll._distribute.values.replica_axis import (
    AXIS,
    Shape,
    Step,
    replicating,
    rows_over,
    run_steps,
    shapes_of_all,
    without_row,
)
from jaxcoll._mesh.mesh import no_mesh, of_this_process, span_processes
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import check_reducible, flattened, where
from jaxcoll._spmd import gather
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.sparse import check_dense

_SPARSE = {
    "reduce": "`reduce` along an axis expects dense arrays; {leaf} is an IndexedSlices. Reduce it "
    "with axis None, or make it an array with `to_dense` first.",
    "gather": "`gather` expects dense arrays; {leaf} is an IndexedSlices. `reduce` gathers the "
    "rows of all replicas, which is their sum; `to_dense` makes it an array.",
}


class _Parts(NamedTuple):
    """A value whose parts have the dimensions that a call names."""

    whole: PerReplica | Mirrored | Uneven
    like: Any  # a tree of one replica's arrays, for their dtypes
    axes: list[tuple[int, ...]]  # the dimensions of each array, from the first
    shapes: list[dict[int, Shape]]  # of each array on every replica


def _parts_of(
    ops: CrossDeviceOps,
    caller: str,
    path: str,
    value: Any,
    axis: Any,
    devices: tuple[jax.Device, ...],
    timeout_seconds: float | None,
) -> _Parts:
    """Return the value that a strategy over `devices` is given, checked on all processes alike."""
    tree = value.tree if isinstance(value, PerReplica | Mirrored) else value
    check_dense(tree, _SPARSE[caller], NotImplementedError if caller == "gather" else ValueError)
    whole: PerReplica | Mirrored | Uneven
    if isinstance(value, list | tuple):
        whole = listed(caller, value, devices)
    else:
        first = devices[of_this_process(devices)[0]]
        whole = taken(caller, type(ops).__name__, value, ops._group, first)
    if isinstance(whole, Uneven):
        like = next(iter(whole.parts.values()))
        shapes = shapes_of_all(
            caller,
            {i: jax.tree.leaves(part) for i, part in whole.parts.items()},
            whole.devices,
            f"{path} along {axis} of {described(like)}",
            timeout_seconds=timeout_seconds,
        )
    else:
        like, shift = whole.tree, int(not whole.replicated)
        shapes = [
            dict.fromkeys(range(len(whole)), Shape(leaf.shape[shift:], leaf.dtype.name))
            for leaf in jax.tree.leaves(like)
        ]
    axes = []
    for (name, leaf), of_leaf in zip(flattened(like)[0], shapes, strict=True):
        what = f"`{caller}`: {where(name)}"
        named = axis if caller == "reduce" and isinstance(axis, tuple | list) else [axis]
        own = tuple(gather.dimension(k, of_leaf[min(of_leaf)].shape, what) for k in named)
        if len(set(own)) < len(own) or not own:
            raise ValueError(f"{what}: expected different axes, at least one; got {axis!r}.")
        check_alike(caller, name, of_leaf, own)
        if caller == "reduce":
            check_reducible(name, leaf.dtype)
        axes.append(own)
    return _Parts(whole, like, axes, shapes)


def reduce_along(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    values: Sequence[tuple[str, Any]],
    axis: Any,
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
    structure: str,
) -> list[Any]:
    """Reduce the parts of each value along `axis`, and by `ops` the results over the replicas.

    Values, with their paths, and results are those of `Strategy.reduce` over `devices`.
    """
    first = devices[of_this_process(devices)[0]]
    with no_mesh():
        parts = [
            _parts_of(ops, "reduce", path, value, axis, devices, options.timeout_seconds)
            for path, value in values
        ]
        # A mean of means would weigh small parts like large ones: one sum, and one division.
        pairs = [(_sums(reduce_op, of_value), first) for of_value in parts]
        totals = ops._reduced("reduce", ReduceOp.SUM, pairs, options, structure)
        if reduce_op is ReduceOp.SUM:
            return totals
        return [_mean(*total_and_parts) for total_and_parts in zip(totals, parts, strict=True)]


def _sums(reduce_op: ReduceOp, parts: _Parts) -> Any:
    """Return each replica's sums, where its part lies."""
    whole, like, axes, _ = parts
    treedef = jax.tree.structure(like)
    if isinstance(whole, Uneven):
        program = _summing(reduce_op, tuple(axes), None)
        sums = {
            i: treedef.unflatten(program(jax.device_put(jax.tree.leaves(part), whole.devices[i])))
            for i, part in whole.parts.items()
        }
        return Uneven(sums, whole.devices).assembled()
    shift = int(not whole.replicated)  # of rows, the dimension of the replicas
    shifted = tuple(tuple(k + shift for k in own) for own in axes)
    program = _summing(reduce_op, shifted, rows_over(whole.devices) if shift else None)
    sums_of_all = treedef.unflatten(program(jax.tree.leaves(whole.tree)))
    if not shift and len(whole) == 1 and isinstance(like, jax.Array):
        return sums_of_all  # of a plain value, which belongs to no group of devices
    return type(whole).of(sums_of_all)


@functools.lru_cache(maxsize=256)
def _summing(
    reduce_op: ReduceOp, axes: tuple[tuple[int, ...], ...], sharding: Any
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The sums of arrays along dimensions of their own, in the type in which a mean is made."""

    def sums(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            jnp.sum(x, k, dtype=_wide(x) if reduce_op is ReduceOp.MEAN else None)
            for x, k in zip(arrays, axes, strict=True)
        ]

    return jax.jit(sums, out_shardings=sharding)


def _mean(total: Any, parts: _Parts) -> Any:
    """Return the mean of all elements that have this sum."""
    counts = [
        sum(math.prod(shape.shape[k] for k in own) for shape in of_leaf.values())
        for of_leaf, own in zip(parts.shapes, parts.axes, strict=True)
    ]
    leaves, treedef = jax.tree.flatten(total)
    likes = jax.tree.leaves(parts.like)
    return treedef.unflatten(
        (x / count).astype(_mean_dtype(like))
        for x, count, like in zip(leaves, counts, likes, strict=True)
    )


def _mean_dtype(array: Any) -> np.dtype:
    """Return the type of a mean of `array`: its own, or of integers JAX's default float."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype


def _wide(array: Any) -> np.dtype:
    """Return the type of a sum whose mean is wanted: that of 16-bit floats must not overflow."""
    dtype = _mean_dtype(array)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def gather_along(
    ops: CrossDeviceOps,
    name: str,
    path: str,
    value: Any,
    axis: int,
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
) -> Any:
    """Join the parts of one value along `axis`, on the first of `devices` in this process.

    The value, with its path in what all processes pass, is as in `Strategy.gather` over `devices`.
    """
    first = devices[of_this_process(devices)[0]]
    with no_mesh():
        parts = _parts_of(ops, "gather", path, value, axis, devices, options.timeout_seconds)
        whole = parts.whole
        if span_processes(whole.devices) and not isinstance(whole, Mirrored):
            rows = _padded(whole, parts) if isinstance(whole, Uneven) else whole
            carried = options.replace(timeout_seconds=UNSET)
            program = replicating("gathered", rows.devices, _gathered, carried, int(axis))
            step = Step(program, rows, rows.devices, (path, axis, carried))
            (result,) = run_steps([step], f"`{name}.gather`", options)
            return _without_padding(copy_near(result, (first,)), parts)
        if isinstance(whole, Uneven):
            local = [*whole.parts.values()]
        elif isinstance(whole, Mirrored):  # the copies of all processes are equal
            local = [copy_near(whole, devices)] * len(whole)
        else:
            local = [whole.part(device) for device in whole.devices]
        joining = _joining_program(axis, isinstance(whole, PerReplica))
        step = Step(joining, jax.device_put(local, first), (first,))
        return run_steps([step], f"`{name}.gather`", options)[0]


def _gathered(value: PerReplica, scope: Scope, axis: int) -> Mirrored:
    return Mirrored.of(gather.all_gather(value.tree, AXIS, axis=axis, scope=scope))


@functools.lru_cache(maxsize=256)
def _joining_program(axis: int, rows: bool) -> Callable[[Sequence[Any]], Any]:
    """A program that joins parts on one device; rows have a leading dimension of one."""

    def joined(parts: Sequence[Any]) -> Any:
        if rows:
            parts = without_row(parts)
        return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis), *parts)

    return jax.jit(joined)


def _padded(value: Uneven, parts: _Parts) -> PerReplica:
    """Return uneven parts as rows, each with the longest size of all along its axis."""
    treedef = jax.tree.structure(parts.like)
    lengths = [max(_sizes(*leaf)) for leaf in zip(parts.shapes, parts.axes, strict=True)]

    def padded(array: Any, axis: int, length: int) -> Any:
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            raise ValueError(
                "`gather` expects arrays; a part is a typed PRNG key. Pass its "
                "`jax.random.key_data`."
            )
        widths = [(0, (length - array.shape[k]) * (k == axis)) for k in range(array.ndim)]
        return jnp.pad(array, widths) if any(map(sum, widths)) else array

    rows = {}
    for i, part in value.parts.items():
        leaves = zip(jax.tree.leaves(part), parts.axes, lengths, strict=True)
        rows[i] = treedef.unflatten(padded(x, axis, length) for x, (axis,), length in leaves)
    return Uneven(rows, value.devices).assembled()


def _sizes(shapes: Mapping[int, Shape], axes: Sequence[int]) -> list[int]:
    return [shapes[i].shape[axes[0]] for i in range(len(shapes))]


def _without_padding(joined: Any, parts: _Parts) -> Any:
    """Take the padding out of parts that stand side by side."""

    def cut(array: jax.Array, axis: int, sizes: Sequence[int]) -> jax.Array:
        longest = max(sizes)
        if min(sizes) == longest:
            return array
        pieces = [
            jax.lax.slice_in_dim(array, i * longest, i * longest + size, axis=axis)
            for i, size in enumerate(sizes)
        ]
        return jnp.concatenate(pieces, axis)

    leaves, treedef = jax.tree.flatten(joined)
    return treedef.unflatten(
        cut(array, axes[0], _sizes(shapes, axes))
        for array, axes, shapes in zip(leaves, parts.axes, parts.shapes, strict=True)
    )
