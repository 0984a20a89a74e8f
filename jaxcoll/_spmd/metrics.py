"""Metrics: numbers that say themselves how they are added up, so that one reduction takes all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcoll import _compat
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import dtype_of, flattened, where
from jaxcoll._plan.packs.packing import BytesPerPack
from jaxcoll._spmd.arithmetic import wide
from jaxcoll._spmd.axes import bound_axes, count
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Scope
from jaxcoll.errors import AlreadyReducedError

_ALREADY_REDUCED = """\
`{caller}`: the total of metric {path} is already the same on every replica along {missing}, so \
adding it up would count it {n} times. Hand over this replica's own numbers and leave the \
reduction to `{caller}`; if every replica's copy does count, say so with \
`jax.lax.pcast(x, {missing}, to="varying")`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedMean:
    """A metric that is a mean: of a loss, an accuracy, a gradient's norm.

    Guarantee: over micro-batches and replicas it becomes sum(total) / sum(weight), the mean that
    one device would have of everything.

    Attributes:
      total: the sum of weight times value over this replica's share; a number, or an array of
        them (as a scan stacks them), all of whose elements are added.
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
    """A metric that is a sum: of tokens, of examples, of overflows.

    Guarantee: over micro-batches and replicas it becomes the sum of all elements of all `value`s.

    Attributes:
      value: this replica's; a number, or an array whose elements are added.

    Examples:
      >>> seen = jax.vmap(lambda x: reduce_metrics(Total(x), "data"), axis_name="data")
      >>> seen(jnp.array([3, 4])).tolist()
      [7, 7]
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a metric that travels: floats, so that one pack takes all."""

    total: Any  # float32[], or wider where the metric is
    weight: Any  # likewise; None for a `Total`
    # The integer type that the result has again; None for a float
    whole: Any = dataclasses.field(metadata={"static": True})
    # The total is a constant of the program, of which each replica's copy counts
    own: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a metric in a tree."""

    path: str


def reduce_metrics(metrics: Any, axis_name: Any, *, scope: Scope) -> Any:
    """A number for each metric, *invariant*, by one reduction for all; see `jc.reduce_metrics`."""
    caller = "jc.reduce_metrics"
    axes = bound_axes(axis_name, caller)
    parts, rest = taken_apart(metrics, caller)
    for path, leaf in flattened(rest)[0]:
        kind = type(leaf).__name__ if not hasattr(leaf, "dtype") else f"an array of {leaf.dtype}"
        raise ValueError(
            f"`{caller}` expects jc.WeightedMean(total, weight) or jc.Total(value); "
            f"{where(path)} is {kind}, which does not say how it is added up."
        )
    parts = varied(parts, axes, caller)
    parts = all_reduce(
        ReduceOp.SUM, parts, axis_name, scope=scope.exactly, packing=BytesPerPack(1 << 60)
    )
    return put_together(rest, parts, 1)


def taken_apart(tree: Any, caller: str) -> tuple[dict[str, Part], Any]:
    """Return the parts of metrics that travel, by path, and the tree with a place for each."""
    parts: dict[str, Part] = {}

    def leave(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, WeightedMean | Total):
            return leaf
        name = jax.tree_util.keystr(path)
        parts[name] = _part(leaf, name, caller)
        return _Place(name)

    is_metric = lambda x: isinstance(x, WeightedMean | Total)  # noqa: E731
    return parts, jax.tree_util.tree_map_with_path(leave, tree, is_leaf=is_metric)


def put_together(tree: Any, parts: Mapping[str, Part], times: int) -> Any:
    """The tree with a number in every place that `taken_apart` left.

    The parts were summed, and divided by `times`.
    """
    return jax.tree.map(
        lambda x: _settled(parts[x.path], times) if isinstance(x, _Place) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _Place),
    )


def varied(parts: dict[str, Part], axes: dict[str, int], caller: str) -> dict[str, Part]:
    """The parts typed as varying over the axes, which is what each replica's own numbers are."""
    for path, part in parts.items():
        missing = {a: axes[a] for a in _compat.same_axes(part.total, axes)}
        if missing and not part.own:
            names = tuple(missing) if len(missing) > 1 else next(iter(missing))
            raise AlreadyReducedError(
                _ALREADY_REDUCED.format(
                    caller=caller, path=path or "itself", missing=repr(names), n=count(missing)
                )
            )
    return jax.tree.map(lambda x: _compat.as_varying(x, tuple(axes)), parts)


def _settled(part: Part, times: int) -> jax.Array:
    if part.weight is not None:
        widest = np.result_type(part.total.dtype, part.weight.dtype)
        return part.total.astype(widest) / part.weight.astype(widest)
    total = part.total * times if times > 1 else part.total
    return total if part.whole is None else jnp.round(total).astype(part.whole)


def _part(metric: WeightedMean | Total, path: str, caller: str) -> Part:
    if isinstance(metric, Total):
        total, whole = _summed(metric.value, path, caller)
        return Part(total, None, whole, not isinstance(metric.value, Tracer))
    if np.shape(metric.total) != np.shape(metric.weight):
        raise ValueError(
            f"`{caller}`: metric {path or 'itself'} has a total of shape {np.shape(metric.total)} "
            f"and a weight of shape {np.shape(metric.weight)}; expected one weight for each total."
        )
    (total, _), (weight, _) = (_summed(x, path, caller) for x in (metric.total, metric.weight))
    return Part(total, weight, None, not isinstance(metric.total, Tracer))


def _summed(value: Any, path: str, caller: str) -> tuple[jax.Array, Any]:
    """All elements added, as a float; and the type that the sum has, if an integer."""
    dtype = dtype_of(value)
    if dtype is None or not any(jnp.issubdtype(dtype, k) for k in (np.number, np.bool_)):
        raise ValueError(
            f"`{caller}`: metric {path or 'itself'} is made of "
            f"{type(value).__name__ if dtype is None else dtype}; expected numbers."
        )
    array = jnp.asarray(value)
    total = jnp.sum(array.astype(wide(array.dtype)))
    if jnp.issubdtype(array.dtype, np.inexact):
        return total, None
    # Flags and narrow counters have sums that they cannot hold.
    return total, array.dtype if array.dtype.itemsize >= 4 else np.dtype(np.int32)
