"""Find the lines of Python that produced an instruction of HLO text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE = re.compile(r'\bsource_file="([^"]*)"(?: source_line=(\d+))?')
_FIELD = re.compile(r"(\w+)=(\d+)")
_OURS = re.compile(r"[/\\]jaxcoll[/\\]_\w+[/\\.]|[/\\]site-packages[/\\]jax[/\\]")
_INSTALLED = re.compile(
    r"[/\\][Ll]ib[/\\]python3[^/\\]*[/\\]|[/\\](?:site|dist)-packages[/\\]|^<frozen "
)
_WRAPS = re.compile(
    r"[/\\]jaxcoll[/\\](?:_inspect|_step[/\\]data_parallel|_distribute[/\\]replica_program)\b"
)


class Source(NamedTuple):
    """The lines of Python that produced an instruction, as file:line; "" if there is none."""

    user: str = ""  # the innermost line outside installed packages; without one, the library's
    library: str = ""  # the innermost of a package other than JAX and jaxcoll, if `user` called it


def find_source(frames: Iterable[tuple[str, str]]) -> Source:
    """Find the user's and the library's lines among stack frames, given innermost first.

    The search ends at jaxcoll's wrapper of a step: its callers are not part of the step.

    Examples:
      >>> find_source([("/x/jaxcoll/_plan/plan.py", "115"), ("/home/me/train.py", "22")]).user
      '/home/me/train.py:22'
      >>> flax = ("/usr/lib/python3.12/site-packages/flax/linen/linear.py", "287")
      >>> find_source([flax, ("/home/me/train.py", "22")]).library.rpartition("/")[2]
      'linear.py:287'
    """
    library = ""
    for file, line in frames:
        if _WRAPS.search(file):
            break
        if _INSTALLED.search(file):
            library = library or (f"{file}:{line}" if not _OURS.search(file) else "")
        elif not _OURS.search(file):
            return Source(f"{file}:{line}", library)
    return Source(library)


class StackFrames:
    """The stack frame tables before an HLO module's computations."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._tables: dict[str, dict[str, str]] = {}
        table: dict[str, str] = {}
        for line in lines:
            number, _, entry = line.rstrip().partition(" ")
            if entry:
                table[number] = entry
            else:
                table = self._tables.setdefault(number, {})
        self._source = functools.cache(lambda number: find_source(self._frames(number)))

    def source(self, attributes: str) -> Source:
        if frame := _FRAME.search(attributes):
            return self._source(frame[1])
        file = _FILE.search(attributes)
        return find_source([(file[1], file[2] or "0")]) if file else Source()

    def _frames(self, number: str) -> Iterator[tuple[str, str]]:
        """Yield the frames, innermost first. The text stores each parent's number plus one."""
        for _ in range(1000):
            frame = self._fields("StackFrames", number)
            place = self._fields("FileLocations", frame.get("file_location_id", ""))
            name = self._entry("FileNames", place.get("file_name_id", ""))
            if not name:
                return
            yield name[1:-1], place.get("line", "0")
            number = str(int(frame.get("parent_frame_id", "0")) - 1)

    def _entry(self, table: str, number: str) -> str:
        return self._tables.get(table, {}).get(number, "")

    def _fields(self, table: str, number: str) -> dict[str, str]:
        return dict(_FIELD.findall(self._entry(table, number)))
