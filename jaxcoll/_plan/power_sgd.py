"""PowerSGD as a value: which leaves travel as two factors, and of which shapes these are."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np

from jaxcoll._plan.checks import is_integer, shown
from jaxcoll._show.units import counted


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
