"""Describes a pack whose sum is wrong."""

from __future__ import annotations

import dataclasses
import math

from jaxcoll._plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Corruption:
    """A pack that came back as what cannot be the sum of what was put in.

    Attributes:
      pack: what it is called in programs, as "all_reduce_4a5596/pack0".
      leaves: the first and the last leaf that it carries.
      wrong: how many replicas hold such a sum.
      replicas: how many there are.
    """

    pack: str
    leaves: str
    wrong: int
    replicas: int

    @classmethod
    def of(cls, plan: Plan, pack: int, wrong: int) -> Corruption:
        """The words for one pack of a plan."""
        name = f"{plan.name}/pack{pack}"
        return cls(name, plan.carried(pack), wrong, math.prod(plan.packs[pack].over))

    def __str__(self) -> str:
        return f"{self.pack} of {self.leaves}, on {self.wrong} of {self.replicas} replicas"
