"""Compares replicas on the first call of each shape of a program with `jc.same` in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._collectives.check_replicas import ReplicaCheck
from jaxcoll._collectives.same import REPORTED, Claims
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.dispatch import run
from jaxcoll._step.mesh.mesh import no_mesh


def make_check(claims: Claims, mesh: Mesh, axes: tuple[str, ...]) -> Callable[[Any, Call], Any]:
    """Make a function that returns a call's result after it checked that all replicas agree.

    Every process of the mesh must call it, with the result and the call.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    replicate = jax.jit(lambda digests: digests, out_shardings=whole)

    def check_result(result: Any, call: Call) -> Any:
        jax.block_until_ready(result)
        jax.effects_barrier()
        places = sorted({place for place, _ in claims.reported})
        table = np.zeros(
            (int(np.prod([mesh.shape[a] for a in axes])), len(places), REPORTED), np.uint32
        )
        for (place, replica), row in claims.reported.items():
            table[replica, places.index(place)] = row
        claims.reported.clear()
        with no_mesh():
            rows = NamedSharding(mesh, PartitionSpec(axes))
            sharded = jax.make_array_from_callback(table.shape, rows, table.__getitem__)
            compare = dataclasses.replace(
                call, program=replicate, args=(sharded,), kwargs={}, rows=False
            )
            digests = np.asarray(run(compare))
        ReplicaCheck(digests, tuple(places), tuple(map(str, range(len(table))))).raise_if_differs()
        return result

    return check_result
