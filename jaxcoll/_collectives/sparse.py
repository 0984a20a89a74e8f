"""Sparse rows of a larger array, with their indices; a reduction gathers them and never adds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxcoll import _compat
from jaxcoll._collectives.pipeline import Recipe, finish_sum
from jaxcoll._plan.checks import as_index, describe_type
from jaxcoll._plan.packs.leaves import (
    Whole,
    check_reducible,
    exact_dtype,
    flatten_with_paths,
    where,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IndexedSlices(Whole):
    """Some rows of a larger array, with their indices: for example the gradient of an embedding.

    Guarantee: it represents the dense array that `to_dense` returns. Row i of that is the sum of
    the `values` with index i, or zeros if there are none. Rows with an index outside the dense
    array are padding, and represent nothing. Only `to_dense` makes it dense.

    A frozen pytree: `values` and `indices` are its leaves, `dense_shape` is static.
    `jc.all_reduce` reduces it by gathering, and so does a `CrossDeviceOps` in a `PerReplica`.

    Args:
      values: (k, *row), the rows; numbers of any dtype.
      indices: (k,), integers; duplicates are allowed.
      dense_shape: (rows, *row), the shape of the dense array; None if unknown.

    Raises:
      ValueError: the shapes do not match, or a dtype is not supported.

    Examples:
      >>> grad = IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1, 1, 3], (4, 2))
      >>> grad
      IndexedSlices(values=float32[3, 2], indices=int32[3], dense_shape=(4, 2))
      >>> grad.to_dense().tolist()
      [[0.0, 0.0], [4.0, 6.0], [0.0, 0.0], [5.0, 6.0]]
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        dense_shape = None if self.dense_shape is None else _shape(self.dense_shape)
        _set_fields(self, _array(self.values), _array(self.indices), dense_shape)
        check_slices(self)

    def _prepare(self, path: str, caller: str) -> IndexedSlices:
        """Return the slices checked, as arrays that vary over the same axes."""
        check_slices(self, f"`{caller}`: {where(path)}")
        check_reducible(path + ".values", self.values.dtype)
        parts = jnp.asarray(self.values), jnp.asarray(self.indices)
        over = sorted(frozenset().union(*map(_compat.varying_axes, parts)))
        values, indices = (_compat.cast_varying(part, over) for part in parts)
        return skip_checks(values, indices, self.dense_shape)

    def _reduce(self, recipe: Recipe) -> IndexedSlices:
        """Return the sum or the mean: the rows of every replica in replica order, *invariant*."""
        # Gathering cannot overflow a float16; only a mean's division needs float32.
        wire = np.dtype(np.float32) if recipe.wire == np.float16 else recipe.wire
        rows = _gather_rows(self.values, recipe).astype(wire)
        values = finish_sum(rows, dataclasses.replace(recipe, wire=wire))
        indices = _compat.cast_invariant(_gather_rows(self.indices, recipe), recipe.axes)
        return skip_checks(values, indices, self.dense_shape)

    def to_dense(self) -> jax.Array:
        """Return the dense array: add up rows with the same index, and drop padding.

        Returns:
          An array of `dense_shape`, *varying* if the values are. Differentiable. Cost: a
          scatter-add into an array of zeros, on this device.

        Raises:
          ValueError: `dense_shape` is None.
        """
        if self.dense_shape is None:
            raise ValueError(
                "`to_dense` needs to know how many rows there are: create the IndexedSlices with "
                "a `dense_shape`, or add the rows to an array yourself with "
                "`array.at[slices.indices].add(slices.values)`."
            )
        values = jnp.asarray(self.values)
        return jax.ops.segment_sum(values, jnp.asarray(self.indices), self.dense_shape[0])

    def padded(self, bound: int) -> IndexedSlices:
        """Return the same slices with `bound` rows; the added ones are zero, with an unused index.

        That index is the largest of its type, 2147483647 for int32, which JAX's own `array.at[...]`
        drops, too (-1 would be the last row). If replicas have different numbers of rows, pad them
        to a common bound.

        Args:
          bound: the number of rows to have, at least the current number.

        Returns:
          New slices, with the same `to_dense`.

        Raises:
          ValueError: there are more rows than `bound`, or the largest index of the type is a row.

        Examples:
          >>> IndexedSlices([5.0], [2], (3,)).padded(2).indices.tolist()
          [2, 2147483647]
        """
        rows, wanted = self.indices.shape[0], as_index(bound)
        if wanted is None:
            raise ValueError(f"`padded` expects an integer `bound`; got {bound!r}.")
        added = wanted - rows
        if added < 0:
            raise ValueError(
                f"`padded` got a bound of {bound}, but there are {rows} rows already, and it drops "
                "none: raise the bound, or add up rows with equal indices first."
            )
        if not added:
            return self
        xp = np if all(isinstance(x, np.ndarray) for x in (self.values, self.indices)) else jnp
        unused = np.iinfo(self.indices.dtype).max
        if self.dense_shape is not None and unused < self.dense_shape[0]:
            raise ValueError(
                f"`padded` needs an index outside of the {self.dense_shape[0]} rows, and no "
                f"{self.indices.dtype} is; make `indices` wider, as in `.astype('int32')`."
            )
        widths = ((0, added), *[(0, 0)] * (len(self.values.shape) - 1))
        return IndexedSlices(
            xp.pad(self.values, widths),
            xp.pad(self.indices, (0, added), constant_values=unused),
            self.dense_shape,
        )

    def without_padding(self) -> IndexedSlices:
        """Return the same slices without padding rows, in the same order.

        The number of rows depends on the indices, so this works only between programs.

        Returns:
          New slices, on the host.

        Raises:
          ValueError: the slices are being traced.

        Examples:
          >>> IndexedSlices([5.0, 6.0], [2, 1], (3,)).padded(7).without_padding().indices.tolist()
          [2, 1]
        """
        if any(isinstance(x, Tracer) for x in (self.values, self.indices)):
            raise ValueError(
                "`without_padding` needs the indices, which are being traced: the number of rows "
                "left must be known as part of a shape. Call it on the result of the program; "
                "inside, padding does no harm."
            )
        values, indices = np.asarray(self.values), np.asarray(self.indices)
        rows = np.iinfo(indices.dtype).max if self.dense_shape is None else self.dense_shape[0]
        used = (indices >= 0) & (indices < rows)
        return IndexedSlices(values[used], indices[used], self.dense_shape)

    def __repr__(self) -> str:
        values, indices = _type(self.values), _type(self.indices)
        return f"IndexedSlices(values={values}, indices={indices}, dense_shape={self.dense_shape})"


def check_slices(slices: IndexedSlices, who: str = "`IndexedSlices`") -> None:
    """Raise an error if the parts do not match, as after a transformation that replaced them."""
    values, indices, dense = slices.values, slices.indices, slices.dense_shape
    for name, part in (("values", values), ("indices", indices)):
        if not _is_array(part):
            raise ValueError(
                f"{who} expects `{name}` to be an array; got {part!r} ({type(part).__name__})."
            )
    if not jax.dtypes.issubdtype(indices.dtype, np.integer):
        raise ValueError(f"{who} expects `indices` to be integers; got {_type(indices)}.")
    if len(indices.shape) != 1 or values.shape[:1] != indices.shape:
        raise ValueError(
            f"{who} expects `values` of shape (k, *row) and `indices` of shape (k,); got "
            f"values {_type(values)} and indices {_type(indices)}."
        )
    if dense is not None and (not dense or tuple(values.shape[1:]) != dense[1:]):
        raise ValueError(
            f"{who} expects `dense_shape` to be (rows, *row), where row is the shape of a row of "
            f"its values, {tuple(values.shape[1:])}; got {dense}."
        )


def skip_checks(values: Any, indices: Any, dense_shape: tuple[int, ...] | None) -> IndexedSlices:
    """Return slices without checks: while JAX transforms a tree, its leaves may be anything."""
    return _set_fields(object.__new__(IndexedSlices), values, indices, dense_shape)


def _set_fields(slices: IndexedSlices, *parts: Any) -> IndexedSlices:
    for name, part in zip(("values", "indices", "dense_shape"), parts, strict=True):
        object.__setattr__(slices, name, part)  # they are frozen
    return slices


_KEYS = [jax.tree_util.GetAttrKey(name) for name in ("values", "indices")]

jax.tree_util.register_pytree_with_keys(
    IndexedSlices,
    lambda x: ([*zip(_KEYS, (x.values, x.indices), strict=True)], x.dense_shape),
    lambda dense_shape, parts: skip_checks(*parts, dense_shape=dense_shape),
)


def _is_array(part: Any) -> bool:
    return hasattr(part, "shape") and hasattr(part, "dtype")


def _array(part: Any) -> Any:
    """Return `part` unchanged if it has a shape and a dtype, else as an array on the host."""
    if _is_array(part):
        return part
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(part)
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    return part  # for `check_slices`


def _shape(dense_shape: Any) -> tuple[int, ...]:
    try:
        shape = tuple(operator.index(size) for size in dense_shape)
    except TypeError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise ValueError(
            "`IndexedSlices` expects `dense_shape` to be a tuple of integers, known when the "
            f"program is traced, or None; got {dense_shape!r}."
        )
    return shape


def _type(part: Any) -> str:
    """Return an array's dtype and shape, or the `repr` of anything else, for a message."""
    return describe_type(part) if _is_array(part) else repr(part)


def is_sparse(leaf: Any) -> TypeGuard[IndexedSlices]:
    """Return whether `leaf` is an IndexedSlices; to be passed as `is_leaf`."""
    return isinstance(leaf, IndexedSlices)


def check_dense(tree: Any, message: str, error: type[Exception] = ValueError) -> None:
    """Raise an error if a tree has an IndexedSlices; "{leaf}" in `message` becomes its path."""
    for path, leaf in flatten_with_paths(tree, is_sparse)[0]:
        if is_sparse(leaf):
            raise error(message.format(leaf=where(path)))


def _gather_rows(rows: jax.Array, recipe: Recipe) -> jax.Array:
    if not recipe.over:
        return rows
    if not rows.size:
        return jnp.concatenate([rows] * math.prod(map(lax.axis_size, recipe.over)))
    # `vmap` and `pmap` track no types, and JAX 0.10 refuses "invarying" under `vmap`.
    typed = any(map(_compat.tracks_variance, recipe.over))
    gathered = lax.all_gather(
        rows.astype(exact_dtype(rows.dtype)),
        recipe.over,
        axis=0,
        tiled=True,
        to="invarying" if typed else "varying",
    )
    return gathered.astype(rows.dtype)
