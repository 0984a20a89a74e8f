"""`data_parallel` makes a step of one replica's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxcoll._gradients.batch import slots
from jaxcoll._plan.options import CommunicationOptions, check_options
from jaxcoll._step.mesh.mesh import check_mesh
from jaxcoll._step.replicated_program import VaryingOutputs, check_rule
from jaxcoll._step.step import DataParallel


def data_parallel(
    step: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    batch_argnums: int | str | Sequence[int | str] | None = None,
    donate_argnums: int | str | Sequence[int | str] = (),
    options: CommunicationOptions | None = None,
    varying_outputs: VaryingOutputs | Any = "error",
    check_vma: bool = False,
) -> Any:
    """Run a train step on every replica, each with its share of the batch.

    The step has the semantics of `jax.pmap`: every value in it is this replica's, and `jax.grad` is
    the gradient of this replica's loss. Its outputs must be the same on every replica; this is
    proven from the traced program before it runs. The step gets its replica's rows of the batch,
    its part of any `Shards`, and whole copies of everything else. Use `data_parallel` as a
    decorator or a function, with or without arguments, on functions and on methods.

    In a job of several processes, a host array (numpy, or a `jax.Array` of this process only) is
    this process's share: its rows of the batch, or the whole value of any other argument. In a
    single process it is the whole batch. The first call compares digests across processes: state
    that differs is an error, and a batch with the same rows everywhere is a warning.

    Args:
      step: a function or method of pytrees of arrays, positional or by keyword. It reduces with
        `jc.grad`, `jc.value_and_grad`, `jc.pmean` or `jax.lax` over `axis_name`. Values that it
        reads from `self` or a closure are constants of the program, as with `jax.jit`: setting
        `self.lr = ...` later has no effect. Pass values that change as arguments.
      mesh: devices and axes; None: the mesh of `jax.set_mesh` at the time of the call, if it has
        the axis; else all devices on one axis.
      axis_name: the mesh axis, or axes from outer to inner, that the batch is split over and that
        reductions in the step use by default. Other axes of the mesh have no name in the step: the
        compiler splits the work along them as the arrays are sharded, and leaves are then reduced
        one by one. Over Explicit axes everything is replicated.
      batch_argnums: positions in the step's signature, or names, of the arguments to split along
        their leading dimension, however they are passed. All others are whole on every replica. By
        default it is the only parameter, or the second of two. Parameters with a default, `*args`
        and `**kwargs` count, too, if they get arrays. For any other step the batch must be named.
      donate_argnums: positions or names of the arguments whose memory may be reused for the
        results. An array that is passed twice is donated once, and copied for its other uses.
      options: defaults for the reductions inside; `timeout_seconds` bounds each call. `overlap`
        sets the compiler options that the plans need, for this program only, on its first call.
      varying_outputs: how to treat an output that differs between replicas. "error": refuse it by
        name. "concatenate": join every array of the output along its leading dimension in replica
        order, as for the predictions of a batch; an array that is the same on all replicas is
        repeated, and only scalars are returned unchanged. Or a tree of these strings, one for each
        output or part of it.
      check_vma: as in `jax.shard_map`. True: JAX's types check the step as in your own `shard_map`;
        nothing is proven here, and gradients follow JAX's rules.

    Returns:
      A `DataParallel`: call it with host numpy arrays or global `jax.Array`s. It places them
      (without a copy if they are already placed), compiles once for each shape and dtype, and
      returns replicated global arrays. Cost: that of the reductions inside.

    Raises:
      ValueError: an argument is invalid, or the mesh is empty, lists a device twice or lacks the
        axis; on a call, the batch is not named, does not divide, or has unequal numbers of rows
        that broadcast only within a replica; an argument is deleted or not a numeric array;
        an output varies; or a reduction would hang or mix values (in a branch that replicas choose
        for themselves).
      AlreadyReducedError: on a call, `Shards` are reduced again.
      ReplicaDivergenceError: on a first call, processes pass different state, or replicas hold
        different values where `jc.same` was called.
      DeadlineExceededError: on a call, `timeout_seconds` passed.

    Warns:
      SameRowsWarning: on a first call, all processes pass the same rows.
      RepeatedSumWarning: on a first call, a sum repeats a value that was already reduced.

    Examples:
      >>> import numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("sum", (w * x).sum()))
      >>> float(step(2.0, np.arange(8.0)))
      56.0
    """
    named = batch_argnums is not None
    settings = (
        mesh,
        axis_name,
        slots("batch_argnums", batch_argnums) if named else None,
        slots("donate_argnums", donate_argnums),
        check_options(options),
        check_rule(varying_outputs),
        check_vma,
    )
    if not isinstance(check_vma, bool):
        raise ValueError(f"`check_vma` must be True or False; got {check_vma!r}.")
    if mesh is not None:
        check_mesh(mesh, axis_name, "data_parallel")
    if step is None:
        return lambda decorated: DataParallel(decorated, *settings)
    if not callable(step) and not isinstance(step, classmethod):
        raise ValueError(f"`data_parallel` expects a function; got {type(step).__name__}.")
    return DataParallel(step, *settings)
