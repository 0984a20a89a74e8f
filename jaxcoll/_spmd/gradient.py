"""The gradient of the global loss: local gradients, and the value beside them in one reduction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.errors import AlreadyReducedError
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.overlap import wants_order
from jaxcoll._spmd.axes import bound_axes
from jaxcoll._spmd.backward import Traced, traced
from jaxcoll._spmd.local import value_and_local_grad
from jaxcoll._spmd.ready import places
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.replication import has, same_outputs
from jaxcoll._spmd.scope import Differentiation, Scope

_LOSS_ALREADY_REDUCED = """\
`{caller}` over {axes}: the loss is already the same on every replica, so its gradient would be \
too small or too large by their number. What probably happened: the loss calls `lax.pmean`, \
`lax.psum` or `jc.all_reduce` itself, or depends neither on the batch nor on the parameters. \
Return the loss of this replica's share of the batch; `{caller}` reduces it."""

_TUPLE_LOSS = """\
`{caller}`: the loss returned a tuple of {n}. If the rest is auxiliary output, pass \
`has_aux=True`. If it is a weight (tokens, unpadded examples), return \
`jc.WeightedLoss(total, weight)`: the sum of the weighted losses of this replica and the sum of \
their weights."""


_SYNCED = """\
not sent again: {n} leaves that `sync_in_backward` has made the same on every replica: {paths}"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """What a loss returns when its mean is weighted: by tokens, or by examples that are real.

    Law: the mean over replicas is sum(total) / sum(weight), which is exact for uneven shares
    (a replica whose whole share is padding has weight 0 and total 0) and is what one device
    would compute from the whole batch.

    Attributes:
      total: scalar; the sum of weight times loss over this replica's share.
      weight: scalar; the sum of the weights over this replica's share. A constant to
        differentiation.

    Examples:
      >>> import jax.numpy as jnp
      >>> losses, mask = jnp.array([1.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 0.0])
      >>> loss = WeightedLoss(jnp.sum(losses * mask), jnp.sum(mask))
      >>> float(loss.total / loss.weight)
      2.0
    """

    total: Any
    weight: Any


class _Local(NamedTuple):
    """What one replica brings to the reduction; the field names are the plan's leaf paths."""

    value: Any
    weight: Any
    grads: Any


def reduced_gradient(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...],
    *,
    reduce_op: ReduceOp,
    argnums: int | Sequence[int],
    has_aux: bool,
    with_value: bool,
    scope: Callable[[], Scope],
    options: CommunicationOptions,
) -> Callable[..., Any]:
    """The body of `jc.value_and_grad` and `jc.grad`, which say what it does.

    Args:
      fun: the loss of one replica's share.
      axis_name: one axis, or several, outer first.
      reduce_op: SUM or MEAN.
      argnums: as in `jax.value_and_grad`.
      has_aux: whether `fun` returns a pair of loss and auxiliary output.
      with_value: whether the loss is reduced and returned too.
      scope: asked at each trace for world and defaults.
      options: of the reduction, and of what `sync_in_backward` reduces before.

    Returns:
      A function with `fun`'s arguments.
    """
    caller = "jc.value_and_grad" if with_value else "jc.grad"

    def loss(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        out = fun(*args, **kwargs)
        out, aux = out if has_aux else (out, None)
        if isinstance(out, WeightedLoss):
            _check_scalars(out, caller)
            return out.total, (lax.stop_gradient(out.weight), aux)
        if isinstance(out, tuple):
            raise TypeError(_TUPLE_LOSS.format(caller=caller, n=len(out)))
        return out, (None, aux)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        axes = bound_axes(axis_name, caller)
        told = scope().merged(options)
        differentiation = Differentiation(tuple(axes), options)
        program = traced(value_and_local_grad, loss, argnums, differentiation, args, kwargs)
        (value, (weight, aux)), grads = program.evaluate()
        order = None
        if wants_order(told.options, told.world(axes)):
            (_, order) = program.result(places(program.program))
        _check_local(value, axes, caller)
        if weight is not None and reduce_op is ReduceOp.SUM:
            raise ValueError(
                f"`{caller}` got a WeightedLoss with reduce_op SUM, which has no use for the "
                'weight. For the weighted mean pass reduce_op="mean"; for the sum return the '
                "total alone."
            )
        weight = None if weight is None else _compat.as_varying(weight, tuple(axes))
        local = _Local(value if with_value else None, weight, grads)
        same = _synced(program, tuple(axes))
        local = all_reduce(
            reduce_op if weight is None else ReduceOp.SUM,
            local,
            axis_name,
            scope=told,
            # The loss is there before any gradient.
            ready=None if order is None else jax.tree.leaves(_loss_first(local, order)),
            same=same,
            reasons=_not_again(list(same)),
        )
        value, grads = local.value, local.grads
        if weight is not None:
            value, grads = jax.tree.map(
                lambda x: (x / local.weight).astype(x.dtype), (value, grads)
            )
        outputs = ((value, aux) if has_aux else value, grads)
        return outputs if with_value else ((grads, aux) if has_aux else grads)

    return reduced


def _loss_first(local: _Local, order: Any) -> _Local:
    """A tree like `local` with the place of each of its leaves."""
    value, weight = jax.tree.map(lambda _: -1, (local.value, local.weight))
    return _Local(value, weight, order)


def _synced(program: Traced, axes: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Paths of the gradients that `sync_in_backward` left equal, and the axes along which.

    Only a proof counts: a gradient that is reduced once more is right, too, because the mean of
    equal numbers is that number; but one that is left out must be equal.
    """
    if not has(program.program.jaxpr, _compat.THROUGH):
        return {}
    _, grads = program.result(same_outputs(program.program, axes))
    found, _ = jax.tree_util.tree_flatten_with_path(_Local(None, None, grads))
    return {jax.tree_util.keystr(path): along for path, along in found if along}


def _not_again(paths: list[str]) -> tuple[str, ...]:
    """What the plan says of leaves that were reduced before."""
    ends = " … ".join(dict.fromkeys([*paths[:1], *paths[-1:]]))
    return (_SYNCED.format(n=len(paths), paths=ends),) if paths else ()


def _check_scalars(loss: WeightedLoss, caller: str) -> None:
    for name, value in (("total", loss.total), ("weight", loss.weight)):
        if jnp.shape(value):
            raise ValueError(
                f"`{caller}` expects the {name} of a WeightedLoss to be a scalar, the sum over "
                f"this replica's share; got shape {jnp.shape(value)}."
            )


def _check_local(value: Any, axes: dict[str, int], caller: str) -> None:
    """Refuse a loss that was reduced on the way, wherever its type shows it."""
    if any(_compat.tracks_variance(a) and a not in _compat.varying_axes(value) for a in axes):
        raise AlreadyReducedError(
            _LOSS_ALREADY_REDUCED.format(caller=caller, axes=", ".join(map(repr, axes)))
        )
