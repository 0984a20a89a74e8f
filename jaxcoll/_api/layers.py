"""The public scan over layers whose parameters are in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxcoll._mesh.world import scope_here
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked
from jaxcoll._spmd.layers.scan import Asked
from jaxcoll._spmd.layers.scan import scan_layers as scan


def scan_layers(
    layer: Callable[[Any, Any], Any],
    carry: Any,
    stacked: Any,
    axis_name: str | tuple[str, ...],
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

    Law: values and gradients are those of `lax.scan` over the whole layers, to rounding, for every
    `ahead`, `remat` and `unroll`. In the forward pass a layer is gathered while the one before it
    is computed; in the backward pass while the one after it is differentiated, and gradients are
    reduce-scattered one layer late. Nothing is gathered or scattered that is not used. Known as
    FSDP, or ZeRO-3 (Rajbhandari et al., SC 2020).

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
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner.
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
        to be whole, or nothing says what it is; the layer reads the gathered stack; or an argument
        is invalid.
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
    asked = Asked(ReduceOp.of(reduce_op), gather_dtype, ahead, remat, unroll)
    return scan(
        layer,
        carry,
        stacked,
        axis_name,
        sharded=sharded,
        asked=asked,
        scope=scope_here(),
        options=checked(options),
    )
