"""Some rows of a larger array, by their indices; replicas bring them together, never add them."""

from __future__ import annotations

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
from jaxcoll._plan.checks import kind_of
from jaxcoll._plan.packs.leaves import Whole, carried_dtype, check_reducible, flattened, where
from jaxcoll._spmd.pipeline import Recipe, finished


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IndexedSlices(Whole):
    """Some rows of a larger array, by their indices: what the gradient of an embedding is.

    Guarantee: it stands for the dense array that `to_dense` gives: row i is the sum of the `values`
    whose index is i, and zero where there is none. A row whose index lies outside the dense
    array is padding and stands for nothing. No call makes it dense but `to_dense`.

    A frozen pytree: `values` and `indices` are its leaves, `dense_shape` is static.
    `jc.all_reduce`, and a `CrossDeviceOps` for a `PerReplica` of them, reduce it by gathering.

    Args:
      values: (k, *row), the rows; numbers of any dtype.
      indices: (k,), integers; one may occur several times.
      dense_shape: (rows, *row) of the dense array; None where nobody needs to know.

    Raises:
      ValueError: the shapes do not fit together, or a dtype is not supported.

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
        values, indices = _array("values", self.values), _array("indices", self.indices)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        if self.dense_shape is not None:
            object.__setattr__(self, "dense_shape", _shape(self.dense_shape))
        check_slices(self)

    def _taken(self, path: str, caller: str) -> IndexedSlices:
        """Return it with values and indices as arrays that vary over the same axes."""
        check_slices(self, f"`{caller}`: {where(path)}")
        check_reducible(path + ".values", self.values.dtype)
        parts = jnp.asarray(self.values), jnp.asarray(self.indices)
        over = sorted(frozenset().union(*map(_compat.varying_axes, parts)))
        values, indices = (_compat.as_varying(part, over) for part in parts)
        return unchecked(values, indices, self.dense_shape)

    def _reduced(self, recipe: Recipe) -> IndexedSlices:
        """Return the rows of every replica, in their order, *invariant*: the sum, or the mean."""
        # Nothing is added up, so all that float16 needs is a division that does not underflow.
        wire = np.dtype(np.float32) if recipe.wire == np.float16 else recipe.wire
        rows = _from_all(self.values, recipe).astype(wire)
        values = finished(rows, dataclasses.replace(recipe, wire=wire))
        indices = _compat.as_invariant(_from_all(self.indices, recipe), recipe.axes)
        return unchecked(values, indices, self.dense_shape)

    def to_dense(self) -> jax.Array:
        """The dense array: rows with one index are added up, padding is dropped.

        Returns:
          An array of `dense_shape`, *varying* where the values do. Differentiable. Cost: a
          scatter-add into an array of zeros, on this device.

        Raises:
          ValueError: there is no `dense_shape`.
        """
        if self.dense_shape is None:
            raise ValueError(
                "`to_dense` needs to know how many rows there are: make the IndexedSlices with a "
                "`dense_shape`, or add the rows to an array yourself with "
                "`array.at[slices.indices].add(slices.values)`."
            )
        values = jnp.asarray(self.values)
        return jax.ops.segment_sum(values, jnp.asarray(self.indices), self.dense_shape[0])

    def padded(self, bound: int) -> IndexedSlices:
        """The same with `bound` rows: what is added is zero, and its index is no row's.

        The index is the largest of its type, 2147483647 for int32, which JAX's own
        `array.at[...]` drops too (-1 would be the last row). Replicas whose lengths differ meet
        at a bound that all of them know.

        Args:
          bound: rows to have, at least as many as there are.

        Returns:
          A new value, with the same `to_dense`.

        Raises:
          ValueError: there are more rows than `bound`, and none is dropped; or every value of the
            indices' type is a row's.

        Examples:
          >>> IndexedSlices([5.0], [2], (3,)).padded(2).indices.tolist()
          [2, 2147483647]
        """
        rows = self.indices.shape[0]
        try:
            added = operator.index(bound) - rows
        except TypeError:
            raise ValueError(f"`padded` expects an integer `bound`; got {bound!r}.") from None
        if added < 0:
            raise ValueError(
                f"`padded` got a bound of {bound}, but there are {rows} rows already, and none may "
                "be lost; raise the bound, or add up rows of one index first."
            )
        if not added:
            return self
        xp = np if all(isinstance(x, np.ndarray) for x in (self.values, self.indices)) else jnp
        unused = np.iinfo(self.indices.dtype).max
        if self.dense_shape is not None and unused < self.dense_shape[0]:
            raise ValueError(
                f"`padded` needs an index that no row of {self.dense_shape} has, and "
                f"{self.indices.dtype} has none; make `indices` wider, as in `.astype('int32')`."
            )
        widths = ((0, added), *[(0, 0)] * (len(self.values.shape) - 1))
        return IndexedSlices(
            xp.pad(self.values, widths),
            xp.pad(self.indices, (0, added), constant_values=unused),
            self.dense_shape,
        )

    def without_padding(self) -> IndexedSlices:
        """The same without the rows that stand for nothing, in their order.

        Their number depends on the indices, so this is for use between programs.

        Returns:
          A new value, on the host.

        Raises:
          ValueError: it is being traced.

        Examples:
          >>> IndexedSlices([5.0, 6.0], [2, 1], (3,)).padded(7).without_padding().indices.tolist()
          [2, 1]
        """
        if any(isinstance(x, Tracer) for x in (self.values, self.indices)):
            raise ValueError(
                "`without_padding` needs the indices, which are being traced: how many rows are "
                "left would be part of a shape. Call it on the result of the program; inside, "
                "padding does no harm."
            )
        values, indices = np.asarray(self.values), np.asarray(self.indices)
        rows = np.iinfo(indices.dtype).max if self.dense_shape is None else self.dense_shape[0]
        used = (indices >= 0) & (indices < rows)
        return IndexedSlices(values[used], indices[used], self.dense_shape)

    def __repr__(self) -> str:
        values, indices = _type(self.values), _type(self.indices)
        return f"IndexedSlices(values={values}, indices={indices}, dense_shape={self.dense_shape})"


def check_slices(slices: IndexedSlices, who: str = "`IndexedSlices`") -> None:
    """Refuse parts that do not fit together, which a transformation may have put there."""
    values, indices, dense = slices.values, slices.indices, slices.dense_shape
    for name, part in (("values", values), ("indices", indices)):
        if not hasattr(part, "dtype") or not hasattr(part, "shape"):
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
            f"{who} expects `dense_shape` to be (rows, *row) with the row of its values, "
            f"{tuple(values.shape[1:])}; got {dense}."
        )


def unchecked(values: Any, indices: Any, dense_shape: tuple[int, ...] | None) -> IndexedSlices:
    """The value without a look at its parts, which may be anything while JAX transforms them."""
    self = object.__new__(IndexedSlices)
    for name, part in (("values", values), ("indices", indices), ("dense_shape", dense_shape)):
        object.__setattr__(self, name, part)
    return self


jax.tree_util.register_pytree_with_keys(
    IndexedSlices,
    lambda x: (
        (
            (jax.tree_util.GetAttrKey("values"), x.values),
            (jax.tree_util.GetAttrKey("indices"), x.indices),
        ),
        x.dense_shape,
    ),
    lambda dense_shape, parts: unchecked(*parts, dense_shape=dense_shape),
)


def _array(name: str, part: Any) -> Any:
    """`part` with a shape and a dtype: as it is if it has them, else an array of the host."""
    if hasattr(part, "shape") and hasattr(part, "dtype"):
        return part
    try:
        array = np.asarray(part)
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    except (TypeError, ValueError):
        raise ValueError(
            f"`IndexedSlices` expects `{name}` to be an array; got {part!r} "
            f"({type(part).__name__})."
        ) from None


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
    """An array by its dtype and shape; anything else as it is."""
    return kind_of(part) if hasattr(part, "dtype") and hasattr(part, "shape") else repr(part)


def is_sparse(leaf: Any) -> TypeGuard[IndexedSlices]:
    """True if `leaf` is an IndexedSlices, which a reduction takes as a whole."""
    return isinstance(leaf, IndexedSlices)


def check_dense(tree: Any, message: str, error: type[Exception] = ValueError) -> None:
    """Refuse a tree with an IndexedSlices, in these words, where "{leaf}" stands for the first."""
    for path, leaf in flattened(tree, is_sparse)[0]:
        if is_sparse(leaf):
            raise error(message.format(leaf=where(path)))


def _from_all(rows: jax.Array, recipe: Recipe) -> jax.Array:
    if not recipe.over:
        return rows
    if not rows.size:
        return jnp.concatenate([rows] * math.prod(map(lax.axis_size, recipe.over)))
    # `vmap` and `pmap` have no types to settle, and JAX 0.10 refuses to under `vmap`.
    typed = any(map(_compat.tracks_variance, recipe.over))
    gathered = lax.all_gather(
        rows.astype(carried_dtype(rows.dtype)),
        recipe.over,
        axis=0,
        tiled=True,
        to="invarying" if typed else "varying",
    )
    return gathered.astype(rows.dtype)
