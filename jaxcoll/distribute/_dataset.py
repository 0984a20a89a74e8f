"""Batches and values of replicas, made into values over all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._plan.packs.leaves import flatten_with_paths
from jaxcoll._step.mesh.mesh import local_positions, no_mesh
from jaxcoll._step.mesh.placement import host_array, place
from jaxcoll.distribute._assemble import assemble
from jaxcoll.distribute._per_replica import PerReplica, Uneven, is_distributed
from jaxcoll.distribute._replica_axis import rows_over

_CALLER = "experimental_distribute_dataset"


class DistributedDataset:
    """An iterable of batches, each split over the replicas.

    See `MirroredStrategy.experimental_distribute_dataset`. Iterating again iterates over the source
    again.
    """

    def __init__(self, batches: Iterable[Any], devices: tuple[jax.Device, ...]) -> None:
        if not isinstance(batches, Iterable):
            what = "an iterable of batches, pytrees of arrays"
            raise ValueError(f"`{_CALLER}` expects {what}; got {type(batches).__name__}.")
        self._batches = batches
        self._devices = devices

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            with no_mesh():
                shares = _split(number, batch, self._devices)
            yield shares


def distribute_parts(
    caller: str, values: Mapping[int, Any], devices: tuple[jax.Device, ...]
) -> Any:
    """Make a tree with a `PerReplica` for each leaf, or an `Uneven` where shapes differ.

    `values` are the trees of this process's replicas. All processes exchange shapes, so that each
    leaf is of one kind on all of them.
    """
    tree = assemble(caller, devices, values.__getitem__, rows=True, uneven=Uneven._wrap)
    return jax.tree.map(
        lambda leaf: leaf if is_distributed(leaf) else PerReplica._wrap(leaf, devices),
        tree,
        is_leaf=is_one_value,
    )


def _split(number: int, batch: Any, devices: tuple[jax.Device, ...]) -> Any:
    """Split one batch into `PerReplica`s, or into `Uneven`s where shares differ."""
    here = local_positions(devices)
    flat, treedef = flatten_with_paths(batch)
    whole: dict[str, PerReplica] = {}
    pieces: dict[int, dict[str, Any]] = {i: {} for i in here}
    for path, leaf in flat:
        name = f"batch {number}" + (f": leaf {path}" if path else "")
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(host_array(leaf))
            if not jax.dtypes.issubdtype(leaf.dtype, np.number) and leaf.dtype != bool:
                raise ValueError(f"{name} holds no numbers: it is an array of {leaf.dtype}.")
        if not leaf.ndim:
            advice = "pass what all replicas share to `run`"
            raise ValueError(f"{name} is a scalar and has no rows to split; {advice}.")
        # A global array has the rows of all processes, any other array those of this process.
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if is_global or (len(here) == len(devices) and not leaf.shape[0] % len(here)):
            if isinstance(leaf, jax.Array):
                leaf = place(leaf, rows_over(devices))  # only then a reshape moves nothing
            share = leaf.shape[0] // len(devices)
            split = leaf.reshape(len(devices), share, *leaf.shape[1:])
            whole[path] = PerReplica._wrap(place(split, rows_over(devices)), devices)
            continue
        if isinstance(leaf, jax.Array):
            leaf = jax.device_put(leaf, SingleDeviceSharding(devices[here[0]]))
        share, rest = divmod(leaf.shape[0], len(here))
        for k, i in enumerate(here):
            start = k * share + min(k, rest)
            pieces[i][path] = leaf[start : start + share + (k < rest)]
    own = distribute_parts(_CALLER, pieces, devices) if any(pieces.values()) else {}
    return treedef.unflatten([{**whole, **own}[path] for path, _ in flat])


def is_one_value(node: Any) -> bool:
    """A leaf of a tree of values is one over replicas, or an `IndexedSlices`."""
    return is_distributed(node) or is_sparse(node)
