"""Puts values where a compiled program wants them; what is there already is not copied."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Every leaf of `tree` as a global array with `sharding`.

    With several processes, a host array is this process's share: its rows of a batch where the
    sharding splits rows, the whole value where it replicates.

    Args:
      tree: a pytree of numpy arrays, numbers, `jax.Array`s, or `jax.ShapeDtypeStruct`s.
      sharding: where they belong.

    Returns:
      The same tree of `jax.Array`s (or `ShapeDtypeStruct`s).
    """
    return jax.tree.map(lambda x: _place(x, sharding), tree)


def is_array(value: Any) -> bool:
    """Whether `value` is an array or a number, which `place` can put on devices."""
    return isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _place(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    if isinstance(x, jax.Array):
        if _is_placed(x, sharding):
            return x
        if x.is_fully_addressable and not sharding.is_fully_addressable:
            return _of_all(x, sharding)
    elif not sharding.is_fully_addressable:
        return _of_all(x, sharding)
    return jax.device_put(x, sharding)


def _of_all(x: Any, sharding: NamedSharding) -> jax.Array:
    """The global array of which each process has its share."""
    if not sharding.addressable_devices:
        owners = sorted({d.process_index for d in sharding.device_set})
        raise ValueError(
            f"This is process {jax.process_index()}, and all devices of the mesh belong to process "
            f"{', '.join(map(str, owners))}. Only processes that have devices in a mesh call what "
            "runs on it."
        )
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def _is_placed(x: jax.Array, sharding: NamedSharding) -> bool:
    """Whether `x` lies there, and says so in words of the same mesh.

    Otherwise `device_put` says it, without a copy: a program compiled for the other words would
    be compiled again as soon as its own results come back as arguments.
    """
    if x.sharding == sharding:
        return True
    same_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == sharding.mesh
    return same_mesh and x.sharding.is_equivalent_to(sharding, x.ndim)


def check_rows(tree: Any, argument: str, replicas: int, processes: int, axis: Any) -> None:
    """Refuse a batch whose rows do not divide over the replicas.

    Args:
      tree: the batch.
      argument: its name.
      replicas: along `axis`.
      processes: whose rows make up a batch; 0: not all have as many devices.
      axis: the name of the axis, or axes.

    Raises:
      ValueError: a leaf has no rows, or a number of them that does not divide; the message
        names the leaf and the sizes.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = argument + jax.tree_util.keystr(path)
        shape = np.shape(leaf)
        if not shape:
            raise ValueError(
                f"`data_parallel`: {name} is a scalar and cannot be split over {replicas} "
                f"replicas along {axis!r}; leave its argument out of `batch_argnums` to give "
                "every replica the same value."
            )
        is_local = not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or (
            isinstance(leaf, jax.Array) and leaf.is_fully_addressable
        )
        if is_local and not processes:
            raise ValueError(
                f"`data_parallel`: {name} is this process's share of the batch, and the processes "
                f"of the mesh have different numbers of devices, so that equal shares do not fit "
                f"{axis!r}. Give every process as many devices (`jaxcoll doctor` in every process "
                "shows what each has), or pass global arrays."
            )
        rows = shape[0] * (processes if is_local else 1)
        if rows % replicas:
            raise ValueError(
                f"`data_parallel`: {name} has {rows} rows, which do not divide over {replicas} "
                f"replicas along {axis!r} ({rows} = {replicas} × {rows // replicas} + "
                f"{rows % replicas}). Drop the remainder, or pad the batch and give the "
                "padding weight 0 with `jc.WeightedLoss`."
            )


def check_concrete(args: Any) -> None:
    """Refuse arguments of a step that are being traced.

    Raises:
      ValueError: one is; the message names it.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        if isinstance(leaf, Tracer):
            raise ValueError(
                f"`data_parallel`: args{jax.tree_util.keystr(path)} is being traced. A wrapped "
                "step is a program of its own, called between programs: take `jax.jit`, "
                "`jax.grad` or `jax.vmap` inside the step instead of around it."
            )
