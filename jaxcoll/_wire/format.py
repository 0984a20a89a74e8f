"""The interface of a wire format, its sizes and its arithmetic on blocks; and formats by name."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar, Literal

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """Codes of a few bits, and for each block of elements a scale of 16 bits.

    A subclass is one file: the fields of its sizes, `encode` and `decode`. Nothing else knows it;
    its name stands for it in options as soon as it is defined.
    """

    block: int  # elements that share a scale. A block ends where its leaf does

    name: ClassVar[str] = ""
    bits: ClassVar[int] = 16
    scale_bytes: ClassVar[int] = 2
    least: ClassVar[int] = 0
    """Elements of the smallest leaf that is coded, if more than a block; others travel exactly."""
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    """Types that are coded; others travel exactly. float64 may exceed what a scale holds."""
    # Of 16 MiB on one core of an EPYC, 2026-11-22, less the adding, which is priced by itself.
    passes: ClassVar[float] = 1.4
    """Copies of an array that coding it both ways, and its shard again, takes as long as."""

    def __init_subclass__(cls) -> None:
        FORMATS[cls.name] = cls

    def __post_init__(self) -> None:
        if not isinstance(self.block, numbers.Integral) or self.block < 2 or self.block % 2:
            raise ValueError(
                f"`block` of jc.{type(self).__name__} must be a multiple of 2, in elements (the "
                f"usual one is {type(self).block}); got {self.block!r}."
            )

    def __str__(self) -> str:
        return self.name if self.block == type(self).block else f"{self.name}/{self.block}"

    def codes(self, shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Return whether a leaf is coded: an array of a type it codes, which fills a block."""
        size = int(np.prod(shape))
        return dtype.name in self.dtypes and bool(shape) and size >= max(self.block, self.least)

    def padded(self, size: int) -> int:
        """Return the elements of as many blocks as `size` elements need."""
        return -(-size // self.block) * self.block

    def nbytes(self, size: int) -> int:
        """Return the bytes of so many coded elements, a multiple of `block`, with their scales."""
        return size * self.bits // 8 + size // self.block * self.scale_bytes

    def encode(self, blocks: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks of float32, of shape (..., m, block), as codes of shape (..., m, w).

        With `feedback`, what a block loses is added to it the next time.
        """
        raise NotImplementedError

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Return blocks of float32; one with anything not finite is not finite anywhere there.

        `feedback` is what it was when they were coded.
        """
        raise NotImplementedError


FORMATS: dict[str, type[Any]] = {}
"""The formats by their names."""

AUTOMATIC = "bf16"
"""The format of large sums over Gloo where the choice is open: it halves their bytes, and leaves
what bfloat16 holds as it is. So travel sums in bfloat16, which XLA would widen there."""


def checked(value: Any) -> WireFormat | Literal["auto"] | None:
    """Return the option `compression` as a format, "auto", or None for exact sums."""
    if value is None or (isinstance(value, WireFormat) and value.name):
        return value
    name = value.lower() if isinstance(value, str) else ""
    if name in FORMATS:
        return FORMATS[name]()
    if name == "auto":
        return "auto"
    raise ValueError(
        f"`compression` must be None, 'auto', one of {', '.join(map(repr, FORMATS))}, or a value "
        f"such as jc.compression.Int8(block=128); got {value!r}."
    )


def named(compression: Any) -> WireFormat | None:
    """Return the format that was asked for; None where none was, or the choice is left open."""
    return None if compression == "auto" else compression


def check_any_coded(compression: Any, tree: Any) -> None:
    """Refuse a format that was asked for in a call of which it can code nothing by its type."""
    format = named(compression)
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)]
    names = [*dict.fromkeys(map(str, dtypes))]
    if format and names and None not in dtypes and not {*names} & {*format.dtypes}:
        coded = ", ".join(format.dtypes)
        raise ValueError(
            f"`compression` {str(format)!r} codes {coded}, and this call reduces only "
            f"{', '.join(names)}, which travel exactly: leave `compression` out here."
        )
