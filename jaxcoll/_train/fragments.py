"""Which part of a tree is exchanged after which step: whole numbers alone."""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When fragments are sent: each once in `every` steps, at distances as equal as can be.

    Attributes:
      every: steps of a round.
      fragments: how many.
      delay: steps between sending a fragment and applying what came of it.
    """

    every: int
    fragments: int
    delay: int

    def sent(self, step: int) -> tuple[int, ...]:
        """The fragments that are sent after this step, counted from 1; the last ends the round."""
        return tuple(
            k
            for k in range(self.fragments)
            if (step - (k + 1) * self.every // self.fragments) % self.every == 0
        )


@functools.lru_cache(maxsize=64)
def fragments_of(sizes: tuple[int, ...], fragments: int) -> tuple[tuple[int, ...], ...]:
    """Leaves of these sizes in so many fragments, as equal as leaves in one piece allow.

    Law: every leaf is in one fragment, in order; the largest fragment exceeds an equal share by
    less than the largest leaf.
    """
    members: list[list[int]] = [[] for _ in range(fragments)]
    filled = [0] * fragments
    # The largest leaf first, each to the fragment that has least; leaves of one size in order.
    for leaf in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        k = min(range(fragments), key=lambda k: (filled[k], len(members[k])))
        members[k].append(leaf)
        filled[k] += sizes[leaf]
    return tuple(tuple(sorted(each)) for each in members)
