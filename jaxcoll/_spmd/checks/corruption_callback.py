"""Who is told, from inside a program, which packs a checksum has found corrupted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._compat import callback
from jaxcoll._plan.corruption import Corruption
from jaxcoll._plan.plan import Plan

Heard = Callable[[tuple[Corruption, ...], Hashable, int], None]


@dataclasses.dataclass(frozen=True)
class _Told:
    """What one program says of some packs; equal by value, as it is part of a program's key."""

    plan: Plan
    packs: tuple[int, ...]
    heard: Heard

    def __call__(self, wrong: np.ndarray, group: int, member: int) -> None:
        worst = wrong.reshape(-1, len(self.packs)).max(0)
        found = [(k, int(n)) for k, n in zip(self.packs, worst, strict=True) if n > 0]
        said = tuple(Corruption.of(self.plan, k, n) for k, n in found)
        self.heard(said, (self.plan.world, group), member)


def told(
    wrong: jax.Array, over: tuple[str, ...], plan: Plan, packs: Sequence[int], heard: Heard
) -> jax.Array:
    """`wrong` itself, of which the host is told where it is not zero.

    Who uses the result waits for the host, so that a program that has ended has told.

    Args:
      wrong: for each pack how many replicas hold what cannot be its sum; *invariant* over `over`.
      over: the axes that they were summed over.
      plan: what the packs belong to.
      packs: their numbers in it.
      heard: called by each device with what was found, what tells the device's group of replicas
        from others that reduce at the same place of a program, and its number in the group.
    """
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    others = tuple(a for a in mapped if a not in over)
    group = lax.axis_index(others) if others else np.int32(0)
    member = lax.axis_index(over)
    said = _Told(plan, tuple(packs), heard)
    return _compat.as_invariant(callback.told(wrong, group, member, said), over)
