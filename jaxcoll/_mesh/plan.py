"""The plan of a reduction, made from shapes on the host, before anything is traced."""

from __future__ import annotations

import math
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcoll._mesh.clusters import topology_named, topology_world
from jaxcoll._mesh.mesh import axis_names, checked_mesh
from jaxcoll._mesh.world import mesh_world
from jaxcoll._plan.checks import is_integer
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked
from jaxcoll._plan.packs.leaves import (
    Leaf,
    check_reducible,
    dtype_of,
    flattened,
    is_array,
    travels_as,
    where,
)
from jaxcoll._plan.packs.shard_layout import Half, layout_of, plan_half
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.planner import make_plan
from jaxcoll._plan.world import World
from jaxcoll._prices.predict import predict
from jaxcoll._spmd.parts import sharded_leaves
from jaxcoll._spmd.reduce_scatter import plan_scatter
from jaxcoll._spmd.sparse import check_slices, is_sparse
from jaxcoll._wire.format import check_any_coded


def plan(
    value: Any,
    *,
    axis_size: int | tuple[int, ...] | None = None,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    options: CommunicationOptions | None = None,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    topology: str | None = None,
    collective: str = "all_reduce",
) -> Plan:
    """Return the plan of an `all_reduce`, or of a half of it, for a tree of these shapes.

    Guarantee: it is the plan that `all_reduce` carries out with the same options on the same world.

    Args:
      value: a pytree of arrays, `jax.ShapeDtypeStruct`s and IndexedSlices of either, as on one
        replica.
      axis_size: replicas, on devices of this process or of `topology`; for several axes their
        sizes, from outer to inner; or
      mesh: devices and axes. Neither: those of `jc.data_parallel` without a mesh.
      axis_name: the axis of `mesh`, or axes from outer to inner, that is reduced over.
      options: how to pack and what carries it.
      reduce_op: SUM or MEAN.
      topology: a cluster to plan for instead of the devices here, such as "h100:2x8" for two
        hosts of eight GPUs or "v5p:8x8x8" for the chips of a TPU pod along each dimension. With
        two axes and no `axis_size` they are its hosts and what each host has.
      collective: "all_reduce", "reduce_scatter", or "all_gather", that of such a tree's `Shards`.

    Returns:
      A `Plan`: print it for a table; `to_json()` for machines. Cost: nothing is compiled.

    Raises:
      ValueError: an argument is invalid, or a leaf cannot be reduced.

    Examples:
      >>> import numpy as np
      >>> grads = {"b": np.zeros(3, "f"), "w": np.zeros((2, 3), "f")}
      >>> plan(grads, axis_size=4, options=CommunicationOptions(bytes_per_pack=64)).wire_bytes
      56
      >>> print(plan(grads, topology="h100:2x8").world)
      16 × gpu, 2 processes
    """
    world = _world(topology, axis_size, mesh, axis_name)
    return plan_in(value, world, options, reduce_op, collective)


def plan_in(
    value: Any,
    world: World,
    options: CommunicationOptions | None = None,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    collective: str = "all_reduce",
) -> Plan:
    """Return the plan in a world that is known; see `plan`."""
    given, op = checked(options), ReduceOp.of(reduce_op)
    if collective == "all_reduce":
        flat = flattened(value, is_sparse)[0]
        leaves = [_leaf(path, leaf, op, world, given) for path, leaf in flat]
        check_any_coded(given.compression, leaves)
        return predict(make_plan(op, leaves, given, world))
    if collective not in get_args(Half):
        raise ValueError(
            "`collective` must be 'all_reduce', 'reduce_scatter' or 'all_gather'; got "
            f"{collective!r}."
        )
    axes = {f"axis{i}": n for i, n in enumerate(world.sizes)}
    treedef, leaves = sharded_leaves(value, axes, "plan")
    if collective == "reduce_scatter":
        return predict(plan_scatter(treedef, leaves, op, axes, world, given)[0])
    layout = layout_of(treedef, leaves, world.replicas, given.bytes_per_pack)
    return predict(plan_half("all_gather", ReduceOp.SUM, layout.packs, layout.leaves, given, world))


def _leaf(
    path: str, leaf: Any, reduce_op: ReduceOp, world: World, options: CommunicationOptions
) -> Leaf:
    indices = None
    if is_sparse(leaf):
        check_slices(leaf, f"`plan`: {where(path)}")
        leaf, indices = leaf.values, jax.dtypes.canonicalize_dtype(leaf.indices.dtype)
    elif not is_array(leaf) and not hasattr(leaf, "dtype"):
        raise ValueError(
            f"`plan`: {where(path)}: expected an array or a number, got {type(leaf).__name__}."
        )
    dtype = dtype_of(leaf)
    check_reducible(path + ".values" * (indices is not None), dtype)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    shape = tuple(np.shape(leaf))
    if indices is not None:
        return Leaf(path, shape, dtype, dtype, world.sizes, indices=indices)
    wire, format = travels_as(dtype, shape, reduce_op, world, options)
    # What comes back in another type is another kind, and has packs of its own.
    return Leaf(path, shape, dtype, wire, world.sizes, kind=dtype.name, format=format)


def _world(
    topology: str | None,
    axis_size: int | tuple[int, ...] | None,
    mesh: Mesh | None,
    axis_name: str | tuple[str, ...],
) -> World:
    cluster = None if topology is None else topology_named(topology)
    if mesh is not None and (cluster or axis_size is not None):
        other = "topology" if cluster else "axis_size"
        raise ValueError(f"`plan` takes `{other}` or `mesh`, not both.")
    if cluster is not None:
        asked = axis_size is not None
        sizes = _sizes(axis_size) if asked else cluster.sizes(len(axis_names(axis_name)))
        if math.prod(sizes) != cluster.size:
            raise ValueError(
                f"`axis_size` {axis_size!r} makes {math.prod(sizes)} replicas, but {cluster} has "
                f"{cluster.size}."
            )
        return topology_world(cluster, sizes)
    if axis_size is None:
        mesh = checked_mesh(mesh, axis_name, "plan")
        return mesh_world(mesh, {name: mesh.shape[name] for name in axis_names(axis_name)})
    kind = jax.devices()[0].device_kind if jax.default_backend() != "cpu" else ""
    return World(jax.default_backend(), _sizes(axis_size), device_kind=kind)


def _sizes(axis_size: int | tuple[int, ...]) -> tuple[int, ...]:
    sizes = axis_size if isinstance(axis_size, tuple) else (axis_size,)
    if not sizes or not all(is_integer(size) and size > 0 for size in sizes):
        raise ValueError(
            f"`axis_size` must be a positive integer, or a tuple of them; got {axis_size!r}."
        )
    return tuple(map(int, sizes))
