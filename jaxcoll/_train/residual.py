"""The residual of error feedback, inside a program and between programs."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxcoll import _compat
from jaxcoll._collectives.residual import Residual, layout_like, zeros
from jaxcoll._collectives.shards import Shards
from jaxcoll._step.mesh.mesh import axis_names, check_any_mesh, no_mesh
from jaxcoll._step.mesh.placement import place_shards
from jaxcoll._step.mesh.shard_arrays import abstract

_CALLER = "residual"


def residual(
    params: Any,
    axis_name: str | tuple[str, ...] = "data",
    *,
    mesh: Mesh | AbstractMesh | None = None,
) -> Shards:
    """Return a residual of zeros, to begin error feedback with.

    Guarantee: at every step and for every format, the sum over replicas of (residual after -
    residual before), plus the sum that arrived, is the sum of the gradients, to rounding in
    float32. Later steps send what one step rounds away. If the reduced gradients of a step are not
    finite, its residual is unchanged. If you skip a step for another reason (such as a loss that is
    not finite), keep the residual from before it.

    Only the sum over replicas has a meaning. `jc.unshard` returns that tree and
    `jc.save_checkpoint` writes it. `jc.restore_checkpoint` splits it equally over the replicas of
    the residual it is given, however many. When a residual is sent, a MEAN divides it by the
    number of replicas at that time, and the mean of a `WeightedLoss` by the weight of that step.
    What this division loses in a 16-bit dtype is not kept.

    Args:
      params: a pytree like the gradients to be reduced. `Shards` in it travel exactly and have no
        residual.
      axis_name: the mesh axis of the reduction, or a tuple, outer to inner.
      mesh: devices and axes; None: as in `jc.data_parallel`. With an `AbstractMesh` the result is
        shapes. It is not used in a program that maps the axis.

    Returns:
      `Shards` in which every replica has a float32 for each element of `params`. In a program they
      are *varying*; between programs they are global arrays for `jc.data_parallel`. Pass them as
      `residual` to `jc.all_reduce`, or to the function from `jc.value_and_grad(...,
      feedback=True)`. Cost: memory of a float32 gradient on each replica; nothing is sent.

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

    Source: error feedback for both roundings, the second in the residual of the part's owner: Seide
    et al., "1-bit stochastic gradient descent" (2014); Tang et al., "DoubleSqueeze" (2019).
    """
    axes = axis_names(axis_name)
    if set(axes) <= set(_compat.axes_in_scope()):
        return zeros(params, axis_name, _CALLER)
    over = check_any_mesh(mesh, axis_name, _CALLER)
    layout = layout_like(params, {a: over.shape[a] for a in axes}, _CALLER)
    shapes = Residual(abstract(layout, axes).parts, layout, axes)
    if isinstance(over, AbstractMesh):
        return shapes
    # Views of a single zero on the host, from which each device gets its part
    host_zeros = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in shapes.parts]
    with no_mesh():
        return place_shards(shapes.replace(host_zeros), over)
