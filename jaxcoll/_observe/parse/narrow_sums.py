"""Finds sums that a program takes in a narrower type than it goes on with, unasked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from jaxcoll._observe.parse.source import Locations
from jaxcoll._plan.scope_names import pack_of
from jaxcoll._show.units import counted, some

_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_FUNCTION = re.compile(r"func\.func ")
_REDUCES = re.compile(r'= "stablehlo\.(?:all_reduce|reduce_scatter)"\(([^)]*)\)')
_RESHAPES = re.compile(
    r"= stablehlo\.(?:reshape|transpose|slice|concatenate|divide|multiply|reduce|"
    r"broadcast_in_dim)[ (]([^:]*):"
)
_CONVERTS = re.compile(
    r"= stablehlo\.convert (%[\w$.\-]+)(?:#\d+)? : "
    r"\(tensor<(?:\d+x)*(\w+)>\) -> tensor<(?:\d+x)*(\w+)>"
)
_DEFINES = re.compile(r"\s*(%[\w$.\-]+)(?::\d+)? = ")
_VALUE = re.compile(r"%[\w$.\-]+")


def narrow_sums(text: str) -> list[str]:
    """What is summed over devices in 16 bits although wider numbers are wanted, as a note.

    Autodiff makes such sums of a float32 parameter that is used in bfloat16 wherever it sums by
    itself (under a checked `shard_map`): it sums the gradient of the bfloat16 copy, and casts the
    sum to float32 after that. A cast to the narrow type right before says that it was asked for.
    """
    lines = text.splitlines()
    locations = Locations(lines)
    found: dict[tuple[str, str], list[str]] = {}
    for narrow, wide, line in _widened(lines):
        name, source = locations.of(line)
        # What jaxcoll scatters travels as its plan shows, in the type it was gathered in.
        if not pack_of(name).startswith("reduce_scatter"):
            found.setdefault((narrow, wide), []).append(source)
    return [
        _note(narrow, wide, len(where), dict.fromkeys(filter(None, where)))
        for (narrow, wide), where in found.items()
    ]


def _note(narrow: str, wide: str, count: int, sources: Iterable[str]) -> str:
    lines = some([PurePath(source.replace("\\", "/")).name for source in sources], 3)
    where = f" ({', '.join(lines)})" if lines else ""
    return (
        f"{counted(count, 'sum')} over devices {'is' if count == 1 else 'are'} requested in "
        f"{narrow} and widened to {wide} right after{where}: autodiff sums the gradient of a "
        f"{narrow} copy of a {wide} parameter before it casts it back, and rounds each sum. "
        "`jc.value_and_grad` and `jc.sync_in_backward` sum in the parameter's own type."
    )


def _widened(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each such sum: its type, the wider one, and the line that ends it."""
    narrowed: set[str] = set()
    sums: dict[str, list[str]] = {}
    ends: list[str] = []
    for line in lines:
        if _FUNCTION.search(line):  # in each of which a value has one name
            narrowed, sums, ends = set(), {}, []
        defined = _DEFINES.match(line)
        name = defined[1] if defined else ""
        sums.pop(name, None)
        narrowed.discard(name)  # a region may give a name again that one before it had
        if sum_ := _REDUCES.search(line):
            asked = set(_VALUE.findall(sum_[1])) <= narrowed
            own = [] if asked else [line]
            sums[name] = own
            ends = own
        elif ends and line.lstrip().startswith("})"):
            ends[0] = line
            ends = []
        elif found := _CONVERTS.search(line):
            value, before, after = found.groups()
            fewer = _BITS.get(after, 0) < _BITS.get(before, 0)
            if fewer and after in _BITS:
                narrowed.add(name)
            more = _BITS.get(after, 0) > _BITS.get(before, 64)
            if more and sums.get(value):
                yield before, after, sums[value].pop()
        elif found := _RESHAPES.search(line):
            values = _VALUE.findall(found[1])
            # A reshape or a division by the count stands between the cast and the sum.
            if values and set(values) <= narrowed:
                narrowed.add(name)
            # The same on the way back: what becomes of a sum is that sum until it is cast.
            carried = next((sums[value] for value in values if value in sums), None)
            if carried is not None:
                sums[name] = carried
