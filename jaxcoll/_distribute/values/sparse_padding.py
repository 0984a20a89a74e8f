"""The `IndexedSlices` of several replicas, padded to one length so that they are one array."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxcoll._distribute.values.replica_axis import known_to_all
from jaxcoll._plan.packs.leaves import where
from jaxcoll._spmd.sparse import is_sparse


def padded_alike(
    name: str, values: Mapping[int, Any], devices: tuple[jax.Device, ...]
) -> Mapping[int, Any]:
    """`values` with every IndexedSlices padded to the longest one in its place.

    Returns:
      The same values where none is sparse; structures that disagree are left for others to
      refuse. Cost: where other processes have replicas, an exchange of lengths.
    """
    first = next(iter(values.values()), None)
    flat, treedef = jax.tree_util.tree_flatten_with_path(first, is_leaf=is_sparse)
    rows = {i: jax.tree.leaves(value, is_leaf=is_sparse) for i, value in values.items()}
    alike = all(jax.tree.structure(v, is_leaf=is_sparse) == treedef for v in values.values())
    if not alike or not any(is_sparse(leaf) for row in rows.values() for leaf in row):
        return values
    sparse = []
    for k, (path, _) in enumerate(flat):
        leaf = where(jax.tree_util.keystr(path))
        if _checked(f"`{name}`: {leaf}", {i: row[k] for i, row in rows.items()}):
            sparse.append(k)
    lengths = _longest(name, {i: [row[k] for k in sparse] for i, row in rows.items()}, devices)
    for row in rows.values():
        for k, length in zip(sparse, lengths, strict=True):
            row[k] = row[k].padded(length)
    return {i: treedef.unflatten(row) for i, row in rows.items()}


def _longest(
    name: str, rows: Mapping[int, list[Any]], devices: tuple[jax.Device, ...]
) -> list[int]:
    """The length of the longest of all replicas' slices, for each leaf that is sparse."""
    facts = {
        i: [fact for slices in row for fact in (slices.indices.shape[0], _shape_hash(slices))]
        for i, row in rows.items()
    }
    table = known_to_all(facts, devices, f"{name} of IndexedSlices")
    lengths, hashes = table[:, ::2], table[:, 1::2]
    if (hashes != hashes[:1]).any():
        shapes = [slices.dense_shape for slices in next(iter(rows.values()))]
        raise ValueError(
            f"`{name}` expects the IndexedSlices of all replicas to be rows of one array; those "
            f"here have the dense_shape {', '.join(map(str, shapes))}, and other processes have "
            "others."
        )
    return lengths.max(0).tolist()


def _shape_hash(slices: Any) -> int:
    """31 bits of the dense shape, for a table of 32-bit integers."""
    return zlib.crc32(repr(slices.dense_shape).encode()) >> 1


def _checked(name: str, leaves: Mapping[int, Any]) -> bool:
    """Whether a leaf is sparse, which it is on all replicas or on none."""
    sparse = {i: leaf for i, leaf in leaves.items() if is_sparse(leaf)}
    if not sparse:
        return False
    first = next(iter(sparse))
    dense = next((i for i in leaves if i not in sparse), None)
    if dense is not None:
        raise ValueError(
            f"{name} is an IndexedSlices on replica {first}, but of type "
            f"{type(leaves[dense]).__name__} on replica {dense}; it must be sparse on all replicas "
            "or dense on all. `slices.to_dense()` makes it dense."
        )
    for i, slices in sparse.items():
        slices.check(f"{name} of replica {i}")
        if slices.dense_shape != sparse[first].dense_shape:
            raise ValueError(
                f"{name} has dense_shape {slices.dense_shape} on replica {i}, "
                f"{sparse[first].dense_shape} on replica {first}; all replicas' rows must be rows "
                "of one array."
            )
    return True
