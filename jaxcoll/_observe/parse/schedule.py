"""Reads the arithmetic of a compiled program, and what of it runs beside which collective."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxcoll._observe.parse.calls import Bodies, Call, Matmul, busy_among
from jaxcoll._observe.parse.collective import Collective, Meanwhile, Operand
from jaxcoll._observe.parse.hlo_text import (
    Computation,
    Instruction,
    Module,
    defined_name,
    pair_ends,
    parse_instruction,
)
from jaxcoll._observe.parse.kernels import KernelReader

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
    """Matrix products, their floating-point operations, and the type that most of them are of."""

    matmuls: int = 0
    flops: int = 0
    dtype: str = ""

    def plus(self, other: Work, times: int = 1) -> Work:
        """Both together."""
        more = times * other.flops
        dtype = self.dtype if self.dtype and self.flops >= more else other.dtype
        return Work(self.matmuls + times * other.matmuls, self.flops + more, dtype)


def _together(works: Iterable[Work]) -> Work:
    return functools.reduce(Work.plus, works, Work())


class Schedule:
    """A module whose collectives and calls are known already.

    Appends to `uncounted` what may send and cannot be counted, to `notes` such arithmetic.
    """

    def __init__(
        self, module: Module, bodies: Bodies, uncounted: list[str], notes: list[str]
    ) -> None:
        self._module, self._bodies = module, bodies
        self._uncounted, self._notes = uncounted, notes
        self._busy = busy_among(bodies, (Collective,))
        self._kernels = KernelReader(module)
        # The work at each line of a computation: its own, and with the programs it calls there.
        self._known: dict[str, tuple[dict[int, Work], dict[int, Work]]] = {}

    def bodies(self) -> Bodies:
        """The bodies with matrix products in their places, and with what runs meanwhile.

        What spells out a single instruction and sends nothing is dropped.
        """
        return {name: self._body(name) for name in self._bodies}

    def _body(self, name: str) -> list[Collective | Call | Matmul]:
        lines, ends = self._module.computations[name], self._ends(name)
        items: list[Collective | Call | Matmul] = [
            Matmul(defined_name(lines[at]), work.flops, at=at, dtype=work.dtype)
            for at, work in self._work(name)[0].items()
        ]
        for item in self._bodies[name]:
            if isinstance(item, Matmul) or (isinstance(item, Call) and self._is_dropped(item)):
                continue
            if isinstance(item, Collective) or item.callee in self._busy:
                item = self._placed(name, item, ends)
            items.append(item)
        return sorted(items, key=lambda item: item.at)

    def _placed(
        self, computation: str, item: Collective | Call, ends: Mapping[str, tuple[int, int]]
    ) -> Collective | Call:
        """A collective, or a call of what sends, with what is around it and runs meanwhile."""
        name = item.site if isinstance(item, Call) else item.name
        if isinstance(item, Call) and item.is_loop and item.trips is None:
            self._uncounted.append(
                f"loop {name!r} does not say how often it turns: what it sends is counted "
                "for one turn."
            )
        if isinstance(item, Collective) or item.is_async:
            try:
                item = dataclasses.replace(item, kernels=self._kernels.around(computation, name))
            except (ValueError, KeyError, IndexError) as error:
                self._notes.append(f"the kernels around {name!r} could not be read: {error}")
        if not item.is_async:
            return item
        at, until = ends.get(name, (item.at, item.at))
        meanwhile = self._meanwhile(computation, at, until)
        return dataclasses.replace(item, at=at, until=until, meanwhile=meanwhile)

    def _is_dropped(self, call: Call) -> bool:
        return call.is_part and call.callee not in self._busy

    def _meanwhile(self, name: str, start: int, end: int) -> Meanwhile:
        """What stands between two lines of a computation."""
        _, whole = self._work(name)
        work = _together(whole[at] for at in range(start + 1, end) if at in whole)
        # Constants, tuples and the ends of other pairs take no time.
        lines = self._module.computations[name][start + 1 : end]
        count = sum(not _IDLE.search(line) for line in lines)
        return Meanwhile(count, work.matmuls, work.flops)

    def _work(self, name: str) -> tuple[dict[int, Work], dict[int, Work]]:
        """The work at each line of a computation: its own, and with the programs it calls there.

        A fusion's own is that of what it fuses; of a conditional the longest branch counts.
        """
        if name not in self._known:
            # Empty while it is worked out, for a text in which a computation calls itself.
            self._known[name] = {}, {}
            direct, called = self._own_work(name), {}
            for call in self._bodies[name]:
                if not isinstance(call, Call):
                    continue
                turns = 1 if call.trips is None else call.trips
                work = Work().plus(_together(self._work(call.callee)[1].values()), turns)
                known = called.get(call.at, Work())
                if self._is_dropped(call):
                    if work.matmuls:
                        direct[call.at] = direct.get(call.at, Work()).plus(work)
                else:
                    called[call.at] = known.plus(work) if call.branch is None else max(known, work)
            both = {at: direct.get(at, Work()).plus(w) for at, w in called.items()}
            self._known[name] = direct, {**direct, **both}
        return self._known[name]

    def _own_work(self, name: str) -> dict[int, Work]:
        found: dict[int, Work] = {}
        lines, inside = self._module.computations[name], None
        for at, line in enumerate(lines):
            if not any(name in line for name in (" dot(", " convolution(", " custom-call(")):
                continue  # quick, because it is asked of every line
            if " custom-call(" in line and (target := _TARGET.search(line)):
                # A backend_config may be long: it is searched only where it has that field.
                config = line.partition("backend_config=")[2] if "has_comm" in line else ""
                if _MAY_SEND.search(target[1]) or _MAY_SEND.search(config):
                    self._uncounted.append(
                        f"custom call {defined_name(line)!r} ({target[1]}) may send by itself, "
                        "which is not counted."
                    )
            inside, instruction = inside or Computation(lines), parse_instruction(line)
            operations = flops(instruction, inside)
            if operations is None:
                self._notes.append(
                    f"{defined_name(line)!r} multiplies matrices of sizes that its text does not "
                    "say: its floating-point operations are not counted."
                )
            if operations != 0:
                operands = inside.operands(instruction)
                found[at] = Work(1, operations or 0, operands[0].dtype if operands else "")
        return found

    def _ends(self, name: str) -> dict[str, tuple[int, int]]:
        """Where what each asynchronous start begins travels, and where it ends, by its name.

        A start that is given nothing yet only prepares; what it sends comes with its update.
        """
        if not any(i.is_async for i in self._bodies[name] if not isinstance(i, Matmul)):
            return {}
        lines = self._module.computations[name]
        places = {defined_name(line): at for at, line in enumerate(lines) if "-start(" in line}
        found: dict[str, tuple[int, int]] = {}
        for at, _, opcode, start in pair_ends(lines):
            begins, _ = found.get(start, (places.get(start, at), at))
            if opcode.endswith("-update") and "-start()" in lines[begins]:
                begins = at
            found[start] = (begins, at)
        return found


def flops(instruction: Instruction, inside: Computation) -> int | None:
    """Floating-point operations of an instruction: 2 for each multiplication and addition.

    Law: a product with an output of N elements that sums over K has 2·N·K of them. A convolution
    has 2 for each element of an output and of its kernel that meet an element of the input, and
    neither padding nor what dilation puts between elements; a library's convolution, whose text
    says less, has those, too. It is 0 if it multiplies no matrices; None if it does, and its text
    does not say how large they are.

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
    results, given = instruction.results, inside.operands(instruction)
    if not results or len(given) < 2:
        return None
    if opcode == "convolution":
        return _convolved(attributes, given[0], given[1], results[0])
    summed = _kernel(attributes, given[1]) if convolves else _contracted(attributes, given[0])
    return None if summed is None else 2 * results[0].size * summed


def _contracted(attributes: str, left: Operand) -> int | None:
    """Elements of the left operand's dimensions that are summed over."""
    found = _CONTRACTED.search(attributes) or _CONTRACTED_IN_CONFIG.search(attributes)
    if not found:
        return None
    dims = [int(d) for d in re.findall(r"\d+", found[1])]
    return (
        math.prod(left.shape[d] for d in dims) if all(d < len(left.shape) for d in dims) else None
    )


def _kernel(attributes: str, kernel: Operand) -> int | None:
    """Elements of a convolution's kernel for one output feature."""
    found = _LABELS.search(attributes)
    if not found or len(found[2]) != len(kernel.shape) or "o" not in found[2]:
        return None
    return math.prod(n for n, label in zip(kernel.shape, found[2], strict=True) if label != "o")


def _convolved(attributes: str, left: Operand, kernel: Operand, output: Operand) -> int | None:
    """Operations of a convolution; TPUs write every product as one, batches as dilated windows."""
    labels, window = _LABELS.search(attributes), _WINDOW.search(attributes)
    if not labels or [*map(len, labels.groups())] != [
        len(each.shape) for each in (left, kernel, output)
    ]:
        return None
    inputs, weights, outputs = (
        dict(zip(named, each.shape, strict=True))
        for named, each in zip(labels.groups(), (left, kernel, output), strict=True)
    )
    given = dict(_FIELD.findall(window[1])) if window else {}
    found = 2 * weights["i"] * outputs["b"] * outputs["f"]
    for k, dim in enumerate(sorted(filter(str.isdigit, inputs))):
        stride, pad, dilated, spread = (
            int(given[name].split("x")[k].partition("_")[0]) if name in given else usual
            for name, usual in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        # For each output element and kernel element the input position, which may be padding.
        at = np.arange(outputs[dim])[:, None] * stride - pad
        at = at + np.arange(weights[dim])[None] * spread
        inside = (at >= 0) & (at <= (inputs[dim] - 1) * dilated) & (at % dilated == 0)
        found *= int(inside.sum())
    return found
