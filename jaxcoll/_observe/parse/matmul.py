"""How much arithmetic an instruction's text stands for: matrix products and convolutions."""

from __future__ import annotations

import math
import re

import numpy as np

from jaxcoll._observe.parse.collective import Operand
from jaxcoll._observe.parse.hlo_text import Computation, Instruction

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_CONTRACTED_IN_CONFIG = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')  # a GPU library's
_ALL_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")  # dim_labels=b01f_01io->b01f
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)=([\w\-]+)")
_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->")
TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_PRODUCT = re.compile(r"gemm|matmul", re.IGNORECASE)
_CONVOLVES = re.compile(r"cudnn\$conv", re.IGNORECASE)


def is_matmul(line: str) -> bool:
    """Whether a line may be one; quick, because it is asked of every line."""
    return " dot(" in line or " convolution(" in line or " custom-call(" in line


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
    target = TARGET.search(attributes) if opcode == "custom-call" else None
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
    if not found or len(found[1]) != len(kernel.shape) or "o" not in found[1]:
        return None
    return math.prod(n for n, label in zip(kernel.shape, found[1], strict=True) if label != "o")


def _convolved(attributes: str, left: Operand, kernel: Operand, output: Operand) -> int | None:
    """Operations of a convolution; TPUs write every product as one, batches as dilated windows."""
    labels, window = _ALL_LABELS.search(attributes), _WINDOW.search(attributes)
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
