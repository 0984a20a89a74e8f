"""`shard` and `unshard`: make `Shards` of a tree or a function, and the tree again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxcoll._collectives.parts import all_parts, describe_tree
from jaxcoll._collectives.scope import count
from jaxcoll._collectives.shards import Shards, is_shards
from jaxcoll._compat.settings import boundary
from jaxcoll._gradients.proof.retrace import trace
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.options import CommunicationOptions, check_options
from jaxcoll._plan.packs.leaves import where
from jaxcoll._plan.packs.shard_layout import lay_out
from jaxcoll._step.mesh.mesh import axis_names, check_any_mesh, no_mesh
from jaxcoll._step.mesh.placement import make_spec
from jaxcoll._step.mesh.shard_arrays import join_shards, make_shards, read

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
    """Split a tree of parameters into `Shards`, of which every device holds 1/n.

    Guarantee: `jc.unshard(jc.shard(params, axis))` is bitwise equal to `params`. No device ever
    holds more than its part; if a function makes the parameters, one more pack.

    Make one `Shards` of what a step gathers in one call: a whole model, each layer of a list, or
    the embedding. For layers stacked in one tree, `stacked=True` makes Shards of which each
    iteration of `lax.scan` or `jc.scan_layers` gets its layer. Leaves are packed, so they may have
    any shape.

    Args:
      params: a pytree of numeric arrays: numpy arrays (or memory maps), or `jax.Array`s that this
        process can read; all processes pass the same. Or a function without arguments that makes
        the tree, as `lambda: model.init(key, x)`; it is traced, and run for one pack at a time on
        all devices. Or `jax.ShapeDtypeStruct`s, to get shapes.
      axis_name: the mesh axis, or a tuple, outer to inner, that the parts are split over. They are
        replicated over the other axes of the mesh.
      stacked: True if the leading dimension of every leaf is the number of layers.
      mesh: devices and axes; None: as in `jc.data_parallel`. With an `AbstractMesh` the result is
        shapes, for `jc.inspect` with a topology.
      options: `bytes_per_pack` decides how leaves are packed, as in `reduce_scatter`.

    Returns:
      `Shards` of global arrays, split over `axis_name`, with shapes (n * rows, 128) or, if stacked,
      (layers, n * rows, 128). Pass them to a `jc.data_parallel` step, gather the tree in it by
      `jc.all_gather`, and keep their optimizer state with `jc.sharded_optimizer`. Cost: for host
      arrays, nothing is sent between devices.

    Raises:
      ValueError: a leaf is not a numeric array, or stacked leaves have different numbers of layers
        (the paths are named); or the mesh lacks the axis.

    Examples:
      >>> import jax, numpy as np
      >>> params = {"w": np.arange(6.0, dtype="f").reshape(2, 3), "b": np.ones(3, "f")}
      >>> shards = shard(params, "data")
      >>> [part.shape for part in shards.parts]
      [(8, 128)]
      >>> unshard(shards)["w"].tolist()
      [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    check_value_first("jc.shard", params)
    over, axes = check_any_mesh(mesh, axis_name, _CALLER), axis_names(axis_name)
    # A model that is a pytree may be callable as well; it is not an initializer.
    init = trace(params) if callable(params) and jax.tree.leaves(params) == [params] else None
    tree = params if init is None else jax.eval_shape(init.evaluate)
    sizes = {a: over.shape[a] for a in axes}
    treedef, leaves = describe_tree(tree, sizes, _CALLER)
    stack = _layers([(leaf.path, leaf.shape) for leaf in leaves]) if stacked else ()
    leaves = tuple(dataclasses.replace(x, shape=x.shape[len(stack) :]) for x in leaves)
    layout = lay_out(treedef, leaves, count(sizes), check_options(options).bytes_per_pack)
    values = treedef.flatten_up_to(tree)
    if init is None or isinstance(over, AbstractMesh):
        return make_shards(values, layout, over, axes, stack)
    with no_mesh():
        sharding = NamedSharding(over, make_spec(axes, stack))
        # One program for each pack, from which the compiler drops the other packs
        part = jax.jit(
            lambda k: all_parts(init.evaluate(), layout, axes, stack).parts[k],
            static_argnums=0,
            out_shardings=sharding,
        )
        return Shards(tuple(map(part, range(len(layout.packs)))), layout, axes)


def unshard(tree: Any) -> Any:
    """Return the tree with every `Shards` replaced by its whole leaves. Call it between programs.

    Guarantee: for any number of devices, the result is what one device would hold.

    Args:
      tree: `Shards`, or a tree with Shards in it, such as the state of an optimizer.

    Returns:
      A tree of numpy arrays. Cost: host memory for all of it. If several processes hold parts, all
      of them must call, and every device temporarily holds a copy of one pack at a time.
    """
    return jax.tree.map(
        lambda x: join_shards(x) if is_shards(x) else read(x), tree, is_leaf=is_shards
    )


def _layers(leaves: list[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """Check that all leaves have equally many layers; (their number,)."""
    for path, shape in leaves:
        first, expected = leaves[0][0], leaves[0][1][:1]
        if shape[:1] != expected or not shape:
            raise ValueError(
                f"`{_CALLER}` with stacked=True expects the layers as the leading dimension, "
                f"equally many in every leaf: {where(path)} has shape {shape}, and {where(first)} "
                f"{leaves[0][1]}. Stack the layers' trees, and shard other leaves separately."
            )
    return leaves[0][1][:1] if leaves else ()
