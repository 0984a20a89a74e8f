"""Residuals in the state of an elastic run: each worker keeps the rows of its own replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxcoll._collectives.all_reduce import all_reduce
from jaxcoll._collectives.residual import is_residual
from jaxcoll._collectives.shards import Shards
from jaxcoll._plan.packs.packing import LANES
from jaxcoll._plan.packs.shard_layout import lay_out_over
from jaxcoll._step.data_parallel import data_parallel
from jaxcoll._step.mesh.mesh import no_mesh
from jaxcoll._step.mesh.placement import make_spec, place
from jaxcoll._step.step import DataParallel
from jaxcoll._train.elastic.checkpoint import copy_to_host


def find_residuals(state: Any) -> list[Shards]:
    return [x for x in jax.tree.leaves(state, is_leaf=is_residual) if is_residual(x)]


def replace_residuals(state: Any, residuals: Iterable[Any]) -> Any:
    new = iter(residuals)
    return jax.tree.map(lambda x: next(new) if is_residual(x) else x, state, is_leaf=is_residual)


def clear_residuals(state: Any) -> Any:
    """Empty the residuals in a state: the rest is equal on all workers."""
    return replace_residuals(state, (x.replace(()) for x in find_residuals(state)))


def own_rows(residual: Shards) -> Shards:
    """Copy the rows of this worker's replicas to host memory."""
    return _like([_rows_here(part) for part in residual.parts], residual)


def sum_replicas(residual: Shards) -> Shards:
    """Sum this worker's replicas into one replica's residual, in host memory."""
    rows = own_rows(residual)
    parts = [x.reshape(rows.layout.replicas, -1, LANES) for x in rows.parts]
    # In float64: a residual is what rounding has lost, and is not to be lost to it again.
    return _like([x.sum(0, dtype=np.float64).astype(x.dtype) for x in parts], residual)


def sum_at_start(name: str, residual: Shards) -> Shards:
    """Sum a residual with which all workers start; each of them must know all of it."""
    if any(_is_elsewhere(x) for x in residual.parts) and norm([residual]):
        raise ValueError(
            f"`Elastic`: state{name} is a residual that is not zero, on devices of several "
            "processes. It is not known yet which of these will train, so a part of it could be "
            "lost. Start with a new `jc.compression.residual`, and let `Elastic` restore the "
            "checkpoint."
        )
    return sum_replicas(residual)


def divide(total: Shards, workers: int, replicas: int) -> Shards:
    """Divide a sum equally among `workers`, and return this one's rows; zeros for 0 workers."""
    if not workers:
        return _like([np.zeros((replicas * len(x), LANES), x.dtype) for x in total.parts], total)
    # Only the sum of all replicas counts: it is what the next reduction adds.
    n = np.float32(workers * replicas)
    return _like([np.tile(x / n, (replicas, 1)) for x in total.parts], total)


def place_rows(rows: Shards, mesh: Mesh) -> Shards:
    with no_mesh():
        parts = place(rows.parts, NamedSharding(mesh, make_spec(rows.axes, ())))
    return _like(parts, rows)


def make_adder(residuals: Sequence[Shards]) -> DataParallel:
    """Make a step that sums the parts of each residual over all replicas, in float32."""
    mesh, axis = residuals[0].parts[0].sharding.mesh, residuals[0].axes[0]
    return data_parallel(lambda x: all_reduce("sum", x, axis), mesh=mesh, axis_name=axis)


def fetch_sums(sums: Sequence[Any], residual: Shards) -> Shards:
    """Copy a sum from the program of `make_adder` to a residual in host memory."""
    return _like([copy_to_host("", part) for part in sums], residual)


def norm(residuals: Iterable[Shards]) -> float:
    parts = [x.astype(np.float64) for residual in residuals for x in own_rows(residual).parts]
    return float(np.sqrt(sum(np.vdot(x, x) for x in parts)))


def _like(parts: Sequence[Any], like: Shards) -> Shards:
    """Make a residual like another of these parts; their rows give the number of replicas."""
    packs = like.layout.packs
    replicas = len(parts[0]) // like.layout.rows(packs[0]) if packs else 1
    layout = lay_out_over(like.layout, (replicas,))
    return dataclasses.replace(like, parts=tuple(parts), layout=layout)


def _is_elsewhere(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _rows_here(x: Any) -> np.ndarray:
    """Copy the rows of an array that this process has, in the order of the mesh."""
    if not _is_elsewhere(x):
        return copy_to_host("", x)
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])
