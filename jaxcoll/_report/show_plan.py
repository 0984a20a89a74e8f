"""`plan`: the plan of a collective, made from shapes on the host without tracing."""

from __future__ import annotations

import math
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcoll._collectives.parts import describe_tree
from jaxcoll._collectives.reduce_scatter import plan_scatter
from jaxcoll._collectives.sparse import check_slices, is_sparse
from jaxcoll._compression.format import check_any_coded
from jaxcoll._plan.checks import is_integer
from jaxcoll._plan.choose import make_plan
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import (
    Leaf,
    check_reducible,
    choose_wire,
    dtype_or_none,
    flatten_with_paths,
    is_array,
    make_leaf,
    where,
)
from jaxcoll._plan.packs.shard_layout import Half, lay_out, plan_half
from jaxcoll._plan.world import World
from jaxcoll._report.cost.predict import predict
from jaxcoll._report.shown_plan import Plan
from jaxcoll._step.mesh.clusters import topology_named, topology_world
from jaxcoll._step.mesh.mesh import axis_names, check_mesh
from jaxcoll._step.mesh.world import mesh_world


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
    """Return the plan of an `all_reduce`, or of one of its halves, for a tree of these shapes.

    Guarantee: `all_reduce` with the same options on the same devices executes this plan.

    Args:
      value: a pytree of arrays, `jax.ShapeDtypeStruct`s and IndexedSlices of either, with the
        shapes on one replica.
      axis_size: number of replicas, on devices of this process or of `topology`; for several axes,
        a tuple of sizes from outer to inner.
      mesh: devices and axes, instead of `axis_size`. With neither, as in `jc.data_parallel`.
      axis_name: the axis of `mesh` to reduce over, or axes from outer to inner.
      options: how to pack and which collectives to use.
      reduce_op: SUM or MEAN.
      topology: a cluster to plan for instead of the local devices, such as "h100:2x8" for two hosts
        of eight GPUs, or "v5p:8x8x8" for the chips of a TPU pod along each dimension. Two axes
        without `axis_size` are its hosts and the devices of each host.
      collective: "all_reduce", "reduce_scatter", or "all_gather" of the `Shards` of such a tree.

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
    """Return the plan in this world; see `plan`."""
    options, op = check_options(options), ReduceOp.of(reduce_op)
    if collective == "all_reduce":
        flat = flatten_with_paths(value, is_sparse)[0]
        leaves = [_leaf(path, leaf, op, world, options) for path, leaf in flat]
        check_any_coded(options.compression, leaves)
        return predict(make_plan(op, leaves, options, world))
    if collective not in get_args(Half):
        raise ValueError(
            "`collective` must be 'all_reduce', 'reduce_scatter' or 'all_gather'; got "
            f"{collective!r}."
        )
    axes = {f"axis{i}": n for i, n in enumerate(world.sizes)}
    treedef, leaves = describe_tree(value, axes, "plan")
    if collective == "reduce_scatter":
        return predict(plan_scatter(treedef, leaves, op, axes, world, options)[0])
    layout = lay_out(treedef, leaves, world.replicas, options.bytes_per_pack)
    gather = "all_gather", ReduceOp.SUM, layout.packs, layout.leaves, options, world
    return predict(plan_half(*gather))


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
    dtype = dtype_or_none(leaf)
    check_reducible(path + ".values" * (indices is not None), dtype)
    shape = jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(dtype))
    leaf = make_leaf(path, shape, world.sizes, indices=indices)
    return choose_wire(leaf, reduce_op, world, options)


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
        axes = len(axis_names(axis_name))
        sizes = cluster.sizes(axes) if axis_size is None else _sizes(axis_size)
        if math.prod(sizes) != cluster.size:
            raise ValueError(
                f"`axis_size` {axis_size!r} makes {math.prod(sizes)} replicas, but {cluster} has "
                f"{cluster.size}."
            )
        return topology_world(cluster, sizes)
    if axis_size is None:
        mesh = check_mesh(mesh, axis_name, "plan")
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
