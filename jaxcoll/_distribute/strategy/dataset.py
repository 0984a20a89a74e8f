"""Batches on their way to the replicas, one share each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxcoll._distribute.values.per_replica import PerReplica
from jaxcoll._distribute.values.replica_axis import rows_over
from jaxcoll._mesh.mesh import no_mesh, of_this_process
from jaxcoll._mesh.placement import host_array, place


class DistributedDataset:
    """The batches of an iterable, each split over the replicas; iterate over it.

    Law: replica i gets the i-th of R equal, consecutive shares of every batch. With several
    processes each iterates over its own rows, which are split over its own replicas: the global
    batch is theirs one after another. Nothing is read ahead, and iterating again iterates over
    the source again.
    """

    def __init__(self, batches: Iterable[Any], devices: tuple[jax.Device, ...]) -> None:
        if not isinstance(batches, Iterable):
            raise ValueError(
                "`experimental_distribute_dataset` expects an iterable of batches, pytrees of "
                f"arrays; got {type(batches).__name__}."
            )
        self._batches = batches
        self._devices = devices

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            yield _split(number, batch, self._devices)


def _split(number: int, batch: Any, devices: tuple[jax.Device, ...]) -> Any:
    """One batch as a tree of `PerReplica`s."""
    here = len(of_this_process(devices))

    def shares(path: Any, leaf: Any) -> PerReplica:
        name = f"batch {number}" + (f": leaf {jax.tree_util.keystr(path)}" if path else "")
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(host_array(leaf))
            if not jax.dtypes.issubdtype(leaf.dtype, np.number) and leaf.dtype != bool:
                raise ValueError(f"{name} holds no numbers: it is an array of {leaf.dtype}.")
        if not leaf.ndim:
            raise ValueError(
                f"{name} is a scalar and has no rows to split over {here} replicas; pass what "
                "all replicas share to `run` beside the batch."
            )
        # A global array has the rows of all processes, any other those of this one.
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        replicas, rows = len(devices) if is_global else here, leaf.shape[0]
        if rows % replicas:
            raise ValueError(
                f"{name} has {rows} rows, which do not divide over {replicas} replicas ({rows} = "
                f"{replicas} × {rows // replicas} + {rows % replicas}). Drop the remainder, or pad "
                "the batch and give the padding weight 0 with `jc.WeightedLoss`."
            )
        split = leaf.reshape(replicas, rows // replicas, *leaf.shape[1:])
        return PerReplica.of(place(split, rows_over(devices)))

    with no_mesh():
        return jax.tree_util.tree_map_with_path(shares, batch)
