"""Comparison of the values that replicas hold, inside a program or between programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxcoll._collectives import check_replicas as _check
from jaxcoll._collectives.all_gather import gather_tree
from jaxcoll._collectives.check_replicas import WORDS, ReplicaCheck, digest
from jaxcoll._collectives.scope import Scope, count, resolve_axes, scope_here
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.packs.leaves import flatten_with_paths, where
from jaxcoll._step.mesh.mesh import local_positions, no_mesh
from jaxcoll.distribute._per_replica import PerReplica
from jaxcoll.distribute._replica_axis import exchange_facts


def check_replicas(tree: Any, axis_name: str | tuple[str, ...] | None = None) -> ReplicaCheck:
    """Compare the values that replicas hold bit by bit, through digests of a few bytes.

    Guarantees: equal bits are never reported, and a leaf that differs in one element always is;
    one in 2⁶⁴ of all other differences escapes. The copies are read even if a type claims that they
    are the same everywhere. A leaf without a second copy is refused, and never passes the check.

    Args:
      tree: any pytree of arrays, with the same structure and shapes on all replicas.
      axis_name: inside a program, the mapped axis or axes. None: between programs. There, copies
        of the same part of a global array are compared, including those of other processes, and
        the rows of a `PerReplica`. The result of `jax.pmap` looks like a batch: pass it as
        `PerReplica.from_global(tree)`. Numbers, numpy arrays and arrays on one device are
        compared with those that the other processes pass.

    Returns:
      A `ReplicaCheck`, *invariant*: `differs` has a boolean per leaf, and `raise_if_differs()`
      names leaves and replicas on the host. Cost: the tree is read once, and 8 bytes per leaf go
      from each replica to every other in one collective. Between programs there is a collective
      only if a leaf lies over several processes; all of these must then call.

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
    check_value_first("jc.check_replicas", tree)
    if axis_name is not None:
        return _compare_in_program(tree, axis_name)
    passed = [
        (leaf, isinstance(node, PerReplica))
        for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PerReplica))
        for leaf in jax.tree.leaves(node)
    ]
    for path, leaf in flatten_with_paths(tree)[0]:
        if isinstance(leaf, Tracer):
            raise ValueError(
                f"`check_replicas`: {where(path)} is being traced, so there are no copies to read. "
                "Name the axis, as in `check_replicas(tree, 'data')`, or call it between programs."
            )
    with no_mesh():
        paths, arrays = _check.flatten_to_arrays(tree)
        leaves = [
            _Leaf(path, array, _parts(array, stacked))
            for path, array, (_, stacked) in zip(paths, arrays, passed, strict=True)
        ]
        _check_copies(leaves, [leaf for leaf, _ in passed])
        return _compare(leaves)


class _Leaf(NamedTuple):
    """The copies of one leaf that are compared."""

    path: str  # its path in the tree
    array: jax.Array  # this process's shards of it
    # The part of it that each device holds; devices with the same part are compared
    part: Mapping[jax.Device, str]


def _compare_in_program(tree: Any, axis_name: str | tuple[str, ...]) -> ReplicaCheck:
    axes = resolve_axes(axis_name, "check_replicas")
    paths, leaves = _check.flatten_to_arrays(tree)
    names = tuple(map(str, range(count(axes))))
    if not leaves:
        return ReplicaCheck(jnp.zeros((len(names), 0, WORDS), jnp.uint32), (), names)
    digests = jnp.stack([digest(leaf) for leaf in leaves])[None]
    # Digests travel exactly, whatever options the gradients have.
    rows = gather_tree(digests, axis_name, axis=0, scope=Scope(scope_here().world))
    return ReplicaCheck(rows, paths, names)


def _parts(array: jax.Array, stacked: bool) -> dict[jax.Device, str]:
    """Say which part of a leaf each device holds, according to its sharding."""
    devices = array.sharding.device_set
    if len(devices) == 1 and jax.process_count() > 1:
        return dict.fromkeys(jax.devices(), "of each process")
    if stacked:
        return dict.fromkeys(devices, "row")
    indices = array.sharding.devices_indices_map(array.shape)
    return {device: str(index) for device, index in indices.items()}


def _check_copies(leaves: Sequence[_Leaf], passed: Sequence[Any]) -> None:
    """Refuse leaves with only one copy, unless there is only one replica."""
    lines = [
        f"  {where(leaf.path)}: {_only_copy(value)}"
        for leaf, value in zip(leaves, passed, strict=True)
        if min(Counter(leaf.part.values()).values()) < 2 and not _is_of_one_device(value)
    ]
    if not lines or jax.device_count() == 1:
        return
    raise ValueError(
        "`check_replicas` compares copies, and these leaves have only one copy:\n"
        + "\n".join(lines[:10] + [f"  and {len(lines) - 10} more"] * (len(lines) > 10))
        + "\nPass values that every replica holds, and the result of `jax.pmap` as "
        "`jc.PerReplica.from_global(tree)`. Leave out a batch, and an optimizer's `Shards`."
    )


def _is_of_one_device(leaf: Any) -> bool:
    """A leaf on a mesh of one device has one replica."""
    is_placed = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    return is_placed and len(leaf.sharding.device_set) == 1


def _only_copy(leaf: Any) -> str:
    """Describe where the only copy of a leaf is."""
    if not isinstance(leaf, jax.Array):
        return f"{type(leaf).__name__} of this process"
    devices = leaf.sharding.device_set
    if len(devices) == 1:
        return f"on {next(iter(devices))} only"
    return f"{leaf.dtype}{list(leaf.shape)} in {len(devices)} parts, one on each device"


def _compare(leaves: Sequence[_Leaf]) -> ReplicaCheck:
    """Write each digest as its difference from that of most copies of the same part."""
    holders = sorted({device for leaf in leaves for device in leaf.part}, key=lambda d: d.id)
    row = {device: i for i, device in enumerate(holders)}
    table = np.zeros((len(holders), len(leaves), WORDS), np.uint32)
    for k, leaf in enumerate(leaves):
        for shard in leaf.array.addressable_shards:
            is_whole = leaf.part.keys() == leaf.array.sharding.device_set
            # A value on one device stands for all devices of this process.
            rows = [row[d] for d in ([shard.device] if is_whole else jax.local_devices())]
            table[rows, k] = np.asarray(_digest(shard.data))
    _exchange(leaves, row, table)
    for k, leaf in enumerate(leaves):
        copies: dict[str, list[int]] = {}
        for device, part in leaf.part.items():
            copies.setdefault(part, []).append(row[device])
        for rows in copies.values():
            # Modulo 2³², a difference is 0 only between equal digests.
            table[rows, k] -= _majority(table[rows, k])
    several = jax.process_count() > 1
    return ReplicaCheck(
        table,
        tuple(leaf.path for leaf in leaves),
        tuple(f"{d} of process {d.process_index}" if several else str(d) for d in holders),
        tuple(tuple(sorted(row[device] for device in leaf.part)) for leaf in leaves),
    )


def _exchange(leaves: Sequence[_Leaf], row: Mapping[jax.Device, int], table: np.ndarray) -> None:
    """Write other processes' digests of leaves that lie over several processes into `table`."""
    shared = [
        k for k, leaf in enumerate(leaves) if len(local_positions([*leaf.part])) < len(leaf.part)
    ]
    if not shared:
        return
    devices = tuple(sorted({d for k in shared for d in leaves[k].part}, key=lambda d: d.id))
    here = local_positions(devices)
    if not here:
        there = ", ".join(map(str, devices[:4]))
        raise ValueError(
            "`check_replicas`: all copies of these leaves lie in other processes, and only these "
            f"can compare them. The copies are on {there}."
        )
    cells = np.ix_([row[device] for device in devices], shared)
    digests = {i: table[cells][i].tolist() for i in here}
    arrays = [(leaves[k].path, leaves[k].array.dtype, leaves[k].array.shape) for k in shared]
    table[cells] = exchange_facts(digests, devices, "check_replicas", settings=repr(arrays))


_digest = jax.jit(digest)


def _majority(digests: np.ndarray) -> np.ndarray:
    """Find the digest of most copies; if there is a tie, zeros, from which every copy differs."""
    distinct, times = np.unique(digests, axis=0, return_counts=True)
    most = distinct[times == times.max()]
    return most[0] if len(most) == 1 else np.zeros(WORDS, np.uint32)
