"""Places values where a compiled program needs them, without copying those already there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._collectives.scope import show_axes
from jaxcoll._collectives.shards import Shards, is_shards
from jaxcoll._compat.axes import make_weak
from jaxcoll._plan.packs.leaves import abstract_shape, argument_name, is_array, is_key, refuse_tied
from jaxcoll._plan.packs.packing import LANES

_is_deleted = operator.methodcaller("is_deleted")


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Make every leaf of `tree` a global array with `sharding`; itself if all already are.

    With several processes, a host array is this process's share: its rows of a batch if the
    sharding splits rows, the whole value if it replicates. A `jax.ShapeDtypeStruct` stays one.
    """
    if is_in_place(tree, sharding):
        return tree
    return jax.tree.map(lambda x: place_leaf(x, sharding), tree)


def is_in_place(tree: Any, sharding: NamedSharding) -> bool:
    """All of `tree` is placed already. It usually is, and every call waits here."""
    leaves = jax.tree.leaves(tree)
    return (
        all(isinstance(x, jax.Array) for x in {type(x): x for x in leaves}.values())
        # `count` compares by identity first, in C.
        and [x.sharding for x in leaves].count(sharding) == len(leaves)
        and not any(map(_is_deleted, leaves))
    )


def host_array(x: Any) -> Any:
    """Give a number or host array its dtype on a device; anything else stays as it is.

    Raises:
      OverflowError: a Python integer does not fit, as everywhere in JAX.
      ValueError: `x` is a masked array, likewise.
    """
    if isinstance(x, jax.Array):
        return x
    dtype = np.asarray(x).dtype
    if not any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.number, np.bool_)):
        return x
    return np.asarray(x, jax.typeof(x if is_array(x) else np.asarray(x)).dtype)


def shape_once_placed(x: Any, sharding: NamedSharding, processes: int) -> Any:
    """Infer the type of the array that `place_leaf` would make, without reading or placing it."""
    if isinstance(x, jax.Array) and _is_placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)
    local = abstract_shape(
        x if is_array(x) or isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)
    )
    rows = bool(sharding.spec) and _is_share(x)
    shape = (local.shape[0] * processes, *local.shape[1:]) if rows else local.shape
    return jax.ShapeDtypeStruct(shape, local.dtype, weak_type=local.weak_type, sharding=sharding)


def _is_share(x: Any) -> bool:
    """A host array is this process's share of a batch, not a global array."""
    if isinstance(x, jax.Array):
        return x.is_fully_addressable
    return not isinstance(x, jax.ShapeDtypeStruct)


def place_leaf(x: Any, sharding: NamedSharding) -> Any:
    """Make one leaf a global array with `sharding`; see `place`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    if isinstance(x, jax.Array):
        if x.is_deleted():  # with several devices, XLA would end the process
            raise ValueError(
                f"An array {x.dtype}{list(x.shape)} in the arguments is deleted: it was donated to "
                "an earlier call, or deleted by hand. Nothing was run. Pass that call's result."
            )
        if _is_placed(x, sharding):
            return x
    if _is_share(x) and not sharding.is_fully_addressable:
        return _join_shares(x, sharding)
    return jax.device_put(x, sharding)


def view(x: jax.Array, sharding: NamedSharding, shape: tuple[int, ...] | None = None) -> jax.Array:
    """View the parts that `x` has on the devices of `sharding` as an array with it.

    Nothing is copied: each part stays on its device, although its index may change. The array has
    another `shape` if it is on more or fewer devices.
    """
    parts = [part.data for part in x.addressable_shards if part.device in sharding.device_set]
    array = jax.make_array_from_single_device_arrays(shape or x.shape, sharding, parts)
    return make_weak(array) if jax.typeof(x).weak_type else array


def _join_shares(x: Any, sharding: NamedSharding) -> jax.Array:
    """Make the global array of the processes' shares."""
    if not sharding.addressable_devices:
        owners = ", ".join(map(str, sorted({d.process_index for d in sharding.device_set})))
        raise ValueError(
            f"This is process {jax.process_index()}, but all devices of the mesh belong to process "
            f"{owners}. Only processes with devices in a mesh may call programs on it."
        )
    if is_key(x):
        data = _join_shares(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    array = jax.make_array_from_process_local_data(sharding, host_array(x))
    return make_weak(array) if is_array(x) and jax.typeof(x).weak_type else array


def _is_placed(x: jax.Array, sharding: NamedSharding) -> bool:
    """An equivalent sharding must also refer to the same mesh.

    If it refers to another mesh, `device_put` changes that without a copy. Otherwise a program
    would be compiled for it, and again once its own results come back as arguments.
    """
    if x.sharding == sharding:
        return True
    same_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == sharding.mesh
    return same_mesh and x.sharding.is_equivalent_to(sharding, x.ndim)


def make_specs(tree: Any) -> Any:
    """Make a `PartitionSpec` for each leaf and each `Shards` of a tree, for `jax.shard_map`.

    `Shards` are split along their axes, and all other leaves are replicated.
    """
    return jax.tree.map(
        lambda x: make_spec(x.axes, x.stack) if is_shards(x) else PartitionSpec(),
        tree,
        is_leaf=is_shards,
    )


def make_spec(axes: tuple[str, ...], stack: tuple[int, ...]) -> PartitionSpec:
    """The parts of Shards are split by rows, which follow the layers."""
    return PartitionSpec(*(None for _ in stack), axes)


def place_shards(shards: Shards, mesh: Mesh) -> Shards:
    """Place the parts on `mesh`, without a copy if they are already there."""
    missing = [a for a in shards.axes if a not in mesh.axis_names]
    n = 0 if missing else int(np.prod([mesh.shape[a] for a in shards.axes]))
    if n != shards.layout.replicas:
        had = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"`data_parallel`: Shards of {shards.layout.replicas} replicas along "
            f"{show_axes(shards.axes)} do not fit the mesh ({had}). Convert them by `jc.unshard` "
            "and then `jc.shard`, a state by its optimizer's `unshard` and `shard`, or restore "
            "a checkpoint for this mesh."
        )
    for pack, part in zip(shards.layout.packs, shards.parts, strict=True):
        expected = (n * shards.layout.rows(pack), LANES)
        if np.shape(part) != (*shards.stack, *expected):
            raise ValueError(
                "`data_parallel`: the parts of Shards between programs are global arrays, here of "
                f"shape {expected}; got {np.shape(part)}. A result of `pmap` is only for `pmap`."
            )
    sharding = NamedSharding(mesh, make_spec(shards.axes, shards.stack))
    return shards.replace([_place_part(part, sharding) for part in shards.parts])


def _place_part(part: Any, sharding: NamedSharding) -> Any:
    """Place all replicas' parts of a pack; a host array has all of them, not a process's share."""
    is_local = part.is_fully_addressable if isinstance(part, jax.Array) else True
    if isinstance(part, jax.ShapeDtypeStruct) or sharding.is_fully_addressable or not is_local:
        return place(part, sharding)
    rows = np.asarray(part)
    return jax.make_array_from_callback(rows.shape, sharding, lambda at: rows[at])


def check_rows(tree: Any, argument: str, replicas: int, processes: int, axis: Any) -> None:
    """Refuse a batch whose rows do not divide over the replicas."""
    over = f"{replicas} replicas along {axis!r}"
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        shape, is_local = np.shape(leaf), _is_share(leaf)
        rows = shape[0] * (processes if is_local else 1) if shape else 0
        if not shape and isinstance(tree, list | tuple) and isinstance(leaf, int | float):
            wrong = f"is a scalar and cannot be split over {over}; pass `np.asarray({argument})`"
        elif not shape:
            wrong = f"is a scalar and cannot be split over {over}; leave it out of `batch_argnums`"
        elif is_local and not processes:
            wrong = (
                "is this process's share of the batch, but the processes of the mesh have "
                f"different numbers of devices, so equal shares do not fit {axis!r}. Give every "
                "process equally many (`jaxcoll doctor` lists them), or pass global arrays"
            )
        elif not rows:
            wrong = f"has no rows (its shape is {list(shape)}); pass at least {replicas}"
        elif rows % replicas:
            wrong = (
                f"has {rows} rows, which do not divide over {over} ({rows} = {replicas} × "
                f"{rows // replicas} + {rows % replicas}). Drop the remainder, or pad the batch "
                "and give the padding weight 0 with `jc.WeightedLoss`"
            )
        else:
            continue
        raise ValueError(f"`data_parallel`: {argument}{_path(tree, i)} {wrong}.")


def check_concrete(args: Any, kwargs: Any, name_of: Callable[[int | str], str]) -> None:
    """Refuse arguments of a step that are being traced or are not arrays, naming the first."""
    refuse_tied({**{name_of(i): x for i, x in enumerate(args)}, **kwargs}, "data_parallel")
    leaves = jax.tree.leaves((args, kwargs))
    # A large model has thousands of leaves, of two or three types: one of each is looked at, and
    # all leaves only if a type is wrong, or is one of host arrays, whose elements may be objects.
    kinds = {type(x): x for x in leaves}
    invalid = {kind for kind, leaf in kinds.items() if not _may_be_placed(leaf)}
    of_host = any(issubclass(kind, np.ndarray | np.generic) for kind in kinds)
    if not invalid and not of_host:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if type(leaf) in invalid or _is_not_numeric(leaf):
            raise ValueError(f"`data_parallel`: {argument_name(path, name_of)} {_explain(leaf)}")


def _explain(leaf: Any) -> str:
    """Say why a step cannot take a leaf, and what to pass instead."""
    if isinstance(leaf, Tracer):
        return (
            "is being traced. A wrapped step is a program of its own: use `jax.jit`, `jax.grad` or "
            "`jax.vmap` inside the step instead of around it. In place of `jax.eval_shape(step, "
            "...)` write `step.trace(...).out_info`, and of `jax.make_jaxpr(step)(...)` "
            "`step.trace(...).jaxpr`."
        )
    if _is_not_numeric(leaf):
        return (
            f"has elements of dtype {leaf.dtype}, which no device can hold; expected numbers. "
            "Leave it out of the tree, or convert it to numbers."
        )
    if isinstance(leaf, jax.Ref):
        return (
            "is a `jax.Ref`, but replicas would write to separate copies. Pass the array in it, "
            "`ref[...]`, return the new value, and write that back."
        )
    return (
        f"is not an array or a number; got {type(leaf).__name__}. Bind a setting with "
        "`functools.partial` before you wrap the step. Of a module pass only the arrays, as from "
        "`eqx.partition(module, eqx.is_array)` or `nnx.split(module)`, and rebuild it in the step."
    )


def _is_not_numeric(x: Any) -> bool:
    """A host array of strings, dates, records or objects has no numbers."""
    if not isinstance(x, np.ndarray | np.generic):
        return False
    return x.dtype.kind in "USOMm" or x.dtype.names is not None


def _may_be_placed(x: Any) -> bool:
    """JAX makes the final check of objects like arrays."""
    array_like = ("dtype", "__jax_array__", "__array__")
    return not isinstance(x, Tracer | jax.Ref) and (
        is_array(x) or any(hasattr(x, name) for name in array_like)
    )


def _path(tree: Any, i: int) -> str:
    return jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(tree)[0][i][0])
