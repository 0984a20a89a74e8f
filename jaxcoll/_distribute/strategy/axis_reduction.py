"""A reduction over the replicas and over dimensions of each one's value, weighted by element."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._distribute.ops.cross_device_ops import CrossDeviceOps
from jaxcoll._distribute.values.parts import Held, held
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica
from jaxcoll._distribute.values.replica_axis import rows_over
from jaxcoll._mesh.mesh import of_this_process
from jaxcoll._mesh.placement import is_array
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import check_reducible, flattened, where
from jaxcoll._spmd.gather import dimension
from jaxcoll._spmd.sparse import check_dense

_SPARSE = (
    "`reduce` along an axis expects dense arrays; {leaf} is an IndexedSlices. Reduce it with axis "
    "None, or make it an array with `to_dense` first."
)


def reduce_along(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    value: Any,
    axis: Any,
    devices: tuple[jax.Device, ...],
    options: CommunicationOptions,
    path: str,
) -> Any:
    """Reduce each replica's part along `axis`, and by `ops` the results over the replicas.

    Values and results are those of `Strategy.reduce` over `devices`; `path` is where the value
    stands in a tree.
    """
    here = of_this_process(devices)
    first = devices[here[0]]
    spans = len(here) < len(devices)
    check_dense(value.tree if isinstance(value, PerReplica | Mirrored) else value, _SPARSE)
    if isinstance(value, PerReplica | Mirrored):
        value = held("reduce", value, devices if spans else ())
    elif spans or not is_array(value):
        value = Held.of_plain("reduce", value, devices)
    else:  # one that all replicas share, or zero
        shared = ops.broadcast(value, first)
        axes = dimensions_of(axis, shared.shape, "")
        return (jnp.mean if reduce_op is ReduceOp.MEAN else jnp.sum)(shared, axes)
    settings = f"{reduce_op} of {path or 'the value'} along {axis!r}"
    if isinstance(value, Held):
        sums, counts = _sums_of_parts(reduce_op, value, axis, options.timeout_seconds, settings)
        like = value.parts[min(value.parts)]
    else:
        sums, counts = _sums_of_rows(reduce_op, value, axis)
        like = value.tree
    # A mean of means would weigh small parts like large ones: one sum, and one division.
    (total,) = ops._reduced("reduce", ReduceOp.SUM, [("", (sums, first))], options, settings)
    return total if reduce_op is ReduceOp.SUM else jax.tree.map(divided, total, counts, like)


def _sums_of_rows(
    reduce_op: ReduceOp, value: PerReplica | Mirrored, axis: Any
) -> tuple[PerReplica | Mirrored, Any]:
    """Each replica's sums where they lie, and how many elements all replicas have in each."""
    shift = int(not value.replicated)
    axes = _axes_of(value.tree, axis, shift)
    leaves, treedef = jax.tree.flatten(value.tree)
    shifted = tuple(tuple(k + shift for k in own) for own in axes)
    counts = [len(value) * _elements(x, own) for x, own in zip(leaves, shifted, strict=True)]
    sharding = rows_over(value.devices) if shift else None
    sums = treedef.unflatten(local_sums(reduce_op, shifted, sharding)(leaves))
    return type(value).of(sums), treedef.unflatten(counts)


def _sums_of_parts(
    reduce_op: ReduceOp, value: Held, axis: Any, timeout_seconds: float | None, settings: str
) -> tuple[PerReplica, Any]:
    """The sums of this process's parts, and how many elements all replicas have in each."""
    part = value.parts[min(value.parts)]
    axes = _axes_of(part, axis, 0)
    treedef = jax.tree.structure(part)
    shapes = value.shapes("reduce", axes, timeout_seconds, settings)
    counts = [sum(_elements(x, own) for x in x_of) for x_of, own in zip(shapes, axes, strict=True)]
    program = local_sums(reduce_op, axes, None)
    sums = {
        i: treedef.unflatten(program(jax.device_put(jax.tree.leaves(part), value.devices[i])))
        for i, part in value.parts.items()
    }
    return Held(sums, value.devices).assembled(), treedef.unflatten(counts)


def _axes_of(tree: Any, axis: Any, shift: int) -> tuple[tuple[int, ...], ...]:
    """For each leaf the dimensions that `axis` names, not counting `shift` leading ones."""
    found = []
    for name, leaf in flattened(tree)[0]:
        check_reducible(name, leaf.dtype)
        found.append(dimensions_of(axis, leaf.shape[shift:], name))
    return tuple(found)


def _elements(array: Any, axes: Sequence[int]) -> int:
    return math.prod(array.shape[k] for k in axes)


def dimensions_of(axis: Any, shape: Sequence[int], path: str) -> tuple[int, ...]:
    """The dimensions that `axis` names, counted from the first."""
    who = f"`reduce`: {where(path)}"
    axes = axis if isinstance(axis, tuple | list) else [axis]
    found = tuple(dimension(k, shape, who) for k in axes)
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"{who}: expected different axes, at least one; got {axis!r}.")
    return found


@functools.lru_cache(maxsize=256)
def local_sums(
    reduce_op: ReduceOp, axes: tuple[tuple[int, ...], ...], sharding: Any
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The sums of arrays along dimensions of their own, in the type in which a mean is made."""

    def sums(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            jnp.sum(x, k, dtype=_wide(x) if reduce_op is ReduceOp.MEAN else None)
            for x, k in zip(arrays, axes, strict=True)
        ]

    return jax.jit(sums, out_shardings=sharding)


def _mean_dtype(array: Any) -> np.dtype:
    """The type of a mean of `array`: its own, or of integers JAX's default float."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype


def _wide(array: Any) -> np.dtype:
    """The type of a sum whose mean is wanted: that of 16-bit floats must not overflow."""
    dtype = _mean_dtype(array)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def divided(total: jax.Array, count: int, part: Any) -> jax.Array:
    """The mean that has this sum, in the type of the mean of such a part."""
    return (total / count).astype(_mean_dtype(part))
