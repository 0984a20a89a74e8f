"""Public in-program metrics and norms: `reduce_metrics`, `global_norm`, `all_finite`."""

from __future__ import annotations

from typing import Any

from jaxcoll._plan.options import CommunicationOptions, checked
from jaxcoll._spmd import metrics, norms
from jaxcoll._spmd.scope import scope_here


def reduce_metrics(
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """Many metrics over all replicas in one collective.

    Guarantee: each `Total` becomes the sum, each `WeightedMean` the mean, that one device would
    have of everything; all travel in one pack, whatever options say of packing. Metrics that a scan
    stacked are added up first, so a step of many pieces or layers needs one call, after the scan.
    Metrics that the loss of `value_and_grad` or `accumulate` returns in its `aux` need no call:
    they travel with the gradients.

    Args:
      value: a pytree of `WeightedMean` and `Total`; None passes through.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner.
      options: as in `all_reduce`.

    Returns:
      The tree with a scalar in place of each metric, *invariant* over the axes: float32 (float64
      where the metric is); a `Total` of integers in their own type, of flags and of integers
      narrower than 32 bits in int32. They travel as floats: integers are exact up to 2^24 (with
      gradients of a mean, 2^22) and rounded beyond. Cost: 4 bytes for a Total, 8 for a
      WeightedMean.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is neither, or a weight has another shape than its total.
      AlreadyReducedError: a total is the same on every replica already.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def log(right, real):
      ...     metrics = {"accuracy": WeightedMean(right, real), "tokens": Total(real)}
      ...     return reduce_metrics(metrics, "data")
      >>> found = jax.vmap(log, axis_name="data")(jnp.array([1, 6]), jnp.array([2, 8]))
      >>> round(float(found["accuracy"][0]), 6), int(found["tokens"][0])
      (0.7, 10)
    """
    scope = scope_here().merged(checked(options, exactly="reduce_metrics"))
    axis_name = scope.over(axis_name, "jc.reduce_metrics")
    return metrics.reduce_metrics(value, axis_name, scope=scope)


def global_norm(
    tree: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """The Euclidean norm of all leaves together, as for clipping; of shards, over all replicas.

    Guarantee: sqrt of the sum of |x|² over every element, squared and added in float32. It is
    finite exactly where every element is and no square overflows (elements up to 1.8·10¹⁹), so one
    pass over memory gives the norm and says whether the step can be taken.

    Args:
      tree: a pytree of arrays of numbers.
      axis_name: None where every replica holds the whole, as after a reduction: nothing is sent.
        The axes over which leaves are in shards otherwise: a leaf that a checked `shard_map` knows
        to be the same everywhere is counted once; where types say nothing, each is a shard, or,
        with `Shards` in the tree, these are, and every replica holds all else.
      options: as in `all_reduce`, for the one scalar that travels.

    Returns:
      A float32 scalar (float64 where a leaf is), *invariant* over the axes; 0 for an empty tree.
      Without axes it is this replica's own where a leaf is.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf holds no numbers, or is an `IndexedSlices`; or `Shards` are along an axis
        that is mapped here and not named.

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
    """Return whether every element of every leaf is finite; with axes, on every replica.

    Gradients that were reduced need no axes: a sum or mean of floats is infinite or NaN wherever
    a summand is, whatever the algorithm and the packing, so all replicas find the same without
    asking each other.

    Args:
      tree: a pytree of arrays of numbers; integers are finite.
      axis_name: None where every replica holds the whole; otherwise the axes whose replicas must
        agree: of gradients before their reduction, or of shards.
      options: as in `all_reduce`, for the one scalar that travels.

    Returns:
      A boolean scalar, *invariant* over the axes.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf holds no numbers, or is an `IndexedSlices`; or `Shards` are along an axis
        that is mapped here and not named.

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
