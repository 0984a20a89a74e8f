"""What is measured: one whole tree, reduced over all devices, in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc

AXIS = "data"

Reduce = Callable[[Any], Any]


def variants(reduce_op: str) -> dict[str, Reduce]:
    """Ways to reduce a tree, by the name the benchmark's table shows.

    "per-leaf" is what JAX users write today, and "per-leaf again" its A/A twin: the same
    program, so that what differs between the two is the noise of the run.
    """
    plain = lax.pmean if reduce_op == "mean" else lax.psum

    def per_leaf(tree: Any) -> Any:
        return jax.tree.map(lambda x: plain(x, AXIS), tree)

    def ours(**options: Any) -> Reduce:
        said = jc.CommunicationOptions(**options)
        return lambda tree: jc.all_reduce(reduce_op, tree, AXIS, options=said)

    return {
        "per-leaf": per_leaf,
        "per-leaf again": lambda tree: per_leaf(tree),
        "auto": ours(),
        "one pack": ours(bytes_per_pack=1 << 40),
        "4 MiB packs": ours(bytes_per_pack=4 << 20),
        "ring": ours(algorithm="ring"),
        "halving_doubling": ours(algorithm="halving_doubling"),
        "shuffle": ours(algorithm="shuffle"),
        "reproducible": ours(reproducible=True),
        "reproducible shuffle": ours(algorithm="shuffle", reproducible=True),
    }


def all_devices() -> Mesh:
    """One Auto axis over every device of every process."""
    return Mesh(np.array(jax.devices(), dtype=object), (AXIS,), axis_types=(AxisType.Auto,))


def row(leaf: int, spec: jax.ShapeDtypeStruct, replica: int) -> np.ndarray:
    """What one replica holds of one leaf: normal numbers, the same in every process that asks."""
    rng = np.random.default_rng([leaf, replica])
    return rng.standard_normal(spec.shape, np.float32).astype(spec.dtype)


def values(shapes: list[jax.ShapeDtypeStruct], mesh: Mesh) -> list[jax.Array]:
    """The replicas' rows of each leaf, one on each device of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return [
        jax.make_array_from_callback(
            (mesh.size, *spec.shape),
            sharding,
            lambda index, i=i, spec=spec: row(i, spec, _start(index))[None],
        )
        for i, spec in enumerate(shapes)
    ]


def _start(index: Any) -> int:
    return index[0].start or 0


def program(reduce: Reduce, mesh: Mesh) -> Any:
    """The jitted reduction of trees whose leaves have a leading replica dimension."""

    def body(tree: Any) -> Any:
        return reduce(jax.tree.map(lambda x: x[0], tree))

    rows, copies = PartitionSpec(AXIS), PartitionSpec()
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(rows,), out_specs=copies))
