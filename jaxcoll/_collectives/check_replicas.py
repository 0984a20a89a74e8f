"""Digests of replicas' copies, to compare them: for `check_replicas` and for `jc.same`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._collectives.scope import require_array
from jaxcoll._plan.packs.leaves import flatten_with_paths, reveal_key, where
from jaxcoll._show.units import pluralize
from jaxcoll.errors import ReplicaDivergenceError

WORDS = 2
"""The number of 32-bit words in a digest."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaCheck:
    """The result of `check_replicas`, a pytree: a program may return it.

    Attributes:
      digests: uint32[n, leaves, 2], every replica's digest of every leaf; *invariant*.
      paths: the leaves' paths, as `jax.tree_util.keystr` writes them.
      names: the replicas' names.
      holders: for each leaf, the positions in `names` of the replicas that hold it; (): all do.

    Examples:
      >>> check = check_replicas(distribute.Mirrored([{"w": np.ones(3)}] * 8))
      >>> check.differs.tolist()
      [False]
      >>> check.raise_if_differs()
    """

    digests: Any
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    holders: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def differs(self) -> Any:
        """bool[leaves]: True where replicas differ. Works inside a program, too."""
        digests = self._digests()
        return (digests != digests[:1]).any((0, 2))

    def _digests(self) -> Any:
        """Return `digests`, without the leading dimension that `pmap` or `vmap` adds."""
        if self.digests.ndim == 3:
            return self.digests
        shards = getattr(self.digests, "addressable_shards", None)
        return shards[0].data[0] if shards else self.digests[0]

    def divergent(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Return, for each leaf that differs, the groups of replicas that agree, largest first.

        If the first group is larger than the second, it is the majority. Runs on the host.
        """
        digests = np.asarray(self._digests())
        divergent = {}
        for leaf in np.flatnonzero((digests != digests[:1]).any((0, 2))):
            groups: dict[bytes, list[str]] = {}
            for i in self.holders[leaf] if self.holders else range(len(self.names)):
                groups.setdefault(digests[i, leaf].tobytes(), []).append(self.names[i])
            # `sorted` is stable: groups of one size stay in the order of their first replicas.
            ordered = sorted(groups.values(), key=len, reverse=True)
            divergent[self.paths[leaf]] = tuple(tuple(group) for group in ordered)
        return divergent

    def raise_if_differs(self) -> None:
        """Wait for the result, on the host, and raise an error if replicas differ.

        Raises:
          ReplicaDivergenceError: replicas differ; it names the leaves and the replicas.
        """
        divergent = self.divergent()
        if not divergent:
            return
        lines = [
            f"  {where(path)}: {_describe_groups(groups)}" for path, groups in divergent.items()
        ]
        if len(lines) > 20:
            more = pluralize(len(lines) - 20, "leaf", "leaves")
            lines[20:] = [f"  … and {more} more"]
        differ = "differs" if len(divergent) == 1 else "differ"
        raise ReplicaDivergenceError(
            f"{len(divergent)} of {pluralize(len(self.paths), 'leaf', 'leaves')} {differ} between "
            f"{pluralize(len(self.names), 'replica')} that should hold the same:\n"
            + "\n".join(lines),
            divergent=divergent,
        )


def digest(x: jax.Array) -> jax.Array:
    """Return uint32[2], which depends on every bit of `x` and on its position.

    The finalizer of MurmurHash3 (Austin Appleby), a bijection, mixes each element with its
    position. The first word is the sum of the results; the second is their sum weighted by odd
    numbers made of the positions. Integers wrap around, so the order of summation does not matter.
    A difference in one element always changes the first word; any other difference leaves both
    unchanged with probability 2⁻⁶⁴. Cost: reads `x` once, and writes nothing of its size.
    """
    if not x.size:
        return jnp.zeros((WORDS,), jnp.uint32)
    word = _words(x)
    position = _positions(word.shape)
    # An odd factor, so that all positions stay different; a constant, so that zeros count.
    mixed = _mix(word ^ (position * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15)))
    weighted = mixed * (position + position + jnp.uint32(1))
    zero = jnp.uint32(0)
    sums = lax.reduce(
        (mixed, weighted),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(word.ndim)),
    )
    return jnp.stack(sums)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of `x`: one 32-bit word for each element, or several for a wider one."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag]))
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    of = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    bits = of(x.dtype).bits
    if bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Return each element's position in the flat array, modulo 2³², without a reshape."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        position += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return position


def _mix(word: jax.Array) -> jax.Array:
    word = (word ^ (word >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> jnp.uint32(16))


def flatten_to_arrays(tree: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Return the paths and the leaves of a tree, as arrays; for typed keys their data."""
    paths, arrays = [], []
    for path, leaf in flatten_with_paths(tree)[0]:
        who = f"`check_replicas`: {where(path)}"
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            raise ValueError(f"{who}: expected an array, got float0.")
        paths.append(path)
        arrays.append(require_array(reveal_key(leaf), who))
    return tuple(paths), arrays


def _describe_groups(groups: Sequence[Sequence[str]]) -> str:
    largest, *others = groups
    if len(largest) == 1:
        return f"all {len(groups)} hold different values"
    if len(others[0]) == len(largest):
        return "no majority: " + " | ".join(f"{_list_names(group)} agree" for group in groups)
    rest = [name for group in others for name in group]
    values = "" if len(others) == 1 else f", with {len(others)} values between them"
    differ = "differs" if len(rest) == 1 else "differ"
    return f"{_list_names(rest)} {differ} from the other {len(largest)}{values}"


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
    kind = "" if not names[0].isdigit() else ("replica " if len(names) == 1 else "replicas ")
    return kind + shown
