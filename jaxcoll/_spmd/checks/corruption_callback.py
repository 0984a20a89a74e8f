"""The call from a running program to the host that names the packs a checksum found corrupted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._compat import callback
from jaxcoll._plan.plan import Corruption, Plan

Heard = Callable[[tuple[Corruption, ...], Hashable, int], None]


@dataclasses.dataclass(frozen=True)
class _Reporter:
    """Reports some packs of one plan; equal by value, because it is part of a program's key."""

    plan: Plan
    packs: tuple[int, ...]
    heard: Heard

    def __call__(self, wrong: np.ndarray, group: int, member: int) -> None:
        worst = wrong.reshape(-1, len(self.packs)).max(0)
        found = [(k, int(n)) for k, n in zip(self.packs, worst, strict=True) if n > 0]
        corruptions = tuple(Corruption.of(self.plan, k, n) for k, n in found)
        self.heard(corruptions, (self.plan.world, group), member)


def reported(
    wrong: jax.Array, over: tuple[str, ...], plan: Plan, packs: Sequence[int], heard: Heard
) -> jax.Array:
    """`wrong` itself, *invariant* over `over`; where it is not zero, the host is called.

    The result depends on that call, so a program that uses it does not end before the call. Each
    device calls `heard` with what was found, what tells its group of replicas from others that
    reduce at the same place of a program, and its number in the group.
    """
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    others = tuple(a for a in mapped if a not in over)
    group = lax.axis_index(others) if others else np.int32(0)
    member = lax.axis_index(over)
    reporter = _Reporter(plan, tuple(packs), heard)
    return _compat.as_invariant(callback.reported(wrong, group, member, reporter), over)
