"""What one compiled collective will take, by the cost model."""

from __future__ import annotations

import functools
from collections import Counter

from jaxcoll._observe.parse.collective import Collective, Groups
from jaxcoll._plan.cost.model import collective
from jaxcoll._plan.cost.terms import Terms


def predicted(c: Collective, terms: Terms) -> float:
    """Seconds of `c` each time it is carried out, alone; 0.0 for a group of one.

    Its devices are numbered island by island.

    Examples:
      >>> from jaxcoll._observe.parse.collective import Operand
      >>> from jaxcoll._plan.cost.terms import Key, Link
      >>> link = Link(step=1e-6, per_byte=1e-9)
      >>> terms = Terms(Key("memory", "", 8, 1, 1), "an example", link, link)
      >>> eight = tuple(range(8))
      >>> c = Collective("all-reduce", "ar", (Operand("f32", (2000,)),), 8, (eight,), "main")
      >>> round(predicted(c, terms) * 1e6)
      20
    """
    met = _met(c.groups, terms.key.per_island)
    if met[0] == 1:
        return 0.0
    return collective(c.kind, c.nbytes, met, terms).seconds + terms.array * len(c.operands)


@functools.lru_cache(64)
def _met(groups: Groups, per_island: int) -> tuple[int, int, int]:
    """Devices of the largest group, most of them on one island, and islands of it."""
    # JAX numbers devices host by host, so a number divided by the size of an island is the island.
    n = near = islands = 1
    for group in groups:
        met = Counter(device // per_island for device in set(group))
        n = max(n, met.total())
        near, islands = max(near, *met.values()), max(islands, len(met))
    return n, near, islands
