"""Functions that are compiled as calls of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def apart(function: Callable[..., Any], **known: Any) -> Callable[..., Any]:
    """`function` with some arguments known, which no compiler joins with what is around it.

    Its arrays are stored before and after, and calls of the same shapes are compiled once. For
    CPUs alone: other compilers make a call of it that waits.
    """
    jitted = _jitted(function, tuple(known))

    def call(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jitted(*arrays, **known)

    return call


@functools.cache
def _jitted(function: Callable[..., Any], known: tuple[str, ...]) -> Any:
    @functools.wraps(function)
    def inside(*arrays: Any, **known: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # of calls within it, which are joined
            return function(*arrays, **known)

    return jax.jit(inside, static_argnames=known)
