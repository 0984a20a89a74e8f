"""A second reader of compiled text, as simple as can be: it counts what stands there."""

import re
from collections import Counter

BITS = {"pred": 8, "s8": 8, "u8": 8, "s32": 32, "u32": 32, "bf16": 16, "f16": 16, "f32": 32}
OPERATION = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(([^)]*)\)"
)


def kinds_and_bytes(text):
    """Each collective's kind, how often, and the bytes of its operands in all."""
    types = dict(re.findall(r"%([\w.\-]+) = (\w+\[[\d,]*\])", text))
    kinds, nbytes = Counter(), 0
    for kind, operands in OPERATION.findall(text):
        kinds[kind] += 1
        for name in re.findall(r"%([\w.\-]+)", operands):
            dtype, dims = re.fullmatch(r"(\w+)\[([\d,]*)\]", types[name]).groups()
            size = 1
            for dim in filter(None, dims.split(",")):
                size *= int(dim)
            nbytes += size * BITS[dtype] // 8
    return kinds, nbytes
