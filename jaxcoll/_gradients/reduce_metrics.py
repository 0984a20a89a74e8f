"""`reduce_metrics`, `global_norm` and `all_finite`: metrics and norms inside a mapped program."""

from __future__ import annotations

from typing import Any

from jaxcoll._collectives.scope import scope_here
from jaxcoll._gradients import metrics, norms
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.options import CommunicationOptions, checked


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
    check_value_first("jc.reduce_metrics", value)
    scope = scope_here().merged(checked(options, exactly="reduce_metrics"))
    axis_name = scope.over(axis_name, "jc.reduce_metrics")
    return metrics.reduce_metrics(value, axis_name, scope=scope)


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
    return norms.global_norm(
        tree, axis_name, scope=scope_here().merged(checked(options, exactly="global_norm"))
    )


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
    return norms.all_finite(
        tree, axis_name, scope=scope_here().merged(checked(options, exactly="all_finite"))
    )
