"""Whether replicas hold the same: inside a program, or of the copies that arrays claim to be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxcoll._host.mesh import no_mesh
from jaxcoll._host.world import scope_here
from jaxcoll._spmd import check_replicas as _check
from jaxcoll._spmd.check_replicas import ReplicaCheck
from jaxcoll._spmd.digest import WORDS, digest


def check_replicas(tree: Any, axis_name: str | tuple[str, ...] | None = None) -> ReplicaCheck:
    """Compare what the replicas hold, bit by bit, by digests of a few bytes.

    Law: equal bits are never reported, and one element that differs always is; of other
    differences one in 2⁶⁴ escapes. That a type says "the same everywhere" is a claim like any
    other: the copies are read.

    Args:
      tree: any pytree of arrays, equal on all replicas in structure and shape.
      axis_name: inside a program, the mapped axis or axes. None: between programs, of global
        arrays; every copy of a shard on this process's devices is compared with the others.

    Returns:
      A `ReplicaCheck`, *invariant*: `differs` is a boolean a leaf, and `raise_if_differs()`
      names leaves and replicas on the host. Cost: the tree is read once, and 8 bytes a leaf go
      from each replica to every other in one collective.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is no array.

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
        return _check.check_replicas(tree, axis_name, scope=scope_here())
    paths, leaves = _check.arrays_of(tree)
    with no_mesh():
        parts = [[(s.device, str(s.index), _digest(s.data)) for s in x.addressable_shards]
                 for x in leaves]  # fmt: skip
    holders = sorted({d for part in parts for d, _, _ in part}, key=lambda d: d.id)
    row = {device: i for i, device in enumerate(holders)}
    digests = np.zeros((len(holders), len(leaves), WORDS), np.uint32)
    for leaf, part in enumerate(parts):
        found = [(device, index, np.asarray(words)) for device, index, words in part]
        copies: dict[str, list[np.ndarray]] = {}
        for _, index, words in found:
            copies.setdefault(index, []).append(words)
        usual = {index: _commonest(words) for index, words in copies.items()}
        for device, index, words in found:
            digests[row[device], leaf] = words - usual[index]  # zero for whoever agrees with most
    return ReplicaCheck(digests, paths, tuple(map(str, holders)))


_digest = jax.jit(digest)


def _commonest(words: list[np.ndarray]) -> np.ndarray:
    (most, _), *_ = Counter(w.tobytes() for w in words).most_common(1)
    return np.frombuffer(most, np.uint32)
