"""Generations of an elastic run: records of who trains from which step on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxcoll._runtime.peers import parse_rank


@dataclasses.dataclass(frozen=True)
class Generation:
    """One set of members, and the step from which they continue."""

    number: int  # of the generation, from 0
    members: tuple[str, ...]  # names of its workers, by number, as in the mesh
    step: int  # number of finished steps when it begins
    source: str = ""  # a member that has the state after that step
    sends_state: bool = False  # whether a member lacks that state, so `source` sends it
    # Names of members of the previous generation that are not in this one
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()  # names of members that were not in the previous one
    why: str = ""  # what ended the previous generation, for messages
    ended: bool = False  # training is done; there are no members
    # Names of those who end because processes have different programs, and the error's text
    ejected: tuple[str, ...] = ()
    mismatch: str = ""
    reconnects: bool = False  # whether its members make new connections, or use JAX's own
    # Number of generations, including those of earlier runs that wrote this one's checkpoint
    term: int = 0
    # Root mean square of the norms of its members' residuals, without newcomers
    residual: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(map(parse_rank, self.members))

    def ends_for_its_program(self, name: str) -> bool:
        # Without members nobody knows whose program is right.
        return name in self.ejected or (bool(self.ejected) and not self.members)

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Generation:
        fields: Any = json.loads(text)
        lists = {name: tuple(x) for name, x in fields.items() if isinstance(x, list)}
        return cls(**(fields | lists))


@dataclasses.dataclass(frozen=True)
class WorldChange:
    """A change of the workers in an `Elastic` run.

    Attributes:
      step: number of finished steps from which training continued.
      workers: process numbers of the workers that continued, in the order of the mesh.
      lost: process numbers of the workers that were lost.
      joined: process numbers of the workers that joined.
      why: what was noticed first.
      seconds: time from then until the next step was finished, compilation included, or training
        ended. If more workers are lost before that, each loss is a separate change.
      residual: estimated norm of the residual (`jc.compression.residual`) that was lost with each
        lost worker: the root mean square over the workers that stayed. 0.0: nothing was lost.
    """

    step: int
    workers: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    why: str
    seconds: float
    residual: float = 0.0


class RegroupError(Exception):
    """The generation is over, because a worker requested a new one."""


def describe(workers: Sequence[str | int]) -> str:
    """Write workers, by names or process numbers, for a message, as in "workers 0, 2"."""
    ranks = [x if isinstance(x, int) else parse_rank(x) for x in workers]
    return f"worker{'s' * (len(ranks) > 1)} {list_ranks(ranks)}"


def list_ranks(ranks: Sequence[int]) -> str:
    """Write process numbers for a message, as in "0, 2", or "none"."""
    return ", ".join(map(str, ranks)) or "none"
