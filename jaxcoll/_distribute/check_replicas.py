"""`check_replicas`: compare what replicas hold, inside a program or between programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxcoll._distribute.per_replica import PerReplica
from jaxcoll._distribute.replica_axis import known_to_all
from jaxcoll._mesh.mesh import no_mesh, of_this_process
from jaxcoll._plan.packs.leaves import where
from jaxcoll._spmd import check_replicas as _check
from jaxcoll._spmd.check_replicas import WORDS, ReplicaCheck, digest
from jaxcoll._spmd.gather import all_gather
from jaxcoll._spmd.scope import Scope, bound_axes, count, scope_here


def check_replicas(tree: Any, axis_name: str | tuple[str, ...] | None = None) -> ReplicaCheck:
    """Compare what the replicas hold, bit by bit, by digests of a few bytes.

    Guarantees: equal bits are never reported, and one element that differs always is; of other
    differences one in 2⁶⁴ escapes. That a type says "the same everywhere" is a claim like any
    other: the copies are read. A leaf without a second copy is refused, never passed.

    Args:
      tree: any pytree of arrays, equal on all replicas in structure and shape.
      axis_name: inside a program, the mapped axis or axes. None: between programs. There, copies
        of one part of a global array are compared with one another, those of other processes
        included; of a `PerReplica` the rows are. What `jax.pmap` returned looks like a batch:
        pass it as `PerReplica.from_global(tree)`. Numbers, numpy arrays and arrays on one device
        are compared with those that the other processes pass.

    Returns:
      A `ReplicaCheck`, *invariant*: `differs` has a boolean per leaf, and `raise_if_differs()`
      names leaves and replicas on the host. Cost: the tree is read once, and 8 bytes per leaf go
      from each replica to every other in one collective. Between programs there is one only
      where a leaf lies over several processes; all of these must call, then.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is not an array; or, without `axis_name`, there is no second copy of it, or
        it is being traced.
      ProgramMismatchError: other processes pass other leaves.
      PeerLostError: another process has died.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> held = {"b": jnp.zeros(3), "w": jnp.array([1.0, 1.0, 2.0])}
      >>> f = jax.vmap(lambda held: check_replicas(held, "data"), axis_name="data")
      >>> f(held).differs.tolist()
      [False, True]
      >>> f(held).divergent()
      {"['w']": (('0', '1'), ('2',))}
    """
    if axis_name is not None:
        return _in_program(tree, axis_name)
    passed = [
        (leaf, isinstance(node, PerReplica))
        for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PerReplica))
        for leaf in jax.tree.leaves(node)
    ]
    with no_mesh():
        paths, arrays = _check.arrays_of(tree)
        leaves = [
            _Leaf(path, array, _parts(path, array, stacked))
            for path, array, (_, stacked) in zip(paths, arrays, passed, strict=True)
        ]
        _check_copies(leaves, [leaf for leaf, _ in passed])
        return _compared(leaves)


class _Leaf(NamedTuple):
    """The copies of one leaf that are compared."""

    path: str  # where it stands
    array: jax.Array  # what this process has of it
    # Which part of it each device holds; devices that hold equal parts are compared
    part: Mapping[jax.Device, str]


def _in_program(tree: Any, axis_name: str | tuple[str, ...]) -> ReplicaCheck:
    """Return the digests of all replicas along mapped axes, *invariant*."""
    axes = bound_axes(axis_name, "check_replicas")
    paths, leaves = _check.arrays_of(tree)
    names = tuple(map(str, range(count(axes))))
    if not leaves:
        return ReplicaCheck(jnp.zeros((len(names), 0, WORDS), jnp.uint32), (), names)
    own = jnp.stack([digest(leaf) for leaf in leaves])[None]
    # Digests travel as they are, whatever was asked for the gradients.
    rows = all_gather(own, axis_name, axis=0, scope=Scope(scope_here().world))
    return ReplicaCheck(rows, paths, names)


def _parts(path: str, array: jax.Array, stacked: bool) -> dict[jax.Device, str]:
    """Return which part of a leaf each device holds, as its type has it."""
    if isinstance(array, Tracer):
        raise ValueError(
            f"`check_replicas`: {where(path)} is being traced, so there are no copies to read. "
            "Name the axis, as in `check_replicas(tree, 'data')`, or call it between programs."
        )
    devices = array.sharding.device_set
    if len(devices) == 1 and jax.process_count() > 1:
        return dict.fromkeys(jax.devices(), "of each process")
    if stacked:
        return dict.fromkeys(devices, "row")
    indices = array.sharding.devices_indices_map(array.shape)
    return {device: str(index) for device, index in indices.items()}


def _check_copies(leaves: Sequence[_Leaf], passed: Sequence[Any]) -> None:
    """Refuse leaves of which there is one copy only, unless there is one replica."""
    lines = [
        f"  {where(leaf.path)}: {_whose(given)}"
        for leaf, given in zip(leaves, passed, strict=True)
        if min(Counter(leaf.part.values()).values()) < 2 and not _is_of_one_device(given)
    ]
    if not lines or jax.device_count() == 1:
        return
    raise ValueError(
        "`check_replicas` compares copies, and of these leaves there is one copy only:\n"
        + "\n".join(lines[:10])
        + (f"\n  and {len(lines) - 10} more" if len(lines) > 10 else "")
        + "\nPass what the replicas hold, as `jc.data_parallel` returns it. Of what `jax.pmap` "
        "returned, the rows are the replicas' values: pass `jc.PerReplica.from_global(tree)`. "
        "Leave out what is meant to be cut, as a batch and a sharded optimizer's `Shards` are."
    )


def _is_of_one_device(leaf: Any) -> bool:
    """True if a leaf lies on a mesh of one device, which is all replicas there are."""
    is_placed = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    return is_placed and len(leaf.sharding.device_set) == 1


def _whose(leaf: Any) -> str:
    """Say where the only copy of a leaf is."""
    if not isinstance(leaf, jax.Array):
        return f"a {type(leaf).__name__} of this process"
    devices = leaf.sharding.device_set
    if len(devices) == 1:
        return f"on {next(iter(devices))} only"
    return f"{leaf.dtype}{list(leaf.shape)} in {len(devices)} parts, one on each device"


def _compared(leaves: Sequence[_Leaf]) -> ReplicaCheck:
    """Return the digests as differences from what most copies of the same part have."""
    holders = sorted({device for leaf in leaves for device in leaf.part}, key=lambda d: d.id)
    row = {device: i for i, device in enumerate(holders)}
    table = np.zeros((len(holders), len(leaves), WORDS), np.uint32)
    for k, leaf in enumerate(leaves):
        for shard in leaf.array.addressable_shards:
            is_whole = leaf.part.keys() == leaf.array.sharding.device_set
            # One value of this process stands for all of its devices.
            rows = [row[d] for d in ([shard.device] if is_whole else jax.local_devices())]
            table[rows, k] = np.asarray(_digest(shard.data))
    _exchange(leaves, row, table)
    for k, leaf in enumerate(leaves):
        copies: dict[str, list[int]] = {}
        for device, part in leaf.part.items():
            copies.setdefault(part, []).append(row[device])
        for rows in copies.values():
            table[rows, k] -= _usual(table[rows, k])  # 0 for the majority
    several = jax.process_count() > 1
    return ReplicaCheck(
        table,
        tuple(leaf.path for leaf in leaves),
        tuple(f"{d} of process {d.process_index}" if several else str(d) for d in holders),
        tuple(tuple(sorted(row[device] for device in leaf.part)) for leaf in leaves),
    )


def _exchange(leaves: Sequence[_Leaf], row: Mapping[jax.Device, int], table: np.ndarray) -> None:
    """Write into the table what other processes have of the leaves that lie over several."""
    shared = [
        k for k, leaf in enumerate(leaves) if len(of_this_process([*leaf.part])) < len(leaf.part)
    ]
    if not shared:
        return
    devices = tuple(sorted({d for k in shared for d in leaves[k].part}, key=lambda d: d.id))
    if not of_this_process(devices):
        raise ValueError(
            "`check_replicas`: all copies of these leaves lie in other processes, which alone can "
            f"compare them: {', '.join(map(str, devices[:4]))}."
        )
    cells = np.ix_([row[device] for device in devices], shared)
    own = dict(enumerate(table[cells].view(np.int32)))
    arrays = [(leaves[k].path, leaves[k].array.dtype, leaves[k].array.shape) for k in shared]
    every = known_to_all(own, devices, "check_replicas", settings=repr(arrays))
    table[cells] = every.view(np.uint32)


_digest = jax.jit(digest)


def _usual(words: np.ndarray) -> np.ndarray:
    """The words of most copies; zeros without a majority, so that every copy then differs."""
    kinds, times = np.unique(words, axis=0, return_counts=True)
    most = kinds[times == times.max()]
    return most[0] if len(most) == 1 else np.zeros(WORDS, np.uint32)
