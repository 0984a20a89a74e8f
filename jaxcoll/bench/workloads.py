"""The shapes that are measured: gradients of known models, two extremes, and single arrays."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import OrderedDict
from pathlib import Path

import jax
import numpy as np

from jaxcoll.bench.naming import spelled

Shapes = dict[str, tuple[int, ...]]
"""Leaves by their names, in the order of the tree."""


def resnet50() -> Shapes:
    """161 leaves, 25,557,032 elements: convolutions, and a scale and a bias for each."""
    kernels: Shapes = {"conv1": (7, 7, 3, 64)}
    channels = 64
    for k, (width, blocks) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True), 1):
        for block in range(blocks):
            at = f"layer{k}.{block}"
            kernels[f"{at}.conv1"] = (1, 1, channels, width)
            kernels[f"{at}.conv2"] = (3, 3, width, width)
            kernels[f"{at}.conv3"] = (1, 1, width, 4 * width)
            if block == 0:
                kernels[f"{at}.shortcut"] = (1, 1, channels, 4 * width)
            channels = 4 * width
    shapes: Shapes = {}
    for name, kernel in kernels.items():
        shapes |= {name: kernel, f"{name}.scale": kernel[-1:], f"{name}.bias": kernel[-1:]}
    return {**shapes, "out": (2048, 1000), "out.bias": (1000,)}


def gpt2_small() -> Shapes:
    """148 leaves, 124,439,808 elements."""
    d = 768
    layer = {
        "norm1.scale": (d,), "norm1.bias": (d,), "qkv": (d, 3 * d), "qkv.bias": (3 * d,),
        "attention": (d, d), "attention.bias": (d,), "norm2.scale": (d,), "norm2.bias": (d,),
        "up": (d, 4 * d), "up.bias": (4 * d,), "down": (4 * d, d), "down.bias": (d,),
    }  # fmt: skip
    layers = {f"layer{k}.{name}": shape for k in range(12) for name, shape in layer.items()}
    ends = {"norm.scale": (d,), "norm.bias": (d,)}
    return {"tokens": (50257, d), "positions": (1024, d), **layers, **ends}


TREES = {
    "resnet50": resnet50,
    "gpt2-small": gpt2_small,
    # Leaves of 1 to 4,096 elements, scattered by a multiplicative hash.
    "many-small": lambda: {str(i): (1 + (i * 2654435761 % 2**32) % 4096,) for i in range(1000)},
    "one-big": lambda: {"all": (16 * 1024 * 1024,)},
    "200x1KiB": lambda: {str(i): (256,) for i in range(200)},
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A tree or an array to reduce."""

    name: str  # of the tree, or the size of the array
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # shapes and dtypes on one replica
    is_size: bool = False  # whether it is one of several sizes, rather than a tree
    names: tuple[str, ...] = ()  # of the leaves; (): their numbers

    @property
    def tree(self) -> OrderedDict[str, jax.ShapeDtypeStruct]:
        """The leaves by their names, in their order, which a dict of JAX would not keep."""
        names = self.names or tuple(map(str, range(len(self.leaves))))
        return OrderedDict(zip(names, self.leaves, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes on one replica (S)."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.leaves)


def array_of(nbytes: int, dtype: str) -> Workload:
    """One array of so many bytes."""
    size, rest = divmod(nbytes, _dtype(dtype).itemsize)
    if rest:
        raise ValueError(f"--sizes: {nbytes} bytes are not a whole number of elements of {dtype}.")
    leaf = jax.ShapeDtypeStruct((size,), _dtype(dtype))
    return Workload(spelled(nbytes), (leaf,), is_size=True)


def tree_of(name: str, dtype: str) -> Workload:
    """One of `TREES`, or that of a .json file of `[{"shape": .., "dtype": .., "name": ..}, ..]`."""
    default = _dtype(dtype)
    if name in TREES:
        shapes = TREES[name]()
        leaves = (jax.ShapeDtypeStruct(shape, default) for shape in shapes.values())
        return Workload(name, tuple(leaves), names=tuple(shapes))
    if not name.endswith(".json"):
        raise ValueError(f"no tree {name!r}: choose {', '.join(TREES)}, or a FILE.json.")
    try:
        entries = json.loads(Path(name).read_text())
        if not isinstance(entries, list) or not entries:
            raise ValueError("not a list, or an empty one")
        leaves = (
            jax.ShapeDtypeStruct(_shape(e["shape"]), _dtype(e.get("dtype", dtype))) for e in entries
        )
        names = tuple(str(e.get("name", k)) for k, e in enumerate(entries))
        if len(set(names)) < len(names):
            raise ValueError("two leaves of one name")
        return Workload(Path(name).stem, tuple(leaves), names=names)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{name} is not a tree: expected a list of {{"shape": [..], "dtype": ".."}} '
            f"({type(error).__name__}: {str(error).rstrip('.')})."
        ) from None


def _shape(sizes: list[int]) -> tuple[int, ...]:
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(f"a shape of {sizes}")
    return tuple(sizes)


def _dtype(name: str) -> np.dtype:
    try:
        dtype = np.dtype(name)
        held = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        raise ValueError(
            f"no dtype {name!r}: expected one such as float32, bfloat16, float16 or int32."
        ) from None
    if held != dtype:
        raise ValueError(f"JAX holds {dtype} as {held}: ask for that, or set JAX_ENABLE_X64=1.")
    return dtype
