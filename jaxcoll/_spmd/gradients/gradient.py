"""The gradient of the global loss: local gradients, and the value beside them in one reduction."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._jaxpr.proof import same_outputs
from jaxcoll._jaxpr.retrace import Traced, places, traced_call
from jaxcoll._jaxpr.subjaxprs import contains
from jaxcoll._plan.checks import kind_of
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import check_not_empty, flattened, where
from jaxcoll._plan.planner import wants_order
from jaxcoll._show.units import counted
from jaxcoll._spmd import metrics
from jaxcoll._spmd.gradients.loss import (
    Differentiated,
    Extras,
    accumulated,
    check_differentiable,
    loss_and_aux,
    value_and_local_grad,
    value_and_weight,
)
from jaxcoll._spmd.gradients.per_replica import checked_same, with_shard_gradients, without_shards
from jaxcoll._spmd.pipeline import halved, halvings, quotient
from jaxcoll._spmd.reduce import all_reduce, feedback_of
from jaxcoll._spmd.reduce_scatter import reduce_scatter
from jaxcoll._spmd.scope import Differentiation, Scope, bound_axes, count, listed, retyped
from jaxcoll._spmd.shards import Shards, axes_of_shards
from jaxcoll._wire.formats import finite
from jaxcoll.errors import AlreadyReducedError

_LOSS_ALREADY_REDUCED = """\
`{caller}` over {axes}: the loss is already the same on every replica along {missing}, so its \
gradient would be too small or too large by their number. What probably happened: the loss calls \
`lax.pmean`, `lax.psum` or `jc.all_reduce` itself, or depends neither on the batch nor on the \
parameters. Return the loss of this replica's share of the batch; `{caller}` reduces it."""

_NO_SHARD = """\
`{caller}` with scatter=True: {leaf} is a part of `Shards` along {axes}, whose gradients are \
Shards without `scatter`. Differentiate it as an argument of its own in a call without `scatter`."""

_SYNCED = """\
not sent again: {what} that `sync_in_backward` has made the same on every replica: {paths}"""

_SYNCED_ALREADY = """\
`{caller}` with feedback=True: {leaf} was reduced by `jc.sync_in_backward`, where no residual can \
be kept: it takes wire formats without feedback. Leave one of the two out."""

_WEIGHT_IN_SUM = """\
`{caller}` got a WeightedLoss with reduce_op SUM, which has no use for the weight. For the \
weighted mean pass reduce_op="mean"; for the sum return the total alone."""


class _Local(NamedTuple):
    """One replica's share of the reduction; the field names are the plan's leaf paths."""

    value: Any
    weight: Any
    metrics: Any
    grads: Any


@dataclasses.dataclass(frozen=True)
class Differentiator:
    """Arguments of `jc.value_and_grad` and its like, checked; see there."""

    fun: Callable[..., Any]
    caller: str  # the function to name in a message
    reduce_op: ReduceOp
    argnums: int | Sequence[int]
    has_aux: bool
    scatter: bool
    feedback: bool
    with_value: bool = True
    pieces: int | None = None  # micro-batches one after another
    batch_argnums: tuple[int, ...] = ()  # positions of the arguments that are cut into them

    def __post_init__(self) -> None:
        if not callable(self.fun):
            raise ValueError(
                f"`{self.caller}` expects a function, the loss, and returns one, as in "
                f'`{self.caller}(loss, "data")(params, batch)`; got {kind_of(self.fun)}.'
            )
        positions = self.argnums if isinstance(self.argnums, Sequence) else (self.argnums,)
        if not positions or not all(isinstance(i, int) for i in positions):
            raise ValueError(
                f"`{self.caller}` expects `argnums` to be a position or several; got "
                f"{self.argnums!r}."
            )
        if self.scatter and self.feedback:
            raise ValueError(
                f"`{self.caller}`: with scatter=True gradients travel exactly, so that there is "
                "nothing to feed back: leave one of the two out."
            )

    def places(self, args: tuple[Any, ...]) -> list[int]:
        """Positions of the arguments that are differentiated."""
        several = [self.argnums] if isinstance(self.argnums, int) else self.argnums
        return [argnum % len(args) for argnum in several if args]

    def leaves(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Return the differentiated leaves by name, in the order of the gradients' leaves."""
        names = self._names
        return {
            f"{names[i] if i < len(names) else f'args[{i}]'}{path}": leaf
            for i in self.places(args)
            for path, leaf in flattened(args[i])[0]
        }

    @functools.cached_property
    def _names(self) -> list[str]:
        """Names of the loss's parameters that are passed by position."""
        return positional_names(self.fun)

    def halvings(self, axes: Mapping[str, int]) -> int:
        """Powers of two off a float16 of a weighted mean, whose sums may be too large for it."""
        return halvings(count(axes) * (self.pieces or 1))

    def of_share(
        self, axes: dict[str, int], here: Differentiation, args: tuple[Any, ...], kwargs: Any
    ) -> Differentiated:
        """Value and gradients of a replica's share; terms of a weighted mean fit to be summed."""
        caller = self.caller

        def loss(*args: Any, **kwargs: Any) -> tuple[Any, Extras]:
            out = self.fun(*args, **kwargs)
            out, aux = loss_and_aux(out, caller) if self.has_aux else (out, None)
            value, weight = value_and_weight(out, caller)
            if weight is not None and self.reduce_op is ReduceOp.SUM:
                raise ValueError(_WEIGHT_IN_SUM.format(caller=caller))
            return value, Extras(weight, metrics.constants_as_varying(aux, tuple(axes)))

        def differentiate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differentiated:
            (value, beside), grads = value_and_local_grad(loss, self.argnums, here, args, kwargs)
            if missing := _compat.same_axes(value, axes):  # reduced on the way, as its type shows
                words = {"caller": caller, "axes": listed(axes), "missing": listed(missing)}
                raise AlreadyReducedError(_LOSS_ALREADY_REDUCED.format(**words))
            weight = jax.tree.map(lambda x: _compat.as_varying(x, tuple(axes)), beside.weight)
            return (value, beside._replace(weight=weight)), grads

        if self.pieces is not None:
            return accumulated(
                differentiate,
                args,
                kwargs,
                self.pieces,
                batch_argnums=self.batch_argnums,
                learned=self.places(args),
                mean=self.reduce_op is ReduceOp.MEAN,
                halvings=self.halvings(axes),
            )
        (value, beside), grads = differentiate(args, kwargs)
        if beside.weight is not None:
            value, grads = jax.tree.map(lambda x: halved(x, self.halvings(axes)), (value, grads))
        return (value, beside), grads

    def reduced(
        self, program: Traced, args: tuple[Any, ...], axes: dict[str, int], scope: Scope, owed: Any
    ) -> Any:
        """Return the caller's result, from the program of one replica's share."""
        leaves = self.leaves(args)
        own = axes_of_shards([args[i] for i in self.places(args)])
        (value, beside), grads = program.evaluate()
        same = {k: x for (k, x), mine in zip(leaves.items(), own, strict=True) if not mine}
        value = checked_same(value, same, axes, self.caller)
        weighted = beside.weight is not None
        op = ReduceOp.SUM if weighted else self.reduce_op
        parts = metrics.parts_of(beside.aux, axes, self.caller)
        local = _Local(value if self.with_value else None, beside.weight, parts, grads)
        residual = None
        if self.scatter:
            for name, mine in zip(leaves, own, strict=True):
                if mine:
                    words = {"caller": self.caller, "leaf": where(name), "axes": listed(mine)}
                    raise ValueError(_NO_SHARD.format(**words))
            shards = reduce_scatter(op, grads, tuple(axes), scope=scope)
            local = all_reduce(op, local._replace(grads=None), tuple(axes), scope=scope.exactly)
            local = local._replace(grads=shards)
        else:
            local, residual = self._together(op, local, own, program, axes, scope, owed)
        value, grads = local.value, local.grads
        if weighted:
            mean = functools.partial(quotient, by=local.weight, times=self.halvings(axes))
            value, grads = jax.tree.map(mean, (value, grads))
            if residual is not None:  # a small weight, or none, may make a finite sum infinite
                fine = finite(jax.tree.leaves(without_shards(grads, own)))
                residual = jax.tree.map(functools.partial(jnp.where, fine), residual, owed)
        times = count(axes) if op is ReduceOp.MEAN else 1
        aux = metrics.with_numbers(beside.aux, local.metrics, times)
        outputs = ((value, aux) if self.has_aux else value, grads)
        if not self.with_value:
            outputs = (grads, aux) if self.has_aux else (grads,)
        if self.feedback:
            return (*outputs, residual)
        return outputs if len(outputs) > 1 else grads

    def _together(
        self,
        op: ReduceOp,
        local: _Local,
        own: Sequence[tuple[str, ...]],
        program: Traced,
        axes: Mapping[str, int],
        scope: Scope,
        residual: Shards | None,
    ) -> tuple[_Local, Shards | None]:
        """One reduction for everything that replicas have in common, and the next residual."""
        same, ready = _synced(program, axes), None
        if residual is not None and same:
            raise ValueError(_SYNCED_ALREADY.format(caller=self.caller, leaf=where(min(same))))
        common = local._replace(grads=without_shards(local.grads, own))
        beside = flattened(common._replace(grads=None))[0]
        if wants_order(scope.options, scope.world(dict(axes))):
            _, order = program.result(places(program.program))
            # All but the gradients is there before any of them.
            ready = [*(-1 for _ in beside), *jax.tree.leaves(without_shards(order, own))]
        if any(own) and scope.world(dict(axes)).over_gloo:
            parts = [x for x, mine in zip(jax.tree.leaves(local.grads), own, strict=True) if mine]
            leaves, treedef = jax.tree.flatten(common)
            common = treedef.unflatten(_compat.at_once(leaves, parts))
        ends = " … ".join(dict.fromkeys([*[*same][:1], *[*same][-1:]]))
        again = _SYNCED.format(what=counted(len(same), "leaf", "leaves"), paths=ends)
        feedback = None
        if residual is not None:
            feedback = feedback_of(residual, local.grads, axes, self.caller, ".grads")
        reduced = all_reduce(
            op,
            common,
            tuple(axes),
            scope=scope,
            ready=ready,
            same=same,
            repeats=local.weight is not None or bool(same),
            exact=frozenset(path for path, _ in beside),
            reasons=(again,) if same else (),
            feedback=feedback,
        )
        if residual is not None:
            reduced, residual = reduced
        if any(own):
            # Of these no residual is kept.
            exactly = scope if residual is None else scope.exactly
            grads = with_shard_gradients(reduced.grads, op, local.grads, own, axes, scope=exactly)
            reduced = reduced._replace(grads=grads)
        return reduced, residual


def positional_names(fun: Callable[..., Any]) -> list[str]:
    """Return the names of parameters that may be passed by position; [] of a function of C's."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def reduced_gradient(
    gradient: Differentiator,
    axis_name: Any,
    scope: Callable[[], Scope],
    options: CommunicationOptions,
) -> Callable[..., Any]:
    """The body of `jc.value_and_grad`, `jc.grad` and `jc.accumulate`, which say what it does."""
    caller = gradient.caller

    def reduced(*args: Any, **kwargs: Any) -> Any:
        here = scope()
        axes = bound_axes(here.over(axis_name, caller), caller)
        residual = kwargs.pop("residual", None) if gradient.feedback else None
        if gradient.feedback and residual is None:
            raise ValueError(
                f"`{caller}` with feedback=True expects the keyword argument `residual` beside the "
                "loss's own: what `jc.compression.residual(params)` returns, then what the last "
                "call returned."
            )
        check_differentiable(gradient.leaves(args), caller)
        learned = gradient.places(args)
        check_not_empty(caller, ([x for i, x in enumerate(args) if i not in learned], kwargs))
        inside = Differentiation(tuple(axes), options, enclosing=retyped())

        def local_gradient() -> Differentiated:
            return gradient.of_share(axes, inside, args, kwargs)

        program = traced_call(local_gradient)
        return gradient.reduced(program, args, axes, here.merged(options), residual)

    return _signed(reduced, gradient)


def _signed(reduced: Callable[..., Any], gradient: Differentiator) -> Callable[..., Any]:
    """A function of the loss's arguments, with the names and the signature of the loss."""
    functools.update_wrapper(reduced, gradient.fun, updated=())
    if gradient.feedback:
        with contextlib.suppress(TypeError, ValueError):  # one of C's has no signature
            signature = inspect.signature(gradient.fun)
            more = inspect.Parameter("residual", inspect.Parameter.KEYWORD_ONLY, default=None)
            others = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
            reduced.__signature__ = signature.replace(parameters=[*others, more])  # pyright: ignore[reportFunctionMemberAccess]
    return reduced


def _synced(program: Traced, axes: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Paths of gradients that `sync_in_backward` left equal, by proof, and the axes along which.

    One that is reduced once more is right, too: the mean of equal numbers is that number.
    """
    if not contains(program.program.jaxpr, marks.THROUGH):
        return {}
    _, grads = program.result(same_outputs(program.program, axes))
    found, _ = flattened(_Local(None, None, None, grads))
    return {path: along for path, along in found if along}
