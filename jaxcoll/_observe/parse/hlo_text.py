"""The grammar of HLO text: computations, their instructions, and the types that they name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
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


class Instruction(NamedTuple):
    """A line of a computation, taken apart: `name = type opcode(operands)attributes`."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str

    @property
    def given(self) -> tuple[str, ...]:
        """The names of what it is given."""
        pieces = _pieces(_COMMENT.sub("", self.operands))
        return tuple(piece.rpartition(" ")[2].lstrip("%") for piece in pieces)

    @property
    def results(self) -> tuple[Operand, ...]:
        """The arrays that it makes."""
        return arrays(self.type)


class Computation:
    """The instructions of a computation by their names, each taken apart when it is asked for."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = {name: line for line in lines if (name := defined_name(line))}

    def __getitem__(self, name: str) -> Instruction:
        return parse_instruction(self.lines[name])

    @property
    def root(self) -> Instruction:
        """What makes its result."""
        (root,) = (line for line in self.lines.values() if line.lstrip().startswith("ROOT "))
        return parse_instruction(root)

    def operands(self, instruction: Instruction) -> tuple[Operand, ...]:
        """The arrays that an instruction is given, typed in place or where they are defined."""
        found: list[Operand] = []
        for piece in _pieces(_COMMENT.sub("", instruction.operands)):
            # Some compilers print the type of each operand in place, others its name alone.
            type_text, _, name = piece.rpartition(" ")
            if not type_text:
                if name.lstrip("%") not in self.lines:
                    raise ValueError(
                        f"{instruction.opcode} {instruction.name!r} has the operand {name!r}, "
                        "which its computation does not define: the text looks cut off."
                    )
                type_text = self[name.lstrip("%")].type
            found += arrays(type_text)
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: the lines of its computations, and how many devices it is for."""

    name: str  # what it was jitted from, as in jit_step
    computations: dict[str, list[str]]  # their lines, by name, in the text's order
    entry: str  # the name of the one that runs
    replicas: int  # of the program
    partitions: int  # of each replica
    # What stands before the computations
    tables: list[str] = dataclasses.field(default_factory=list)


def parse_module(text: str) -> Module:
    """Cut HLO text into computations, each as its lines, in the text's order."""
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.strip()), "")
    if not header.startswith("HloModule"):
        raise ValueError(
            "expected HLO text, which begins with 'HloModule' (`compiled.as_text()`); got "
            f"{header[:60]!r}. What `lowered.as_text()` returns is StableHLO: use "
            "`read_stablehlo`."
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
        raise ValueError(f"the HLO text looks cut off: it ends {where}.")
    replicas, partitions = (
        int(found[1]) if (found := re.search(rf"\b{count}=(\d+)", header)) else 1
        for count in ("replica_count", "num_partitions")
    )
    called = _MODULE.match(header)
    title = called[1] if called else ""
    return Module(title, computations, entry, replicas, partitions, tables)


def parse_instruction(line: str) -> Instruction:
    """Take a line apart."""
    found = _INSTRUCTION.match(line)
    close = _closing(line, found.end() - 1) if found else -1
    if found and close > 0:
        name, type_text, opcode = found.groups()
        operands, attributes = line[found.end() : close], line[close + 1 :]
        return Instruction(name, type_text, opcode, operands, attributes)
    raise ValueError(
        f"expected an instruction, `name = type opcode(operands)`; got {line.strip()[:80]!r}: the "
        "text looks cut off or damaged."
    )


def defined_name(line: str) -> str:
    """The name that a line of a computation defines; "" if none."""
    found = _DEFINES.match(line)
    return found[1] if found else ""


def pair_ends(lines: Sequence[str]) -> Iterator[tuple[int, str, str, str]]:
    """The ends of asynchronous instructions: line number, name, opcode, and the start's name."""
    first: dict[str, str] = {}
    for at, line in enumerate(lines):
        if "-done(" in line or "-update(" in line:
            instruction = parse_instruction(line)
            if instruction.opcode.endswith(("-done", "-update")):
                start = next(iter(instruction.given), "")
                # What only prolongs another (`-update`) stands for the start afterwards.
                first[instruction.name] = first.get(start, start)
                yield at, instruction.name, instruction.opcode, first[instruction.name]


def arrays(type_text: str) -> tuple[Operand, ...]:
    """The arrays of a type.

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
    """The parts of a list that commas separate outside of all brackets."""
    depth = start = 0
    for found in _BRACKET.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, ",": 0}.get(found[0], -1)
        if found[0] == "," and not depth:
            yield text[start : found.start()].strip()
            start = found.end()
    if text[start:].strip():
        yield text[start:].strip()


def _closing(text: str, start: int) -> int:
    """The position of the parenthesis that closes the one at `start`; -1 if it is missing."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return -1
