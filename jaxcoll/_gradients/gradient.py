"""Gradient of the global loss: local gradients, reduced together with the loss and the metrics."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcoll import _compat
from jaxcoll._collectives.all_reduce import AllReduce, make_feedback
from jaxcoll._collectives.common_over_replicas import (
    check_same,
    drop_shards,
    insert_shard_gradients,
)
from jaxcoll._collectives.pipeline import divide_wide, halvings, scale_down
from jaxcoll._collectives.reduce_scatter import scatter_tree
from jaxcoll._collectives.scope import Differentiation, Scope, count, show_axes
from jaxcoll._collectives.shards import Shards, axes_of_shards
from jaxcoll._compat import marks
from jaxcoll._compression.formats import finite
from jaxcoll._gradients import metrics
from jaxcoll._gradients.loss import (
    Differentiated,
    Extras,
    loss_and_aux,
    value_and_local_grad,
    value_and_weight,
)
from jaxcoll._gradients.proof.proof import same_outputs
from jaxcoll._gradients.proof.retrace import Traced, places
from jaxcoll._gradients.proof.subjaxprs import equations
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.choose import wants_order
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import flatten_with_paths, where
from jaxcoll._show.units import pluralize
from jaxcoll.errors import AlreadyReducedError

_LOSS_ALREADY_REDUCED = """\
`{caller}` over {axes}: the loss is already the same on every replica along {missing}, so its \
gradient would be wrong by a factor of their number. Return the loss of this replica's share, \
without `lax.pmean`, `lax.psum` or `jc.all_reduce`; `{caller}` reduces it."""

_NO_SHARD = """\
`{caller}` with scatter=True: {leaf} is a part of `Shards` along {axes}. The gradient of Shards is \
Shards without `scatter`: differentiate them in a separate call, without it."""

_SYNCED = """\
not sent again: {what} that `sync_in_backward` has made the same on every replica: {paths}"""

_SYNCED_ALREADY = """\
`{caller}` with feedback=True: {leaf} was reduced by `jc.sync_in_backward`, which cannot keep \
residuals: it uses wire formats without feedback. Leave out one of the two."""

_WEIGHT_IN_SUM = """\
`{caller}` got a WeightedLoss with reduce_op SUM, which has no use for the weight. For the \
weighted mean pass reduce_op="mean"; for the sum return only the total."""


class _Local(NamedTuple):
    """The tree that one replica reduces; the field names are the plan's leaf paths."""

    value: Any
    weight: Any
    metrics: Any
    grads: Any


@dataclasses.dataclass(frozen=True)
class Differentiator:
    """The checked arguments of `jc.value_and_grad`, `jc.grad` or `jc.accumulate`."""

    fun: Callable[..., Any]
    caller: str  # the function to name in a message
    reduce_op: ReduceOp
    argnums: int | Sequence[int]
    has_aux: bool
    scatter: bool
    feedback: bool
    with_value: bool = True
    pieces: int = 1  # the number of microbatches
    # Calls a `Differentiate` for each microbatch, and combines the results
    over_pieces: Callable[..., Differentiated] | None = None

    def __post_init__(self) -> None:
        if not callable(self.fun):
            raise ValueError(
                f"`{self.caller}` expects a function, the loss, and returns one, as in "
                f'`{self.caller}(loss, "data")(params, batch)`; got {describe_type(self.fun)}.'
            )
        positions = self.argnums if isinstance(self.argnums, Sequence) else (self.argnums,)
        if not positions or not all(isinstance(i, int) for i in positions):
            raise ValueError(
                f"`{self.caller}` expects `argnums` to be a position or several; got "
                f"{self.argnums!r}."
            )
        if self.scatter and self.feedback:
            raise ValueError(
                f"`{self.caller}`: with scatter=True gradients travel exactly, so there is no "
                "rounding error to feed back: leave out one of the two."
            )

    def positions(self, args: tuple[Any, ...]) -> list[int]:
        """List the positions of the differentiated arguments, from 0."""
        several = [self.argnums] if isinstance(self.argnums, int) else self.argnums
        return [argnum % len(args) for argnum in several if args]

    def leaves(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Name the differentiated leaves, in the order of the gradients' leaves."""
        return {
            f"{self._names[i] if i < len(self._names) else f'args[{i}]'}{path}": leaf
            for i in self.positions(args)
            for path, leaf in flatten_with_paths(args[i])[0]
        }

    @functools.cached_property
    def _names(self) -> list[str]:
        return positional_names(self.fun)

    def halvings(self, axes: Mapping[str, int]) -> int:
        """Find the power of two that keeps float16 sums of a weighted mean from overflowing."""
        return halvings(count(axes) * self.pieces)

    def local(
        self, axes: dict[str, int], here: Differentiation, args: tuple[Any, ...], kwargs: Any
    ) -> Differentiated:
        """Compute value and gradients of this replica's share, scaled so that sums fit."""
        caller = self.caller
        # The batch may have been passed by keyword, and becomes the last positional argument.
        argnums = jax.tree.map(lambda i: i + len(args) if i < 0 else i, self.argnums)

        def loss(*args: Any, **kwargs: Any) -> tuple[Any, Extras]:
            out = self.fun(*args, **kwargs)
            out, aux = loss_and_aux(out, caller) if self.has_aux else (out, None)
            value, weight = value_and_weight(out, caller)
            if weight is not None and self.reduce_op is ReduceOp.SUM:
                raise ValueError(_WEIGHT_IN_SUM.format(caller=caller))
            return value, Extras(weight, metrics.constants_as_varying(aux, tuple(axes)))

        def differentiate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differentiated:
            (value, extras), grads = value_and_local_grad(loss, argnums, here, args, kwargs)
            if missing := _compat.same_axes(value, axes):  # by its type, the loss reduced it
                fields = {"caller": caller, "axes": show_axes(axes), "missing": show_axes(missing)}
                raise AlreadyReducedError(_LOSS_ALREADY_REDUCED.format(**fields))
            weight = jax.tree.map(lambda x: _compat.cast_varying(x, tuple(axes)), extras.weight)
            return (value, extras._replace(weight=weight)), grads

        times = self.halvings(axes)
        if self.over_pieces is not None:
            mean = self.reduce_op is ReduceOp.MEAN
            return self.over_pieces(
                differentiate, args, kwargs, learned=self.positions(args), mean=mean, halvings=times
            )
        (value, extras), grads = differentiate(args, kwargs)
        if extras.weight is not None:
            value, grads = jax.tree.map(lambda x: scale_down(x, times), (value, grads))
        return (value, extras), grads

    def reduce(
        self, program: Traced, args: tuple[Any, ...], axes: dict[str, int], scope: Scope, old: Any
    ) -> Any:
        """Evaluate the program of `local` and reduce it, given the old residual, if any."""
        leaves = self.leaves(args)
        sharded = axes_of_shards([args[i] for i in self.positions(args)])
        (value, extras), grads = program.evaluate()
        same = {k: x for (k, x), cut in zip(leaves.items(), sharded, strict=True) if not cut}
        value = check_same(value, same, axes, self.caller)
        weighted = extras.weight is not None
        # A weighted mean is a sum of totals, divided below by the sum of the weights.
        op = ReduceOp.SUM if weighted else self.reduce_op
        parts = metrics.make_parts(extras.aux, axes, self.caller)
        local = _Local(value if self.with_value else None, extras.weight, parts, grads)
        residual = None
        if self.scatter:
            for name, cut in zip(leaves, sharded, strict=True):
                if cut:
                    fields = {"caller": self.caller, "leaf": where(name), "axes": show_axes(cut)}
                    raise ValueError(_NO_SHARD.format(**fields))
            shards = scatter_tree(op, grads, tuple(axes), scope=scope, repeats=weighted)
            local = AllReduce(op, axes, scope.exactly).reduce(local._replace(grads=None))
            local = local._replace(grads=shards)
        else:
            local, residual = self._together(op, local, sharded, program, axes, scope, old)
        value, grads = local.value, local.grads
        if weighted:
            mean = functools.partial(divide_wide, by=local.weight, times=self.halvings(axes))
            value, grads = jax.tree.map(mean, (value, grads))
            if residual is not None:  # a small weight, or none, may make a finite sum infinite
                is_finite = finite(jax.tree.leaves(drop_shards(grads, sharded)))
                residual = jax.tree.map(functools.partial(jnp.where, is_finite), residual, old)
        times = count(axes) if op is ReduceOp.MEAN else 1
        aux = metrics.insert_numbers(extras.aux, local.metrics, times)
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
        sharded: Sequence[tuple[str, ...]],
        program: Traced,
        axes: Mapping[str, int],
        scope: Scope,
        residual: Shards | None,
    ) -> tuple[_Local, Shards | None]:
        """Reduce the leaves outside of `Shards` in one call, then the others; also the residual."""
        same, ready = _find_synced(program, axes), None
        if residual is not None and same:
            raise ValueError(_SYNCED_ALREADY.format(caller=self.caller, leaf=where(min(same))))
        common = local._replace(grads=drop_shards(local.grads, sharded))
        others = flatten_with_paths(common._replace(grads=None))[0]
        if wants_order(scope.options, scope.world(dict(axes))):
            _, order = program.result(places(program.program))
            # Everything else is ready before the first gradient.
            ready = [*(-1 for _ in others), *jax.tree.leaves(drop_shards(order, sharded))]
        if any(sharded) and scope.world(dict(axes)).over_gloo:
            parts = [x for x, a in zip(jax.tree.leaves(local.grads), sharded, strict=True) if a]
            leaves, treedef = jax.tree.flatten(common)
            common = treedef.unflatten(_compat.depend_on_all(leaves, parts))
        ends = " … ".join(dict.fromkeys([*[*same][:1], *[*same][-1:]]))
        synced = _SYNCED.format(what=pluralize(len(same), "leaf", "leaves"), paths=ends)
        reduction = AllReduce(
            op, axes, scope, ready=ready, same=same, notes=(synced,) if same else (),
            exact=frozenset(path for path, _ in others),
            repeats=local.weight is not None or bool(same),
        )  # fmt: skip
        feedback = make_feedback(residual, local.grads, axes, self.caller, ".grads")
        reduced = reduction.reduce(common, feedback)
        if residual is not None:
            reduced, residual = reduced
        if any(sharded):
            exactly = scope if residual is None else scope.exactly  # these have no residual
            inserted = insert_shard_gradients(
                reduced.grads, op, local.grads, sharded, axes, scope=exactly
            )
            reduced = reduced._replace(grads=inserted)
        return reduced, residual


def positional_names(fun: Callable[..., Any]) -> list[str]:
    """List the names of the positional parameters; [] for a C function without a signature."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _find_synced(program: Traced, axes: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Find, by path, the axes along which `sync_in_backward` provably made a gradient equal.

    Reducing a gradient that the proof misses is correct, too: the mean of equal numbers.
    """
    if all(eqn.primitive.name != marks.THROUGH for eqn in equations(program.program.jaxpr)):
        return {}
    _, grads = program.result(same_outputs(program.program, axes))
    axes_by_path, _ = flatten_with_paths(_Local(None, None, None, grads))
    return {path: along for path, along in axes_by_path if along}
