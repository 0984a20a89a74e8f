"""The interface of a wire format, and the registry of formats by name."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar, Literal

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """A code of a few bits for each element, and a 16-bit scale for each block of elements.

    A subclass defines its sizes, `encode` and `decode`. Defining it registers its name, which
    options may then use; no other code needs to change.
    """

    block: int  # elements that share a scale; a block never spans two leaves

    name: ClassVar[str] = ""
    bits: ClassVar[int] = 16
    scale_bytes: ClassVar[int] = 2
    min_size: ClassVar[int] = 0
    """Leaves with fewer elements than this, or than a block, travel exactly."""
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    """Types that are coded; others travel exactly. float64 may exceed the range of a scale."""
    # For 16 MiB on one core of an EPYC, 2026-11-22, without the addition, which is priced apart.
    passes: ClassVar[float] = 1.4
    """Time to encode and decode an array and then its shard, in copies of the array."""

    def __init_subclass__(cls) -> None:
        FORMATS[cls.name] = cls

    def __post_init__(self) -> None:
        if not isinstance(self.block, numbers.Integral) or self.block < 2 or self.block % 2:
            raise ValueError(
                f"`block` of jc.{type(self).__name__} must be a multiple of 2, in elements (the "
                f"default is {type(self).block}); got {self.block!r}."
            )

    def __str__(self) -> str:
        return self.name if self.block == type(self).block else f"{self.name}/{self.block}"

    def codes(self, shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Return whether a leaf is coded: it is not a scalar, and its type and size allow it."""
        size = int(np.prod(shape))
        return dtype.name in self.dtypes and bool(shape) and size >= max(self.block, self.min_size)

    def padded(self, size: int) -> int:
        """Return `size`, in elements, rounded up to whole blocks."""
        return -(-size // self.block) * self.block

    def nbytes(self, size: int) -> int:
        """Return the bytes of `size` coded elements and their scales; `size` fills whole blocks."""
        return size * self.bits // 8 + size // self.block * self.scale_bytes

    def encode(self, blocks: jax.Array, feedback: bool) -> jax.Array:
        """Encode float32 blocks of shape (..., m, block) as codes of shape (..., m, w).

        `feedback` says that the caller adds the rounding error of a block to its next values.
        """
        raise NotImplementedError

    def decode(self, codes: jax.Array, feedback: bool) -> jax.Array:
        """Decode float32 blocks; if an element was not finite, none in its block is afterwards.

        `feedback` must be what `encode` was called with.
        """
        raise NotImplementedError


FORMATS: dict[str, type[Any]] = {}
"""The formats by their names."""

AUTOMATIC = "bf16"
"""The format that "auto" uses for large sums over Gloo. It halves the bytes of float32, and sends
bfloat16 unchanged, which XLA would widen to float32 there."""


def check_format(value: Any) -> WireFormat | Literal["auto"] | None:
    """Check the option `compression`; return a format, "auto", or None for exact sums."""
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


def find_format(compression: Any) -> WireFormat | None:
    """Return the format that the user chose; None for "auto" and for exact sums."""
    return None if compression == "auto" else compression


def check_any_coded(compression: Any, tree: Any) -> None:
    """Raise an error if the user chose a format that can code no leaf of `tree`, by their types."""
    format = find_format(compression)
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)]
    names = [*dict.fromkeys(map(str, dtypes))]
    if format and names and None not in dtypes and not {*names} & {*format.dtypes}:
        coded = ", ".join(format.dtypes)
        raise ValueError(
            f"`compression` {str(format)!r} codes {coded}, and this call reduces only "
            f"{', '.join(names)}, which travel exactly: leave `compression` out here."
        )
