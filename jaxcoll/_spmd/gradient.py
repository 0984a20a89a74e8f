"""The gradient of the global loss: local gradients, and the value beside them in one reduction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.errors import AlreadyReducedError
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.overlap import wants_order
from jaxcoll._spmd import metrics
from jaxcoll._spmd.accumulate import Beside, Differentiated, MicroBatches, accumulated
from jaxcoll._spmd.axes import bound_axes, count
from jaxcoll._spmd.backward import Traced, traced
from jaxcoll._spmd.local import value_and_local_grad
from jaxcoll._spmd.ready import places
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.reduce_scatter import reduce_scatter
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

_NO_SCALAR = """\
`{caller}` expects the loss to be a scalar or a `jc.WeightedLoss`; got {got}. Return its mean over \
this replica's share (`jnp.mean`), or, for examples that count differently, their weighted sum and \
the sum of the weights as `jc.WeightedLoss(total, weight)`."""


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


_MEAN = ReduceOp.MEAN

_WEIGHT_IN_SUM = """\
`{caller}` got a WeightedLoss with reduce_op SUM, which has no use for the weight. For the \
weighted mean pass reduce_op="mean"; for the sum return the total alone."""


class _Local(NamedTuple):
    """What one replica brings to the reduction; the field names are the plan's leaf paths."""

    value: Any
    weight: Any
    metrics: Any
    grads: Any


def reduced_gradient(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...],
    *,
    reduce_op: ReduceOp,
    argnums: int | Sequence[int],
    has_aux: bool,
    scatter: bool,
    with_value: bool,
    scope: Callable[[], Scope],
    options: CommunicationOptions,
    micro_batches: MicroBatches | None = None,
) -> Callable[..., Any]:
    """The body of `jc.value_and_grad`, `jc.grad` and `jc.accumulate`, which say what it does.

    Args:
      fun: the loss of one replica's share.
      axis_name: one axis, or several, outer first.
      reduce_op: SUM or MEAN.
      argnums: as in `jax.value_and_grad`.
      has_aux: whether `fun` returns a pair of loss and auxiliary output.
      scatter: whether each replica gets its part of the gradients only.
      with_value: whether the loss is reduced and returned too.
      scope: asked at each trace for world and defaults.
      options: of the reduction, and of what `sync_in_backward` reduces before.
      micro_batches: how each share is cut; None: not at all.

    Returns:
      A function with `fun`'s arguments.

    Raises:
      ValueError: `fun` is no function, or `argnums` names no position.
    """
    caller = "jc.value_and_grad" if with_value else "jc.grad"
    caller = caller if micro_batches is None else "jc.accumulate"
    if not callable(fun):
        raise ValueError(f"`{caller}` expects a function, the loss; got {type(fun).__name__}.")
    positions = argnums if isinstance(argnums, Sequence) else (argnums,)
    if not positions or not all(isinstance(i, int) for i in positions):
        raise ValueError(
            f"`{caller}` expects `argnums` to be a position or several; got {argnums!r}."
        )

    def loss(*args: Any, **kwargs: Any) -> tuple[Any, Beside]:
        out = fun(*args, **kwargs)
        out, aux = _pair(out, caller) if has_aux else (out, None)
        parts, rest = metrics.taken_apart(aux, caller)
        if isinstance(out, WeightedLoss):
            _check_scalars(out, caller)
            return out.total, Beside(lax.stop_gradient(out.weight), parts, rest)
        _check_scalar(out, caller)
        return out, Beside(None, parts, rest)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        axes = bound_axes(axis_name, caller)
        told = scope().merged(options)
        differentiation = Differentiation(tuple(axes), options)

        def differentiate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differentiated:
            result = value_and_local_grad(loss, argnums, differentiation, args, kwargs)
            (value, beside), grads = result
            _check_local(value, axes, caller)
            if beside.weight is not None and reduce_op is ReduceOp.SUM:
                raise ValueError(_WEIGHT_IN_SUM.format(caller=caller))
            parts = metrics.varied(beside.metrics, axes, caller)
            weight = jax.tree.map(lambda x: _compat.as_varying(x, tuple(axes)), beside.weight)
            return (value, Beside(weight, parts, beside.aux)), grads

        def whole_share() -> Differentiated:
            if micro_batches is None:
                return differentiate(args, kwargs)
            mean = reduce_op is _MEAN
            return accumulated(
                differentiate, args, kwargs, micro_batches, argnums=argnums, mean=mean
            )

        program = traced(whole_share)
        (value, beside), grads = program.evaluate()
        grads = _watched(told, axes, caller, argnums, args, grads)
        op = reduce_op if beside.weight is None else ReduceOp.SUM
        local = _Local(value if with_value else None, beside.weight, beside.metrics, grads)
        same, order = _synced(program, tuple(axes)), None
        if scatter:
            grads, same = reduce_scatter(op, grads, axis_name, scope=told), {}
            local = local._replace(grads=None)
        elif wants_order(told.options, told.world(axes)):
            (_, order) = program.result(places(program.program))
        local = all_reduce(
            op,
            local,
            axis_name,
            scope=told,
            # All but the gradients is there before any of them.
            ready=None if order is None else jax.tree.leaves(_gradients_last(local, order)),
            same=same,
            reasons=_not_again(list(same)),
        )
        value, grads = local.value, grads if scatter else local.grads
        if local.weight is not None:
            value, grads = jax.tree.map(
                lambda x: (x / local.weight).astype(x.dtype), (value, grads)
            )
        numbers = metrics.settled(local.metrics, count(axes) if op is _MEAN else 1)
        aux = metrics.put_together(beside.aux, numbers)
        outputs = ((value, aux) if has_aux else value, grads)
        return outputs if with_value else ((grads, aux) if has_aux else grads)

    return reduced


def _watched(
    scope: Scope,
    axes: dict[str, int],
    caller: str,
    argnums: int | Sequence[int],
    args: tuple[Any, ...],
    grads: Any,
) -> Any:
    """The gradients, marked with the arguments that they are those of; see `Scope.watched`."""

    def one(i: int, grad: Any) -> Any:
        return scope.watched(args[i], grad, axes, caller, f"args[{i % len(args)}]")

    if isinstance(argnums, int):
        return one(argnums, grads)
    return tuple(one(i, grad) for i, grad in zip(argnums, grads, strict=True))


def _gradients_last(local: _Local, order: Any) -> _Local:
    """A tree like `local` with the place of each of its leaves."""
    before = jax.tree.map(lambda _: -1, local._replace(grads=None))
    return before._replace(grads=order)


def _synced(program: Traced, axes: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Paths of the gradients that `sync_in_backward` left equal, and the axes along which.

    Only a proof counts: a gradient that is reduced once more is right, too, because the mean of
    equal numbers is that number; but one that is left out must be equal.
    """
    if not has(program.program.jaxpr, _compat.THROUGH):
        return {}
    _, grads = program.result(same_outputs(program.program, axes))
    found, _ = jax.tree_util.tree_flatten_with_path(_Local(None, None, None, grads))
    return {jax.tree_util.keystr(path): along for path, along in found if along}


def _not_again(paths: list[str]) -> tuple[str, ...]:
    """What the plan says of leaves that were reduced before."""
    ends = " … ".join(dict.fromkeys([*paths[:1], *paths[-1:]]))
    return (_SYNCED.format(n=len(paths), paths=ends),) if paths else ()


def _pair(out: Any, caller: str) -> tuple[Any, Any]:
    if isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    got = f"a tuple of {len(out)}" if isinstance(out, tuple) else _kind(out)
    raise TypeError(
        f"`{caller}` with has_aux=True expects the loss to return (loss, aux); got {got}."
    )


def _check_scalar(loss: Any, caller: str) -> None:
    if isinstance(loss, tuple):
        raise TypeError(_TUPLE_LOSS.format(caller=caller, n=len(loss)))
    is_number = _is_array(loss) or isinstance(loss, bool | int | float | complex)
    if not is_number or np.shape(loss):
        raise TypeError(_NO_SCALAR.format(caller=caller, got=_kind(loss)))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _kind(x: Any) -> str:
    """What `x` is, in a message."""
    if not _is_array(x):
        return type(x).__name__
    return f"{jnp.result_type(x).name}[{', '.join(map(str, np.shape(x)))}]"


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
