"""Public in-program gradients: of the whole batch, in pieces, when they exist, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxcoll._plan.checks import positive
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked
from jaxcoll._spmd.gradients import gradient, sync
from jaxcoll._spmd.gradients import mean_loss as mean
from jaxcoll._spmd.layers import scan
from jaxcoll._spmd.scope import scope_here


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
    """`jax.value_and_grad` of the loss over all replicas, from the loss of each one's share.

    Guarantee: n devices equal one device. The value and the gradient are those that `fun` would
    have on the whole batch, to rounding, under `pmap` and under `shard_map` with checks on or
    off: for MEAN with equal shares, for SUM with any, and for a mean weighted by tokens or by
    real examples when `fun` returns a `WeightedLoss`. The gradient of every leaf is reduced, but of
    `Shards`, which `fun` puts together by `jc.all_gather` or `jc.scan_layers`: theirs come as
    Shards, reduced by the derivative of the gather. Every other leaf must be the same on every
    replica; one that differs (an expert, the batch) is refused by name in a step of jaxcoll's and
    in a checked `shard_map`, and is differentiated by `jax.grad`.

    Args:
      fun: the loss of one replica's share of the batch, a scalar or a `WeightedLoss`. It need not
        reduce over `axis_name`, and must not where types show it: in a checked `shard_map`.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case.
      argnums: positions of the arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: whether `fun` returns `(loss, aux)`.
      scatter: leave each replica an n-th of the gradients only, as `Shards`, for the `update` of a
        `sharded_optimizer`.
      feedback: send with the next gradients what a wire format (`options.compression`) rounds away
        of these: the function takes one more keyword argument, `residual`, at first
        `jc.compression.residual(params)`, and returns the next one as its last result.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns `(value, grads)`, or `((value, aux),
      grads)`. Value and gradients are *invariant* over the axes, gradients in `Shards` *varying*;
      `aux` is this replica's own (*varying*), but each `WeightedMean` and `Total` in it comes back
      as a number over all replicas (*invariant*). Cost: one `all_reduce` of the gradients with loss
      and metrics among them; with `scatter` a `reduce_scatter`, and an `all_reduce` of the rest.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a WeightedLoss meets SUM, `Shards` meet `scatter`, a leaf differs between replicas
        where that is known, or an argument is invalid (a wrong `fun` or `argnums` at once).
      TypeError: the loss is not a scalar, or a tuple without `has_aux`.
      AlreadyReducedError: in a checked `shard_map`, the loss was reduced inside `fun`.

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
    return gradient.reduced_gradient(loss, axis_name, scope_here, checked(options))


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
    """`value_and_grad` without the value, which is then not reduced either.

    Args:
      fun: the loss of one replica's share of the batch.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case.
      argnums: positions of the arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      scatter: as in `value_and_grad`.
      feedback: as in `value_and_grad`.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns `grads`, or `(grads, aux)`; the gradients
      are *invariant* over the axes, but for `Shards`; `aux` is *varying*.
    """
    op = ReduceOp.of(reduce_op)
    loss = gradient.Differentiator(
        fun, "jc.grad", op, argnums, has_aux, scatter, feedback, with_value=False
    )
    return gradient.reduced_gradient(loss, axis_name, scope_here, checked(options))


def mean_loss(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """The mean of the replicas' losses, as a function with the derivative of that mean.

    Made for what differentiates a function that it is given: a line search, L-BFGS, an implicit
    step. `jax.grad` of `lax.pmean(loss)` is each replica's own gradient, so that replicas would
    search in different directions. Of this function value and derivative are those of one device.

    Args:
      fun: the loss of one replica's share of the batch, as in `value_and_grad`; it must not reduce
        the loss itself.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      options: as in `all_reduce`, for the gradients.

    Returns:
      A function with `fun`'s arguments that returns a scalar, *invariant* over the axes, with
      derivatives in forward and reverse mode by whatever is the same on every replica, arguments
      or captured values. Cost: an `all_reduce` of a number; where it is differentiated, one of
      value and gradients together.

    Raises:
      NameError: an axis is not mapped here.
      TypeError: the loss is not a scalar.
      ValueError: it is differentiated by what differs between replicas.

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
    """`params` themselves, whose gradient is reduced over replicas as soon as it exists.

    Made for models that scan over their layers. Called inside the scan's body on that layer's
    slice of the stacked parameters, it puts one `all_reduce` of that layer's gradient inside the
    loop of the backward pass, where it can travel while the layer before is differentiated.

    Guarantee: the forward pass is the identity. In the backward pass the gradients of the group are
    one `all_reduce`, packed by a plan, in the dtype of `params`: what is cast to bfloat16 after
    it travels as float32. Works under `jax.checkpoint`, in nested scans, for parameters used
    more than once, and for derivatives of any order and direction.

    Inside the loss of `jc.value_and_grad` or `jc.grad`, which is where it belongs, n devices
    equal one device for every mixture of leaves that are synced, partly synced or not synced:
    what is proven to be the same everywhere is not sent again, and what differs between replicas is
    refused. Inside plain `jax.grad` the synced leaves alone are averaged: others keep each
    replica's own gradient or, under a checked `shard_map`, the sum that autodiff makes of it.

    Args:
      params: a pytree of floating arrays, *invariant* or *varying* over the axes; None passes.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case. Inside `jc.value_and_grad` MEAN, which
        that makes a sum or a weighted mean of where it was asked for one.
      options: as in `all_reduce`; unset ones are those of the enclosing `jc.value_and_grad`, then
        of the enclosing program.

    Returns:
      A pytree like `params`, *varying* over the axes, so that autodiff adds no sum of its own.
      The loss must be this replica's own: one that was averaged over replicas has gradients that
      were divided by their number already. Cost: none forward; backward an `all_reduce`.

    Raises:
      NameError: an axis is not mapped here; the message lists those that are.
      ValueError: a leaf has no gradient (its path is named), SUM was asked for inside
        `jc.value_and_grad`, or a leaf differs between replicas where that can be read (there, and
        in `strategy.run`).

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
    batch_argnums: int | Sequence[int] = -1,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    feedback: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """`value_and_grad` of a batch that is taken in pieces: one reduction a step, not one a piece.

    Guarantee: the result is that of `jc.value_and_grad(fun, axis_name)` on the whole batch, to
    rounding: for MEAN, since the pieces are equal; for SUM; and for a `WeightedLoss`, however its
    weights are spread over pieces and replicas. No collective stands in the loop over the pieces
    that `fun` does not put there.

    Args:
      fun: the loss of one piece, as in `value_and_grad`.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      num_microbatches: pieces, of neighbouring rows, that each replica's share is cut into.
      batch_argnums: positions of the arguments that are cut along their leading dimension; the
        rest, and keyword arguments, are whole in every piece. Default: the last one, as in
        `data_parallel`. For other random numbers in every piece, cut an array of keys with it.
      reduce_op: as in `value_and_grad`.
      argnums: as in `value_and_grad`.
      has_aux: as in `value_and_grad`.
      scatter: as in `value_and_grad`.
      feedback: as in `value_and_grad`.
      options: as in `all_reduce`.

    Returns:
      A function with `fun`'s arguments that returns what that of `value_and_grad` does. Each
      `WeightedMean` and `Total` in `aux` becomes one number over pieces and replicas; the rest of
      `aux` is this replica's own (*varying*), with the pieces along a new leading dimension; what
      is neither array nor number is as it was. Gradients narrower than 32 bits are added up in
      float32 and travel in their own type. Cost: the memory of one piece and of one gradient more
      (in float32); one `all_reduce` for all.

    Raises:
      ValueError: the pieces do not divide a share, a leaf of the batch is a scalar, an argument is
        both cut and differentiated, or `num_microbatches` is not an integer above 0; and as in
        `value_and_grad`.

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
            "`jc.accumulate` needs a number of micro-batches behind the axis, as in "
            '`jc.accumulate(loss, "data", 4)` or `jc.accumulate(loss, num_microbatches=4)`.'
        )
    count = positive("jc.accumulate", "num_microbatches", num_microbatches)
    several = isinstance(batch_argnums, Sequence)
    positions = tuple(batch_argnums) if several else (batch_argnums,)
    if not positions or not all(isinstance(p, int) for p in positions):
        raise ValueError(
            "`jc.accumulate` expects `batch_argnums` to be a position or several; "
            f"got {batch_argnums!r}."
        )
    op = ReduceOp.of(reduce_op)
    loss = gradient.Differentiator(
        fun, "jc.accumulate", op, argnums, has_aux, scatter, feedback,
        pieces=count, batch_argnums=positions,
    )  # fmt: skip
    return gradient.reduced_gradient(loss, axis_name, scope_here, checked(options))


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
    """`lax.scan` over layers of which every replica holds an n-th, each gathered ahead of its use.

    Guarantee: values and gradients are those of `lax.scan` over the whole layers, to rounding, for
    every `ahead`, `remat` and `unroll`. In the forward pass a layer is gathered while the one
    before it is computed; in the backward pass while the one after it is differentiated, and
    gradients are reduce-scattered one layer late. Nothing is gathered or scattered that is not
    used. Known as FSDP, or ZeRO-3 (Rajbhandari et al., SC 2020).

    Inside the loss of `jc.value_and_grad`, `jc.grad` or `jc.accumulate` over the same axes, these
    know that gradients of rows are reduced and send nothing again; they reduce those of whole
    leaves with all others, and make the mean, sum or weighted mean that they were asked for.
    Outside, under `jax.grad` of this replica's own loss, all of `stacked` has the gradient that
    `reduce_op` says, and must be reduced no more.

    Args:
      layer: from carry and one layer's parameters, whole, to the next carry, or to a pair of it and
        a result of this layer. It may read traced values from around it, whose gradients are right.
      carry: a tree of arrays, keys among them, of the types that `layer` returns.
      stacked: a tree of arrays with the layers first and behind them this replica's rows, as
        `in_specs=P(None, "data")` cuts them; or of `Shards` of stacked layers.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      reduce_op: MEAN or SUM, or their names in any case; inside `jc.value_and_grad` MEAN, which
        that makes what it was asked for.
      gather_dtype: real floating rows are cast to it before they are gathered, and their gradients
        travel in it; None: in their own type. CPUs widen bfloat16 on the wire.
      ahead: layers that are gathered, or under way, while another is computed; 0: none.
      remat: what the backward pass finds of a layer. True: its carry alone; False: all that it
        needs but what is made of parameters; or a policy of `jax.checkpoint_policies`. Gathered
        parameters are never kept, but those of the last `ahead` layers.
      sharded: which leaves hold rows, in the places of `stacked` or for all below: True, False for
        those that every replica holds whole (biases, norms), or the axes that rows are cut over,
        if these are not all of `axis_name` (("node", "data") with "data": shards within a host,
        sums between). None: `Shards` do, and plain arrays beside them are whole; without `Shards`
        all do. Types, where they tell, must agree; where nothing does, it must be said.
      unroll: as in `lax.scan`, of both loops.
      options: as in `all_reduce`; what gathers and scatters is not cut in `shards`.

    Returns:
      The last carry and the layers' results stacked (None without any), as `lax.scan` returns
      them; *varying*. The gradients of rows are rows, *varying*; outside of `jc.value_and_grad`
      those of whole leaves are *invariant*. Cost: with L layers 2L - `ahead` gathers of one layer
      and L reduce-scatters, (n-1)/n of a layer's bytes each.

    Raises:
      NameError: an axis is not mapped here; the message lists those that are.
      ValueError: a leaf has no rows or other layers (its path is named), differs where it is said
        to be whole, or nothing says what it is; or an argument is invalid.
      AlreadyReducedError: a leaf that would be gathered is the same on every replica.
      TypeError: the layer returns another carry than it was given.
      NotImplementedError: a derivative of the gradient is asked for.

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
