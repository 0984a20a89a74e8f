"""Checks of arguments that several functions share."""

from __future__ import annotations

import contextlib
import enum
import math
import numbers
import operator
from typing import Any, NoReturn

import jax
from jax.core import Tracer


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer, NumPy's included; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_index(value: Any) -> int | None:
    """Return an integer, or an array of one, as an `int`; None for anything else."""
    with contextlib.suppress(TypeError):
        return None if isinstance(value, bool) else operator.index(value)


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite real number, NumPy's included, and not a bool."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def refuse(argument: str, what: str, value: Any) -> NoReturn:
    """Raise a ValueError: `argument` must be `what`, and `value` is not."""
    raise ValueError(f"`{argument}` must be {what}; got {show(value)}.")


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
        f"`{caller}` expects `{argument}` to be an integer above 0; got {show(value)}."
    )


def seconds(caller: str, argument: str, value: Any) -> float:
    """Return a finite number above 0 as a `float`; refuse others, in the name of `caller`."""
    if is_number(value) and value > 0:
        return float(value)
    raise ValueError(
        f"`{caller}` expects `{argument}` to be a finite number of seconds above 0; "
        f"got {show(value)}."
    )


def describe_type(value: Any) -> str:
    """Return a value's type for a message; for an array, traced or not, its dtype and shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype.name}{[*value.shape]}"
    return type(value).__name__


def show(value: Any) -> str:
    """Return `repr(value)`, or the type of an array or a tree with arrays; advise on tracers."""
    if isinstance(value, Tracer):
        return f"the traced value {value}, which is not known here: make this argument static"
    has_array = any(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(value))
    return describe_type(value) if has_array else repr(value)


def refuse_axes(caller: str, axis_name: Any) -> NoReturn:
    """Raise a ValueError: `axis_name` is neither a name nor names of axes."""
    raise ValueError(
        f"`{caller}` expects `axis_name` to be a string or a non-empty tuple of strings; got "
        f"{show(axis_name)}."
    )


def check_value_first(caller: str, value: Any) -> None:
    """Refuse a string or an operation in the place of a value: arguments are probably swapped."""
    if isinstance(value, str | enum.Enum):
        raise ValueError(
            f"`{caller}` takes the value first and then the axis: "
            f'`{caller}(value, "data")`; got {value!r} for the value.'
        )
