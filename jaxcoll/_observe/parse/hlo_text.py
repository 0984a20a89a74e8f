"""The grammar of HLO text: computations, instructions, types, and lines of Python."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxcoll._observe.parse.collective import Operand
from jaxcoll._observe.parse.replica_groups import numbers

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_HEAD = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_DEFINES = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")  # "  ROOT %add.3 = f32[4] …"
_INSTRUCTION = re.compile(_DEFINES.pattern + r"(.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")  # bf16[8,128]
_COMMENT = re.compile(r"/\*.*?\*/")  # /*index=5*/
_PARENTHESIS = re.compile(r"[()]")
_BRACKET = re.compile(r"[(\[{}\]),]")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE = re.compile(r'\bsource_file="([^"]*)"(?: source_line=(\d+))?')
_ENTRY = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})\s*')  # 3 "step", or 3 {file_name_id=1 line=22}
_FIELD = re.compile(r"(\w+)=(\d+)")
_OURS = re.compile(r"[/\\]jaxcoll[/\\]_\w+[/\\.]|[/\\]site-packages[/\\]jax[/\\]")
_INSTALLED = re.compile(
    r"[/\\][Ll]ib[/\\]python3[^/\\]*[/\\]|[/\\](?:site|dist)-packages[/\\]|^<frozen "
)
_WRAPS = re.compile(
    r"[/\\]jaxcoll[/\\](?:_inspect|_step[/\\]data_parallel|_distribute[/\\]replica_program)\b"
)


class Instruction(NamedTuple):
    """A parsed line of a computation: `name = type opcode(operands)attributes`."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of its operands."""
        pieces = _pieces(_COMMENT.sub("", self.operands))
        return tuple(piece.rpartition(" ")[2].lstrip("%") for piece in pieces)

    @property
    def results(self) -> tuple[Operand, ...]:
        """The arrays that it returns."""
        return arrays(self.type)


class Computation:
    """The instructions of a computation by name, each parsed on access."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = {name: line for line in lines if (name := defined_name(line))}

    def __getitem__(self, name: str) -> Instruction:
        return parse_instruction(self.lines[name])

    @property
    def root(self) -> Instruction:
        """The instruction that makes its result."""
        (root,) = (line for line in self.lines.values() if line.lstrip().startswith("ROOT "))
        return parse_instruction(root)

    def operands(self, instruction: Instruction) -> tuple[Operand, ...]:
        """Return the arrays that an instruction takes."""
        operands: list[Operand] = []
        for piece in _pieces(_COMMENT.sub("", instruction.operands)):
            # Some compilers print each operand with its type, others only its name.
            type_text, _, name = piece.rpartition(" ")
            if not type_text:
                if name.lstrip("%") not in self.lines:
                    raise ValueError(
                        f"{instruction.opcode} {instruction.name!r} has the operand {name!r}, "
                        "which its computation does not define: the text looks truncated."
                    )
                type_text = self[name.lstrip("%")].type
            operands += arrays(type_text)
        return tuple(operands)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: the lines of its computations, and the number of devices it is for."""

    name: str  # such as jit_step
    computations: dict[str, list[str]]  # their lines, by name, in the text's order
    entry: str  # the name of the computation that runs
    replicas: int  # of the program
    partitions: int  # of each replica
    # The lines before the computations
    tables: list[str] = dataclasses.field(default_factory=list)


def parse_module(text: str, devices: int = 1) -> Module:
    """Split HLO text into the lines of its computations, in the text's order.

    `devices` is the number of devices of a program that is not compiled yet: its text lacks it.

    Raises:
      ValueError: the text is not HLO, or is truncated.
    """
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.strip()), "")
    if not header.startswith("HloModule"):
        raise ValueError(
            "expected HLO text, which begins with 'HloModule' (`compiled.as_text()`); got "
            f"{header[:60]!r}. If the program is only lowered, pass it instead of its text."
        )
    computations: dict[str, list[str]] = {}
    entry, name = "", ""
    tables: list[str] = []
    for line in lines:
        if line[:1].isspace():
            if name:
                computations[name].append(line)
        elif line.startswith("}"):
            name = ""
        elif line.endswith("{") and (head := _HEAD.match(line)):
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif not entry and not computations:
            tables.append(line)
    if name or not entry:
        where = f"inside the computation {name!r}" if name else "before the ENTRY computation"
        raise ValueError(f"the HLO text looks truncated: it ends {where}.")
    replicas, partitions = (
        int(match[1]) if (match := re.search(rf"\b{count}=(\d+)", header)) else default
        for count, default in (("replica_count", 1), ("num_partitions", devices))
    )
    title = _MODULE.match(header)
    return Module(title[1] if title else "", computations, entry, replicas, partitions, tables)


def parse_instruction(line: str) -> Instruction:
    """Parse a line of a computation."""
    match = _INSTRUCTION.match(line)
    close = _closing(line, match.end() - 1) if match else -1
    if match and close > 0:
        name, type_text, opcode = match.groups()
        operands, attributes = line[match.end() : close], line[close + 1 :]
        return Instruction(name, type_text, opcode, operands, attributes)
    raise ValueError(
        f"expected an instruction, `name = type opcode(operands)`; got {line.strip()[:80]!r}: the "
        "text looks truncated or damaged."
    )


def defined_name(line: str) -> str:
    """Return the name that a line of a computation defines; "" if none."""
    match = _DEFINES.match(line)
    return match[1] if match else ""


def pair_ends(lines: Sequence[str]) -> Iterator[tuple[int, str, str, str]]:
    """Yield (line number, name, opcode, name of the start) for each asynchronous end."""
    first: dict[str, str] = {}
    for at, line in enumerate(lines):
        if "-done(" in line or "-update(" in line:
            instruction = parse_instruction(line)
            if instruction.opcode.endswith(("-done", "-update")):
                start = next(iter(instruction.operand_names), "")
                # An `-update` stands for its start in later lines.
                first[instruction.name] = first.get(start, start)
                yield at, instruction.name, instruction.opcode, first[instruction.name]


def arrays(type_text: str) -> tuple[Operand, ...]:
    """Return the arrays of a type.

    Examples:
      >>> arrays("(bf16[2,3]{1,0:T(8,128)}, token[], pred[<=4])")
      (Operand(dtype='bf16', shape=(2, 3)), Operand(dtype='pred', shape=(4,)))
    """
    return tuple(
        Operand(dtype, numbers(dims.replace("<=", "")))
        for dtype, dims in _ARRAY.findall(type_text)
        if dtype != "token"
    )


def _pieces(text: str) -> Iterator[str]:
    """Yield the parts of a comma-separated list, ignoring commas in brackets."""
    depth = start = 0
    for mark in _BRACKET.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, ",": 0}.get(mark[0], -1)
        if mark[0] == "," and not depth:
            yield text[start : mark.start()].strip()
            start = mark.end()
    if text[start:].strip():
        yield text[start:].strip()


def _closing(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`; -1 if none does."""
    depth = 0
    for mark in _PARENTHESIS.finditer(text, start):
        depth += 1 if mark[0] == "(" else -1
        if not depth:
            return mark.start()
    return -1


class Source(NamedTuple):
    """The lines of Python that produced an instruction, as file:line; "" if there is none."""

    user: str = ""  # the innermost line outside installed packages; without one, the library's
    library: str = ""  # the innermost of a package other than JAX and jaxcoll, if `user` called it


def source_of(frames: Iterable[tuple[str, str]]) -> Source:
    """Find the user's and the library's lines among stack frames, given innermost first.

    The search ends at jaxcoll's wrapper of a step: its callers are not part of the step.

    Examples:
      >>> source_of([("/x/jaxcoll/_spmd/reduce.py", "115"), ("/home/me/train.py", "22")]).user
      '/home/me/train.py:22'
      >>> flax = ("/usr/lib/python3.12/site-packages/flax/linen/linear.py", "287")
      >>> source_of([flax, ("/home/me/train.py", "22")]).library.rpartition("/")[2]
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
        self._tables: dict[str, dict[str, dict[str, str]]] = {}
        table: dict[str, dict[str, str]] = {}
        for line in lines:
            if entry := _ENTRY.fullmatch(line):
                number, text, fields = entry.groups()
                table[number] = {"": text} if fields is None else dict(_FIELD.findall(fields))
            elif line.strip():
                table = self._tables.setdefault(line.strip(), {})
        self._source = functools.cache(lambda number: source_of(self._frames(number)))

    def source(self, attributes: str) -> Source:
        """Return the lines of Python that an instruction's attributes refer to."""
        if frame := _FRAME.search(attributes):
            return self._source(frame[1])
        file = _FILE.search(attributes)
        return source_of([(file[1], file[2] or "0")]) if file else Source()

    def _frames(self, number: str) -> Iterator[tuple[str, str]]:
        """Yield the frames, innermost first. The text stores each parent's number plus one."""
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
