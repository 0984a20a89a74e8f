"""The parsed values: collectives, matrix products, and the loops around them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

Groups = tuple[tuple[int, ...], ...]

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_BITS = re.compile(r"(?:bf|[sufc])(\d+)(?:e\d+m\d+\w*)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An array that one device passes to a collective."""

    dtype: str  # HLO's name of the element type: f32, bf16, f8e4m3fn, s4, pred, c64
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements on one device."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on one device; types narrower than a byte are bit-packed."""
        return count_bytes(self.dtype, self.size)


def count_bytes(dtype: str, size: int) -> int:
    """Count the bytes of `size` elements of an HLO type, rounded up to whole bytes."""
    if dtype == "pred":
        return size
    bits = _BITS.fullmatch(dtype)
    if bits is None:
        raise ValueError(
            f"expected an element type of HLO (f32, bf16, s8, pred, ...), got {dtype!r}: it is "
            "newer than this version of jaxcoll, or the text is damaged."
        )
    return -(-size * int(bits[1]) // 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Meanwhile:
    """Work that is scheduled between the start and the end of an asynchronous collective."""

    instructions: int  # without constants, tuples and the like, which take no time
    matmuls: int  # matrix products and convolutions, counted for each iteration of a loop
    flops: int  # their floating-point operations: a multiplication and an addition are two


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program. An asynchronous start and done are one collective.

    Attributes:
      kind: one of `KINDS`.
      name: the instruction's name.
      operands: the arrays that it sends, with their dtype and shape on one device.
      group_size: the number of devices in the largest group; for a collective-permute, the
        number of devices that take part.
      groups: the device numbers of each group; for a collective-permute, its pairs of source and
        target.
      computation: the computation, function or region that contains it.
      trips: how often one run of the program executes it; None if it is in a loop without a known
        trip count.
      is_async: other work may run between its start and its end.
      op_name: the path of Python scopes in the text, or "". For a combined collective, it is their
        common path and "(one:another)".
      branches: the conditionals around it, outermost first, each with the number of the branch.
      loops: the loops around it, outermost first.
      source: the file and line of the user's Python that requested it; "" if unknown.
      library: the line of an installed package that `source` called, if it did.
      is_near: `source` is not in its text; it is that of the nearest instruction that uses its
        result, or else makes its operands.
      at: its position in the schedule: the number of instructions before it, each loop's body once.
      until: the position where it ends.
      meanwhile: the work scheduled between its start and end; None if it is synchronous.
    """

    kind: str
    name: str
    operands: tuple[Operand, ...]
    group_size: int
    groups: Groups
    computation: str
    trips: int | None = 1
    is_async: bool = False
    op_name: str = ""
    branches: tuple[tuple[str, int], ...] = ()
    loops: tuple[str, ...] = ()
    source: str = ""
    library: str = ""
    is_near: bool = False
    at: int = 0
    until: int = 0
    meanwhile: Meanwhile | None = None

    @property
    def turns(self) -> int:
        """Number of times one run executes it; a loop without a known trip count runs once."""
        return 1 if self.trips is None else self.trips

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The distinct element types that it sends."""
        return tuple(dict.fromkeys(operand.dtype for operand in self.operands))

    @property
    def nbytes(self) -> int:
        """Bytes of all operands on one device."""
        return sum(operand.nbytes for operand in self.operands)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave one device in each execution; see `wire_bytes`."""
        if self.kind == "all-to-all" and len(self.operands) == self.group_size > 1:
            # Each operand is the share of one device, and one of them stays here.
            return self.nbytes // self.group_size * (self.group_size - 1)
        return sum(_count_leaving(self.kind, operand, self.group_size) for operand in self.operands)


def _count_leaving(kind: str, operand: Operand, n: int) -> int:
    """Count the bytes of one operand that leave a device in a group of `n`, at most."""
    if n <= 1:
        return 0
    match kind:
        case "all-reduce":
            # All parts but its own to their owners; then the sum of its own, as often.
            return 2 * count_bytes(operand.dtype, operand.size - operand.size // n)
        case "reduce-scatter" | "all-to-all":
            return (n - 1) * count_bytes(operand.dtype, -(-operand.size // n))
        case "all-gather":
            return (n - 1) * operand.nbytes
        case _:
            return operand.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """An instruction that multiplies matrices, or a fusion of such instructions."""

    name: str  # the instruction's name
    flops: int  # floating-point operations of each execution
    # How often one run executes it; None in a loop without a known trip count
    trips: int | None = 1
    at: int = 0  # its position in the schedule, as in `Collective`
    # The element type of its factors (in a fusion, of the largest product); "" if unknown
    dtype: str = ""

    @property
    def turns(self) -> int:
        """Number of times one run executes it; a loop without a known trip count runs once."""
        return 1 if self.trips is None else self.trips


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop that contains collectives or matrix products."""

    name: str  # the instruction's name
    # The number of its iterations in one run of the program; None if unknown
    trips: int | None
    at: int  # its position in the schedule
    until: int  # the position of its end


def wire_bytes(collectives: Iterable[Collective]) -> int:
    """Count the bytes that leave one device when the program runs once.

    The figures are those of a byte-optimal implementation. With n devices in a group and S bytes in
    an operand, an all-reduce sends 2(n-1)/n·S, a reduce-scatter and an all-to-all (n-1)/n·S, an
    all-gather (n-1)·S, and a collective-permute and a collective-broadcast S. A ragged all-to-all
    sends at most S: its sizes are known only when it runs. A group of one sends nothing.

    Each operand is cut into n shares of whole elements. The shares of an all-reduce may differ by
    one element, and a device sends all but one of them, twice. If devices or the branches of a
    conditional differ, the one that sends the most counts. A loop without a known trip count
    counts one iteration. Traffic inside a kernel (a custom call) is not counted.
    """
    return _add_largest([(c.branches, c.turns * c.wire_bytes) for c in collectives])


def runs(collectives: Iterable[Collective]) -> int:
    """Count the collectives of one run, with the branch of each conditional that has the most."""
    return _add_largest([(c.branches, c.turns) for c in collectives])


def _add_largest(amounts: list[tuple[tuple[tuple[str, int], ...], int]]) -> int:
    """Add up (branches, amount) pairs, with the largest branch of each conditional."""
    total = sum(amount for branches, amount in amounts if not branches)
    conditionals: dict[str, dict[int, list]] = {}
    for branches, amount in amounts:
        if branches:
            (conditional, branch), *inner = branches
            within = conditionals.setdefault(conditional, {}).setdefault(branch, [])
            within.append((tuple(inner), amount))
    return total + sum(max(map(_add_largest, c.values())) for c in conditionals.values())
