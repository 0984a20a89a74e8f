"""Puts values where a compiled program wants them; what is there already is not copied."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._plan.packs.leaves import is_array, shape_of
from jaxcoll._plan.packs.packing import LANES
from jaxcoll._spmd.scope import listed
from jaxcoll._spmd.shards import Shards, is_shards

_is_deleted = operator.methodcaller("is_deleted")


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Every leaf of `tree` as a global array with `sharding`; the tree itself, if all is in place.

    With several processes, a host array is this process's share: its rows of a batch where the
    sharding splits rows, the whole value where it replicates. A `jax.ShapeDtypeStruct` stays one.
    """
    if is_in_place(tree, sharding):
        return tree
    return jax.tree.map(lambda x: place_leaf(x, sharding), tree)


def is_in_place(tree: Any, sharding: NamedSharding) -> bool:
    """True if nothing of `tree` is to be moved; the usual case, which every call waits for."""
    leaves = jax.tree.leaves(tree)
    return (
        all(isinstance(x, jax.Array) for x in {type(x): x for x in leaves}.values())
        and [x.sharding for x in leaves].count(sharding) == len(leaves)
        and not any(map(_is_deleted, leaves))
    )


@dataclasses.dataclass(frozen=True)
class InPlace:
    """The arguments of a call whose arrays were all in place, as the next call's are compared.

    Guarantee: what depends on the structure of arguments, on the types of their arrays and on where
    these lie holds for another call, too, if `is_like` it.
    """

    tree: Any
    kinds: set[type]
    avals: list[Any]
    shardings: list[Any]

    @classmethod
    def of(cls, leaves: list[Any], tree: Any) -> InPlace | None:
        """Make one of flattened arguments; None: not all of them are arrays."""
        kinds = {type(x): x for x in leaves}
        if any(isinstance(x, Tracer) or not isinstance(x, jax.Array) for x in kinds.values()):
            return None
        return cls(tree, {*kinds}, [x.aval for x in leaves], [x.sharding for x in leaves])

    def is_like(self, leaves: list[Any], tree: Any) -> bool:
        """True if another call's arguments are of the same types, in the same places, and live."""
        return (
            tree == self.tree
            and set(map(type, leaves)) == self.kinds
            # A loop passes what the last call returned, whose types are the same objects: lists of
            # them are compared by identity first.
            and [x.aval for x in leaves] == self.avals
            and [x.sharding for x in leaves] == self.shardings
            and not any(map(_is_deleted, leaves))
        )


def host_array(x: Any) -> Any:
    """A number, or an array of the host, as it is once it lies on a device; anything else as it is.

    Raises:
      OverflowError: a Python integer does not fit, as in all programs of JAX.
      ValueError: it is a masked array, likewise.
    """
    if isinstance(x, jax.Array):
        return x
    dtype = np.asarray(x).dtype
    if not any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.number, np.bool_)):
        return x
    return np.asarray(x, jax.typeof(x if is_array(x) else np.asarray(x)).dtype)


def placed_shape(x: Any, sharding: NamedSharding, processes: int) -> Any:
    """Return the type that `place_leaf` would make of one leaf: nothing is read or placed."""
    if isinstance(x, jax.Array) and _is_placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)
    known = shape_of(x if is_array(x) or isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x))
    rows = bool(sharding.spec) and _is_share(x)
    shape = (known.shape[0] * processes, *known.shape[1:]) if rows else known.shape
    return jax.ShapeDtypeStruct(shape, known.dtype, weak_type=known.weak_type, sharding=sharding)


def _is_share(x: Any) -> bool:
    """True if `x` is what this process alone has of a batch."""
    if isinstance(x, jax.Array):
        return x.is_fully_addressable
    return not isinstance(x, jax.ShapeDtypeStruct)


def place_leaf(x: Any, sharding: NamedSharding) -> Any:
    """One leaf as a global array with `sharding`; see `place`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    if isinstance(x, jax.Array):
        if x.is_deleted():  # XLA would end the process where it has several devices
            raise ValueError(
                f"An array {x.dtype}{list(x.shape)} of the arguments is deleted: it was donated to "
                "an earlier call, by `donate_argnums`, or deleted by hand. Nothing was run. Pass "
                "what that call returned in its place."
            )
        if _is_placed(x, sharding):
            return x
    if _is_share(x) and not sharding.is_fully_addressable:
        return _of_all(x, sharding)
    return jax.device_put(x, sharding)


def viewed(
    x: jax.Array, sharding: NamedSharding, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """The parts that `x` has on the devices of `sharding`, as an array that lies so.

    Nothing is copied: each device's part stays there, whatever index it gets in the array, which
    may have another `shape` if it lies on more devices, or on fewer.
    """
    parts = [each.data for each in x.addressable_shards if each.device in sharding.device_set]
    return jax.make_array_from_single_device_arrays(shape or x.shape, sharding, parts)


def _of_all(x: Any, sharding: NamedSharding) -> jax.Array:
    """The global array of which each process has its share."""
    if not sharding.addressable_devices:
        owners = sorted({d.process_index for d in sharding.device_set})
        raise ValueError(
            f"This is process {jax.process_index()}, and all devices of the mesh belong to process "
            f"{', '.join(map(str, owners))}. Only processes that have devices in a mesh call what "
            "runs on it."
        )
    if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
        data = _of_all(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(sharding, host_array(x))


def _is_placed(x: jax.Array, sharding: NamedSharding) -> bool:
    """True if `x` lies there, and says so in words of the same mesh.

    Otherwise `device_put` says it, without a copy: a program compiled for the other words would
    be compiled again as soon as its own results come back as arguments.
    """
    if x.sharding == sharding:
        return True
    same_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == sharding.mesh
    return same_mesh and x.sharding.is_equivalent_to(sharding, x.ndim)


def specs_of(tree: Any) -> Any:
    """A `PartitionSpec` for each leaf and each `Shards` of a tree: copies of all but the latter.

    What `jax.shard_map` takes as `in_specs` and `out_specs`.
    """
    return jax.tree.map(
        lambda x: spec_of(x.axes, x.stack) if is_shards(x) else PartitionSpec(),
        tree,
        is_leaf=is_shards,
    )


def spec_of(axes: tuple[str, ...], stack: tuple[int, ...]) -> PartitionSpec:
    """Return the spec of the parts of Shards: by their rows, which stand behind the layers."""
    return PartitionSpec(*(None for _ in stack), axes)


def place_shards(shards: Shards, mesh: Mesh) -> Shards:
    """The parts where they belong on `mesh`, without a copy if they are there."""
    missing = [a for a in shards.axes if a not in mesh.axis_names]
    n = 0 if missing else int(np.prod([mesh.shape[a] for a in shards.axes]))
    if n != shards.layout.replicas:
        had = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"`data_parallel`: Shards of {shards.layout.replicas} replicas along "
            f"{listed(shards.axes)} do not fit the mesh ({had}). Restore a "
            "checkpoint for it; or bring parameters to it with `jc.unshard` and then `jc.shard`, "
            "an optimizer's state with `unshard`, and then `shard` of an optimizer made for it."
        )
    for pack, part in zip(shards.layout.packs, shards.parts, strict=True):
        expected = (n * shards.layout.rows(pack), LANES)
        if np.shape(part) != (*shards.stack, *expected):
            raise ValueError(
                "`data_parallel`: the parts of Shards between programs are global arrays, here of "
                f"shape {expected}; got {np.shape(part)}. What `pmap` returns stays with `pmap`; "
                "stacked layers come before that shape."
            )
    sharding = NamedSharding(mesh, spec_of(shards.axes, shards.stack))
    return shards.replace([_placed(part, sharding) for part in shards.parts])


def _placed(part: Any, sharding: NamedSharding) -> Any:
    """All replicas' parts of a pack, each on its device; never taken for one process's share."""
    here = part.is_fully_addressable if isinstance(part, jax.Array) else True
    if isinstance(part, jax.ShapeDtypeStruct) or sharding.is_fully_addressable or not here:
        return place(part, sharding)
    rows = np.asarray(part)
    return jax.make_array_from_callback(rows.shape, sharding, lambda at: rows[at])


def check_rows(
    tree: Any, argument: str, replicas: int, processes: int, axis: Any
) -> dict[tuple[int, ...], Callable[[], str]]:
    """The shapes of a batch's shares on a replica; it is refused if its rows do not divide."""
    # Beside each stands what makes the name of the first leaf of it: naming it is slow, and every
    # call comes this way.
    shares: dict[tuple[int, ...], Callable[[], str]] = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        shape = np.shape(leaf)
        if not shape:
            is_listed = isinstance(tree, list | tuple) and isinstance(leaf, int | float)
            raise ValueError(
                f"`data_parallel`: {argument}{_path(tree, i)} is a scalar and cannot be split over "
                f"{replicas} replicas along {axis!r}; "
                + (
                    f"a list of numbers is no array: pass `np.asarray({argument})`."
                    if is_listed
                    else "leave its argument out of `batch_argnums` to give every replica the same "
                    "value."
                )
            )
        is_local = _is_share(leaf)
        if is_local and not processes:
            raise ValueError(
                f"`data_parallel`: {argument}{_path(tree, i)} is this process's share of the "
                "batch, and the processes of the mesh have different numbers of devices, so that "
                f"equal shares do not fit {axis!r}. Give every process as many devices (`jaxcoll "
                "doctor` in every process shows what each has), or pass global arrays."
            )
        rows = shape[0] * (processes if is_local else 1)
        if not rows:
            raise ValueError(
                f"`data_parallel`: {argument}{_path(tree, i)} has no rows (its shape is "
                f"{list(shape)}); pass at least {replicas}, one for each replica along {axis!r}."
            )
        if rows % replicas:
            raise ValueError(
                f"`data_parallel`: {argument}{_path(tree, i)} has {rows} rows, which do not divide "
                f"over {replicas} replicas along {axis!r} ({rows} = {replicas} × "
                f"{rows // replicas} + {rows % replicas}). Drop the remainder, or pad the batch "
                "and give the padding weight 0 with `jc.WeightedLoss`."
            )
        share = rows // replicas, *shape[1:]
        shares.setdefault(share, lambda i=i: argument + _path(tree, i))
    return shares


def check_concrete(args: Any, kwargs: Any) -> None:
    """Refuse arguments of a step that are being traced, or are not arrays; name the first."""
    leaves = jax.tree.leaves((args, kwargs))
    kinds = {type(x): x for x in leaves}
    odd = {kind for kind, leaf in kinds.items() if not _may_be_placed(leaf)}
    of_host = any(issubclass(kind, np.ndarray | np.generic) for kind in kinds)
    if not odd and not of_host:
        return
    found = (i for i, leaf in enumerate(leaves) if type(leaf) in odd or _is_wordy(leaf))
    i = next(found, None)
    if i is None:
        return
    n = len(jax.tree.leaves(args))
    name = f"args{_path(args, i)}" if i < n else f"kwargs{_path(kwargs, i - n)}"
    if isinstance(leaves[i], Tracer):
        raise ValueError(
            f"`data_parallel`: {name} is being traced. A wrapped step is a program of its own, "
            "called between programs: take `jax.jit`, `jax.grad` or `jax.vmap` inside the step "
            "instead of around it."
        )
    if _is_wordy(leaves[i]):
        raise ValueError(
            f"`data_parallel`: {name} has elements of dtype {leaves[i].dtype}, which no device can "
            "hold; expected numbers. Leave it out of the tree, or give it as numbers (tokens, "
            "categories, `.astype`)."
        )
    if isinstance(leaves[i], jax.Ref):
        raise ValueError(
            f"`data_parallel`: {name} is a `jax.Ref`, and replicas write to copies of their own. "
            "Pass the array in it, `ref[...]`, return what becomes of it, and write that back."
        )
    raise ValueError(
        f"`data_parallel`: {name} is no array or number; got {type(leaves[i]).__name__}. What only "
        "decides how a step computes belongs to the step: bind it with `functools.partial` before "
        "you wrap it. Of a whole module pass the arrays alone, as `eqx.partition(module, "
        "eqx.is_array)` or `nnx.split(module)` gives them, and put it together in the step."
    )


def _is_wordy(x: Any) -> bool:
    """True if `x` is an array of the host of strings, dates, records or objects."""
    if not isinstance(x, np.ndarray | np.generic):
        return False
    return x.dtype.kind in "USOMm" or x.dtype.names is not None


def _may_be_placed(x: Any) -> bool:
    """True if JAX might take it: if an array is in it, JAX itself says whether it can be one."""
    others = ("dtype", "__jax_array__", "__array__")
    return not isinstance(x, Tracer | jax.Ref) and (
        is_array(x) or any(hasattr(x, name) for name in others)
    )


def _path(tree: Any, i: int) -> str:
    """The place of leaf `i`."""
    return jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(tree)[0][i][0])
