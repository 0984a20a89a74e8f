"""Settings that the caller of a traced program hands down to the reductions in it.

The scope is part of JAX's trace-cache key: a function that was traced under one scope is
traced anew under one that differs, so an inner `jax.jit` cannot carry options from one program to
the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.world import World
from jaxcoll._spmd.axes import listed


class _Hashed:
    """A frozen value that is hashed once: JAX asks for it at every operation of a trace."""

    def __hash__(self) -> int:
        cached = vars(self).get("_hash")
        if cached is None:
            values = (getattr(self, field.name) for field in dataclasses.fields(self))  # pyright: ignore[reportArgumentType]
            cached = vars(self)["_hash"] = hash(tuple(values))
        return cached


@dataclasses.dataclass(frozen=True)
class Scope(_Hashed):
    """A frozen value; its functions are values, too, so that equal programs share their traces."""

    __hash__ = _Hashed.__hash__

    # From the axes of a reduction and their sizes to where it runs
    world: Callable[[dict[str, int]], World]
    # Defaults under the options of each call
    options: CommunicationOptions = CommunicationOptions()
    # Called with each plan that is carried out
    record: Callable[[CollectivePlan], None] = lambda plan: None
    # Called with each deadline that a call inside is given; None: the program is called by others,
    # so that nobody could keep one
    deadline: Callable[[float], None] | None = None
    # The axes of a call that names none, outer first; (): there is no default
    axes: tuple[str, ...] = ()
    claims: Any = None  # a `Claims` that notes what `jc.same` is called with; None: nobody compares

    def merged(self, options: CommunicationOptions | None) -> Scope:
        """This scope with a call's own options over its defaults."""
        seconds = options.timeout_seconds if options else None
        if seconds and self.deadline is None:
            raise ValueError(
                f"`timeout_seconds` {seconds:g} was given inside a program that jaxcoll does not "
                "call, where nobody waits with a deadline. It is kept inside `jc.data_parallel` "
                "and `strategy.run`, and by calls between programs. Use one of these, or options "
                "without `timeout_seconds`."
            )
        if seconds and self.deadline is not None:
            self.deadline(seconds)
        merged = self.options.merge(options)
        return self if merged is self.options else dataclasses.replace(self, options=merged)

    def over(self, axis_name: Any, caller: str) -> Any:
        """The axes of a call: those that it names, or those of the step around it.

        Raises:
          ValueError: it names none, and there is no such step.
        """
        if axis_name is None and not self.axes:
            raise ValueError(
                f"`{caller}` needs an `axis_name` here. Only inside `jc.data_parallel` and "
                "`strategy.run` it has a default, the axes of the replicas; in a `jax.shard_map` "
                "or `jax.pmap` of your own, name the axis that it maps."
            )
        return self.axes if axis_name is None else axis_name

    @property
    def exactly(self) -> Scope:
        """This scope for what is not a gradient, and is not rounded on the wire."""
        return dataclasses.replace(self, options=self.options.replace(compression=UNSET))


@dataclasses.dataclass(frozen=True)
class Differentiation(_Hashed):
    """A mark that a loss is traced whose gradient is going to be reduced; equal by value."""

    __hash__ = _Hashed.__hash__

    axes: tuple[str, ...]  # what the gradient is reduced over
    options: CommunicationOptions = CommunicationOptions()  # of that reduction
    enclosing: frozenset[str] = frozenset()  # axes of all losses around this one

    def check_mean(self, reduce_op: ReduceOp, axes: Iterable[str], caller: str) -> None:
        """Refuse a SUM, inside of the loss, of gradients that are made a sum around it."""
        if reduce_op is not ReduceOp.MEAN:
            raise ValueError(
                f"`{caller}` over {listed(axes)} with reduce_op SUM, inside the loss of "
                "`jc.value_and_grad`, `jc.grad` or `jc.accumulate`: what they differentiate is "
                "this replica's own loss, and they make a sum or a weighted mean of its gradients "
                'themselves. Leave reduce_op at "mean" here, whatever theirs is.'
            )


entered = jax.make_user_context(default_value=None)
"""`with entered(scope):` traces what follows under a `Scope`; `entered.value` is the one that holds
here, None outside every jaxcoll program."""

differentiated = jax.make_user_context(default_value=None)
"""`with differentiated(differentiation):` traces what follows as part of a loss."""


_bare: list[Scope] = []


def set_bare_scope(scope: Scope) -> None:
    """Let `scope` hold where no jaxcoll program is around; who reads worlds from JAX says it."""
    _bare[:] = [scope]


def scope_here() -> Scope:
    """Return the scope that a jaxcoll program set, or that of bare calls."""
    return entered.value or _bare[0]


def differentiation() -> Differentiation | None:
    """Whose loss this point of the trace belongs to; None outside every such loss."""
    return differentiated.value


def retyped() -> frozenset[str]:
    """Axes along which a value is typed as varying here, whether it differs or not."""
    inside = differentiation()
    return frozenset() if inside is None else inside.enclosing.union(inside.axes)
