"""The shapes that are measured: gradients of well-known models, and two extremes."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """161 leaves, 25,557,032 elements: convolutions, and a scale and a bias for each."""
    shapes: Shapes = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            convolutions = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, 1, channels, 4 * width))
            for kernel in convolutions:
                shapes += [kernel, (kernel[-1],), (kernel[-1],)]
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def gpt2_small() -> Shapes:
    """148 leaves, 124,439,808 elements."""
    d = 768
    layer = [
        (d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,),
        (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,),
    ]  # fmt: skip
    return [(50257, d), (1024, d), *(layer * 12), (d,), (d,)]


def many_small() -> Shapes:
    """1,000 leaves of 1 to 4,096 elements, scattered by a multiplicative hash."""
    return [(1 + (i * 2654435761 % 2**32) % 4096,) for i in range(1000)]


TREES = {
    "resnet50": resnet50,
    "gpt2-small": gpt2_small,
    "many-small": many_small,
    "one-big": lambda: [(16 * 1024 * 1024,)],
    "200x1KiB": lambda: [(256,)] * 200,
}


def tree_of(name: str, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a named tree, or of a JSON file of `[{"shape": [..], "dtype": ".."}, ..]`.

    Raises:
      ValueError: there is no such tree, or the file does not hold one.
    """
    if name in TREES:
        return [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape in TREES[name]()]
    if not name.endswith(".json"):
        raise ValueError(f"no tree {name!r}: choose {', '.join(TREES)}, or a FILE.json.")
    try:
        entries = json.loads(Path(name).read_text())
        if not isinstance(entries, list) or not entries:
            raise ValueError("no list, or an empty one")
        return [
            jax.ShapeDtypeStruct(tuple(map(int, e["shape"])), np.dtype(e.get("dtype", dtype)))
            for e in entries
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{name} is no tree: expected a list of {{"shape": [..], "dtype": ".."}} '
            f"({type(error).__name__}: {error})."
        ) from None
