"""Before one program follows another for the first time, processes compare what they will run.

Everyone writes the mark of its program; the first process of the team reads them all and writes
the verdict, which the others wait for. That is two messages a process, and three for the first,
whatever their number; the lines of a program travel only where marks differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxcoll._cluster.liveness import followed
from jaxcoll._dispatch.fingerprint import first_difference
from jaxcoll._dispatch.first_values import compared, uncompared
from jaxcoll._dispatch.watchdog import BEAT_SECONDS, Watch
from jaxcoll._errors import PeerLostError

if TYPE_CHECKING:
    from jaxcoll._dispatch.call_status import Entered
    from jaxcoll._dispatch.process_group import Team

PATIENCE_SECONDS = 0.25
"""How long one who does not write its mark is waited for before it is asked what it does."""

LOST_SECONDS = 5.0
"""How long one who was there and is silent is waited for, where nobody tells who has ended."""

SHOW_SECONDS = 2.0
"""How long the lines of another process are waited for."""


def agreed(
    watch: Watch, team: Team, program: Any, call: Entered
) -> tuple[str | Exception, bool] | None:
    """Wait until all processes of a team are about to run the same program.

    Args:
      watch: of this process.
      team: who.
      program: a `Program`.
      call: which call of it.

    Returns:
      None, if they are; else what differs, in words or as an error, and whether nobody has run
      anything.
    """
    folder = f"{watch.root}/agree/{team.name}/{call.position}"
    first = uncompared(program)
    if first is not None:
        watch.store.set(f"{folder}/values/{watch.process}", first.short)
    watch.store.set(f"{folder}/marks/{watch.process}", call.mark)
    if watch.process == team.processes[0]:
        verdict = _judged(watch, team, call, folder)
        watch.store.set(f"{folder}/verdict", json.dumps(verdict))
        if verdict["same"]:  # all are here, and so past the one before
            if team.agreement:
                watch.store.delete(team.agreement)
            team.agreement = folder
    else:
        verdict = _awaited(watch, team, call, folder)
    if verdict["same"]:
        if first is None:
            return None
        different = compared(watch, folder, team.processes, first, program.name)
        return None if different is None else (different, True)
    if not verdict.get("show"):
        return verdict["said"], False
    if watch.process in verdict["show"]:
        watch.store.set(f"{folder}/lines/{watch.process}", json.dumps(program.lines))
    sides = {}
    for process in verdict["show"]:
        try:
            sides[process] = json.loads(watch.store.get(f"{folder}/lines/{process}", SHOW_SECONDS))
        except TimeoutError:
            sides[process] = ("(its lines did not arrive)",)
    ran = verdict["ran"]
    done = f"process {ran[0]} runs one and waits in it" if ran else "nothing was run"
    said = _SAID.format(position=call.position, done=done, sides=first_difference(sides))
    return said, not ran


_SAID = """\
Processes are about to run different programs as call {position}; {done}. The first difference:
{sides}
Every process has to call the same function, with arguments of the same structure, shapes and \
dtypes and the same options, under the same version of JAX, its settings and `XLA_FLAGS`, and on \
the same kind of processor."""


def _judged(watch: Watch, team: Team, call: Entered, folder: str) -> dict[str, Any]:
    """The verdict, by the one who reads all marks."""
    inquiry = _Inquiry(watch, team, call)
    pause = 0.001
    while True:
        marks = {int(p): m for p, m in watch.store.all(f"{folder}/marks").items()}
        other = next((p for p in sorted(marks) if marks[p] != call.mark), None)
        missing = [p for p in team.processes if p not in marks and p not in inquiry.alike]
        if other is not None:
            return {"same": False, "show": [watch.process, other], "ran": inquiry.ran(missing)}
        if not missing:
            return {"same": True}
        if said := inquiry.about(missing):
            return {"same": False, "said": said}
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _awaited(watch: Watch, team: Team, call: Entered, folder: str) -> dict[str, Any]:
    """The verdict of the first process; or one of this process's own, if that one does not come."""
    inquiry = _Inquiry(watch, team, call)
    while True:
        try:
            return json.loads(watch.store.get(f"{folder}/verdict", PATIENCE_SECONDS))
        except TimeoutError:
            if said := inquiry.about(team.processes[:1]):
                return {"same": False, "said": said}
            if inquiry.alike:
                return {"same": True}


class _Inquiry:
    """Asks those who do not come, at growing intervals, what they do instead.

    Attributes:
      alike: those who run the same program here, and saw nothing to agree upon.
    """

    def __init__(self, watch: Watch, team: Team, call: Entered) -> None:
        self._watch, self._team, self._call = watch, team, call
        self._heard: dict[int, float] = {}
        self.alike: set[int] = set()
        self._wait = PATIENCE_SECONDS
        self._next = time.monotonic() + self._wait

    def about(self, missing: Sequence[int]) -> str:
        """What somebody runs in the place of this call, in words; "" if nobody is known to.

        Raises:
          PeerLostError: one has ended; or, where nobody would tell of that, has not answered for
            long.
        """
        now = time.monotonic()
        if now < self._next:
            return ""
        answers = self._watch.roll_call(self._team.name, self._call.position, missing)
        self._wait = min(2 * self._wait, BEAT_SECONDS)
        self._next = time.monotonic() + self._wait
        lost = [p for p in missing if p not in answers and self._is_lost(p, now)]
        if lost:
            raise PeerLostError("it did not come to agree upon the next program.", ranks=lost)
        for process, answer in sorted(answers.items()):
            self._heard.pop(process, None)
            # One that has not agreed either is about to say what it calls.
            ran = answer.get("agreed", 0) >= self._call.position
            if ran and answer["mark"] != self._call.mark:
                return self._said(process, answer)
            if ran:
                self.alike.add(process)
        return ""

    def ran(self, missing: Sequence[int]) -> list[int]:
        """Those who saw nothing to agree upon, and run what they always ran here."""
        position = self._call.position
        answers = self._watch.roll_call(self._team.name, position, missing) if missing else {}
        return sorted(p for p, answer in answers.items() if answer.get("agreed", 0) >= position)

    def _is_lost(self, process: int, now: float) -> bool:
        known = self._watch.known(process)
        silent = now - self._heard.setdefault(process, now) >= LOST_SECONDS
        return known in ("ended", "dead") or (known == "here" and silent and followed() is None)

    def _said(self, process: int, answer: dict[str, Any]) -> str:
        here = self._watch.process
        if answer["then"] == self._call.name:
            sides = {here: self._call.lines, process: answer["lines"]}
            difference = first_difference(dict(sorted(sides.items())))
        else:
            names = sorted([(here, self._call.name), (process, answer["then"])])
            difference = "\n".join(f"process {p}: {name}" for p, name in names)
        return (
            f"Processes run different programs as call {self._call.position}. The first "
            f"difference:\n{difference}\nProcess {process} may wait in it for the others. Every "
            "process has to make the same calls, with arguments of the same shapes and the same "
            "options, in the same order."
        )
