"""Parameters in shards between programs: made from a tree or a function, and the tree again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxcoll._compat.settings import boundary
from jaxcoll._jaxpr.retrace import traced
from jaxcoll._mesh.mesh import axis_names, checked_any_mesh, no_mesh
from jaxcoll._mesh.placement import spec_of
from jaxcoll._mesh.shard_arrays import abstract, cut, joined, read
from jaxcoll._plan.options import CommunicationOptions, checked
from jaxcoll._plan.packs.leaves import where
from jaxcoll._plan.packs.shard_layout import layout_of
from jaxcoll._spmd.parts import all_parts, sharded_leaves
from jaxcoll._spmd.scope import count
from jaxcoll._spmd.shards import Shards, is_shards

_CALLER = "shard"


@boundary
def shard(
    params: Any,
    axis_name: str | tuple[str, ...],
    *,
    stacked: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    options: CommunicationOptions | None = None,
) -> Shards:
    """A tree of parameters as `Shards`, of which every device holds its own n-th.

    Guarantee: `jc.unshard(jc.shard(params, axis))` is `params`, to the bit. No device ever holds
    more than its own part, and, of parameters that a function makes, one pack more.

    What a step gathers by one call is one `Shards`: a whole model, or each layer of a list, or the
    embedding. Of layers that a loop runs through, stacked in one tree, `stacked=True` makes Shards
    of which each turn of `lax.scan` or `jc.scan_layers` sees its layer. Leaves may have any shape:
    they are packed, so nothing needs to divide.

    Args:
      params: a pytree of arrays of numbers: numpy arrays (or memory maps), or `jax.Array`s that
        this process can read; over several processes all pass the same. Or a function without
        arguments that makes the tree, as `lambda: model.init(key, x)`, which is traced and run in
        pieces, each on all devices. Or `jax.ShapeDtypeStruct`s, for shapes.
      axis_name: the mesh axis that the parts are split over, or a tuple, outer to inner; along
        other axes of the mesh there are copies.
      stacked: every leaf has the layers first, as many in all.
      mesh: devices and axes; None: as in `jc.data_parallel`. With an `AbstractMesh` the result is
        shapes, for `jc.inspect` with a topology.
      options: `bytes_per_pack` decides how leaves are packed, as in `reduce_scatter`.

    Returns:
      `Shards` of global arrays, split over `axis_name`: (n * rows, 128) each, stacked (layers,
      n * rows, 128). `jc.data_parallel` takes them as an argument, `jc.all_gather` makes the tree
      of them inside the step, and `jc.sharded_optimizer` keeps their state. Cost: nothing is sent
      between devices for arrays of the host.

    Raises:
      ValueError: a leaf is not an array of numbers, or stacked leaves have different numbers of
        layers (the paths are named); or the mesh lacks the axis.

    Examples:
      >>> import jax, numpy as np
      >>> params = {"w": np.arange(6.0, dtype="f").reshape(2, 3), "b": np.ones(3, "f")}
      >>> shards = shard(params, "data")
      >>> [part.shape for part in shards.parts]
      [(8, 128)]
      >>> unshard(shards)["w"].tolist()
      [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    over, axes = checked_any_mesh(mesh, axis_name, _CALLER), axis_names(axis_name)
    # A model that is a tree may be called as well.
    init = traced(params) if callable(params) and jax.tree.leaves(params) == [params] else None
    tree = params if init is None else jax.eval_shape(init.evaluate)
    sizes = {a: over.shape[a] for a in axes}
    treedef, leaves = sharded_leaves(tree, sizes, _CALLER)
    stack = _layers([(leaf.path, leaf.shape) for leaf in leaves]) if stacked else ()
    leaves = tuple(dataclasses.replace(x, shape=x.shape[len(stack) :]) for x in leaves)
    layout = layout_of(treedef, leaves, count(sizes), checked(options).bytes_per_pack)
    given = treedef.flatten_up_to(tree)
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in given) and init is None
    if isinstance(over, AbstractMesh) or shapes:
        return abstract(layout, axes, stack)
    with no_mesh():
        if init is None:
            return cut(given, layout, over, axes, stack)
        sharding = NamedSharding(over, spec_of(axes, stack))
        # A program for each pack, from which the compiler drops all others.
        part = jax.jit(
            lambda k: all_parts(init.evaluate(), layout, axes, stack).parts[k],
            static_argnums=0,
            out_shardings=sharding,
        )
        return Shards(tuple(map(part, range(len(layout.packs)))), layout, axes)


def unshard(tree: Any) -> Any:
    """The tree again, with its whole leaves in the place of every `Shards`.

    Guarantee: whatever the number of devices, the result is what one device would hold.

    Args:
      tree: between programs: `Shards`, or a tree with Shards in it, such as the state of an
        optimizer.

    Returns:
      A tree of numpy arrays. Cost: all of it in host memory. Where several processes hold parts,
      all of them must call, and every device holds a copy of one pack at a time on the way.
    """
    return jax.tree.map(lambda x: joined(x) if is_shards(x) else read(x), tree, is_leaf=is_shards)


def _layers(leaves: list[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """The number of layers that all leaves have first."""
    for path, shape in leaves:
        first, expected = leaves[0][0], leaves[0][1][:1]
        if shape[:1] != expected or not shape:
            raise ValueError(
                f"`{_CALLER}` with stacked=True expects every leaf to have the layers first, as "
                f"many in all: {where(path)} has shape {shape}, and {where(first)} "
                f"{leaves[0][1]}. Stack the layers' trees with `jax.tree.map(lambda *x: "
                "np.stack(x), *layers)`, and make Shards of their own of what no layer has."
            )
    return leaves[0][1][:1] if leaves else ()
