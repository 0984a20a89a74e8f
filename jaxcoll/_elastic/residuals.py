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
from jaxcoll._elastic.checkpoint import on_host
from jaxcoll._mesh.mesh import no_mesh
from jaxcoll._mesh.placement import place, spec_of
from jaxcoll._plan.packs.packing import LANES
from jaxcoll._plan.packs.shard_layout import laid_over
from jaxcoll._step.data_parallel import DataParallel, data_parallel


def residuals_in(state: Any) -> list[Shards]:
    """Return all residuals in a state, in order."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_residual) if is_residual(x)]


def with_residuals(state: Any, residuals: Iterable[Any]) -> Any:
    """Return the state with its residuals replaced by these, in order."""
    new = iter(residuals)
    return jax.tree.map(lambda x: next(new) if is_residual(x) else x, state, is_leaf=is_residual)


def without_residuals(state: Any) -> Any:
    """Return the state with empty residuals: the part that is equal on all workers."""
    return with_residuals(state, (x.replace(()) for x in residuals_in(state)))


def own_rows(residual: Shards) -> Shards:
    """Return the residual of this worker's replicas only, in host memory."""
    return _like([_rows_here(part) for part in residual.parts], residual)


def summed(residual: Shards) -> Shards:
    """Return the sum over this worker's replicas, as one replica's residual, in host memory."""
    rows = own_rows(residual)
    parts = [x.reshape(rows.layout.replicas, -1, LANES) for x in rows.parts]
    return _like([x.sum(0, dtype=np.float64).astype(x.dtype) for x in parts], residual)


def at_start(name: str, residual: Shards) -> Shards:
    """Return the sum of a residual with which all workers start; each of them must know it."""
    if any(_is_elsewhere(x) for x in residual.parts) and norm([residual]):
        raise ValueError(
            f"`Elastic`: state{name} is a residual that is not zero, on devices of several "
            "processes. It is not known yet which of these will train, so a part of it could be "
            "lost. Start with a new `jc.compression.residual`, and let `Elastic` restore the "
            "checkpoint."
        )
    return summed(residual)


def divided(total: Shards, workers: int, replicas: int) -> Shards:
    """Divide a sum equally among `workers`, and return this one's rows; zeros for 0 workers."""
    if not workers:
        return _like([np.zeros((replicas * len(x), LANES), x.dtype) for x in total.parts], total)
    n = np.float32(workers * replicas)
    return _like([np.tile(x / n, (replicas, 1)) for x in total.parts], total)


def placed(rows: Shards, mesh: Mesh) -> Shards:
    """Return the residual of all workers' replicas on a mesh, from this worker's rows."""
    with no_mesh():
        parts = place(rows.parts, NamedSharding(mesh, spec_of(rows.axes, ())))
    return _like(parts, rows)


def adder(residuals: Sequence[Shards]) -> DataParallel:
    """Return a step that sums the parts of each residual over all replicas, in float32."""
    mesh, axis = residuals[0].parts[0].sharding.mesh, residuals[0].axes[0]
    return data_parallel(lambda x: all_reduce("sum", x, axis), mesh=mesh, axis_name=axis)


def in_host_memory(sums: Sequence[Any], residual: Shards) -> Shards:
    """Return a sum from the program of `adder` as a residual in host memory."""
    return _like([on_host("", part) for part in sums], residual)


def norm(residuals: Iterable[Shards]) -> float:
    """Return the norm of the residuals of this worker's replicas."""
    parts = [x.astype(np.float64) for residual in residuals for x in own_rows(residual).parts]
    return float(np.sqrt(sum(np.vdot(x, x) for x in parts)))


def _like(parts: Sequence[Any], like: Shards) -> Shards:
    """Return a residual like another, with these parts; their rows give the number of replicas."""
    packs = like.layout.packs
    replicas = len(parts[0]) // like.layout.rows(packs[0]) if packs else 1
    layout = laid_over(like.layout, (replicas,))
    return dataclasses.replace(like, parts=tuple(parts), layout=layout)


def _is_elsewhere(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _rows_here(x: Any) -> np.ndarray:
    """Return the rows of an array that this process has, in the order of the mesh."""
    if not _is_elsewhere(x):
        return on_host("", x)
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])
