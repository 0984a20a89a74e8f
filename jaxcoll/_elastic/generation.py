"""What the workers of a run agree upon, in words that cross between processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a generation begins with.

    Attributes:
      number: of the generation, from 0.
      members: names of its workers, by number, as in the mesh.
      step: finished steps, from which it goes on.
      source: the member that has the state after that step.
      given: whether some member has it not, and is given it.
      lost: names of those of the generation before that are not in this one.
      joined: names of those that were not in it.
      why: what ended the generation before, in words.
      ended: the work is done; there are no members.
      differ: workers who bring different programs to the step. Where there are members, one of
        them is the first of these, and the others had just been taken in; else nobody goes on.
      anew: whether its members make connections of its own; else they have those of JAX.
      term: counts generations, those of earlier runs that wrote this one's checkpoint included.
    """

    number: int
    members: tuple[str, ...]
    step: int
    source: str = ""
    given: bool = False
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    why: str = ""
    ended: bool = False
    differ: tuple[str, ...] = ()
    anew: bool = False
    term: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members as process numbers."""
        return tuple(map(rank_of, self.members))

    def ends_for_its_program(self, name: str) -> bool:
        """Whether a worker does not go on because of the program that it or another brings."""
        return bool(self.differ) and (not self.members or name in self.differ[1:])


@dataclasses.dataclass(frozen=True)
class WorldChange:
    """One change of who works in an `Elastic` run.

    Attributes:
      step: finished steps from which it went on.
      workers: process numbers of those who went on, in the order of the mesh.
      lost: process numbers of those who did not.
      joined: process numbers of those who were taken in.
      why: what was noticed first.
      seconds: from then until a step was finished again, compilation included, or training ended.
        Where more is lost before a step is finished, each loss is a change of its own.
    """

    step: int
    workers: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    why: str
    seconds: float


class RegroupError(Exception):
    """The generation is over: somebody asked for a new one."""


class CoordinatorLostError(Exception):
    """Nothing can be agreed upon any more."""


def rank_of(name: str) -> int:
    """The process number in a worker's name, which also has a part that a restart changes."""
    return int(name.split(".")[0])


def written(decision: Decision) -> str:
    """A decision as JSON."""
    return json.dumps(dataclasses.asdict(decision))


def read(text: str) -> Decision:
    """A decision from JSON."""
    said: dict[str, Any] = json.loads(text)
    for name in ("members", "lost", "joined", "differ"):
        said[name] = tuple(said[name])
    return Decision(**said)


def words(names: Sequence[str]) -> str:
    """Workers, for a message."""
    ranks = ", ".join(str(rank_of(name)) for name in names)
    return f"worker{'s' * (len(names) > 1)} {ranks}"


def listed(ranks: Sequence[int]) -> str:
    """Process numbers, for a message."""
    return ", ".join(map(str, ranks)) or "none"
