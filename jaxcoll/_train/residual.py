"""The residual of error feedback, between programs and inside of one."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxcoll import _compat
from jaxcoll._mesh.mesh import axis_names, checked_any_mesh, no_mesh
from jaxcoll._mesh.placement import place_shards
from jaxcoll._mesh.shard_arrays import abstract
from jaxcoll._spmd.residual import Residual, layout_like, zeros
from jaxcoll._spmd.shards import Shards

_CALLER = "residual"


def residual(
    params: Any,
    axis_name: str | tuple[str, ...] = "data",
    *,
    mesh: Mesh | AbstractMesh | None = None,
) -> Shards:
    """Return what replicas owe to the sum of their gradients, at the beginning: nothing.

    Guarantee: with a residual, sum over replicas of (residual after - residual before) + the sum of
    what arrived = the sum of the gradients, to rounding in float32, at every step and for every
    format. What one step rounds away the next ones send. A step whose reduced gradients are not
    finite leaves it as it was; for a step that is skipped for another reason (a loss or a metric
    that is not finite, say), keep the residual that it was given.

    Only the sum over the replicas has a meaning. `jc.unshard` makes that tree, and
    `jc.save_checkpoint` writes it; `jc.restore_checkpoint` with a residual of any number of
    replicas deals it out in equal shares. A MEAN divides what is owed by the number of replicas
    that there are when it is sent, the mean of a `WeightedLoss` by that step's weight; what this
    last quotient loses in a type of 16 bits is not kept.

    Args:
      params: a pytree like the gradients that are going to be reduced.
      axis_name: the mesh axis of the reduction, or a tuple, outer to inner.
      mesh: devices and axes; None: as in `jc.data_parallel`. With an `AbstractMesh` the result is
        shapes. In a program that maps the axis it is not asked for.

    Returns:
      `Shards` in which every replica has a float32 for each element of `params`; *varying* in a
      program, and between programs global arrays that `jc.data_parallel` takes and returns.
      Give it to `jc.all_reduce(..., residual=)` or to what `jc.value_and_grad(..., feedback=True)`
      returns. Cost: the memory of a gradient in float32 on each replica; nothing is sent.

    Raises:
      ValueError: a leaf is not an array of numbers, or the mesh lacks the axis.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcoll import CommunicationOptions, all_reduce
      >>> int8 = CommunicationOptions(compression="int8")
      >>> def step(g):
      ...     r = residual(g, "data")
      ...     total, r = all_reduce("sum", g, "data", residual=r, options=int8)
      ...     return total + jax.lax.psum(r.parts[0].reshape(-1)[:300], "data")
      >>> g = jnp.linspace(0.0, 1.0, 600).reshape(2, 300)
      >>> float(abs(jax.vmap(step, axis_name="data")(g)[0] - g.sum(0)).max()) < 1e-6
      True

    Source: error feedback of both roundings, the second in its owner's residual: Seide et al.,
    "1-bit stochastic gradient descent" (2014); Tang et al., "DoubleSqueeze" (2019).
    """
    axes = axis_names(axis_name)
    if set(axes) <= set(_compat.axes_in_scope()):
        return zeros(params, axis_name, _CALLER)
    over = checked_any_mesh(mesh, axis_name, _CALLER)
    layout = layout_like(params, {a: over.shape[a] for a in axes}, _CALLER)
    shapes = Residual(abstract(layout, axes).parts, layout, axes)
    if isinstance(over, AbstractMesh):
        return shapes
    # On the host a view of one zero: each device is given its own part of it.
    nothing = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in shapes.parts]
    with no_mesh():
        return place_shards(shapes.replace(nothing), over)
