"""The arguments of a reduction: its axes, its arrays, and the settings of the program around it.

The scope is part of JAX's trace-cache key: JAX traces a function anew under a different scope, so
an inner `jax.jit` cannot carry options from one program to the next.
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
from jaxcoll._plan.checks import refuse_axes
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import no_array, where
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._plan.world import World
from jaxcoll.errors import AlreadyReducedError

DILOCO_AXIS = "jaxcoll_replica"
"""The axis that a step of `diloco` is mapped over; reductions over it are refused."""


@dataclasses.dataclass(frozen=True)
class Scope:
    """The settings of a program; its functions compare by value, so equal programs share traces."""

    # Describes where a reduction runs, from its axes and their sizes
    world: Callable[[dict[str, int]], World]
    # Defaults for the options of each call
    options: CommunicationOptions = CommunicationOptions()
    # Called with each plan that is carried out
    record: Callable[[CollectivePlan], None] = lambda plan: None
    # Called with each call's `timeout_seconds`; None: jaxcoll does not call the program, so it
    # cannot enforce a deadline
    deadline: Callable[[float], None] | None = None
    # The axes of a call that names none, outer first; (): there is no default
    axes: tuple[str, ...] = ()
    claims: Any = None  # a `Claims` that collects the calls of `jc.same`; None: they are unchecked

    def __hash__(self) -> int:
        # JAX asks at every operation of a trace, and a world lists all devices. Scopes that differ
        # in other fields are rare enough to share a hash.
        return hash((self.axes, self.options))

    def merge(self, options: CommunicationOptions | None) -> Scope:
        """Return this scope with a call's options, which override its defaults."""
        seconds = options.timeout_seconds if options else None
        if seconds and self.deadline is None:
            raise ValueError(
                f"`timeout_seconds` {seconds:g} was given inside a program that jaxcoll does not "
                "call, so it cannot enforce the deadline. Use `jc.data_parallel`, `strategy.run` "
                "or a call between programs; or leave it out."
            )
        if seconds and self.deadline is not None:
            self.deadline(seconds)
        merged = self.options.merge(options)
        return self if merged is self.options else dataclasses.replace(self, options=merged)

    def choose_axes(self, axis_name: Any, caller: str) -> Any:
        """Return the axes of a call: those that it names, or those of the step around it."""
        if axis_name is None and not self.axes:
            raise ValueError(
                f"`{caller}` needs an `axis_name` here. The default, the axes of the replicas, "
                "exists only inside `jc.data_parallel` and `strategy.run`. In your own "
                "`jax.shard_map` or `jax.pmap`, name the axis that it maps."
            )
        return self.axes if axis_name is None else axis_name

    @property
    def exactly(self) -> Scope:
        """This scope without compression, for values that are not gradients."""
        return dataclasses.replace(self, options=self.options.replace(compression=UNSET))


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """The reduction that awaits the gradient of the loss being traced; compares by value."""

    axes: tuple[str, ...]  # the axes of that reduction
    options: CommunicationOptions = CommunicationOptions()  # its options
    enclosing: frozenset[str] = frozenset()  # axes of all losses around this one

    def check_mean(self, reduce_op: ReduceOp, axes: Iterable[str], caller: str) -> None:
        """Raise an error if gradients would be summed inside the loss, and again around it."""
        if reduce_op is not ReduceOp.MEAN:
            raise ValueError(
                f"`{caller}` over {show_axes(axes)} with reduce_op SUM, inside the loss of "
                "`jc.value_and_grad`, `jc.grad` or `jc.accumulate`, which sum gradients "
                'themselves. Leave reduce_op at "mean" here, even if theirs is "sum".'
            )


entered = jax.make_user_context(default_value=None)
"""The context of a program: `with entered(scope):` traces under a `Scope`, and `entered.value` is
the current one, None outside every jaxcoll program."""

differentiated = jax.make_user_context(default_value=None)
"""The context of a loss: `with differentiated(differentiation):` traces its body."""


_default_scope: list[Scope] = []


def set_default_scope(scope: Scope) -> None:
    """Set the scope outside every jaxcoll program; `mesh.world`, which can see devices, does."""
    _default_scope[:] = [scope]


def scope_here() -> Scope:
    """Return the scope of the jaxcoll program around this call, or else the default one."""
    return entered.value or _default_scope[0]


def differentiation() -> Differentiation | None:
    """Return the `Differentiation` of the loss being traced; None outside every such loss."""
    return differentiated.value


def loss_axes() -> frozenset[str]:
    """Return the axes along which even equal values are typed as varying here."""
    inside = differentiation()
    return frozenset() if inside is None else inside.enclosing.union(inside.axes)


def resolve_axes(axis_name: Any, caller: str) -> dict[str, int]:
    """Return the named axes with their sizes, outer first; raise an error if one is not mapped."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    axes: dict[str, int] = {}
    for name in names:
        if isinstance(name, Tracer):
            raise ValueError(
                f"`{caller}` got a traced value for `axis_name`: pass the name as a string, and "
                "make the argument static if a jitted function takes it."
            )
        if not isinstance(name, str):
            break
        if name in axes:
            raise ValueError(f"`{caller}` got an axis twice in `axis_name`: {axis_name!r}.")
        try:
            # Local steps do not communicate: to users this axis does not exist.
            if name == DILOCO_AXIS:
                raise NameError(name)
            axes[name] = lax.axis_size(name)
        except NameError:
            scope = " or ".join(repr(a) for a in _compat.axes_in_scope() if a != DILOCO_AXIS)
            call = f"Did you mean {scope}? If not, call it" if scope else "Call it"
            raise NameError(
                f"`{caller}` over axis {name!r}: no such axis here. {call} inside `jax.shard_map`, "
                f"`jax.pmap` or `jc.data_parallel` that maps {name!r}."
            ) from None
        if obstacle := _compat.obstacle(name):
            raise ValueError(f"`{caller}` over axis {name!r}: {_OBSTACLES[obstacle]}")
    if len(axes) < max(1, len(names)):
        refuse_axes(caller, axis_name)
    return axes


_OBSTACLES = {
    "unreachable": "JAX cannot communicate over the axis of a `vmap` inside a `shard_map` that "
    "checks types. Do not map that dimension: sum over it with `jnp.sum`, before or after.",
    "shadowed": "a `vmap` here has taken the name of an axis of the mesh. Give the axis of the "
    "`vmap` another name.",
}


def require_array(value: Any, who: str, expected: str = "an array") -> jax.Array:
    """Convert an array or a number to an array; for anything else raise an error about `who`."""
    if (got := no_array(value)) is not None:
        raise ValueError(f"{who}: expected {expected}, got {got}.")
    return jnp.asarray(value)


def show_sizes(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} (size {size})" for name, size in axes.items())


def show_axes(axes: Iterable[str]) -> str:
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
    """Return the error for a leaf equal on all replicas; `value` and `gradient` are its advice."""
    n = count(same)
    message = (
        f"`{caller}` over {show_sizes(axes)}: {where(path)} is already the same on every replica "
        f"along {show_sizes(same)}, so reducing it would count it {n} times. {value.format(n=n)}"
    )
    if jnp.issubdtype(array.dtype, jnp.inexact):
        message += (
            " If it is a gradient, autodiff has summed it, because its parameter enters this "
            f"checked `shard_map` replicated: {gradient.format(n=n)}"
        )
    return AlreadyReducedError(message)


def count(axes: Mapping[str, int]) -> int:
    """Return the number of replicas along all of `axes` together."""
    return math.prod(axes.values())
