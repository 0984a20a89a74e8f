"""Checks of a call's arguments before anything is sent: names of axes, and arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxcoll import _compat
from jaxcoll._plan.packs.leaves import no_array, where
from jaxcoll.errors import AlreadyReducedError


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
    """The refusal of a leaf that is the same on every replica along some of the axes.

    What to do is said for a value that all replicas hold, and for a gradient, if it can be one.
    """
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
