"""`all_reduce_updates`: the reduction as an optax transformation."""

from __future__ import annotations

import functools
from typing import Any

from jax.sharding import Mesh

from jaxcoll._collectives.all_reduce import Invariant, all_reduce
from jaxcoll._collectives.common_over_replicas import check_same_tree
from jaxcoll._collectives.scope import resolve_axes
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._train.residual import residual

_CALLER = "jc.all_reduce_updates"


def all_reduce_updates(
    axis_name: str | tuple[str, ...],
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    options: CommunicationOptions | None = None,
    invariant: Invariant = "error",
    feedback: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """Return an optax transformation that reduces its updates by `jc.all_reduce`.

    Guarantee: `optax.chain(all_reduce_updates(axis), tx)` on each replica's own gradients has the
    updates of `tx` on the reduced gradients. It must come first in a chain, because clipping and
    adaptive methods must see reduced gradients. Gradients of `jc.value_and_grad` are already
    reduced and do not need it. Every update is reduced. Use `optax.masked` to keep out parameters
    that differ between replicas (experts, parts of a sharded parameter); they are refused if they
    are passed to `update` and their types show it.

    Args:
      axis_name: the mapped axis, or a tuple of mesh axes, outer to inner.
      reduce_op: MEAN or SUM, or their names in any case.
      options: as in `all_reduce`.
      invariant: as in `all_reduce`: how to treat a gradient that is already the same on every
        replica, as autodiff sums it under a checked `shard_map`. "error" refuses it.
      feedback: keep what a wire format rounds away as the state, and add it to the next updates.
      mesh: with `feedback`, the mesh of the state between programs, as in `compression.residual`.

    Returns:
      An `optax.GradientTransformation` without state; with `feedback` its state is a
      `jc.compression.residual` of the parameters. Updates are *invariant* over the axes.

    Raises:
      ImportError: optax is not installed.
      ValueError: an argument is invalid; on an update, a parameter is known to differ between
        replicas, and as in `all_reduce`.

    Examples:
      >>> import jax, optax, jax.numpy as jnp
      >>> tx = optax.chain(all_reduce_updates("data"), optax.sgd(1.0))
      >>> step = lambda g: tx.update(g, tx.init(g))[0]
      >>> jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0])).tolist()
      [-2.0, -2.0]
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "`jc.all_reduce_updates` needs optax, which is not installed: "
            "pip install 'jaxcoll[train]'."
        ) from error
    op, options = ReduceOp.of(reduce_op), check_options(options)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        reduce = functools.partial(all_reduce, op, updates, axis_name, options=options)
        reduced = reduce(invariant=invariant, residual=state if feedback else None)
        reduced, state = reduced if feedback else (reduced, state)
        if params is not None:
            axes = resolve_axes(axis_name, _CALLER)
            check_same_tree(params, axes, _CALLER)
        return reduced, state

    def init(params: Any) -> Any:
        if not feedback:
            return optax.EmptyState()
        return residual(params, axis_name, mesh=mesh)

    return optax.GradientTransformation(init, update)
