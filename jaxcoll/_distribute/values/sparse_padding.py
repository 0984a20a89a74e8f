"""The `IndexedSlices` of several replicas, brought to one length so that they are one array."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxcoll._distribute.values.small_facts import known_to_all
from jaxcoll._spmd.sparse import is_sparse


def evened(
    name: str, values: Mapping[int, Any], devices: tuple[jax.Device, ...]
) -> Mapping[int, Any]:
    """`values` with every IndexedSlices padded to the longest one in its place.

    Args:
      name: the kind of distributed value, for messages.
      values: the values that this process has, by replica.
      devices: one for each replica, of all processes.

    Returns:
      The same values where none is sparse, or none is shorter; structures that disagree are
      left for others to refuse. Cost: where other processes have replicas, an exchange of lengths.

    Raises:
      ValueError: a leaf is sparse on some replicas only, or of different dense shapes.
    """
    flat = {
        i: jax.tree_util.tree_flatten_with_path(value, is_leaf=is_sparse)
        for i, value in values.items()
    }
    structures = [treedef for _, treedef in flat.values()]
    if not any(is_sparse(leaf) for leaves, _ in flat.values() for _, leaf in leaves) or any(
        treedef != structures[0] for treedef in structures
    ):
        return values
    columns, sparse = [], []
    for column in zip(*(leaves for leaves, _ in flat.values()), strict=True):
        where = f"leaf {jax.tree_util.keystr(column[0][0])}" if column[0][0] else "the value"
        leaves = dict(zip(values, (leaf for _, leaf in column), strict=True))
        if _checked(f"`{name}`: {where}", leaves):
            sparse.append(len(columns))
        columns.append(list(leaves.values()))
    rows = {i: [columns[k][row] for k in sparse] for row, i in enumerate(values)}
    longest = _longest(name, rows, devices)
    for k, length in zip(sparse, longest, strict=True):
        columns[k] = [slices.padded(length) for slices in columns[k]]
    rows = zip(*columns, strict=True)
    return {i: structures[0].unflatten(row) for i, row in zip(values, rows, strict=True)}


def _longest(
    name: str, rows: Mapping[int, list[Any]], devices: tuple[jax.Device, ...]
) -> list[int]:
    """The length of the longest of all replicas' slices, for each leaf that is sparse."""
    facts = {
        i: [fact for slices in row for fact in (slices.indices.shape[0], _mark(slices))]
        for i, row in rows.items()
    }
    table = known_to_all(facts, devices, f"{name} of IndexedSlices")
    lengths, marks = table[:, ::2], table[:, 1::2]
    if (marks != marks[:1]).any():
        shapes = [slices.dense_shape for slices in next(iter(rows.values()))]
        raise ValueError(
            f"`{name}` expects the IndexedSlices of all replicas to be rows of one array; those "
            f"here have the dense_shape {', '.join(map(str, shapes))}, and other processes have "
            "others."
        )
    return lengths.max(0).tolist()


def _mark(slices: Any) -> int:
    """Short for the dense shape."""
    return zlib.crc32(repr(slices.dense_shape).encode()) >> 1


def _checked(where: str, leaves: Mapping[int, Any]) -> bool:
    """Whether a leaf is sparse, which it is on all replicas or on none."""
    sparse = {i: leaf for i, leaf in leaves.items() if is_sparse(leaf)}
    if not sparse:
        return False
    first = next(iter(sparse))
    dense = next((i for i in leaves if i not in sparse), None)
    if dense is not None:
        raise ValueError(
            f"{where} is an IndexedSlices on replica {first}, but of type "
            f"{type(leaves[dense]).__name__} on replica {dense}; it must be sparse on all replicas "
            "or dense on all. `slices.to_dense()` makes it dense."
        )
    for i, slices in sparse.items():
        slices.check(f"{where} of replica {i}")
        if slices.dense_shape != sparse[first].dense_shape:
            raise ValueError(
                f"{where} has dense_shape {slices.dense_shape} on replica {i}, "
                f"{sparse[first].dense_shape} on replica {first}; all replicas' rows must be rows "
                "of one array."
            )
    return True
