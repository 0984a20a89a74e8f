"""A train step as one program of all replicas: what its types mean, and which outputs are the same.

A step is traced as JAX's checked `shard_map` means it, where types tell replicas apart, and that
is that unless its types show, or refuse, what is right in a program written for `pmap`: a gradient
of each replica's own loss, which types sum before the step can take the mean; a loop from a
constant; a value gathered everywhere. Such a step is traced once more as `pmap` means it: without
types, every argument each replica's own copy, and the prover of `replication` in their place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxcoll import _compat
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._jaxpr.beside_types import check_own_gradients, hidden_outputs
from jaxcoll._jaxpr.replication import VARIES, is_wrong, varying_outputs
from jaxcoll._jaxpr.retrace import unused_outputs
from jaxcoll._jaxpr.subjaxprs import at_line, opened
from jaxcoll._jaxpr.summed_again import check_own_norms, check_sums
from jaxcoll._jaxpr.summed_gradients import Summed, crossing_sums, summed_gradients
from jaxcoll._mesh.placement import is_array
from jaxcoll._plan.plan import Plan
from jaxcoll._spmd.axes import listed
from jaxcoll._spmd.scope import Scope, entered
from jaxcoll._step.arguments import FLAGS
from jaxcoll._step.out_specs import output_name, output_specs

_SUMMED = """\
`data_parallel` with checks=True: autodiff has summed the gradient {like} over {axis!r} already\
{at}, because its parameter is the same on every replica and the loss is each replica's own; \
{again} takes it for one replica's and would leave it as many times too large as there are \
replicas. What to do: take the gradient with `jc.grad` or `jc.value_and_grad`; or differentiate \
the mean, `jax.grad(lambda w: lax.pmean(loss(w), {axis!r}))`, and reduce it no more; or leave \
`checks` to None, which runs such a step as `pmap` would."""

_NOT_REDUCED = """\
`jax.grad` of a loss that is each replica's own gives each replica's own gradient, here \
{like}{at}. If the sum over the replicas is meant, as JAX's types have it, pass checks=True. """

_CROSSING = """\
`data_parallel`: this step has to run as `pmap` would run it{why}, and its loss sums over \
{axes}, which the batch is not split over. Without types JAX's derivative of that sum is as many \
times too large as the axis is long. Take the gradient with `jc.grad` of a loss that passes the \
checks; or pass checks=False if the step corrects for it."""

_TWO_MEANINGS = """\
`data_parallel`: {name} of the step comes from the derivative of a loss that was reduced over \
{axis!r}, and the step has to run as `pmap` would run it, where that derivative is as many times \
too large as there are replicas. Take the mean over the replicas of a parameter's derivative \
before you use it; or differentiate this replica's own loss (for the mean's derivative divide by \
`lax.axis_size({axis!r})`); or pass checks=False if pmap's meaning is meant."""

_LOST = """\
`data_parallel`: the step changes {name} in place{others} and neither returns nor uses what it \
becomes, so the change would be lost: as with `jax.jit`, a step works on copies of the objects \
among its arguments. What to do: return the object from the step, and go on with what it returns; \
or pass its arrays, as of `graph, state = nnx.split(module)`, put it together in the step by \
`nnx.merge(graph, state)`, and return `nnx.state(module)`."""


class _NotProvenError(ValueError):
    """What a step returns is not shown to be the same everywhere."""


class _TwoMeaningsError(ValueError):
    """What a step returns comes from the derivative of a reduced loss, as `pmap` has it."""


@contextlib.contextmanager
def _not_proven() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise _NotProvenError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A call of a step that is being traced, and all that decides what it becomes on a mesh."""

    step: Callable[..., Any]  # the function of one replica
    mesh: Any  # devices and axes
    axes: tuple[str, ...]  # those that the batch is split over, outer first
    scope: Scope  # the world and the options of the reductions inside
    # True: as types mean it; False: as `pmap` does; None: as the step is found to need
    checks: bool | None
    rule: Any  # what becomes of outputs that vary; see `output_specs`
    lying: Any  # the specs of the arguments
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # positional ones, and those by name

    def traced(self, record: Callable[[Plan], None]) -> Any:
        """The step's result; `record` is given its plans."""
        try:
            run = self._asked(self.checks is not False)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(FLAGS)
            raise
        except Exception as error:
            if self.checks is not None or not _is_refused_by_types(error):
                raise
            run = self._as_pmap(error, ())
        else:
            if run.summed and self.checks is None:
                run = self._as_pmap(None, run.summed)
        check_sums(run.program, self.mesh.shape, run.typed)
        check_own_norms(run.program, self.mesh.shape)
        for plan in run.plans:
            record(plan)
        with entered(run.scope):
            return run.call(*self.arguments)

    def _as_pmap(self, error: Exception | None, summed: tuple[Summed, ...]) -> _Run:
        """The other meaning, once types have refused the step or do not mean what it says."""
        try:
            return self._asked(False, summed, error)
        except AlreadyReducedError:
            if error is None:
                raise
            raise error from None
        except ValueError as refused:
            # The refusal by types is nearer to what the user wrote.
            twice = isinstance(error, AlreadyReducedError)
            if isinstance(error, _NotProvenError) or (
                twice and isinstance(refused, _TwoMeaningsError)
            ):
                raise error from None
            if not isinstance(refused, _NotProvenError):
                raise
            raise ValueError(str(refused)) from error

    def _asked(
        self, typed: bool, summed: tuple[Summed, ...] = (), error: Exception | None = None
    ) -> _Run:
        """One trace of the step, which serves to ask how its outputs vary and to run it."""
        plans: list[Plan] = []
        marked = frozenset() if typed else frozenset(self.mesh.axis_names)
        watched = frozenset(a for a, n in self.mesh.shape.items() if n > 1)
        scope = dataclasses.replace(
            self.scope, record=plans.append, marked=marked, once=not typed, watched=watched
        )
        step = jax.jit(self.step, inline=True)
        mapped = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=self.lying, check_vma=typed
        )
        found: list[Any] = []

        def ask(args: Any, kwargs: Any) -> None:
            traced = step.trace(*args, **kwargs)
            _check_lost_updates(self.step, args, kwargs)
            found.append((traced.jaxpr, traced.out_info))

        with entered(scope):
            jax.eval_shape(mapped(ask, out_specs=None), *self.arguments)
        ((program, results),) = found
        # Tracers of a program around this one, which the step closes over, are inputs that come
        # first; like all that a `shard_map` captures they are the same on every replica.
        captured = len(opened(program).invars) - len(jax.tree.leaves(self.arguments))
        shown = ""
        if typed:
            again = self._summed(program)
            with _not_proven():
                check_own_gradients(program, self.axes)
                hidden = hidden_outputs(program, self.mesh.axis_names)
            by_type = (_compat.varying_axes_of_type(var.aval) for var in opened(program).outvars)
            varying = [a | b for a, b in zip(by_type, hidden, strict=True)]
        else:
            again = ()
            if self.checks is None:
                self._check_crossing(program, summed, error)
            inputs = [frozenset[str]()] * captured + _by_spec(self.lying, self.arguments)
            found = self._proven(program, inputs)
            varying = [frozenset(a for a in facts if facts[a] & VARIES) for facts in found]
            if summed:
                shown = _NOT_REDUCED.format(like=summed[0].like, at=at_line(summed[0].line))
        with _not_proven():
            specs = output_specs(results, varying, self.axes, self.rule, shown)
        if not typed and self.checks is None:
            _check_meanings(found, results)
        tree = jax.tree.structure(results)

        def replayed(args: Any, kwargs: Any) -> Any:
            if captured:
                return step(*args, **kwargs)
            # Not `step` once more: what JAX 0.10 inlines has lost its lines of Python.
            return jax.tree.unflatten(tree, jaxpr_as_fun(program)(*jax.tree.leaves((args, kwargs))))

        call = mapped(replayed, out_specs=specs)
        return _Run(call, scope, plans, again, program, typed)

    def _summed(self, program: Any) -> tuple[Summed, ...]:
        """Gradients of local losses that types have summed."""
        found = {axis: summed_gradients(program, axis) for axis in self.axes}
        for axis, each in found.items():
            twice = next((one for one in each if one.again is not None), None)
            if self.checks and twice is not None:
                again = f"the reduction at {twice.again}" if twice.again else "the next reduction"
                raise AlreadyReducedError(
                    _SUMMED.format(like=twice.like, axis=axis, at=at_line(twice.line), again=again)
                )
        return tuple(one for each in found.values() for one in each)

    def _proven(self, program: Any, inputs: list[frozenset[str]]) -> list[dict[str, int]]:
        """What is found of each output along each axis; see `varying_outputs`."""
        found = {
            axis: varying_outputs(program, axis, [axis in along for along in inputs], n)
            for axis, n in self.mesh.shape.items()
            if n > 1
        }
        return [
            {axis: found[axis][k] for axis in found} for k in range(len(opened(program).outvars))
        ]

    def _check_crossing(
        self, program: Any, summed: tuple[Summed, ...], error: Exception | None
    ) -> None:
        others = [a for a, n in self.mesh.shape.items() if a not in self.axes and n > 1]
        crossed = crossing_sums(program, others)
        if crossed:
            why = "".join(
                f", because of the gradient {x.like}{at_line(x.line)}" for x in summed[:1]
            )
            raise ValueError(_CROSSING.format(why=why, axes=listed(crossed))) from error


@dataclasses.dataclass(frozen=True)
class _Run:
    """A traced step that is ready to run."""

    call: Callable[[Any, Any], Any]
    scope: Scope
    plans: list[Plan]
    summed: tuple[Summed, ...]  # by types, of losses that are each replica's own
    program: Any
    typed: bool  # whether types tell replicas apart


def _is_refused_by_types(error: BaseException | None) -> bool:
    """Whether types, or what we make of them, are why a step could not be traced.

    A library may fail of its own once JAX has refused its loop, so what came before counts, too.
    """
    while error is not None:
        ours = isinstance(error, AlreadyReducedError | _NotProvenError)
        if ours or _compat.is_variance_mismatch(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _by_spec(lying: Any, arguments: Any) -> list[frozenset[str]]:
    """Along which axes each array among the arguments is split."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    specs = jax.tree.leaves(jax.tree.broadcast(lying, arguments, is_leaf=is_spec), is_leaf=is_spec)
    return [frozenset(jax.tree.leaves(tuple(spec))) for spec in specs]


def _check_meanings(found: list[dict[str, int]], results: Any) -> None:
    for facts, (path, _) in zip(found, jax.tree.leaves_with_path(results), strict=True):
        if axes := [axis for axis, fact in facts.items() if is_wrong(fact)]:
            raise _TwoMeaningsError(_TWO_MEANINGS.format(name=output_name(path), axis=axes[0]))


def _check_lost_updates(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a step that would lose what it changes in an object, as in a module of flax's nnx."""
    # It is traced once more for this, so only if there is such an object.
    if not _has_mutable(jax.tree.structure((args, kwargs))):
        return
    names: list[str] = []

    def with_changes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        before = _named(args, kwargs)
        result = step(*args, **kwargs)
        after = _named(args, kwargs)
        names[:] = [name for name in after if after[name] is not before.get(name, after[name])]
        return result, [after[name] for name in names]

    traced = jax.jit(with_changes).trace(args, kwargs)
    lost = [names[k] for k in unused_outputs(traced.jaxpr, len(names))]
    if lost:
        others = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        raise ValueError(_LOST.format(name=lost[0], others=others))


def _has_mutable(structure: Any) -> bool:
    """Whether a tree has nodes that a function may change, other than dicts and lists."""
    node = structure.node_data()
    if node is None:  # a leaf
        return False
    frozen = getattr(getattr(node[0], "__dataclass_params__", None), "frozen", False)
    if not frozen and not issubclass(node[0], dict | list | tuple | type(None)):
        return True
    return any(map(_has_mutable, structure.children()))


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arrays of those arguments that have mutable objects in them, by name."""
    given = [*((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]
    return {
        name + jax.tree_util.keystr(path): leaf
        for name, tree in given
        if _has_mutable(jax.tree.structure(tree))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if is_array(leaf)
    }
