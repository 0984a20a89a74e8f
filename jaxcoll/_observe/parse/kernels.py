"""Finds the kernels that hand a collective its arrays or take its results, and what they move."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxcoll._observe.parse.collective import Kernels
from jaxcoll._observe.parse.hlo_text import Computation, Instruction, Module, pair_ends

_INSIDE = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_NO_KERNELS = frozenset(("bitcast", "get-tuple-element", "copy-done"))
_SLICES = frozenset(("slice", "dynamic-slice"))
_COPIES = frozenset(
    ("copy", "copy-start", "concatenate", "dynamic-update-slice", "pad", "reshape", "transpose")
).union(_SLICES)
_GIVEN = frozenset(
    ("parameter", "constant", "iota", "tuple", "after-all", "partition-id", "replica-id")
)
_APART = re.compile(
    r"while|conditional|custom-call|dot|convolution|optimization-barrier|send|recv|"
    r"(?:all-|collective-|reduce-scatter|ragged-all).*|.*-(?:start|update|done)"
)


class _Kernel(NamedTuple):
    """An instruction that runs as one kernel."""

    nbytes: int
    only_copies: bool


class _Fused(NamedTuple):
    """What a fusion reads of its parameters where that is less than all, and what it writes."""

    only_copies: bool
    is_apart: bool
    reads: Mapping[int, int]
    writes: int | None


class KernelReader:
    """Finds the kernels around the collectives of a module.

    Law: a kernel belongs to a collective if it makes an array that the collective is handed, or
    is handed one that the collective makes; where it only copies, so do those beyond it. Products
    of matrices, loops and other collectives do not belong to it. One between two collectives
    belongs to both. A kernel reads of an array what it slices out of it, and writes into one what
    it updates.
    """

    def __init__(self, module: Module) -> None:
        computations = module.computations
        # One computation's at a time: a large program's would take more than its text.
        self._graph = functools.lru_cache(1)(lambda name: _Graph(computations[name]))
        self._fused = functools.cache(lambda name: _fused(computations[name]))

    def around(self, computation: str, name: str) -> Kernels:
        """The kernels around one instruction of a computation."""
        graph = self._graph(computation)
        found: dict[str, _Kernel] = {}
        ends = graph.ends.get(name, [name])
        for start, beyond in ((name, graph.makers), *((end, graph.users) for end in ends)):
            waiting = list(beyond.get(start, ()))
            while waiting:
                each = waiting.pop()
                if each in found or each in (name, *ends) or each not in graph.lines:
                    continue
                instruction = graph[each]
                if instruction.opcode not in _NO_KERNELS:
                    if each not in graph.kernels:  # one may be around hundreds of collectives
                        graph.kernels[each] = self._kernel(instruction, graph)
                    kernel = graph.kernels[each]
                    if kernel is None:
                        continue
                    found[each] = kernel
                    if not kernel.only_copies:
                        continue
                waiting += beyond.get(each, ())
        return Kernels(len(found), sum(kernel.nbytes for kernel in found.values()))

    def _kernel(self, instruction: Instruction, inside: Computation) -> _Kernel | None:
        """The kernel of an instruction; None if it is none of those that are counted."""
        opcode = instruction.opcode
        if opcode in _GIVEN or (_APART.fullmatch(opcode) and opcode not in _COPIES):
            return None
        given = [operand.nbytes for operand in inside.operands(instruction)]
        result = sum(x.nbytes for x in instruction.results)
        if opcode == "copy-start":  # its type has the memory of both ends
            return _Kernel(2 * sum(given), True)
        if opcode in _SLICES:
            return _Kernel(2 * result, True)
        if opcode == "dynamic-update-slice":
            return _Kernel(2 * given[1], True)
        called = _INSIDE.search(instruction.attributes) if opcode in ("fusion", "call") else None
        if called is None:
            return _Kernel(sum(given) + result, opcode in _COPIES)
        fused = self._fused(called[1])
        if fused.is_apart:
            return None
        read = sum(fused.reads.get(k, nbytes) for k, nbytes in enumerate(given))
        return _Kernel(read + (result if fused.writes is None else fused.writes), fused.only_copies)


def _fused(lines: Sequence[str]) -> _Fused:
    computation = Computation(lines)
    inside = {name: computation[name] for name in computation.lines}
    sizes = {name: sum(x.size for x in each.results) for name, each in inside.items()}
    root = computation.root.name
    needed = Counter({root: sizes[root]})
    while inside[root].opcode == "bitcast":
        (root,) = inside[root].given
    is_update = inside[root].opcode == "dynamic-update-slice"
    reads = {}
    for name, each in reversed(inside.items()):  # what uses an array stands behind it
        wanted = min(needed[name], sizes[name])
        for k, given in enumerate(each.given):
            if given in sizes and not (is_update and name == root and not k):  # updated in place
                needed[given] += _needed(each, k, wanted, sizes[name], sizes[given])
        if each.opcode == "parameter" and wanted < sizes[name]:
            nbytes = sum(x.nbytes for x in each.results)
            reads[int(each.operands)] = nbytes * wanted // sizes[name]
    opcodes = {each.opcode for each in inside.values()}
    return _Fused(
        only_copies=opcodes <= _COPIES | _NO_KERNELS | _GIVEN,
        is_apart=any(map(_APART.fullmatch, opcodes)),
        reads=reads,
        writes=computation.operands(inside[root])[1].nbytes if is_update else None,
    )


def _needed(user: Instruction, k: int, wanted: int, size: int, given: int) -> int:
    """How many of its operand's `given` elements an instruction needs for `wanted` of its own."""
    if (user.opcode in _SLICES and not k) or size == given:
        return wanted
    return min(wanted, given) if user.opcode == "concatenate" else given


class _Graph(Computation):
    """A computation's instructions, by what they are given and what they are given to."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(lines)
        self.kernels: dict[str, _Kernel | None] = {}
        self.makers = {name: self[name].given for name in self.lines}
        self.users: dict[str, list[str]] = {}
        for user, given in self.makers.items():
            for each in given:
                self.users.setdefault(each, []).append(user)
        self.ends: dict[str, list[str]] = {}
        for _, name, opcode, start in pair_ends(lines):
            if opcode.endswith("-done") and opcode != "copy-done":
                self.ends.setdefault(start, []).append(name)
