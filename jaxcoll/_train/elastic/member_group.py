"""The process group of a generation, and who must leave it because programs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import Program
from jaxcoll._runtime.process_group import ProcessGroup
from jaxcoll._train.elastic.generation import describe
from jaxcoll.errors import PeerLostError


class MemberGroup(ProcessGroup):
    """The process group of one generation. Who is lost is found by regrouping, and not here."""

    def beat(self) -> None:
        if ended := self._find_ended(self.position + 1):
            ranks = sorted(ended)
            self.end(PeerLostError(f"{describe(ranks)} ended", ranks=ranks))

    def explain(self, error: Exception) -> Exception:
        return self.failure or error

    def describe_late(self, call: Call, program: Program) -> tuple[tuple[int, ...], str]:
        return (), ""


def find_ejected(
    members: tuple[str, ...], joined: Sequence[str], programs: Mapping[str, tuple[int, str]]
) -> tuple[str, ...]:
    """Find the members that must end because members called different programs.

    `programs` has the position and the digest of each one's last call. A newcomer ends if it
    differs from the others. If these differ, nobody knows who is right, and all end.
    """
    staying = [m for m in members if m not in joined] or members
    before = [programs[m] for m in staying if m in programs]
    if _differ(before):
        return members
    return tuple(m for m in joined if m in programs and _differ([*before, programs[m]]))


def _differ(programs: Sequence[tuple[int, str]]) -> bool:
    # Whether two have the same position and different digests
    return len(set(programs)) > len({position for position, _ in programs})
