"""A traced function as a value, to analyse and cut before it becomes part of another program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxcoll import _compat
from jaxcoll._gradients.proof.subjaxprs import find_callee, open_jaxpr, programs

_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_matmul"}

Moment = tuple[int, int]
"""The time a value is ready: the number of the last matrix product or loop that it needs, then of
the equation that makes it."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function, with the values that it captured."""

    # Its outputs are the arrays among the leaves of the result, in the order of the tree
    program: ClosedJaxpr
    treedef: jax.tree_util.PyTreeDef  # of the result
    # For each leaf of the result: None if it is an array, otherwise a tuple with the leaf
    others: tuple[tuple[Any] | None, ...]
    call: Callable[..., Sequence[jax.Array]]  # from arrays, the input leaves, to the outputs

    def outputs(self, *inputs: Any) -> list[jax.Array]:
        """Compute the arrays of the result, for inputs like those that it was traced with."""
        return self.make_arrays(self.call(*jax.tree.leaves(inputs)))

    def make_arrays(self, outputs: Sequence[Any]) -> list[jax.Array]:
        """Make the outputs of a call arrays: a constant one is a number of Python or NumPy."""
        return _compat.make_arrays(outputs, self.program.out_avals)

    def evaluate(self) -> Any:
        """Compute the result of a function without inputs, as part of the current trace."""
        return self.result(self.outputs())

    def result(self, outputs: Sequence[Any]) -> Any:
        """Build a pytree like the result, with `outputs` as its arrays."""
        arrays = iter(outputs)
        leaves = [next(arrays) if other is None else other[0] for other in self.others]
        return jax.tree.unflatten(self.treedef, leaves)


def trace_call(fun: Callable[..., Any], *inputs: Any) -> Traced:
    """Trace `fun(*inputs)` once, as a jitted function, which later calls reuse.

    `fun` may capture tracers of the current trace. Leaves of the result that are not a `jax.Array`
    are those of the one call.
    """
    flat_function, others = _flatten_function(fun, inputs)
    program, call = _compat.trace_once(flat_function, *jax.tree.leaves(inputs))
    return Traced(program, *others(), call)


def trace(fun: Callable[..., Any], *inputs: Any) -> Traced:
    """Trace `fun(*inputs)`, so that its equations can be cut; a call inlines them."""
    flat_function, others = _flatten_function(fun, inputs)
    program = jax.make_jaxpr(flat_function)(*jax.tree.leaves(inputs))
    return Traced(program, *others(), jaxpr_as_fun(program))


_Others = tuple[jax.tree_util.PyTreeDef, tuple[tuple[Any] | None, ...]]


def _flatten_function(
    fun: Callable[..., Any], inputs: Any
) -> tuple[Callable[..., list[Any]], Callable[[], _Others]]:
    """Make `fun` a function from leaves to arrays, and one for the rest of its result."""
    treedef = jax.tree.structure(inputs)
    calls: list[_Others] = []

    def flat_function(*leaves: Any) -> list[Any]:
        results, structure = jax.tree.flatten(fun(*treedef.unflatten(leaves)))
        is_array = [isinstance(x, jax.Array) for x in results]
        others = tuple(None if a else (x,) for x, a in zip(results, is_array, strict=True))
        calls.append((structure, others))
        return [x for x, a in zip(results, is_array, strict=True) if a]

    flat_function.__name__ = getattr(fun, "__name__", "function")
    return flat_function, lambda: calls[0]


def lift_captured(program: Traced) -> tuple[Traced, list[Any]]:
    """Make the captured tracers additional inputs of the program, and list them."""
    jaxpr = program.program.jaxpr
    pairs = [*zip(jaxpr.constvars, program.program.consts, strict=True)]
    # A tracer belongs to the trace around this one. The backward pass, which is traced later, may
    # run under another.
    captured = {var: const for var, const in pairs if isinstance(const, Tracer)}
    held = {var: const for var, const in pairs if var not in captured}
    jaxpr = jaxpr.replace(
        constvars=[*held],
        invars=[*jaxpr.invars, *captured],
        debug_info=jaxpr.debug_info._replace(arg_names=None),
    )
    closed = ClosedJaxpr(jaxpr, [*held.values()])
    program = dataclasses.replace(program, program=closed, call=jaxpr_as_fun(closed))
    return program, [*captured.values()]


def find_independent(program: ClosedJaxpr, inputs: Sequence[int]) -> list[bool]:
    """Say of each output whether it depends on neither `inputs` (positions) nor effects."""
    jaxpr = program.jaxpr
    tainted = {jaxpr.invars[i] for i in inputs}
    for eqn in jaxpr.eqns:
        if eqn.effects or not tainted.isdisjoint(_variables(eqn.invars)):
            tainted.update(eqn.outvars)
    return [isinstance(x, Literal) or x not in tainted for x in jaxpr.outvars]


def cut_program(program: ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]) -> ClosedJaxpr:
    """Cut out the part of a program that computes `outputs` from `inputs`, all by position."""
    jaxpr = program.jaxpr
    wanted = [jaxpr.outvars[k] for k in outputs]
    needed, kept = _variables(wanted), list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed |= _variables(eqn.invars)  # assume that an equation needs all its operands
    smaller = jaxpr.replace(
        invars=[jaxpr.invars[i] for i in inputs],
        eqns=kept[::-1],
        outvars=wanted,
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return ClosedJaxpr(smaller, program.consts)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {x for x in atoms if not isinstance(x, Literal)}


def places(program: ClosedJaxpr) -> list[int]:
    """Rank the outputs in the order in which they become ready, with equal ranks.

    In a backward pass, matrix products take the time, and the equations between them take little.
    So a value is ready when the last product that it needs is, wherever its equation is: a program
    may cast all gradients at its end. Products run in the order of their equations, which for
    gradients is the order of transposition, last layer first. All results of a loop are ready at
    the same time.
    """
    moments = _moments(program.jaxpr, [(0, 0)] * len(program.jaxpr.invars), itertools.count(1))
    order = {moment: place for place, moment in enumerate(sorted(set(moments)))}
    return [order[moment] for moment in moments]


def _moments(jaxpr: Jaxpr, inputs: Sequence[Moment], numbers: itertools.count[int]) -> list[Moment]:
    ready: dict[Any, Moment] = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [
            ready.get(x, (0, 0)) if not isinstance(x, Literal) else (0, 0) for x in eqn.invars
        ]
        body = find_callee(eqn)
        if body is not None:
            moments = _moments(open_jaxpr(body), operands, numbers)
            ready.update(zip(eqn.outvars, moments, strict=True))
            continue
        now = next(numbers)
        is_product = eqn.primitive.name in _PRODUCTS or programs(eqn)
        last = now if is_product else max((moment[0] for moment in operands), default=0)
        ready.update(dict.fromkeys(eqn.outvars, (last, now)))
    return [(0, 0) if isinstance(x, Literal) else ready.get(x, (0, 0)) for x in jaxpr.outvars]
