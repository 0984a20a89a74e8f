"""Metrics: numbers that say how they combine, so that one reduction serves all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcoll import _compat
from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.scope import count, resolve_axes, scope_here
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import accumulation_dtype, dtype_or_none, flatten_with_paths, where
from jaxcoll._plan.packs.packing import BytesPerPack
from jaxcoll.errors import AlreadyReducedError

_ALREADY_REDUCED = """\
`{caller}`: the total of metric {path} is already the same on every replica along {missing}, so \
adding it up would count it {n} times. Pass this replica's own numbers; if every replica's copy \
does count, pass `jax.lax.pcast(x, {missing}, to="varying")`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedMean:
    """A metric that is a mean: a loss, an accuracy, a gradient's norm.

    Guarantee: over microbatches and replicas it becomes sum(total) / sum(weight), the mean that
    one device would compute from all the data.

    Attributes:
      total: the sum of weight times value over this replica's share; a number, or an array (for
        example one that a scan stacked), whose elements are all added.
      weight: the sum of the weights, of the same shape.

    Examples:
      >>> right, real = jnp.array([1.0, 0.0, 1.0]), jnp.array([1.0, 1.0, 0.0])
      >>> accuracy = WeightedMean((right * real).sum(), real.sum())
      >>> float(accuracy.total / accuracy.weight)
      0.5
    """

    total: Any
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Total:
    """A metric that is a sum: a number of tokens, of examples, of overflows.

    Guarantee: over microbatches and replicas it becomes the sum of all elements of all `value`s;
    of integers and flags it is exact, modulo 2^32 (2^64 for 64-bit ones), as that of `jnp.sum`.

    Attributes:
      value: this replica's number, or an array whose elements are added.

    Examples:
      >>> seen = jax.vmap(lambda x: reduce_metrics(Total(x), "data"), axis_name="data")
      >>> seen(jnp.array([3, 4])).tolist()
      [7, 7]
    """

    value: Any


Parts = dict[str, WeightedMean | Total]
"""The metrics of a tree by path, as floats, so that they share one pack."""

_DIGITS = 4
"""Digits of an integer in a pack of floats, which hold the sum of 2^16 of each exactly."""


def is_metric(x: Any) -> bool:
    return isinstance(x, WeightedMean | Total)


def reduce_metrics(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """Reduce many metrics over all replicas in one collective.

    Guarantee: each `Total` becomes the sum and each `WeightedMean` the mean that one device would
    compute of all rows. All travel in one pack, whatever packing `options` say. Metrics stacked by
    a scan are added up first, so a scan over microbatches or layers needs one call, after it.
    Metrics that the loss of `value_and_grad` or `accumulate` returns in its `aux` need no call:
    they travel with the gradients.

    Args:
      value: a pytree of `WeightedMean` and `Total`; None passes through.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner.
      options: as in `all_reduce`.

    Returns:
      The tree with a scalar for each metric, *invariant* over the axes. Scalars are float32, or
      float64 where the metric is; a `Total` of integers keeps their dtype, one of booleans or of
      integers narrower than 32 bits is int32. They travel as floats: integers are exact up to 2^24
      (with gradients of a mean, 2^22) and rounded beyond. Cost: 4 bytes for a Total, 8 for a
      WeightedMean.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is no metric, or the shapes of a weight and its total differ.
      AlreadyReducedError: a total is already the same on every replica.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def log(right, real):
      ...     metrics = {"accuracy": WeightedMean(right, real), "tokens": Total(real)}
      ...     return reduce_metrics(metrics, "data")
      >>> values = jax.vmap(log, axis_name="data")(jnp.array([1, 6]), jnp.array([2, 8]))
      >>> round(float(values["accuracy"][0]), 6), int(values["tokens"][0])
      (0.7, 10)
    """
    caller = "jc.reduce_metrics"
    check_value_first(caller, value)
    scope = scope_here().merge(check_options(options, exactly="reduce_metrics"))
    axes = resolve_axes(scope.choose_axes(axis_name, caller), caller)
    for path, leaf in flatten_with_paths(value, is_metric)[0]:
        if not is_metric(leaf):
            is_array = hasattr(leaf, "dtype")
            kind = f"an array of {leaf.dtype}" if is_array else type(leaf).__name__
            raise ValueError(
                f"`{caller}` expects jc.WeightedMean(total, weight) or jc.Total(value); "
                f"{where(path)} is {kind}, which does not say how it is added up."
            )
    metrics = constants_as_varying(value, tuple(axes))
    reduction = AllReduce(ReduceOp.SUM, axes, scope.exactly, packing=BytesPerPack(1 << 60))
    parts = reduction.reduce(make_parts(metrics, axes, caller))
    return insert_numbers(metrics, parts, 1)


def constants_as_varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Type the program's constants in metrics as varying: every replica's copy counts."""

    def varying(x: Any) -> Any:
        is_constant = dtype_or_none(x) is not None and not isinstance(x, Tracer)
        return _compat.cast_varying(jnp.asarray(x), axes) if is_constant else x

    return jax.tree.map(
        lambda x: jax.tree.map(varying, x) if is_metric(x) else x, tree, is_leaf=is_metric
    )


def make_parts(tree: Any, axes: Mapping[str, int], caller: str) -> Parts:
    """Sum each metric of a tree on this replica; *varying* over the axes."""
    parts: Parts = {}
    for path, metric in flatten_with_paths(tree, is_metric)[0]:
        if isinstance(metric, Total):
            total = _sum(metric.value, path, caller)
            counter = _counter(metric.value)
            if counter is not None:
                total = _digits(jnp.sum(jnp.asarray(metric.value), dtype=counter))
            parts[path] = Total(total)
        elif isinstance(metric, WeightedMean):
            shapes = np.shape(metric.total), np.shape(metric.weight)
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"`{caller}`: metric {path or 'itself'} has a total of shape {shapes[0]} and a "
                    f"weight of shape {shapes[1]}; expected one weight for each total."
                )
            total = _sum(metric.total, path, caller)
            parts[path] = WeightedMean(total, _sum(metric.weight, path, caller))
        else:
            continue
        if missing := {a: axes[a] for a in _compat.same_axes(total, axes)}:
            names = repr(tuple(missing) if len(missing) > 1 else next(iter(missing)))
            fields = {"path": path or "itself", "missing": names, "n": count(missing)}
            raise AlreadyReducedError(_ALREADY_REDUCED.format(caller=caller, **fields))
    return jax.tree.map(lambda x: _compat.cast_varying(x, tuple(axes)), parts)


def insert_numbers(tree: Any, parts: Parts, times: int) -> Any:
    """Replace each metric of a tree by its number.

    `parts` are the summands, reduced: their sum, divided by `times`.
    """

    def number(path: Any, metric: Any) -> Any:
        if not is_metric(metric):
            return metric
        part = parts[jax.tree_util.keystr(path)]
        if isinstance(part, WeightedMean):
            widest = np.result_type(part.total.dtype, part.weight.dtype)
            return part.total.astype(widest) / part.weight.astype(widest)
        total = part.value * times if times > 1 else part.value
        counter = _counter(metric.value)
        return total if counter is None else _integer(jnp.round(total).astype(counter))

    return jax.tree_util.tree_map_with_path(number, tree, is_leaf=is_metric)


def _sum(value: Any, path: str, caller: str) -> jax.Array:
    """Sum all elements, as a float of at least 32 bits."""
    dtype = dtype_or_none(value)
    if dtype is None or not any(jnp.issubdtype(dtype, k) for k in (np.number, np.bool_)):
        raise ValueError(
            f"`{caller}`: metric {path or 'itself'} is made of "
            f"{type(value).__name__ if dtype is None else dtype}; expected numbers."
        )
    array = jnp.asarray(value)
    # Widened before the sum: a float16 total stops where an addend rounds away.
    return jnp.sum(array.astype(accumulation_dtype(array.dtype)))


def _counter(value: Any) -> np.dtype | None:
    """Choose the type in which integers or flags are counted; None for other numbers."""
    dtype = jnp.asarray(value).dtype
    if jnp.issubdtype(dtype, np.inexact):
        return None
    # The sum of flags or narrow counters may not fit into their type.
    return dtype if dtype.itemsize >= 4 else np.dtype(np.int32)


def _digits(total: jax.Array) -> jax.Array:
    """Split an integer into digits, as floats: a float would round the integer itself."""
    places, base = _places(total.dtype)
    return (total >> places & (base - 1)).astype(accumulation_dtype(total.dtype))


def _integer(digits: jax.Array) -> jax.Array:
    """Join digits, or sums of digits, to an integer."""
    return jnp.sum(digits << _places(digits.dtype)[0], dtype=digits.dtype)


def _places(dtype: np.dtype) -> tuple[np.ndarray, int]:
    bits = 8 * dtype.itemsize // _DIGITS
    return np.arange(_DIGITS, dtype=dtype) * dtype.type(bits), 1 << bits
