"""Read the matrix products of a compiled program, and the work that overlaps each collective."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxcoll._observe.parse.calls import Bodies, Call, Item, containing
from jaxcoll._observe.parse.collective import Collective, Matmul, Meanwhile, Operand
from jaxcoll._observe.parse.hlo_text import (
    Computation,
    Instruction,
    Module,
    defined_name,
    pair_ends,
    parse_instruction,
)

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_CONTRACTED_IN_CONFIG = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')  # a GPU library's
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")  # dim_labels=b01f_01io->b01f
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)=([\w\-]+)")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_PRODUCT = re.compile(r"gemm|matmul", re.IGNORECASE)
_CONVOLVES = re.compile(r"cudnn\$conv", re.IGNORECASE)
_IDLE = re.compile(
    r" (?:parameter|constant|get-tuple-element|tuple|bitcast|after-all|iota|partition-id|"
    r"[a-z][\w\-]*-(?:start|update|done))\("
)
_MAY_SEND = re.compile(
    r"nccl|nvshmem|\bmpi|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|collective|"
    r"has_communication\\?\":\s*true",
    re.IGNORECASE,
)


class Work(NamedTuple):
    """Matrix products, their FLOP, and the dtype with the most FLOP among them."""

    matmuls: int = 0
    flops: int = 0
    dtype: str = ""

    def plus(self, other: Work, times: int = 1) -> Work:
        """Add `other`, executed `times` times."""
        more = times * other.flops
        dtype = self.dtype if self.dtype and self.flops >= more else other.dtype
        return Work(self.matmuls + times * other.matmuls, self.flops + more, dtype)


def _total(works: Iterable[Work]) -> Work:
    return functools.reduce(Work.plus, works, Work())


class Arithmetic:
    """The arithmetic of a module, added to the collectives and calls of its computations."""

    def __init__(self, module: Module, bodies: Bodies) -> None:
        self._module, self._bodies = module, bodies
        self._communicating = containing(bodies, (Collective,))
        # The work at each line of a computation, without and with the computations it calls
        self._known: dict[str, tuple[dict[int, Work], dict[int, Work]]] = {}
        self.unread: list[str] = []  # custom calls that may communicate
        self.unbounded: list[str] = []  # loops with collectives and no known trip count
        self.notes: list[str] = []  # products of unknown size

    def bodies(self) -> Bodies:
        """Return the bodies with their matrix products, and with the work that overlaps.

        Leaves out calls that are part of one instruction, such as a fusion, and do not communicate.
        """
        return {name: self._body(name) for name in self._bodies}

    def _body(self, name: str) -> list[Item]:
        lines, ends = self._module.computations[name], self._ends(name)
        items: list[Item] = [
            Matmul(defined_name(lines[at]), work.flops, at=at, dtype=work.dtype)
            for at, work in self._work(name)[0].items()
        ]
        for item in self._bodies[name]:
            if isinstance(item, Call):
                if self._is_arithmetic(item):
                    continue
                if item.is_loop and item.trips is None and item.callee in self._communicating:
                    self.unbounded.append(item.site)
            items.append(self._scheduled(name, item, ends))
        return sorted(items, key=lambda item: item.at)

    def _scheduled(self, computation: str, item: Item, ends: Mapping[str, tuple[int, int]]) -> Item:
        """Add to an asynchronous item the lines of its start and end, and the work between them."""
        if isinstance(item, Matmul) or not item.is_async:
            return item
        if isinstance(item, Call) and item.callee not in self._communicating:
            return item
        name = item.site if isinstance(item, Call) else item.name
        at, until = ends.get(name, (item.at, item.at))
        _, whole = self._work(computation)
        work = _total(whole[line] for line in range(at + 1, until) if line in whole)
        # Constants, tuples and the ends of other pairs take no time.
        between = self._module.computations[computation][at + 1 : until]
        count = sum(not _IDLE.search(line) for line in between)
        meanwhile = Meanwhile(count, work.matmuls, work.flops)
        return dataclasses.replace(item, at=at, until=until, meanwhile=meanwhile)

    def _is_arithmetic(self, call: Call) -> bool:
        return call.is_part and call.callee not in self._communicating

    def _work(self, name: str) -> tuple[dict[int, Work], dict[int, Work]]:
        """Return the work at each line, without and with the computations called there.

        The work of a fusion is that of its parts; of a conditional, the largest branch counts.
        """
        if name not in self._known:
            # Empty while it is computed, in case a computation calls itself.
            self._known[name] = {}, {}
            own, called = self._direct_work(name), {}
            for call in self._bodies[name]:
                if not isinstance(call, Call):
                    continue
                turns = 1 if call.trips is None else call.trips
                work = Work().plus(_total(self._work(call.callee)[1].values()), turns)
                others = called.get(call.at, Work())
                if self._is_arithmetic(call):
                    if work.matmuls:
                        own[call.at] = own.get(call.at, Work()).plus(work)
                else:
                    called[call.at] = (
                        others.plus(work) if call.branch is None else max(others, work)
                    )
            both = {at: own.get(at, Work()).plus(work) for at, work in called.items()}
            self._known[name] = own, {**own, **both}
        return self._known[name]

    def _direct_work(self, name: str) -> dict[int, Work]:
        works: dict[int, Work] = {}
        lines, inside = self._module.computations[name], None
        for at, line in enumerate(lines):
            # This runs on every line of the text, so look for substrings first, which is fast.
            if not any(opcode in line for opcode in (" dot(", " convolution(", " custom-call(")):
                continue
            if " custom-call(" in line and (target := _TARGET.search(line)):
                # A backend_config may be long: search it only if it has that field.
                config = line.partition("backend_config=")[2] if "has_comm" in line else ""
                if _MAY_SEND.search(target[1]) or _MAY_SEND.search(config):
                    self.unread.append(
                        f"custom call {defined_name(line)!r} ({target[1]}) may communicate, which "
                        "is not counted."
                    )
            inside, instruction = inside or Computation(lines), parse_instruction(line)
            operations = flops(instruction, inside)
            if operations is None:
                self.notes.append(
                    f"{defined_name(line)!r} multiplies matrices of unknown sizes: its "
                    "floating-point operations are not counted."
                )
            if operations != 0:
                operands = inside.operands(instruction)
                works[at] = Work(1, operations or 0, operands[0].dtype if operands else "")
        return works

    def _ends(self, name: str) -> dict[str, tuple[int, int]]:
        """Return the lines where each asynchronous operation begins and ends, by its start's name.

        A start without operands only prepares: the operation begins with its update.
        """
        if not any(i.is_async for i in self._bodies[name] if not isinstance(i, Matmul)):
            return {}
        lines = self._module.computations[name]
        places = {defined_name(line): at for at, line in enumerate(lines) if "-start(" in line}
        ends: dict[str, tuple[int, int]] = {}
        for at, _, opcode, start in pair_ends(lines):
            begins, _ = ends.get(start, (places.get(start, at), at))
            if opcode.endswith("-update") and "-start()" in lines[begins]:
                begins = at
            ends[start] = (begins, at)
        return ends


def flops(instruction: Instruction, inside: Computation) -> int | None:
    """Count the floating-point operations of an instruction.

    Multiplications and additions count separately: a product with N output elements that sums over
    K terms has 2·N·K. A convolution has 2 for each pair of an output element and a kernel element
    that reads an element of the input, and none for padding and the zeros of dilation. For a
    library's convolution, these zeros count, because its text says less. Returns 0 if the
    instruction multiplies no matrices, None if it does but their sizes are unknown.

    Examples:
      >>> from jaxcoll._observe.parse.hlo_text import parse_instruction
      >>> text = "  %d = f32[4,6] dot(f32[4,5] %a, f32[5,6] %b), lhs_contracting_dims={1}"
      >>> flops(parse_instruction(text), Computation([]))
      240
    """
    opcode, attributes = instruction.opcode, instruction.attributes
    target = _TARGET.search(attributes) if opcode == "custom-call" else None
    convolves = opcode == "convolution" or (target and _CONVOLVES.search(target[1]))
    if not (opcode == "dot" or convolves or (target and _PRODUCT.search(target[1]))):
        return 0
    results, operands = instruction.results, inside.operands(instruction)
    if not results or len(operands) < 2:
        return None
    if opcode == "convolution":
        return _convolved(attributes, operands[0], operands[1], results[0])
    read = (
        _kernel_size(attributes, operands[1]) if convolves else _contracted(attributes, operands[0])
    )
    return None if read is None else 2 * results[0].size * read


def _contracted(attributes: str, left: Operand) -> int | None:
    """Return the number of terms in each sum, from the left operand's contracted dimensions."""
    match = _CONTRACTED.search(attributes) or _CONTRACTED_IN_CONFIG.search(attributes)
    if not match:
        return None
    dims = [int(d) for d in re.findall(r"\d+", match[1])]
    if any(d >= len(left.shape) for d in dims):
        return None
    return math.prod(left.shape[d] for d in dims)


def _kernel_size(attributes: str, kernel: Operand) -> int | None:
    """Return the number of elements in a convolution's kernel for one output feature."""
    labels = _LABELS.search(attributes)
    if not labels or len(labels[2]) != len(kernel.shape) or "o" not in labels[2]:
        return None
    return math.prod(n for n, label in zip(kernel.shape, labels[2], strict=True) if label != "o")


def _convolved(attributes: str, left: Operand, kernel: Operand, output: Operand) -> int | None:
    """Count a convolution's operations; TPUs write products as these, and batches as dilations."""
    labels, window = _LABELS.search(attributes), _WINDOW.search(attributes)
    arrays = (left, kernel, output)
    if not labels or [*map(len, labels.groups())] != [len(array.shape) for array in arrays]:
        return None
    inputs, weights, outputs = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(labels.groups(), arrays, strict=True)
    )
    fields = dict(_FIELD.findall(window[1])) if window else {}
    total = 2 * weights["i"] * outputs["b"] * outputs["f"]
    for k, dim in enumerate(sorted(filter(str.isdigit, inputs))):
        stride, pad, dilated, spread = (
            int(fields[name].split("x")[k].partition("_")[0]) if name in fields else default
            for name, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        # The input position for each output element and kernel element; it may be padding.
        at = np.arange(outputs[dim])[:, None] * stride - pad
        at = at + np.arange(weights[dim])[None] * spread
        inside = (at >= 0) & (at <= (inputs[dim] - 1) * dilated) & (at % dilated == 0)
        total *= int(inside.sum())
    return total
