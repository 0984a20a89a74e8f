"""Which line of Python an instruction came from, as far as the texts keep it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping

_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE = re.compile(r'\bsource_file="([^"]*)"(?: source_line=(\d+))?')
_ENTRY = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})\s*')  # 3 "step", or 3 {file_name_id=1 line=22}
_FIELD = re.compile(r"(\w+)=(\d+)")
_OURS = re.compile(r"[/\\]jaxcoll[/\\]_\w+[/\\.]|[/\\]site-packages[/\\]jax[/\\]")
_WRAPS = re.compile(
    r"[/\\]jaxcoll[/\\](?:_inspect|_step[/\\]data_parallel|_distribute[/\\]strategy[/\\]replica_program)\b"
)

_LOCATION = re.compile(r"(#loc\d*) = loc\((.*)\)\s*")  # #loc7 = loc(...)
_PLACE = re.compile(r'"([^"]*)":(\d+):\d+')  # "train.py":22:8
_NAMED = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\((.*)\))?')  # "jit(step)/psum"(#loc6)
_CALLSITE = re.compile(r"callsite\((.*) at (.*)\)")  # callsite(#loc1 at #loc2)
_REFERENCE = re.compile(r"loc\((#loc\d*)\)\s*$")  # loc(#loc7)


def users(frames: Iterable[tuple[str, str]]) -> str:
    """The innermost frame that is neither jaxcoll's nor JAX's, as file:line.

    The caller of a wrapped step is not part of it, so frames beyond the wrapper do not count.

    Examples:
      >>> users([("/x/jaxcoll/_spmd/reduce.py", "115"), ("/home/me/train.py", "22")])
      '/home/me/train.py:22'
    """
    for file, line in frames:
        if _WRAPS.search(file):
            return ""
        if not _OURS.search(file):
            return f"{file}:{line}"
    return ""


class StackFrames:
    """The tables before an HLO module's computations, in which instructions name a row."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._tables: dict[str, dict[str, dict[str, str]]] = {}
        table: dict[str, dict[str, str]] = {}
        for line in lines:
            if found := _ENTRY.fullmatch(line):
                number, text, fields = found.groups()
                table[number] = {"": text} if fields is None else dict(_FIELD.findall(fields))
            elif line.strip():
                table = self._tables.setdefault(line.strip(), {})
        self._user = functools.cache(lambda number: users(self._frames(number)))

    def source(self, attributes: str) -> str:
        """File and line of the Python behind an instruction; "" if its text does not say."""
        if found := _FRAME.search(attributes):
            return self._user(found[1])
        found = _FILE.search(attributes)
        return users([(found[1], found[2] or "0")]) if found else ""

    def _frames(self, number: str) -> Iterator[tuple[str, str]]:
        """The frames from the innermost outwards; a parent is one less than what is written."""
        for _ in range(1000):
            frame = self._row("StackFrames", number)
            place = self._row("FileLocations", frame.get("file_location_id", ""))
            name = self._row("FileNames", place.get("file_name_id", "")).get("")
            if name is None:
                return
            yield name, place.get("line", "0")
            number = str(int(frame.get("parent_frame_id", "0")) - 1)

    def _row(self, table: str, number: str) -> Mapping[str, str]:
        return self._tables.get(table, {}).get(number, {})


class Locations:
    """The `#loc` lines of a StableHLO text that was printed with `debug_info=True`."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._text = {
            found[1]: found[2]
            for line in lines
            if line.startswith("#loc") and (found := _LOCATION.fullmatch(line))
        }

    def of(self, line: str) -> tuple[str, str]:
        """The path of Python scopes, and file:line, of the operation that ends on `line`."""
        found = _REFERENCE.search(line)
        if not found:
            return "", ""
        named = _NAMED.fullmatch(self._text.get(found[1], ""))
        return named[1] if named else "", users(self._frames(found[1]))

    def _frames(self, text: str) -> Iterator[tuple[str, str]]:
        for _ in range(100):
            if not text.startswith("#loc"):
                break
            text = self._text.get(text, "")
        if found := _PLACE.match(text):
            yield found[1], found[2]
        elif found := _CALLSITE.fullmatch(text):
            yield from self._frames(found[1])
            yield from self._frames(found[2])
        elif (found := _NAMED.fullmatch(text)) and found[2]:
            yield from self._frames(found[2])
