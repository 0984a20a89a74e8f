"""Generations of an elastic run: who works from which step on, in words that processes exchange."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Generation:
    """One membership view and the step from which it goes on."""

    number: int  # of the generation, from 0
    members: tuple[str, ...]  # names of its workers, by number, as in the mesh
    step: int  # finished steps, from which it goes on
    source: str = ""  # the member that has the state after that step
    given: bool = False  # whether some member lacks that state and receives it
    # Names of members of the previous generation that are not in this one
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()  # names of members that were not in the previous one
    why: str = ""  # what ended the previous generation, in words
    ended: bool = False  # the work is done; there are no members
    # Workers that bring different programs to the step. Where there are members, one of them is the
    # first of these, and the others had just been taken in; else nobody goes on
    differ: tuple[str, ...] = ()
    reconnects: bool = False  # whether its members make new connections; else they use JAX's own
    # Counts generations, those of earlier runs that wrote this one's checkpoint included
    term: int = 0
    # Root mean square of the norms of what its members, but for newcomers, owe
    residual: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members as process numbers."""
        return tuple(map(rank_of, self.members))

    def ends_for_its_program(self, name: str) -> bool:
        """True if a worker stops because of the program that it or another one brings."""
        return bool(self.differ) and (not self.members or name in self.differ[1:])

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Generation:
        fields: Any = json.loads(text)
        lists = {name: tuple(x) for name, x in fields.items() if isinstance(x, list)}
        return cls(**(fields | lists))


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
      residual: about the norm of the residual (`jc.compression.residual`) that each lost worker
        took along: the root mean square of those of the workers that stayed. 0.0: nothing was lost.
    """

    step: int
    workers: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    why: str
    seconds: float
    residual: float = 0.0


class RegroupError(Exception):
    """The generation is over: some worker asked for a new one."""


def rank_of(name: str) -> int:
    """The process number in a worker's name; its other part differs after a restart."""
    return int(name.split(".")[0])


def words(names: Sequence[str]) -> str:
    """Workers, for a message."""
    return f"worker{'s' * (len(names) > 1)} {listed([rank_of(name) for name in names])}"


def listed(ranks: Sequence[int]) -> str:
    """Process numbers, for a message."""
    return ", ".join(map(str, ranks)) or "none"
