"""The arguments of a reduction: the axes it is over, its arrays, and settings from around it.

The scope is part of JAX's trace-cache key: a function that was traced under one scope is
traced anew under one that differs, so an inner `jax.jit` cannot carry options from one program to
the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxcoll import _compat
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import no_array, where
from jaxcoll._plan.world import World
from jaxcoll.errors import AlreadyReducedError


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
        """The axes of a call: those that it names, or those of the step around it."""
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


_default_scope: list[Scope] = []


def set_default_scope(scope: Scope) -> None:
    """Let `scope` hold where no jaxcoll program is around; who reads worlds from JAX says it."""
    _default_scope[:] = [scope]


def scope_here() -> Scope:
    """Return the scope that a jaxcoll program set, or that of bare calls."""
    return entered.value or _default_scope[0]


def differentiation() -> Differentiation | None:
    """Whose loss this point of the trace belongs to; None outside every such loss."""
    return differentiated.value


def retyped() -> frozenset[str]:
    """Axes along which a value is typed as varying here, whether it differs or not."""
    inside = differentiation()
    return frozenset() if inside is None else inside.enclosing.union(inside.axes)


def bound_axes(axis_name: Any, caller: str) -> dict[str, int]:
    """The named axes and their sizes, outer first; all of them must be mapped here."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    axes: dict[str, int] = {}
    for name in names:
        if isinstance(name, Tracer):
            raise ValueError(
                f"`{caller}` got a traced value for `axis_name`; an axis is known by its name: "
                "pass the string itself, and make the argument static if a jitted function takes "
                "it."
            )
        if not isinstance(name, str):
            break
        if name in axes:
            raise ValueError(f"`{caller}` got an axis twice in `axis_name`: {axis_name!r}.")
        axes[name] = _size(name, caller)
    if len(axes) < max(1, len(names)):
        raise ValueError(
            f"`{caller}` expects `axis_name` to be a string or a non-empty tuple of strings; "
            f"got {axis_name!r}."
        )
    return axes


def _size(name: str, caller: str) -> int:
    try:
        size = lax.axis_size(name)
    except NameError:
        scope = " or ".join(map(repr, _compat.axes_in_scope()))
        call = f"Did you mean {scope}? If not, call it" if scope else "Call it"
        raise NameError(
            f"`{caller}` over axis {name!r}: no such axis here. {call} inside `jax.shard_map`, "
            f"`jax.pmap` or `jc.data_parallel` that maps {name!r}."
        ) from None
    obstacle = _compat.obstacle(name)
    if obstacle == "unreachable":
        raise ValueError(
            f"`{caller}` over axis {name!r}: JAX cannot communicate over the axis of a `vmap` "
            "inside a `shard_map` that checks types. Leave the mapped dimension in place and "
            "sum over it with `jnp.sum`, before or after."
        )
    if obstacle == "shadowed":
        raise ValueError(
            f"`{caller}` over axis {name!r}: a `vmap` here has taken the name of an axis of "
            "the mesh. Give the axis of the `vmap` a name of its own."
        )
    return size


def as_array(value: Any, who: str, expected: str = "an array") -> jax.Array:
    """An array, or a number as one; anything else is refused, beginning with `who`."""
    if (got := no_array(value)) is not None:
        raise ValueError(f"{who}: expected {expected}, got {got}.")
    return jnp.asarray(value)


def named(axes: Mapping[str, int]) -> str:
    """Axes with their sizes, for a message."""
    return ", ".join(f"{name!r} (size {size})" for name, size in axes.items())


def listed(axes: Iterable[str]) -> str:
    """Axes for a message."""
    return ", ".join(map(repr, axes))


def already_reduced(
    caller: str,
    path: str,
    array: Any,
    axes: Mapping[str, int],
    same: Mapping[str, int],
    *,
    value: str,
    gradient: str,
) -> AlreadyReducedError:
    """The refusal of a leaf that all replicas hold; what to do with a value, or a gradient."""
    n = count(same)
    message = (
        f"`{caller}` over {named(axes)}: {where(path)} is already the same on every replica along "
        f"{named(same)}, so reducing it would count it {n} times. {value.format(n=n)}"
    )
    if jnp.issubdtype(array.dtype, jnp.inexact):
        message += (
            " If it is a gradient, autodiff has summed it, because its parameter enters this "
            f"checked `shard_map` replicated: {gradient.format(n=n)}"
        )
    return AlreadyReducedError(message)


def count(axes: Mapping[str, int]) -> int:
    """Replicas along all of `axes` together."""
    return math.prod(axes.values())
