"""Binds a step to an object, or to a class, whose method it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


class _Bound(tuple[Any, ...]):
    """An instance, a step and the step bound to it; deep copies and pickles of it are empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ()


def bind_step(step: Any, instance: Any, bind: Callable[[Any], Any]) -> Any:
    """Bind a step that is a method to an instance, or a step that is a `classmethod` to a class.

    An instance that is a pytree of arrays is the step's first argument, replicated, as with
    `jax.jit`. Any other instance is a constant of the program.
    """
    if not jax.tree_util.all_leaves([instance]):
        return functools.partial(step, instance)
    try:
        attributes = vars(instance)
    except TypeError:  # it has slots, and no room for another attribute
        return bind(instance)
    key = f"_data_parallel_{id(step)}"
    bound = attributes.get(key)
    if not bound or bound[0] is not instance or bound[1] is not step:
        # Stored with the instance, as a copy of its attributes must not use this step; and with
        # the step, as its id may be used again once it is garbage.
        bound = _Bound((instance, step, bind(instance)))
        if isinstance(instance, type):  # the attributes of a class are a read-only view
            setattr(instance, key, bound)
        else:
            attributes[key] = bound
    return bound[2]
