"""Tracebacks that end at the user's line, by JAX's own filter of them."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

Function = TypeVar("Function", bound=Callable[..., Any])

_filter: Any = getattr(sys.modules[jax.jit.__module__], "traceback_util", None)

if hasattr(_filter, "register_exclusion"):
    # JAX_TRACEBACK_FILTERING=off shows our frames as it shows JAX's.
    _filter.register_exclusion(str(pathlib.Path(__file__).parent.parent))


def boundary(fun: Function) -> Function:
    """`fun`, whose errors have tracebacks without the frames of JAX and of this package."""
    return _filter.api_boundary(fun) if hasattr(_filter, "api_boundary") else fun
