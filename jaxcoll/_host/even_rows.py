"""The `IndexedSlices` of several replicas, brought to one length so that they are one array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxcoll._spmd.sparse import is_sparse


def evened(name: str, values: Mapping[int, Any], replicas: int) -> Mapping[int, Any]:
    """`values` with every IndexedSlices padded to the longest one in its place.

    Args:
      name: the kind of distributed value, for messages.
      values: the values that this process has, by replica.
      replicas: how many there are in all processes.

    Returns:
      The same values where none is sparse, or none is shorter; structures that disagree are
      left for others to refuse.

    Raises:
      ValueError: a leaf is sparse on some replicas only, or of different dense shapes; or the
        lengths differ while other processes have lengths of their own.
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
    columns = []
    for column in zip(*(leaves for leaves, _ in flat.values()), strict=True):
        where = f"leaf {jax.tree_util.keystr(column[0][0])}" if column[0][0] else "the value"
        leaves = dict(zip(values, (leaf for _, leaf in column), strict=True))
        columns.append(_evened(f"`{name}`: {where}", leaves, replicas))
    rows = zip(*columns, strict=True)
    return {i: structures[0].unflatten(row) for i, row in zip(values, rows, strict=True)}


def _evened(where: str, leaves: Mapping[int, Any], replicas: int) -> Sequence[Any]:
    sparse = {i: leaf for i, leaf in leaves.items() if is_sparse(leaf)}
    if not sparse:
        return list(leaves.values())
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
    lengths = {i: slices.indices.shape[0] for i, slices in sparse.items()}
    longest = max(lengths.values())
    if min(lengths.values()) < longest and len(sparse) < replicas:
        raise ValueError(
            f"{where} has {lengths} rows by replica, and other processes have replicas whose "
            "lengths are not known here. Pad all to one bound first, with `slices.padded(bound)`."
        )
    return [slices.padded(longest) for slices in sparse.values()]
