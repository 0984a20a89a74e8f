"""The grammar of HLO text: modules, computations, instructions and types."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxcoll._hlo.collective import KINDS, Operand
from jaxcoll._hlo.layout import find_header_end, lay_out
from jaxcoll._hlo.replica_groups import read_numbers

_HEADER = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*HloModule ?([\w.\-]*)", re.DOTALL)
# A line between two line breaks: an instruction (1: its opcode), the end of a computation (2), the
# head of one (3, and 4: its name), nothing, or something else (5).
_TYPED = r"(?:\S+, )*\S+"  # f32[4]{0}, or (f32[4]{0}, /*index=1*/s8[2,3]{1,0})
_LINE = re.compile(
    rf"\n(?:[ \t]*(?:ROOT )?%?[\w.\-]+ = {_TYPED} ([a-z][\w\-]*)\("
    r'|(\})(?:, execution_thread="[^"\n]*")?[ \t\r]*(?=\n|\Z)'
    r"|(ENTRY )?%?([\w.\-]+)(?: ?\([^\n]*)? \{[ \t\r]*(?=\n)"
    r"|[ \t\r]*(?=\n|\Z)|([^\n]+))"
)
_NAME = re.compile(r"%?([\w.\-]+)")
_DEFINES = re.compile(r"\n[ \t]*(?:ROOT )?%?([\w.\-]+) = ")  # "  ROOT %add.3 = f32[4] …"
_ROOT = re.compile(r"\n[ \t]*ROOT ")
_USES = re.compile(_DEFINES.pattern + rf"{_TYPED} [a-z][\w\-]*\(([^()\n]*)")
_NAMES = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(rf"\s*(?:ROOT )?%?([\w.\-]+) = ({_TYPED}) ([a-z][\w\-]*)\(")
_ADDED = re.compile(r",\s*(?:frontend_attributes|metadata|backend_config)=")
_TABLE = re.compile(r"(?:File|Function|Stack)[A-Z]\w+\s*|\d+ .*", re.DOTALL)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")  # bf16[8,128]
_COMMENT = re.compile(r"/\*.*?\*/")  # /*index=5*/
_SPACE = re.compile(r"\s+")
_PARENTHESIS = re.compile(r"[()]|/\*.*?\*/")
_BRACKET = re.compile(r"[(\[{}\]),]")
_OPEN = "{[(,:="  # how no line of an instruction ends

_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)

_SENDS = re.compile(r"all-|collective-|reduce-scatter|ragged-all|send(?:-|$)")
_IDLE = re.compile(
    r"parameter|constant|get-tuple-element|tuple|bitcast|after-all|iota|partition-id|"
    r"[a-z][\w\-]*-(?:start|update|done)|send|recv"
)
_CALLS = frozenset(("while", "call", "conditional", "custom-call"))
PRODUCTS = frozenset(("dot", "convolution", "custom-call"))


class Instruction(NamedTuple):
    """A parsed line of a computation: `name = type opcode(operands)attributes`."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str

    @property
    def settings(self) -> str:
        """Its attributes without what programs and backends add, which may say anything."""
        settings = _COMMENT.sub(" ", _ADDED.split(self.attributes, maxsplit=1)[0])
        return _SPACE.sub(" ", settings).replace("= ", "=")

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of its operands; an element of a tuple may be `name#index`."""
        return _find_names(self.operands)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The attributes that name computations, with a name each.

        If a start names the computation that it wraps, last, its others are those of what it wraps.
        """
        found = _CALLED.findall(self.settings)
        if self.opcode.endswith("-start"):
            found = [x for x in found if x[0] == "calls"][-1:] or found
        return [(attribute, name) for attribute, some in found for name in _NAME.findall(some)]

    @property
    def results(self) -> tuple[Operand, ...]:
        """The arrays that it returns."""
        return read_arrays(self.type)


class Site(NamedTuple):
    """An instruction that may send, call or multiply."""

    at: int  # the number of instructions before it in its computation
    opcode: str
    start: int  # its position in the text


class Computation:
    """The instructions of a computation, each parsed on access."""

    def __init__(self, text: str, start: int = 0, end: int = 0) -> None:
        self.text, self._start, self._end = text, start, end
        self.sites: list[Site] = []
        self.idle = bytearray()  # for each instruction, 1 if it takes no time

    def __iter__(self) -> Iterator[str]:
        return iter(self.text[self._start : self._end].splitlines()[1:])

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def __getitem__(self, name: str) -> Instruction:
        return self._parse(self._starts[name])

    def parse(self, site: Site) -> Instruction:
        return self._parse(site.start)

    @property
    def root(self) -> Instruction:
        """The instruction that makes its result."""
        root = _ROOT.search(self.text, self._start, self._end)
        return self._parse(root.start() + 1 if root else [*self._starts.values()][-1])

    @property
    def names(self) -> Iterable[str]:
        return self._starts

    def ends(self) -> Iterator[tuple[Site, str, str]]:
        """Yield the ends and updates of asynchronous instructions, with their start's name."""
        first: dict[str, str] = {}  # An update stands for its start in later lines.
        for site in self.sites:
            if site.opcode.endswith(("-done", "-update")):
                name, start = self.parse(site).name, next(iter(self.parse(site).operand_names), "")
                first[name] = first.get(start, start)
                yield site, name, first[name]

    @property
    def count(self) -> int:
        return len(self.idle)

    @functools.cached_property
    def users(self) -> dict[str, list[str]]:
        """The names of the instructions that use each result."""
        users: dict[str, list[str]] = {}
        for line in _USES.finditer(self.text, self._start, self._end):
            name, operands = line.groups()
            if "%" not in operands or not self.text.startswith(")", line.end()):
                operands = "%".join(["", *self._parse(line.start() + 1).operand_names])
            for operand in dict.fromkeys(_NAMES.findall(operands)):
                users.setdefault(operand, []).append(name)
        return users

    def forget(self) -> None:
        """Free the memory of what was parsed."""
        for name in ("_parsed", "_starts", "users"):
            vars(self).pop(name, None)

    @functools.cached_property
    def _parsed(self) -> dict[int, Instruction]:
        return {}

    def _parse(self, start: int) -> Instruction:
        if start not in self._parsed:
            self._parsed[start] = parse_instruction(self.text, start)
        return self._parsed[start]

    @functools.cached_property
    def _starts(self) -> dict[str, int]:
        found = _DEFINES.finditer(self.text, self._start, self._end)
        return {line[1]: line.start() + 1 for line in found}

    def find_type(self, name: str) -> str:
        """Find the type of an instruction, or of one element of it: `name#1`."""
        name, *indices = name.split("#")
        text = self[name].type
        for index in indices:
            text = _split_tuple(text)[int(index)]
        return text

    def operands(self, instruction: Instruction) -> tuple[Operand, ...]:
        operands: list[Operand] = []
        for piece in split(_COMMENT.sub("", instruction.operands)):
            # Some compilers print each operand with its type, others only its name.
            type_text, _, name = piece.rpartition(" ")
            if not type_text:
                if name.lstrip("%").partition("#")[0] not in self:
                    raise ValueError(
                        f"{instruction.opcode} {instruction.name!r} has the operand {name!r}, "
                        "which its computation does not define: the text looks truncated."
                    )
                type_text = self.find_type(name.lstrip("%"))
            operands += read_arrays(type_text)
        return tuple(operands)


@dataclasses.dataclass
class Module:
    """A program: its computations, and the number of devices it is for."""

    name: str  # such as jit_step
    replicas: int  # of the program
    partitions: int  # of each replica
    entry: str = ""  # the name of the computation that runs
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    # The lines before the computations
    tables: list[str] = dataclasses.field(default_factory=list)
    # Computations that an instruction defines in its place, and the computation around it. If there
    # are any, some of those with a name are copies that nothing calls.
    nested: dict[str, str] = dataclasses.field(default_factory=dict)


def parse_module(text: str, devices: int = 1) -> Module:
    """Find the computations of HLO text, and the lines in them that may send, call or multiply.

    `devices` is the number of devices of a program that is not compiled yet: its text lacks it.

    Raises:
      ValueError: the text is not HLO, or is truncated.
    """
    title = _HEADER.match(text)
    if not title:
        first = text.strip().partition("\n")[0]
        raise ValueError(
            "expected HLO text, which begins with 'HloModule' (`compiled.as_text()`); got "
            f"{first[:60]!r}. If the program is only lowered, pass it instead of its text."
        )
    at = find_header_end(text, title.end())
    header = text[title.end() : at]
    replicas, partitions = (
        int(match[1]) if (match := re.search(rf"\b{count}=(\d+)", header)) else default
        for count, default in (("replica_count", 1), ("num_partitions", devices))
    )
    module, useful = Module(title[1], replicas, partitions), set()
    # One pattern reads the usual layout at the speed of a search. A computation of another layout
    # is first written in the usual one, which is slower.
    while (odd := _read_lines(module, text, at, useful)) is not None:
        laid_out, at = lay_out(text, odd)
        for name, written, parent in laid_out:
            if parent:
                module.nested[name] = parent
            if (odd := _read_lines(module, written, 0, useful)) is not None:
                raise ValueError(
                    f"expected an instruction, got {written[odd:].strip()[:80]!r}: its "
                    "notation is newer than this version of jaxcoll, or the text is damaged."
                )
    if not module.entry:
        raise ValueError("the HLO text looks truncated: it ends before the ENTRY computation.")
    return module


def _read_lines(module: Module, text: str, start: int, useful: set[str]) -> int | None:
    """Add the computations of a text; return the position of one that is laid out otherwise.

    `useful` are the computations with sites. A fusion of another one is no site: most lines of a
    large program are such.

    Raises:
      ValueError: the text ends inside a computation, or defines one twice.
    """
    name, is_entry, computation, idle, head = "", False, Computation(""), bytearray(), start
    for line in _LINE.finditer(text, start):
        opcode = line[1]
        if opcode:
            # It stands in no computation, or goes on with the line before: another layout.
            if not name or (idle and text[line.start() - 1] in _OPEN):
                return head if name else line.start()
            if opcode == "fusion":
                callee = _NAME.match(text, text.find(" calls=", line.end()) + 7)
                # A compiler prints what a fusion calls before it. If not, the fusion may be of use.
                if not callee or callee[1] in useful or callee[1] not in module.computations:
                    computation.sites.append(Site(len(idle), opcode, line.start() + 1))
            elif _is_site(opcode):
                computation.sites.append(Site(len(idle), opcode, line.start() + 1))
            idle.append(_is_idle(opcode))
        elif line[2] and name and text[line.start() - 1] not in _OPEN:
            if name in module.computations:
                raise ValueError(f"the computation {name!r} is defined twice: the text is damaged.")
            computation._end, computation.idle = line.start(), idle
            module.computations[name] = computation
            module.entry = name if is_entry else module.entry
            if computation.sites:
                useful.add(name)
            name = ""
        elif line[4] and not name:
            name, is_entry, idle, head = line[4], bool(line[3]), bytearray(), line.start()
            computation = Computation(text, line.end())
        elif line[5] and not name and not module.computations and _TABLE.fullmatch(line[5]):
            module.tables.append(line[5])
        elif line[2] or line[4] or line[5]:
            return head if name else line.start()
    if name:
        raise ValueError(f"the HLO text looks truncated: it ends inside the computation {name!r}.")
    return None


@functools.cache
def _is_site(opcode: str) -> bool:
    if opcode in PRODUCTS or opcode in _CALLS or sends(opcode):
        return True
    return opcode.endswith(("-start", "-done", "-update")) and not opcode.startswith("copy")


@functools.cache
def _is_idle(opcode: str) -> bool:
    return bool(_IDLE.fullmatch(opcode))


def sends(opcode: str) -> bool:
    """True for instructions that send to other devices, of known and of unknown kinds."""
    return bool(_SENDS.match(opcode)) or opcode in KINDS


def parse_instruction(text: str, start: int = 0) -> Instruction:
    match = _INSTRUCTION.match(text, start)
    end = text.find("\n", start) if match is None else text.find("\n", match.end())
    end = len(text) if end < 0 else end
    close = _closing(text, match.end() - 1, end) if match else -1
    if match and close > 0:
        name, type_text, opcode = match.groups()
        operands, attributes = text[match.end() : close], text[close + 1 : end]
        return Instruction(name, type_text, opcode, operands, attributes)
    raise ValueError(
        f"expected an instruction, `name = type opcode(operands)`; got "
        f"{text[start:end].strip()[:80]!r}: the text looks truncated or damaged."
    )


@functools.lru_cache(maxsize=1024)  # a program repeats a few types thousands of times
def read_arrays(type_text: str) -> tuple[Operand, ...]:
    """Parse the arrays of a type.

    Examples:
      >>> read_arrays("(bf16[2,3]{1,0:T(8,128)}, token[], pred[<=4])")
      (Operand(dtype='bf16', shape=(2, 3)), Operand(dtype='pred', shape=(4,)))
    """
    return tuple(
        Operand(dtype, read_numbers(dims.replace("<=", "")))
        for dtype, dims in _ARRAY.findall(type_text)
        if dtype != "token"
    )


@functools.lru_cache(maxsize=1024)  # some tuples have thousands of elements, and as many users
def _split_tuple(type_text: str) -> tuple[str, ...]:
    return tuple(split(_COMMENT.sub("", type_text)[1:-1]))


@functools.lru_cache(maxsize=1024)
def _find_names(operands: str) -> tuple[str, ...]:
    return tuple(x.rpartition(" ")[2].lstrip("%") for x in split(_COMMENT.sub("", operands)))


def split(text: str) -> Iterator[str]:
    """Yield the parts of a comma-separated list, ignoring commas in brackets."""
    depth = start = 0
    for mark in _BRACKET.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, ",": 0}.get(mark[0], -1)
        if mark[0] == "," and not depth:
            yield text[start : mark.start()].strip()
            start = mark.end()
    if text[start:].strip():
        yield text[start:].strip()


def _closing(text: str, start: int, end: int) -> int:
    """Find the parenthesis that closes the one at `start`; -1 if none does."""
    close = text.find(")", start, end)
    if text.find("(", start + 1, close) < 0 and text.find("/*", start, close) < 0:
        return close  # most instructions
    depth = 0
    for mark in _PARENTHESIS.finditer(text, start, end):
        depth += {"(": 1, ")": -1}.get(mark[0], 0)
        if not depth:
            return mark.start()
    return -1
