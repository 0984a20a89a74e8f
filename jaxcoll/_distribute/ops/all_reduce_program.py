"""The compiled all-reduce behind every cross-device op that has one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica
from jaxcoll._mesh.world import mesh_scope
from jaxcoll._plan.all_reduce_spec import first_that_takes
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.packing import PackingRule
from jaxcoll._spmd import reduce
from jaxcoll._spmd.sparse import is_sparse


@dataclasses.dataclass(frozen=True)
class Route:
    """How the arrays of some sizes are reduced.

    Attributes:
      options: what carries them, and how they are packed where `packing` is None.
      packing: a rule that stands whatever the options say.
      limit: bytes of the largest array it is for; -1: any.
    """

    options: CommunicationOptions = CommunicationOptions()
    packing: PackingRule | None = None
    limit: int = -1


@functools.lru_cache(maxsize=256)
def all_reduce_program(
    mesh: Mesh, reduce_op: ReduceOp, routes: tuple[Route, ...]
) -> Callable[[list[PerReplica | Mirrored]], list[Mirrored]]:
    """The all-reduce of a list of values over the same devices, compiled once for each shape.

    Law: every array takes the first route whose limit it does not exceed (the last one has none);
    those of one route are packed together; all come back in the order and structure they had.
    """
    axes = tuple(mesh.axis_names)
    scope = mesh_scope(mesh)

    def reduced(values: list[PerReplica | Mirrored]) -> list[Mirrored]:
        local = [v.local(v.tree) for v in values]
        leaves, treedef = jax.tree.flatten(local, is_leaf=is_sparse)
        taken = [_route_of(leaf, routes) for leaf in leaves]
        results: dict[int, Any] = {}
        for k, route in enumerate(routes):
            mine = [leaf if taker == k else None for leaf, taker in zip(leaves, taken, strict=True)]
            sums = reduce.all_reduce(
                reduce_op,
                treedef.unflatten(mine),  # so that messages have the leaves' own names
                axes,
                scope=dataclasses.replace(scope, options=route.options),
                invariant="replicated",
                packing=route.packing,
            )
            members = [i for i, taker in enumerate(taken) if taker == k]
            sums = jax.tree.leaves(sums, is_leaf=is_sparse)
            results.update(zip(members, sums, strict=True))
        tree = treedef.unflatten([results[i] for i in range(len(leaves))])
        return [Mirrored.of(total) for total in tree]

    def batch_reduce(values: list[PerReplica | Mirrored]) -> list[Mirrored]:
        specs = [PartitionSpec() if v.replicated else PartitionSpec(axes) for v in values]
        return jax.shard_map(
            reduced, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=True
        )(values)

    return jax.jit(batch_reduce)


def _route_of(leaf: Any, routes: tuple[Route, ...]) -> int:
    array = leaf.values if is_sparse(leaf) else leaf
    return first_that_takes((r.limit for r in routes), array.size * array.dtype.itemsize)
