"""What may travel in place of a sum's elements: codes of other widths, or factors of matrices."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import numpy as np

from jaxcoll._plan.checks import is_integer, shown
from jaxcoll._show.units import counted


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """Codes of a few bits, and for each block of elements a scale of 16 bits."""

    block: int  # elements that share a scale. A block ends where its leaf does

    name: ClassVar[str] = ""
    bits: ClassVar[int] = 16
    scale_bytes: ClassVar[int] = 2
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    """Types that are coded; others travel exactly. float64 may exceed what a scale holds."""
    # Of 16 MiB on one core of an EPYC, 2026-11-22, less the adding, which is priced by itself.
    passes: ClassVar[float] = 1.4
    """Copies of an array that coding it both ways, and its shard again, takes as long as."""

    def __post_init__(self) -> None:
        if not is_integer(self.block) or self.block < 2 or self.block % 2:
            raise ValueError(
                f"`block` of jc.{type(self).__name__} must be a multiple of 2, in elements (the "
                f"usual one is {type(self).block}); got {shown(self.block)}."
            )

    def __str__(self) -> str:
        return self.name if self.block == type(self).block else f"{self.name}/{self.block}"

    @property
    def least(self) -> int:
        """Elements of the smallest leaf that is coded; a smaller one travels exactly."""
        return self.block

    def padded(self, size: int) -> int:
        """Elements of as many blocks as `size` elements need."""
        return -(-size // self.block) * self.block

    def nbytes(self, size: int) -> int:
        """Bytes of so many coded elements, which are a multiple of `block`, with their scales."""
        return size * self.bits // 8 + size // self.block * self.scale_bytes


@dataclasses.dataclass(frozen=True)
class Bf16(WireFormat):
    """bfloat16: the upper half of a float32, rounded to nearest; an element takes 2 bytes.

    Law: what bfloat16 can hold arrives exactly. Error of a sum, rounded twice: 0.0024 of the norm.

    Examples:
      >>> Bf16().nbytes(1000)
      2000
    """

    block: int = dataclasses.field(default=1, init=False, repr=False)

    name: ClassVar[str] = "bf16"
    scale_bytes: ClassVar[int] = 0
    # float16 has more bits of mantissa, and is no longer.
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    passes: ClassVar[float] = 0.6

    def __post_init__(self) -> None:
        pass

    @property
    def least(self) -> int:
        """Elements of the smallest leaf that is coded; a smaller one travels exactly."""
        return 64


@dataclasses.dataclass(frozen=True)
class Int8(WireFormat):
    """Multiples -127 to 127 of a scale for each block: an element takes 1 byte and 2/block.

    Law: zeros, and blocks of multiples of 2^k of which the largest is 127·2^k, arrive exactly.
    Error of a sum of Gaussian numbers, rounded twice whatever n is: 0.0099 of the norm.

    Args:
      block: elements that share a scale; a multiple of 2.

    Examples:
      >>> Int8().nbytes(1024)
      1032
    """

    block: int = 256

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@dataclasses.dataclass(frozen=True)
class Int4(WireFormat):
    """One of 16 fitted levels of a scale for each block: an element takes 4 bits and 2/block byte.

    The levels are fitted to Gaussian numbers divided by the largest of their block. Under error
    feedback, and where a block's largest is 7·2^k, they are even: -7 to 7 times the scale.

    Law: zeros, and blocks of multiples of 2^k of which the largest is 7·2^k, arrive exactly. Error
    of a sum of Gaussian numbers, rounded twice whatever n is: 0.125 of the norm.

    Args:
      block: elements that share a scale; a multiple of 2.

    Examples:
      >>> Int4().nbytes(1024)
      544
    """

    block: int = 64

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    passes: ClassVar[float] = 2.2


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Matrices as a product of two narrow factors, which alone are summed; with feedback only.

    A leaf of two or more dimensions is a matrix of its last one against all others, as the kernel
    of a convolution is; stacked layers are one matrix. It travels exactly unless both factors
    together have less than half of its elements. So do vectors and what is not a float of 16 or 32
    bits. The right factors stay from call to call in `jc.residual(params, options=...)`.

    Law: a sum of rank `rank` or less arrives to rounding. With its residual nothing is lost:
    sum over replicas of (residual after - residual before) + the sum of what arrived = the sum of
    the gradients, to rounding in float32.

    Cost: two sums, of which the second waits for the first, of rank · (rows + columns) float32 for
    each matrix and of what travels exactly.

    Args:
      rank: columns of each factor.

    Raises:
      ValueError: `rank` is not a positive integer.

    Examples:
      >>> PowerSGD(rank=2).matrix((3, 3, 16, 32), np.dtype("float32"))
      (144, 32)
      >>> PowerSGD(rank=16).matrix((3, 3, 16, 32), np.dtype("float32"))

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization" (arXiv:1905.13727), algorithm 1. A residual is what a replica's own
    gradient loses, rather than its distance from the mean: it has the same sum, and stays bounded
    where the replicas' gradients differ.
    """

    rank: int = 4

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")

    def __post_init__(self) -> None:
        if not is_integer(self.rank) or self.rank < 1:
            raise ValueError(
                "`rank` of jc.PowerSGD must be a positive integer, the columns of each factor "
                f"(the usual one is 4); got {shown(self.rank)}."
            )

    def __str__(self) -> str:
        return f"powersgd/{self.rank}"

    def matrix(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, int] | None:
        """Rows and columns of a leaf that travels as factors; None for one that does not."""
        if len(shape) < 2 or dtype.name not in self.dtypes:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        fewer = 2 * self.rank * (rows + columns) < rows * columns
        return (rows, columns) if fewer else None

    def reason(self, matrices: int) -> str:
        """What a plan says of them."""
        return (
            f"format: {self} for {counted(matrices, 'matrix', 'matrices')}, as asked: left "
            "factors are summed with all that travels exactly, then right factors"
        )


_FORMATS: dict[str, type[Any]] = {kind.name: kind for kind in (Bf16, Int8, Int4)}


@functools.cache
def of(text: str) -> WireFormat:
    """The format that `str` of it names.

    Examples:
      >>> of("int8/128")
      Int8(block=128)
    """
    name, _, block = text.partition("/")
    return _FORMATS[name](int(block)) if block else _FORMATS[name]()


def checked(value: Any) -> WireFormat | PowerSGD | Literal["auto"] | None:
    """The option `compression` as a format, "auto", or None for exact sums."""
    if value is None or isinstance(value, PowerSGD):
        return value
    if isinstance(value, WireFormat) and value.name:
        return value
    if isinstance(value, str) and value.lower() in _FORMATS:
        return _FORMATS[value.lower()]()
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    raise ValueError(
        f"`compression` must be None, 'auto', one of {', '.join(map(repr, _FORMATS))}, or a value "
        f"such as jc.Int8(block=128) or jc.PowerSGD(rank=4); got {shown(value)}."
    )


def named(compression: Any) -> WireFormat | PowerSGD | None:
    """The format that was asked for; None where none was, or the choice is left to jaxcoll."""
    return None if compression == "auto" else compression


def check_any_coded(compression: Any, dtypes: list[Any]) -> None:
    """Refuse a format that was asked for in a call of which it can code nothing by its type."""
    format = named(compression)
    names = list(dict.fromkeys(str(dtype) for dtype in dtypes))
    if format is not None and names and not set(names) & set(format.dtypes):
        coded = ", ".join(format.dtypes)
        raise ValueError(
            f"`compression` {str(format)!r} codes {coded}, and this call reduces only "
            f"{', '.join(names)}, which travel exactly: leave `compression` out here."
        )


def codes(format: WireFormat | PowerSGD | None, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a leaf is coded: an array of a type that the format codes, which fills a block."""
    if not isinstance(format, WireFormat) or dtype.name not in format.dtypes or not shape:
        return False
    return int(np.prod(shape)) >= format.least
