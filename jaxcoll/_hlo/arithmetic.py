"""Read the matrix products of a compiled program, and the work that overlaps each collective."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import re
from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxcoll._hlo.calls import Bodies, Call, Item, find_containing
from jaxcoll._hlo.chains import Chains
from jaxcoll._hlo.collective import Collective, Matmul, Meanwhile, Operand
from jaxcoll._hlo.hlo_text import PRODUCTS, Computation, Instruction, Module

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_CONTRACTED_IN_CONFIG = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')  # a GPU library's
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")  # dim_labels=b01f_01io->b01f
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)=([\w\-]+)")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_PRODUCT = re.compile(r"gemm|matmul", re.IGNORECASE)
_CONVOLVES = re.compile(r"cudnn\$conv", re.IGNORECASE)
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


class Arithmetic:
    """The arithmetic of a module, added to the collectives and calls of its computations."""

    def __init__(self, module: Module, bodies: Bodies, chains: Chains) -> None:
        self._module, self._bodies, self._chains = module, bodies, chains
        self._communicating = find_containing(bodies, module, (Collective,))
        # The work at each line of a computation, without and with the computations it calls
        self._known: dict[str, tuple[dict[int, Work], dict[int, Work]]] = {}
        self.unread: list[str] = []  # custom calls that may communicate
        self.unbounded: list[str] = []  # loops with collectives and no known trip count
        self.notes: list[str] = []  # products of unknown size

    def bodies(self) -> Bodies:
        """Add matrix products to the bodies, and the work that overlaps.

        Leaves out calls that are part of one instruction, such as a fusion, and do not communicate.
        """
        return {name: self._body(name) for name in self._bodies}

    def _body(self, name: str) -> list[Item]:
        inside, pairs, own = self._module.computations[name], self._pairs(name), self._work(name)[0]
        items: list[Item] = [
            Matmul(
                inside.parse(site).name, own[site.at].flops, at=site.at, dtype=own[site.at].dtype
            )
            for site in inside.sites
            if site.at in own
        ]
        between = self._between(name) if pairs else None
        for item in self._bodies[name]:
            if isinstance(item, Call):
                if self._is_arithmetic(item):
                    continue
                if item.is_loop and item.trips is None and item.callee in self._communicating:
                    self.unbounded.append(item.site)
                is_async = item.site in pairs and item.callee in self._communicating
            else:
                is_async = isinstance(item, Collective) and item.is_async
            site = item.site if isinstance(item, Call) else item.name
            if is_async and between and site in pairs:
                at, until = pairs[site]
                meanwhile = between(at, until)
                item = dataclasses.replace(
                    item, is_async=True, at=at, until=until, meanwhile=meanwhile
                )
            items.append(item)
        return sorted(items, key=lambda item: item.at)

    def _between(self, name: str) -> Callable[[int, int], Meanwhile]:
        """Make a function of two lines that adds up the work between them."""
        whole = sorted(self._work(name)[1].items())
        lines = [at for at, _ in whole]
        matmuls = [0, *itertools.accumulate(work.matmuls for _, work in whole)]
        operations = [0, *itertools.accumulate(work.flops for _, work in whole)]
        # Constants, tuples and the ends of other pairs take no time.
        busy = (not idle for idle in self._module.computations[name].idle)
        before = array("I", itertools.accumulate(busy, initial=0))

        def between(at: int, until: int) -> Meanwhile:
            until = max(until, at + 1)
            first, last = bisect.bisect_right(lines, at), bisect.bisect_left(lines, until)
            return Meanwhile(
                before[until] - before[at + 1],
                matmuls[last] - matmuls[first],
                operations[last] - operations[first],
            )

        return between

    def _is_arithmetic(self, call: Call) -> bool:
        return call.is_part and call.callee not in self._communicating

    def _work(self, name: str) -> tuple[dict[int, Work], dict[int, Work]]:
        """Find the work at each line, without and with the computations called there.

        The work of a fusion is that of its parts; of a conditional, the largest branch counts.
        """
        if name not in self._known:
            # Empty while it is computed, in case a computation calls itself.
            self._known[name] = {}, {}
            own, called = self._direct_work(name), {}
            for call in self._bodies.get(name, ()):
                if not isinstance(call, Call) or call.callee not in self._bodies:
                    continue
                turns = 1 if call.trips is None else call.trips
                once = functools.reduce(Work.plus, self._work(call.callee)[1].values(), Work())
                work = Work().plus(once, turns)
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
        inside = self._module.computations[name]
        for site in inside.sites:
            if site.opcode not in PRODUCTS:
                continue
            instruction = inside.parse(site)
            target = _TARGET.search(instruction.attributes)
            if target and not (name in self._chains and target[1].startswith("AsyncCollective")):
                # A backend_config may be long: search it only if it has that field.
                config = instruction.attributes.partition("backend_config=")[2]
                if _MAY_SEND.search(target[1]) or (
                    "has_comm" in config and _MAY_SEND.search(config)
                ):
                    self.unread.append(
                        f"custom call {instruction.name!r} ({target[1]}) may communicate, which "
                        "is not counted."
                    )
            operations = count_flops(instruction, inside)
            if operations is None:
                self.notes.append(
                    f"{instruction.name!r} multiplies matrices of unknown sizes: its "
                    "floating-point operations are not counted."
                )
            if operations != 0:
                operands = inside.operands(instruction)
                works[site.at] = Work(1, operations or 0, operands[0].dtype if operands else "")
        if name != self._module.entry:
            inside.forget()  # a large program has thousands of small ones
        return works

    def _pairs(self, name: str) -> dict[str, tuple[int, int]]:
        """Find the lines where each asynchronous operation begins and ends, by its start's name.

        A start without operands only prepares: the operation begins with its update.
        """
        inside = self._module.computations[name]
        pairs: dict[str, tuple[int, int]] = {}
        chains: dict[str, str] = {}  # the start of a chain of fusions
        for site in inside.sites:
            if site.opcode == "fusion":
                instruction = inside.parse(site)
                for _, callee in instruction.calls:
                    for chain, part in self._chains.get(callee, {}).values():
                        start = chains.setdefault(chain, instruction.name)
                        at, _ = pairs.get(start, (site.at, site.at))
                        pairs[start] = (at, site.at if part == "Done" else at)
            elif site.opcode.endswith("-start") or site.opcode == "send":
                pairs[inside.parse(site).name] = (site.at, site.at)
        for site, _, start in inside.ends():
            at, _ = pairs.get(start, (site.at, site.at))
            is_update = site.opcode.endswith("-update")
            if is_update and start in inside and not inside[start].operands:
                at = site.at
            pairs[start] = (at, site.at)
        return pairs


def count_flops(instruction: Instruction, inside: Computation) -> int | None:
    """Count the floating-point operations of an instruction.

    Multiplications and additions count separately: a product with N output elements that sums over
    K terms has 2·N·K. A convolution has 2 for each pair of an output element and a kernel element
    that reads an element of the input, and none for padding and the zeros of dilation. For a
    library's convolution, these zeros count, because its text says less. Returns 0 if the
    instruction multiplies no matrices, None if it does but their sizes are unknown.

    Examples:
      >>> from jaxcoll._hlo.hlo_text import parse_instruction
      >>> text = "  %d = f32[4,6] dot(f32[4,5] %a, f32[5,6] %b), lhs_contracting_dims={1}"
      >>> count_flops(parse_instruction(text), Computation(""))
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
        return _count_convolution(attributes, operands[0], operands[1], results[0])
    terms = _count_terms(attributes, operands[0], operands[1] if convolves else None)
    return None if terms is None else 2 * results[0].size * terms


def _count_terms(attributes: str, left: Operand, kernel: Operand | None) -> int | None:
    """Count the terms of an element: of a product, or of a convolution; None if not known."""
    if kernel is not None:
        labels = _LABELS.search(attributes)
        if not labels or len(labels[2]) != len(kernel.shape) or "o" not in labels[2]:
            return None
        return math.prod(n for n, x in zip(kernel.shape, labels[2], strict=True) if x != "o")
    if not (match := _CONTRACTED.search(attributes) or _CONTRACTED_IN_CONFIG.search(attributes)):
        return None
    dims = [int(d) for d in re.findall(r"\d+", match[1])]
    known = all(d < len(left.shape) for d in dims)
    return math.prod(left.shape[d] for d in dims) if known else None


def _count_convolution(
    attributes: str, left: Operand, kernel: Operand, output: Operand
) -> int | None:
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
    # For each image and output feature, and below for each pair of places, a sum over the kernel's
    # input features (fewer than the image's if these are in groups).
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
