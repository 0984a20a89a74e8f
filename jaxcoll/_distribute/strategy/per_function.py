"""A cache of what is made of functions, which keeps no function alive."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

_MOST = 16  # programs of one function, for other devices, options or strategies


def per_function(make: Callable[..., Any]) -> Callable[..., Any]:
    """Cache `make(devices, function, ...)` by its arguments, for as long as `function` lives.

    A program kept by its function must not keep the function, nor the weights that it closes over:
    `make` gets one that refers to it weakly. Who calls the program has the function.
    """
    made: dict[Any, dict[Any, Any]] = {}
    strongly = functools.lru_cache(maxsize=_MOST)(make)

    def forget(reference: Any) -> None:
        made.pop(reference, None)

    @functools.wraps(make)
    def cached(devices: Any, function: Callable[..., Any], *more: Any) -> Any:
        is_method = isinstance(function, types.MethodType)
        try:
            reference: Any = (weakref.WeakMethod if is_method else weakref.ref)(function, forget)
            of_function = made.setdefault(reference, {})
        except TypeError:  # nothing refers to it weakly, or the owner of a method has no hash
            return strongly(devices, function, *more)
        key = (devices, *more)
        if key not in of_function:
            weakly = _weakly(reference, getattr(function, "__name__", type(function).__name__))
            of_function[key] = make(devices, weakly, *more)
            if len(of_function) > _MOST:
                del of_function[next(iter(of_function))]
        return of_function[key]

    return cached


def _weakly(reference: Callable[[], Any], name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return reference()(*args, **kwargs)

    function.__name__ = name
    return function
