"""Values that the reader makes: collectives, matrix products, and the loops around them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

Groups = tuple[tuple[int, ...], ...]

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_BITS = re.compile(r"(?:bf|[sufc])(\d+)(?:e\d+m\d+\w*)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An array that one device hands to a collective."""

    dtype: str  # element type, spelled as in HLO: f32, bf16, f8e4m3fn, s4, pred, c64
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements on one device."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on one device; types narrower than a byte are packed."""
        return bytes_of(self.dtype, self.size)


def bytes_of(dtype: str, size: int) -> int:
    """Return the bytes of `size` elements of an HLO type, rounded up to whole bytes."""
    if dtype == "pred":
        return size
    bits = _BITS.fullmatch(dtype)
    if bits is None:
        raise ValueError(
            f"expected an element type of HLO (f32, bf16, s8, pred, ...), got {dtype!r}: it is "
            "newer than this reader, or the text is damaged."
        )
    return -(-size * int(bits[1]) // 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Meanwhile:
    """Work that is scheduled between the start and the end of an asynchronous collective."""

    instructions: int  # those that do something; constants, tuples and the like are left out
    matmuls: int  # matrix products and convolutions among them, a loop's each time
    flops: int  # floating-point operations of these, two for each multiplication and addition


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, as its text has it. An asynchronous pair is one.

    Attributes:
      kind: one of `KINDS`.
      name: the instruction's name.
      operands: every array that it sends, with the type and shape they have on one device.
      group_size: devices that exchange with one another (the largest group); for a
        collective-permute, the devices that take part.
      groups: the devices' numbers, group by group; for a collective-permute its pairs of
        source and target.
      computation: the computation, function or region that it stands in.
      trips: how often one run of the program carries it out; None when a loop around it does
        not say how often it turns.
      is_async: other work may run between its start and its end.
      op_name: the path of Python scopes that the text keeps, "" if it keeps none. Of several
        that were combined it is "(one:another)" behind what they share.
      branches: the conditionals around it, outer first, and which branch of each it is in.
      loops: the loops around it, outer first.
      source: file and line of the user's Python that asked for it, "" if the text does not say.
      library: the line of an installed package that this called, if one asked.
      is_near: its own text names no line, and `source` is that of the nearest instruction which
        takes its result, or else makes its operands.
      at: its place in the schedule: instructions before it, each loop's body once.
      until: the place where it ends.
      meanwhile: what is scheduled while it is under way; None if it is not asynchronous.
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
        """Times that one run carries it out; a loop that does not say how often it turns, once."""
        return 1 if self.trips is None else self.trips

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The element types that it sends, each once."""
        return tuple(dict.fromkeys(operand.dtype for operand in self.operands))

    @property
    def nbytes(self) -> int:
        """Bytes of all operands on one device."""
        return sum(operand.nbytes for operand in self.operands)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave one device each time; see `wire_bytes`."""
        if self.kind == "all-to-all" and len(self.operands) == self.group_size > 1:
            # Cut up already: each operand is a whole share, and one of them stays.
            return self.nbytes // self.group_size * (self.group_size - 1)
        return sum(_leaving(self.kind, operand, self.group_size) for operand in self.operands)


def _leaving(kind: str, operand: Operand, n: int) -> int:
    """Return the bytes of one operand that leave the device of a group of `n` that sends most."""
    if n <= 1:
        return 0
    match kind:
        case "all-reduce":
            return 2 * bytes_of(operand.dtype, operand.size - operand.size // n)
        case "reduce-scatter" | "all-to-all":
            return (n - 1) * bytes_of(operand.dtype, -(-operand.size // n))
        case "all-gather":
            return (n - 1) * operand.nbytes
        case _:
            return operand.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """An instruction that multiplies matrices, by itself or in what it fuses."""

    name: str  # the instruction's name
    flops: int  # floating-point operations each time
    # How often one run carries it out; None when a loop does not say how often it turns
    trips: int | None = 1
    at: int = 0  # its place in the schedule, as in `Collective`
    # The element type of what it multiplies (of several, of the largest); "" if the text does not
    # say
    dtype: str = ""

    @property
    def turns(self) -> int:
        """Times that one run carries it out; a loop that does not say how often it turns, once."""
        return 1 if self.trips is None else self.trips


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop that collectives or matrix products stand in."""

    name: str  # the instruction's name
    # How often it turns in one run of the program; None when the text does not say
    trips: int | None
    at: int  # its place in the schedule
    until: int  # the place of its end


def wire_bytes(collectives: Iterable[Collective]) -> int:
    """Return the bytes that leave one device when the program runs once.

    With n devices in a group and S bytes in an operand, an all-reduce sends 2(n-1)/n·S,
    a reduce-scatter and an all-to-all (n-1)/n·S, an all-gather (n-1)·S, a collective-permute
    and a collective-broadcast S, all of them what a byte-optimal implementation sends; a
    ragged all-to-all at most S, its sizes being known only when it runs. A group of one sends
    nothing. Shares are of whole elements, operand by operand: those of an all-reduce may differ
    by one, and a device sends all but one of them, twice. Where devices differ, the one that
    sends most counts; of the branches of a conditional, the one that sends most. A loop that does
    not say how often it turns counts one turn. What a kernel (a custom call) sends by itself is
    not seen.
    """
    return _dearest([(c.branches, c.turns * c.wire_bytes) for c in collectives])


def runs(collectives: Iterable[Collective]) -> int:
    """Count the collectives of one run: of a conditional those of its longest branch."""
    return _dearest([(c.branches, c.turns) for c in collectives])


def _dearest(sent: list[tuple[tuple[tuple[str, int], ...], int]]) -> int:
    """Add up everything sent, with the dearest branch of each conditional."""
    total = sum(nbytes for branches, nbytes in sent if not branches)
    conditionals: dict[str, dict[int, list]] = {}
    for branches, nbytes in sent:
        if branches:
            (conditional, branch), *inner = branches
            within = conditionals.setdefault(conditional, {}).setdefault(branch, [])
            within.append((tuple(inner), nbytes))
    return total + sum(max(map(_dearest, c.values())) for c in conditionals.values())
