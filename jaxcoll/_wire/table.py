"""The table of wire formats, and the option that names one."""

from __future__ import annotations

from typing import Any, Literal

from jaxcoll._wire.bf16 import Bf16
from jaxcoll._wire.format import WireFormat
from jaxcoll._wire.int4 import Int4
from jaxcoll._wire.int8 import Int8

_FORMATS: dict[str, type[Any]] = {kind.name: kind for kind in (Bf16, Int8, Int4)}

AUTOMATIC = Bf16()
"""The format of large sums over Gloo where the choice is open: it halves their bytes, and leaves
what bfloat16 holds as it is. So travel sums in bfloat16, which XLA would widen there."""


def checked(value: Any) -> WireFormat | Literal["auto"] | None:
    """Return the option `compression` as a format, "auto", or None for exact sums."""
    if value is None or (isinstance(value, WireFormat) and value.name):
        return value
    name = value.lower() if isinstance(value, str) else ""
    if name in _FORMATS:
        return _FORMATS[name]()
    if name == "auto":
        return "auto"
    raise ValueError(
        f"`compression` must be None, 'auto', one of {', '.join(map(repr, _FORMATS))}, or a value "
        f"such as jc.compression.Int8(block=128); got {value!r}."
    )
