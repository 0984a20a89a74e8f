"""Read replica groups in all notations that compilers print."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable

import numpy as np

from jaxcoll._hlo.collective import Groups

_LISTED = re.compile(r"\{((?:\{[\d,\s]*\},?\s*)*)\}")  # {{0,1},{2,3}}
_COUNTED = re.compile(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")  # [2,4]<=[4,2]T(1,0)
_ON_MESH = re.compile(  # mesh['a'=2,'b'=4] {'b'}
    r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}"
)
_NOTATIONS = (_LISTED, _COUNTED, _ON_MESH)
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")  # [4,2]T(1,0)
_AXIS = re.compile(r"'?([^',=:]+)'?=(\d+)")  # 'a'=2
_AXIS_REF = re.compile(r"'?([^',=:]+)'?(?::\((\d+)\)(\d+))?")  # 'a', or 'a':(2)4 for a part of it


def read_groups(text: str) -> Groups:
    """Parse the groups at the beginning of `text`; () for `{}`, a single group of all."""
    listed = next(filter(None, (notation.match(text) for notation in _NOTATIONS)), None)
    groups = None if listed is None else _parse_groups(listed[0])
    if groups is None:
        raise ValueError(
            "expected replica groups as {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'a'}; got "
            f"{text[:60]!r}: it is newer than this version of jaxcoll, or the text is damaged."
        )
    return groups


@functools.lru_cache(maxsize=256)  # a program repeats a few groups thousands of times
def _parse_groups(text: str) -> Groups | None:
    if listed := _LISTED.fullmatch(text):
        return tuple(read_numbers(group) for group in re.findall(r"\{([\d,\s]*)\}", listed[1]))
    if counted := _COUNTED.fullmatch(text):
        return list_rows(_read_order(counted[2]).reshape(read_numbers(counted[1])))
    if on_mesh := _ON_MESH.fullmatch(text):
        axes = [_AXIS.fullmatch(axis.strip()) for axis in on_mesh[1].split(",")]
        refs = [_AXIS_REF.fullmatch(ref.strip()) for ref in on_mesh[3].split(",")]
        if all(axes) and all(refs):
            return _group_mesh(
                {axis[1]: int(axis[2]) for axis in axes if axis},
                _read_order(on_mesh[2]) if on_mesh[2] else None,
                [(r[1], int(r[2] or 1), int(r[3]) if r[3] else None) for r in refs if r],
            )
    return None


def _group_mesh(
    sizes: dict[str, int], devices: np.ndarray | None, axes: Iterable[tuple[str, int, int | None]]
) -> Groups:
    """Group the devices of a mesh that differ only along `axes`, in the order of `axes`.

    Each axis is (name, pre, size): the part of `size` (None: all) after parts of product `pre`.

    Raises:
      ValueError: the mesh has no such axis, or the part does not divide it.
    """
    spans = []
    for name, pre, size in axes:
        if name not in sizes or sizes[name] % (pre * (size or 1)):
            raise ValueError(
                f"replica groups over axis {name!r} (part {pre}:{size}) of a mesh with {sizes}: "
                "no such axis, or the part does not divide it."
            )
        spans.append((name, pre, pre * size if size else sizes[name]))
    # Cut each axis wherever a part of it begins or ends; `pieces` are the resulting factors.
    pieces: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        edges = {1, size}.union(*({a, b} for axis, a, b in spans if axis == name))
        pieces += [(name, a, b) for a, b in zip(sorted(edges), sorted(edges)[1:], strict=False)]
    # Move the chosen pieces to the last dimensions of the mesh: each row is then a group.
    chosen = [
        k
        for axis, low, high in spans
        for k, (name, a, b) in enumerate(pieces)
        if name == axis and low <= a and b <= high
    ]
    rest = [k for k in range(len(pieces)) if k not in chosen]
    grid = np.arange(math.prod(sizes.values())) if devices is None else devices
    grid = grid.reshape([b // a for _, a, b in pieces]).transpose(rest + chosen)
    return list_rows(grid.reshape(-1, math.prod(grid.shape[len(rest) :])))


def find_groups(kind: str, attributes: str, replicas: int, partitions: int) -> Groups:
    """Find the device groups in a collective's attributes.

    XLA numbers devices in three ways, which two attributes distinguish. With a channel, groups are
    of partitions instead of replicas; with global ids, they number all devices, replica by
    replica. For a collective-permute, returns its (source, target) pairs.
    """
    _, name, text = attributes.partition(
        "source_target_pairs=" if kind == "collective-permute" else "replica_groups="
    )
    listed = read_groups(text) if name else ()
    if kind == "collective-permute":
        return listed
    if "use_global_device_ids=true" in attributes:
        return listed or (tuple(range(replicas * partitions)),)
    has_channel = "channel_id=" in attributes
    if has_channel and kind in ("all-reduce", "all-gather", "reduce-scatter"):
        # Groups of replicas, each with all of its partitions.
        return tuple(
            tuple(r * partitions + p for r in group for p in range(partitions))
            for group in listed or (tuple(range(replicas)),)
        )
    return listed or (tuple(range(partitions if has_channel else replicas)),)


def count_group(kind: str, groups: Groups) -> int:
    """Count the devices of the largest group; for a collective-permute, all that take part."""
    if kind == "collective-permute":
        return len({device for pair in groups if len(set(pair)) > 1 for device in pair})
    return max(map(len, groups))


def list_rows(rows: np.ndarray) -> Groups:
    return tuple(map(tuple, rows.tolist()))


def read_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.rstrip(", ").split(","))) if text.strip() else ()


def _read_order(text: str) -> np.ndarray:
    """Parse device numbers: a list (`3,1,2,0`) or an iota notation (`[4,2]T(1,0)`)."""
    counted = _ORDER.fullmatch(text)
    if counted is None:
        return np.array(read_numbers(text))
    shape = read_numbers(counted[1])
    order = read_numbers(counted[2]) if counted[2] else tuple(range(len(shape)))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1)
