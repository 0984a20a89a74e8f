"""The form of profiles: the planes of an XSpace, and the events of a line as columns.

The field numbers are those of OpenXLA's xplane.proto. `jax.profiler.ProfileData` reads them, too,
but hides the metadata of events, and makes objects that take 18 times the memory of the file.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcoll._compat.running import read_field, read_fields

ABSENT = np.iinfo(np.int64).min
"""The value of a stat that an event does not have."""
_CHUNK = 1 << 16  # events that are read at a time: their columns stay in the processor's cache
_STOPS, _BITS, _ONE = np.uint64(0x8080808080808080), np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(1)
_JOINS = [  # the low and the high groups of bits, and how far the high ones are to move
    (np.uint64(0x007F007F007F007F), np.uint64(0x7F007F007F007F00), np.uint64(1)),
    (np.uint64(0x00003FFF00003FFF), np.uint64(0x3FFF00003FFF0000), np.uint64(2)),
    (np.uint64(0x000000000FFFFFFF), np.uint64(0x0FFFFFFF00000000), np.uint64(4)),
]


class Events(NamedTuple):
    """Some events of a line, as columns."""

    name: np.ndarray  # keys of `Plane.names`
    start: np.ndarray  # nanoseconds since the session began
    end: np.ndarray
    stats: dict[str, np.ndarray]  # integers, or keys of `Plane.strings`, or `ABSENT`


class Plane:
    """A plane: the events that one source recorded. It is read only as far as it is used."""

    def __init__(self, message: memoryview) -> None:
        self._fields: dict[int, list[Any]] = defaultdict(list)
        for number, value in read_fields(message):
            self._fields[number].append(value)
        self.name = "".join(map(text, self._fields[2]))

    def metadata(self, field: int = 4) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        """Yield the key and the fields of each kind of event; with field 5, of stat."""
        for entry in map(dict, map(read_fields, self._fields[field])):
            yield entry.get(1, 0), list(read_fields(entry.get(2, b"")))

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """The names of events; a TPU's instructions have their text as their names."""
        return {key: text(dict(fields).get(2, b"")) for key, fields in self.metadata()}

    @functools.cached_property
    def strings(self) -> dict[int, str]:
        """The names of stats, and the strings that stats refer to."""
        return {key: text(dict(fields).get(2, b"")) for key, fields in self.metadata(5)}

    def stat(self, name: str) -> Any:
        """Return a stat of the plane itself; None if it has none of that name."""
        stats = [[*read_fields(stat), (0, None)] for stat in self._fields[6]]
        return next((s[1][1] for s in stats if self.strings.get(s[0][1]) == name), None)

    def lines(self) -> Iterator[tuple[str, memoryview]]:
        """Yield the name and the message of each line."""
        for line in self._fields[3]:
            yield text(_head(line).get(2, b"")), line

    def events(self, line: memoryview, stats: Sequence[str] = ()) -> Iterator[Events]:
        """Yield the events of a line, with the values of some stats. Cost: 0.5 to 2 µs each."""
        data, origin = b"".join([line, bytes(16)]), _head(line).get(3, 0)
        words = np.ndarray(len(line) + 9, "<u8", data, 0, (1,))  # one begins at each byte
        keys = {key: name for key, name in self.strings.items() if name in stats}
        for begins, ends in _messages(data, len(line), 4):
            columns = np.zeros((4, len(begins)), np.int64)
            values = {name: np.full(len(begins), ABSENT) for name in stats}
            for rows, number, value, begin in _columns(words, begins, ends):
                if not keys and (number > 3).all():
                    break  # only stats are left
                for field in (1, 2, 3):
                    columns[field, rows[number == field]] = value[number == field]
                if keys and (own := number == 4).any():
                    # A stat begins with its key; most are not wanted, and are read no further.
                    key, at = _varints(words, begin[own] + 1)
                    wanted = np.isin(key, list(keys))
                    key, of_event = key[wanted], rows[own][wanted]
                    until = (begin + value)[own][wanted]
                    for found, number, one, _ in _columns(words, at[wanted], until):
                        for k in np.unique(key):
                            fits = (key[found] == k) & np.isin(number, (3, 4, 7))
                            values[keys[int(k)]][of_event[found[fits]]] = one[fits]
            # Times are picoseconds. Both ends are rounded down, so that their order stays.
            start, end = columns[2] // 1000, (columns[2] + columns[3]) // 1000
            yield Events(columns[1], origin + start, origin + end, values)


def read_planes(profile: memoryview) -> list[Plane]:
    """Split a serialized XSpace into planes.

    Raises:
      ValueError: it is not a profile, or only a part of one; or IndexError, KeyError, TypeError.
    """
    fields = list(read_fields(profile))
    if {number for number, _ in fields} - {1, 2, 3, 4} or (profile and not fields[0][0] == 1):
        raise ValueError("it has fields that no profile has")
    return [Plane(value) for number, value in fields if number == 1]


def text(value: Any) -> str:
    return str(
        value, "utf8"
    )  # a number, in a damaged file, is a TypeError; `bytes` would make as many


def _head(line: memoryview) -> dict[int, Any]:
    """Read the fields of a line that stand before its events."""
    return dict(itertools.takewhile(lambda field: field[0] < 4, read_fields(line)))


def _messages(data: bytes, size: int, field: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield where the messages of a repeated field begin and end, `_CHUNK` at a time."""
    at, tag = 0, field << 3 | 2
    begins: list[int] = []
    ends: list[int] = []
    while at < size:
        if data[at] == tag and data[at + 1] < 128:  # nearly all
            begins.append(at + 2)
            at += 2 + data[at + 1]
            ends.append(at)
        else:
            number, value, at = read_field(data, at)
            if number == field:
                begins.append(at - len(value))
                ends.append(at)
        if len(begins) == _CHUNK:
            yield np.array(begins), np.array(ends)
            begins, ends = [], []
    if at != size:
        raise ValueError("a line ends inside an event")
    if begins:
        yield np.array(begins), np.array(ends)


def _columns(
    words: np.ndarray, at: np.ndarray, end: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the first field of many messages, the second field of each, and so on.

    A step has the rows of the messages that have such a field, the fields' numbers, their values
    (of a string or message: its length), and where their contents begin.

    Raises:
      ValueError: a field is of no known kind, or longer than its message.
    """
    rows = np.arange(len(at))
    while (going := at < end).any():
        rows, at, end = rows[going], at[going], end[going]
        tag, at = _varints(words, at)
        value, begin = _varints(words, at)
        # Protocol buffers: 0 is a varint, 1 has eight bytes, 2 a length and contents, 5 four bytes.
        kind = tag & 7
        is_message = kind == 2
        fixed = (kind == 1) * 8 + (kind == 5) * 4
        if (fixed + (kind == 0) + is_message == 0).any() or (value[is_message] >= len(words)).any():
            raise ValueError("an event is damaged")
        at = np.where(fixed > 0, at + fixed, begin + np.where(is_message, value, 0))
        if (at > end).any():
            raise ValueError("a field is longer than its event")
        yield rows, tag >> 3, value, begin


def _varints(words: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read the numbers of variable length that begin at some places; also return where they end."""
    word = words[at]
    stops = ~word & _STOPS  # the highest bit of a number's last byte is 0
    last = stops & (~stops + _ONE)
    own = last | (last - _ONE)
    value = word & own & _BITS
    for low, high, shift in _JOINS:
        value = (value & low) | (value & high) >> shift
    size = np.bitwise_count(own) >> 3
    if not stops.all():  # nine or ten bytes, as of negative numbers
        long = stops == 0
        rest = words[at[long] + 8]
        more = rest >> np.uint64(7) & _ONE
        value[long] |= (rest & np.uint64(127)) << np.uint64(56)
        value[long] |= (more & rest >> np.uint64(8)) << np.uint64(63)
        size[long] = 9 + more
    return value.view(np.int64), at + size
