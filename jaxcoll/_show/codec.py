"""Dataclasses to the plain values of JSON, and back, by the types of their fields."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

OPTIONAL = {"optional": True}
"""Metadata of a field that a file may lack, as older ones do; it then reads as its default."""


def plain(value: Any) -> Any:
    """A value in numbers, strings, lists and dicts, as JSON has them; enums and dtypes by name.

    Examples:
      >>> plain((np.dtype("f"), 3, None))
      ['float32', 3, None]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.name if isinstance(value, enum.Enum | np.dtype) else value


def read(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `plain` gave `data` for.

    Law: `read(type(x), plain(x)) == x`. A key that is missing or unknown, and a value of another
    type, are errors; but for fields marked `OPTIONAL`.

    Args:
      kind: a dataclass, `np.dtype`, an enum, a number, `str`, `bool`, `tuple[...]`, `dict[...]`,
        `X | Y` or `Literal` of these. A value of any other type is taken as it is.
      data: from JSON. A list stands for a dataclass, too, its fields in their order.

    Raises:
      ValueError: `data` is not of that type; the message says where.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(kind, args, data)
    if origin is tuple:
        if isinstance(data, list | tuple):
            kinds = args[:1] * len(data) if args[-1] is ... else args
            if len(kinds) == len(data):
                return tuple(map(read, kinds, data))
    elif origin is dict:
        if isinstance(data, Mapping):
            return {read(args[0], key): read(args[1], value) for key, value in data.items()}
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _read_fields(kind, data)
    elif kind is np.dtype:
        with contextlib.suppress(TypeError):
            return np.dtype(data or "nothing")  # None would mean float64
    elif isinstance(kind, enum.EnumMeta):
        if data in kind.__members__:
            return kind[data]
    elif data in args if origin is Literal else _fits(kind, data):
        return data
    raise ValueError(_expected(kind, data))


def _fits(kind: Any, data: Any) -> bool:
    if kind in (int, float):  # an int may stand for a float; True is an int to isinstance
        return isinstance(data, (int, kind)) and not isinstance(data, bool)
    return not isinstance(kind, type) or kind.__module__ != "builtins" or isinstance(data, kind)


def _read_union(kind: Any, args: tuple[Any, ...], data: Any) -> Any:
    if data is None and types.NoneType in args:
        return None
    rest = [each for each in args if each is not types.NoneType]
    for each in rest[:-1]:
        with contextlib.suppress(ValueError):
            return read(each, data)
    return read(rest[-1], data)


def _read_fields(kind: type, data: Any) -> Any:
    known = _fields(kind)
    if isinstance(data, list | tuple) and len(data) <= len(known):
        data = dict(zip(known, data, strict=False))
    if not isinstance(data, Mapping):
        raise ValueError(_expected(kind, data))
    needed = {name for name, (_, optional) in known.items() if not optional}
    for what, names in (("lacks", needed - set(data)), ("has no", set(data) - set(known))):
        if names:
            raise ValueError(f"{kind.__name__} {what} {', '.join(sorted(map(str, names)))}")
    return kind(**{name: read(known[name][0], value) for name, value in data.items()})


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether a file may lack it."""
    hints = typing.get_type_hints(kind)
    return {f.name: (hints[f.name], "optional" in f.metadata) for f in dataclasses.fields(kind)}


def _expected(kind: Any, data: Any) -> str:
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return f"expected {name}, got {str(data)[:60]!r}"
