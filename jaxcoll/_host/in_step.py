"""What a train step calls beside the reductions: micro-batches, metrics, norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxcoll._host.world import scope_here
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked
from jaxcoll._spmd import gradient, metrics, norms
from jaxcoll._spmd.accumulate import MicroBatches


def accumulate(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...],
    num_micro_batches: int,
    *,
    batch_argnums: int | Sequence[int] = -1,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """`value_and_grad` of a batch that is taken in pieces: one reduction a step, not one a piece.

    Law: the result is that of `jc.value_and_grad(fun, axis_name)` on the whole batch, to
    rounding: for MEAN, since the pieces are equal; for SUM; and for a `WeightedLoss`, however its
    weights are spread over pieces and replicas. No collective stands in the loop over the pieces
    that `fun` does not put there.

    Args:
      fun: the loss of one piece, as in `value_and_grad`.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner.
      num_micro_batches: pieces, of neighbouring rows, that each replica's share is cut into.
      batch_argnums: positions of the arguments that are cut along their leading dimension; the
        rest, and keyword arguments, are whole in every piece. Default: the last one, as in
        `data_parallel`. For other random numbers in every piece, cut an array of keys with it.
      reduce_op: MEAN or SUM, or their names in any case.
      argnums: positions of the arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      scatter: as in `value_and_grad`.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`.
      Value and gradients are *invariant*, gradients in `Shards` and of what is a replica's own
      *varying*, as in `value_and_grad`. Each `WeightedMean` and `Total` in `aux` becomes one number
      over pieces and replicas; the rest of `aux` is this replica's own (*varying*), with the pieces
      along a new leading dimension; what is neither array nor number is as it was. Gradients
      narrower than 32 bits are added up in float32 and travel in their own type. Cost: the memory
      of one piece and of one gradient more (in float32); one `all_reduce` for all.

    Raises:
      ValueError: the pieces do not divide a share, a leaf of the batch is a scalar, an argument is
        both cut and differentiated, or `num_micro_batches` is no integer above 0; and as in
        `value_and_grad`.

    Warns:
      ReductionInLoopWarning: `fun` reduces what is only added up or kept.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> step = accumulate(lambda w, x: jnp.mean(w * x), "data", 2)
      >>> shares = jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
      >>> value, grad = jax.vmap(step, in_axes=(None, 0), axis_name="data")(2.0, shares)
      >>> value.tolist(), grad.tolist()
      ([9.0, 9.0], [4.5, 4.5])
    """
    count = num_micro_batches
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"`jc.accumulate` expects `num_micro_batches` to be an integer of at least 1; "
            f"got {count!r}."
        )
    several = isinstance(batch_argnums, Sequence)
    positions = tuple(batch_argnums) if several else (batch_argnums,)
    if not positions or not all(isinstance(p, int) for p in positions):
        raise ValueError(
            "`jc.accumulate` expects `batch_argnums` to be a position or several; "
            f"got {batch_argnums!r}."
        )
    return gradient.reduced_gradient(
        fun,
        axis_name,
        reduce_op=ReduceOp.of(reduce_op),
        argnums=argnums,
        has_aux=has_aux,
        scatter=scatter,
        with_value=True,
        scope=scope_here,
        options=checked(options),
        micro_batches=MicroBatches(count, positions),
    )


def reduce_metrics(
    value: Any,
    axis_name: str | tuple[str, ...],
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """Many metrics over all replicas in one collective.

    Law: each `Total` becomes the sum, each `WeightedMean` the mean, that one device would have of
    everything; all travel in one pack, whatever options say of packing. Metrics that a scan
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
    return metrics.reduce_metrics(value, axis_name, scope=scope_here().merged(checked(options)))


def global_norm(
    tree: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """The Euclidean norm of all leaves together, as for clipping; of shards, over all replicas.

    Law: sqrt of the sum of |x|² over every element, squared and added in float32. It is finite
    exactly where every element is and no square overflows (elements up to 1.8·10¹⁹), so one pass
    over memory gives the norm and says whether the step can be taken.

    Args:
      tree: a pytree of arrays of numbers.
      axis_name: None where every replica holds the whole, as after a reduction: nothing is sent.
        The axes over which leaves are in shards otherwise: a leaf that a checked `shard_map` knows
        to be the same everywhere is counted once; where types say nothing, each is a shard.
      options: as in `all_reduce`, for the one scalar that travels.

    Returns:
      A float32 scalar (float64 where a leaf is), *invariant* over the axes; 0 for an empty tree.
      Without axes it is this replica's own where a leaf is.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf holds no numbers, or is an `IndexedSlices`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> float(global_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}))
      5.0
      >>> shards = jax.vmap(lambda x: global_norm(x, "data"), axis_name="data")
      >>> shards(jnp.array([3.0, 4.0])).tolist()
      [5.0, 5.0]
    """
    return norms.global_norm(tree, axis_name, scope=scope_here().merged(checked(options)))


def all_finite(
    tree: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Any:
    """Whether every element of every leaf is finite; with axes, on every replica.

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
      ValueError: a leaf holds no numbers, or is an `IndexedSlices`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> bool(all_finite([jnp.ones(3), jnp.array(jnp.inf)]))
      False
      >>> everywhere = jax.vmap(lambda x: all_finite(x, "data"), axis_name="data")
      >>> everywhere(jnp.array([1.0, jnp.nan])).tolist()
      [False, False]
    """
    return norms.all_finite(tree, axis_name, scope=scope_here().merged(checked(options)))
