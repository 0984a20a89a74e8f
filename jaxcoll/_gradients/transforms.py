"""Gradients inside a mapped program: `value_and_grad`, `accumulate`, `scan_layers` and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxcoll._collectives.scope import scope_here
from jaxcoll._gradients import gradient, sync
from jaxcoll._gradients import mean_loss as mean
from jaxcoll._gradients.batch import Signature, slots
from jaxcoll._gradients.layers import scan
from jaxcoll._plan.checks import positive
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    feedback: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Return `jax.value_and_grad` of the loss over all replicas, given the loss of one share.

    Guarantee: n devices equal one device. Value and gradient are those of `fun` on the whole batch,
    to rounding, under `pmap` and under `shard_map` with or without checks. This holds for a MEAN of
    equal shares, for a SUM of any shares, and, if `fun` returns a `WeightedLoss`, for a mean
    weighted by tokens or real examples. The gradient of every leaf is reduced, except those of
    `Shards`: `fun` gathers them by `jc.all_gather` or `jc.scan_layers`, and the derivative of the
    gather returns reduced gradients in Shards. Every other leaf must be the same on every replica.
    A leaf that differs (an expert, the batch) is refused by name in a `data_parallel` step and in a
    checked `shard_map`; differentiate it by `jax.grad`.

    Args:
      fun: the loss of one replica's share of the batch, a scalar or a `WeightedLoss`. It need not
        reduce over `axis_name`; in a checked `shard_map`, where types show it, it must not.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case.
      argnums: positions of the arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: True if `fun` returns `(loss, aux)`.
      scatter: give each replica only 1/n of the gradients, as `Shards`, for the `update` of a
        `sharded_optimizer`.
      feedback: add what a wire format (`options.compression`) rounds away to the next gradients.
        The function then takes one more keyword argument, `residual`, at first
        `jc.compression.residual(params)`, and returns the next residual as its last result.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`.
      Value and gradients are *invariant* over the axes; gradients in `Shards` are *varying*. `aux`
      is this replica's (*varying*), but each `WeightedMean` and `Total` in it becomes a number over
      all replicas (*invariant*). Cost: one `all_reduce` that carries gradients, loss and metrics;
      with `scatter`, a `reduce_scatter` of the gradients and an `all_reduce` of the rest.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a WeightedLoss comes with SUM or `Shards` with `scatter`, a leaf is known to
        differ between replicas, or an argument is invalid (a wrong `fun` or `argnums` at once).
      TypeError: the loss is not a scalar, or is a tuple without `has_aux`.
      AlreadyReducedError: in a checked `shard_map`, `fun` has reduced the loss.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> step = value_and_grad(lambda w, x: jnp.mean(w * x), "data")
      >>> shares = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> value, grad = jax.vmap(step, in_axes=(None, 0), axis_name="data")(2.0, shares)
      >>> value.tolist(), grad.tolist()
      ([5.0, 5.0], [2.5, 2.5])
    """
    op = ReduceOp.of(reduce_op)
    loss = gradient.Differentiator(
        fun, "jc.value_and_grad", op, argnums, has_aux, scatter, feedback
    )
    return gradient.make_gradient(loss, axis_name, scope_here, checked(options))


def grad(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    feedback: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Like `value_and_grad`, but neither reduce nor return the value.

    Args:
      fun: the loss of one replica's share of the batch.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case.
      argnums: positions of the arguments to differentiate.
      has_aux: True if `fun` returns `(loss, aux)`.
      scatter: as in `value_and_grad`.
      feedback: as in `value_and_grad`.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns `grads`, or `(grads, aux)`. Gradients are
      *invariant* over the axes, those in `Shards` *varying*; `aux` is *varying*.
    """
    op = ReduceOp.of(reduce_op)
    loss = gradient.Differentiator(
        fun, "jc.grad", op, argnums, has_aux, scatter, feedback, with_value=False
    )
    return gradient.make_gradient(loss, axis_name, scope_here, checked(options))


def mean_loss(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Return the mean of the replicas' losses as a function that can be differentiated.

    Use it with algorithms that differentiate a function themselves: a line search, L-BFGS, an
    implicit step. `jax.grad` of `lax.pmean(loss)` is each replica's own gradient, so replicas would
    search in different directions. This function has the value and derivative of one device.

    Args:
      fun: the loss of one replica's share of the batch, as in `value_and_grad`; it must not reduce
        the loss.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      options: as in `all_reduce`, for the gradients.

    Returns:
      A function with `fun`'s arguments that returns a scalar, *invariant* over the axes. It has
      forward- and reverse-mode derivatives with respect to all that is the same on every replica:
      arguments and, except in a checked `shard_map`, captured values; and of any order, each with
      respect to the same arguments. (Unchecked, a derivative of the gradient with respect to others
      is each replica's own; `jc.sync_in_backward` of these makes it the mean.) Cost: an
      `all_reduce` of one number; differentiated, one `all_reduce` of value and gradients together.

    Raises:
      NameError: an axis is not mapped here.
      TypeError: the loss is not a scalar.
      ValueError: it is differentiated with respect to a value that differs between replicas, or to
        a captured one in a checked `shard_map`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> loss = mean_loss(lambda w, x: jnp.mean(w * x), "data")
      >>> shares = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> step = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0), axis_name="data")
      >>> value, grad = step(2.0, shares)
      >>> value.tolist(), grad.tolist()
      ([5.0, 5.0], [2.5, 2.5])
    """
    return mean.mean_loss(fun, axis_name, scope_here, checked(options))


def sync_in_backward(
    params: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    options: CommunicationOptions | None = None,
) -> Any:
    """Return `params`, and reduce their gradient over replicas as soon as it is computed.

    Use it in models that scan over their layers: call it in the body of the scan, on the layer's
    slice of the stacked parameters. It puts one `all_reduce` of the layer's gradient into the loop
    of the backward pass, where it overlaps with differentiating the previous layer.

    Guarantee: the forward pass is the identity. The backward pass makes one `all_reduce` of the
    gradients, packed by a plan, in the dtype of `params`: parameters that are cast to bfloat16
    after the call have gradients that travel as float32. It works under `jax.checkpoint`, in
    nested scans, for parameters used more than once, and for derivatives of any order and mode.

    Call it inside the loss of `jc.value_and_grad` or `jc.grad`. There n devices equal one device,
    whichever leaves are synced, partly synced or not synced: gradients proven to be the same on
    every replica are not sent again, and leaves that differ between replicas are refused. Inside
    plain `jax.grad` only the synced leaves are averaged. The others keep each replica's gradient
    or, under a checked `shard_map`, have the sum that autodiff makes.

    Args:
      params: a pytree of floating arrays, *invariant* or *varying* over the axes; None passes.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case. It must be MEAN inside
        `jc.value_and_grad`, which turns it into its own sum or weighted mean.
      options: as in `all_reduce`. Unset options come from the enclosing `jc.value_and_grad`, then
        from the enclosing program.

    Returns:
      A pytree like `params`, *varying* over the axes, so that autodiff adds no sum of its own. The
      loss must be this replica's own: a loss averaged over replicas has gradients that are already
      divided by their number. Cost: none forward; an `all_reduce` backward.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf has no gradient (its path is named), `reduce_op` is SUM inside
        `jc.value_and_grad`, or a leaf is known to differ between replicas (there, and in
        `strategy.run`).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def loss(stack, x):
      ...     def layer(x, w):
      ...         return x * sync_in_backward(w, "data"), None
      ...     return jax.lax.scan(layer, x, stack)[0]
      >>> step = jax.vmap(grad(loss, "data"), in_axes=(None, 0), axis_name="data")
      >>> step(jnp.array([2.0, 5.0]), jnp.array([1.0, 3.0]))[0].tolist()
      [10.0, 4.0]
    """
    op, scope = ReduceOp.of(reduce_op), scope_here()
    axis_name = scope.over(axis_name, "jc.sync_in_backward")
    return sync.sync_in_backward(params, axis_name, op, scope, checked(options))


def accumulate(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    num_microbatches: int | None = None,
    *,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    feedback: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Accumulate `value_and_grad` over microbatches: one reduction per step, not per microbatch.

    Guarantee: the result is that of `jc.value_and_grad(fun, axis_name)` on the whole batch, to
    rounding: for MEAN, as microbatches are equally large; for SUM; and for a `WeightedLoss`, with
    weights spread in any way over microbatches and replicas. The loop over microbatches has no
    collectives but those of `fun`.

    Args:
      fun: the loss of one microbatch, as in `value_and_grad`.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      num_microbatches: number of microbatches, of consecutive rows, in each replica's share.
      batch_argnums: positions or names of the arguments to split along their leading dimension, as
        in `data_parallel`: by default the second of two. Others are whole in every microbatch. For
        new random numbers in each microbatch, split an array of keys too.
      reduce_op: as in `value_and_grad`.
      argnums: as in `value_and_grad`.
      has_aux: as in `value_and_grad`.
      scatter: as in `value_and_grad`.
      feedback: as in `value_and_grad`.
      options: as in `all_reduce`.

    Returns:
      A function with the arguments and results of `value_and_grad`'s. Each `WeightedMean` and
      `Total` in `aux` becomes one number over microbatches and replicas. Other arrays and numbers
      in `aux` are this replica's (*varying*), stacked over microbatches along a new leading
      dimension; anything else is unchanged. Gradients narrower than 32 bits are added up in float32
      and travel in their own dtype. Cost: the memory of one microbatch and one more gradient (in
      float32); one `all_reduce` for all.

    Raises:
      ValueError: the batch is not named, does not divide into the microbatches, or has a scalar;
        an argument is both split and differentiated, or `num_microbatches` is not a positive
        integer; and as in `value_and_grad`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> step = accumulate(lambda w, x: jnp.mean(w * x), "data", 2)
      >>> shares = jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
      >>> value, grad = jax.vmap(step, in_axes=(None, 0), axis_name="data")(2.0, shares)
      >>> value.tolist(), grad.tolist()
      ([9.0, 9.0], [4.5, 4.5])
    """
    if num_microbatches is None:
        raise ValueError(
            "`jc.accumulate` needs a number of microbatches after the axis, as in "
            '`jc.accumulate(loss, "data", 4)` or `jc.accumulate(loss, num_microbatches=4)`.'
        )
    count = positive("jc.accumulate", "num_microbatches", num_microbatches)
    batch = None if batch_argnums is None else slots("batch_argnums", batch_argnums)
    if batch == ():
        raise ValueError("`jc.accumulate` needs an argument to split: `batch_argnums` is ().")
    line = f"jc.accumulate({{name}}, {axis_name!r}, {count}, batch_argnums={{batch}})"
    op = ReduceOp.of(reduce_op)
    loss = gradient.Differentiator(
        fun, "jc.accumulate", op, argnums, has_aux, scatter, feedback,
        pieces=count, signature=Signature(fun, batch, "jc.accumulate", line, "in every microbatch"),
    )  # fmt: skip
    return gradient.make_gradient(loss, axis_name, scope_here, checked(options))


def scan_layers(
    layer: Callable[[Any, Any], Any],
    carry: Any,
    stacked: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    gather_dtype: Any = None,
    ahead: int = 1,
    remat: bool | Callable[..., Any] = True,
    sharded: Any = None,
    unroll: int = 1,
    options: CommunicationOptions | None = None,
) -> tuple[Any, Any]:
    """Scan over sharded layers, gathering each layer's parameters ahead of its use (FSDP, ZeRO-3).

    Guarantee: values and gradients are those of `lax.scan` over the whole layers, to rounding, for
    every `ahead`, `remat` and `unroll`. The forward pass gathers a layer while it computes the
    previous one. The backward pass gathers a layer while it differentiates the next one, and
    reduce-scatters gradients one layer later. It gathers and scatters only what is used. Source:
    ZeRO-3, Rajbhandari et al., SC 2020.

    Inside the loss of `jc.value_and_grad`, `jc.grad` or `jc.accumulate` over the same axes,
    gradients of rows are already reduced and are not sent again. Those of whole leaves are reduced
    with all others, and the result is the mean, sum or weighted mean of the enclosing function.
    Outside, under `jax.grad` of this replica's own loss, all gradients of `stacked` are already
    reduced by `reduce_op`.

    Args:
      layer: a function of the carry and one layer's whole parameters. It returns the next carry, or
        a pair of that and a result of the layer. It may capture traced values; they get gradients.
      carry: a tree of arrays, including PRNG keys, with the types that `layer` returns.
      stacked: a tree of arrays with dimensions (layers, this replica's rows, ...), as
        `in_specs=P(None, "data")` splits them; or of `Shards` of stacked layers.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case. It must be MEAN inside
        `jc.value_and_grad`, which turns it into its own sum or weighted mean.
      gather_dtype: dtype to which real floating rows are cast before they are gathered, and in
        which their gradients travel; None: their own. CPUs widen bfloat16 on the wire.
      ahead: number of layers to gather ahead of the one being computed; 0: none.
      remat: what the backward pass keeps of a layer. True: only its carry. False: everything it
        needs, except what is computed from parameters alone. Or a policy of
        `jax.checkpoint_policies`. Only the gathered parameters of the last `ahead` layers are kept.
      sharded: which leaves hold rows: one value for all, or a tree like `stacked` or a prefix of
        it. True; False for leaves that every replica holds whole (biases, norms); or the axes that
        rows are split over, if not all of `axis_name` ("data" of ("node", "data"): shards within a
        host, sums between hosts). None: `Shards` hold rows and arrays beside them are whole;
        without `Shards` all leaves hold rows. Types must agree; where they are not tracked, and
        there are no `Shards`, it must be given.
      unroll: as in `lax.scan`, for both loops.
      options: as in `all_reduce`; the option `shards` has no effect on gathers and scatters.

    Returns:
      The last carry and the stacked results of the layers (None if there are none), as from
      `lax.scan`; *varying*. Gradients of rows are rows, *varying*; outside `jc.value_and_grad`,
      those of whole leaves are *invariant*. Cost: with L layers, 2L - `ahead` gathers of one layer
      and L reduce-scatters, each of (n-1)/n of a layer's bytes.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf has no rows or another number of layers (its path is named), differs
        between replicas but is declared whole, or may be either; or an argument is invalid.
      AlreadyReducedError: a leaf to be gathered is the same on every replica.
      TypeError: the carry that `layer` returns has another type than the one it got.
      NotImplementedError: a gradient is differentiated again.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def replica(rows, x):
      ...     return scan_layers(lambda x, w: w @ x, x, rows, "data", sharded=True)[0]
      >>> rows = jnp.arange(2 * 3 * 1 * 2.0).reshape(2, 3, 1, 2)  # two replicas, three layers
      >>> jax.vmap(replica, axis_name="data")(rows, jnp.ones((2, 2)))[0].tolist()
      [789.0, 1785.0]
    """
    settings = scan.ScanOptions(ReduceOp.of(reduce_op), gather_dtype, ahead, remat, unroll)
    scope = scope_here()
    axes = scope.over(axis_name, "jc.scan_layers")
    return scan.scan_layers(layer, carry, stacked, axes, sharded, settings, scope, checked(options))
