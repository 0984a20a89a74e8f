"""Checks of arguments that several functions share."""

from __future__ import annotations

import math
import numbers
from typing import Any, NoReturn

from jax.core import Tracer


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer, NumPy's included; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite real number, NumPy's included, and not a bool."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def refuse(argument: str, what: str, value: Any) -> NoReturn:
    """Raise a ValueError: `argument` must be `what`, and `value` is not."""
    raise ValueError(f"`{argument}` must be {what}; got {shown(value)}.")


def count(argument: str, meaning: str, value: Any) -> int:
    """Return a non-negative integer as an `int`; refuse others, with `meaning` in the message."""
    if is_integer(value) and value >= 0:
        return int(value)
    refuse(argument, f"a non-negative integer{meaning}", value)


def positive(caller: str, argument: str, value: Any) -> int:
    """Return an integer above 0 as an `int`; refuse others, in the name of `caller`."""
    if is_integer(value) and value > 0:
        return int(value)
    raise ValueError(
        f"`{caller}` expects `{argument}` to be an integer above 0; got {shown(value)}."
    )


def seconds(caller: str, argument: str, value: Any) -> float:
    """Return a finite number above 0 as a `float`; refuse others, in the name of `caller`."""
    if is_number(value) and value > 0:
        return float(value)
    raise ValueError(
        f"`{caller}` expects `{argument}` to be a finite number of seconds above 0; "
        f"got {shown(value)}."
    )


def kind_of(value: Any) -> str:
    """Return a value's type for a message; for an array, traced or not, its dtype and shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype.name}{[*value.shape]}"
    return type(value).__name__


def shown(value: Any) -> str:
    """Return `repr(value)`, or for an array its dtype and shape; for a tracer also advice."""
    if isinstance(value, Tracer):
        return f"the traced value {value}, which is not known here: make this argument static"
    return kind_of(value) if getattr(value, "shape", ()) else repr(value)
