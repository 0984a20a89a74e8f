"""Who works together, and what they agreed upon: over keys and values, never over a collective.

A run is a chain of generations. Each begins with one decision: its members, in order, and the step
it goes on from. A decision is written once; whoever comes first writes it, and all others read it.
So processes that disagree on who is alive agree on who goes on, and one that is left out learns it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcoll._cluster.key_value import Keys
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._elastic.coordinator_client import Answers
from jaxcoll._elastic.generation import (
    CoordinatorLostError,
    Decision,
    RegroupError,
    rank_of,
    read,
    words,
    written,
)
from jaxcoll._elastic.heartbeat import BEAT_SECONDS, ENDED, Beats, Doing, beat, has_ended, named
from jaxcoll._elastic.reachability import named_links, to_leave_out
from jaxcoll._elastic.step_keys import BLOCK, StepKeys
from jaxcoll._errors import DeadlineExceededError, PeerLostError

_POLL_SECONDS = 0.02


class Crew:
    """One worker's part in a run.

    Attributes:
      name: of this worker.
      startup: seconds for which a worker that lives is waited for at the beginning of a generation.
      decision: what the present generation began with; None: it belongs to none yet.
      doing: the step that this worker is in, of which its beat tells the others.
      anew: whether JAX's own connections may be broken here.
      broken: pairs of workers of this generation that cannot connect to each other.
      woken: set whenever something has happened that a waiting worker should look at.
    """

    def __init__(
        self, store: Keys, root: str, *, patience: float, startup: float, most: int | None
    ) -> None:
        self.store = store
        self.name = named(store.process)
        self.decision: Decision | None = None
        self.woken = threading.Event()
        self._root = root
        self._patience, self.startup = patience, startup
        self._most = most or store.processes
        self._asked = self._ended = self.anew = False
        self.broken: set[frozenset[str]] = set()
        self._lock = threading.Lock()
        self._answers = Answers(patience, self.woken.set)
        self._tell = self._answers.to
        self.doing = Doing(-1, -1)
        self._beats = Beats()
        self._store_beat(0)
        self._listener = threading.Thread(target=self._listen, name="jaxcoll-crew", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Be heard no more: others take it for gone at once."""
        self._ended = True
        with contextlib.suppress(CoordinatorLostError, RuntimeError):
            self._tell(lambda: self.store.set(f"{self._root}/beat/{self.name}", ENDED))
        # A thread that waits in the client while Python ends would take it down.
        self._listener.join(0.0 if self._answers.lost else 3 * BEAT_SECONDS)

    @property
    def threads(self) -> list[threading.Thread]:
        """Those of its own that may be left waiting for a coordinator that has died."""
        return [self._listener, *self._answers.left]

    @property
    def number(self) -> int:
        """Of the present generation; -1 before the first."""
        return -1 if self.decision is None else self.decision.number

    def check(self) -> None:
        """Whether this generation goes on.

        Raises:
          RegroupError: somebody asked for a new one.
          CoordinatorLostError: there will be none.
        """
        self._answers.check()
        if self._asked:
            raise RegroupError

    def miss(self) -> None:
        """Ask for a new generation if a member of this one has ended.

        Raises:
          RegroupError: one has.
        """
        if gone := [name for name in self._members if has_ended(name)]:
            self.ask(f"{words(gone)} ended")
            raise RegroupError

    def lose_coordinator(self) -> None:
        """Tell whoever waits that nobody answers any more."""
        self._answers.lose()

    def ask(self, why: str, late: bool = False) -> bool:
        """End this generation on all its members.

        Args:
          why: in words.
          late: because time was up; whoever does not come at once is then left behind.

        Returns:
          Whether time was up first, here or elsewhere: what fails after that fails because of it.
        """
        said = json.dumps({"why": why, "late": late, "by": self.name})
        first = self._tell(lambda: self.store.agree(self._key(self.number + 1, "asked"), said))
        self._asked = True
        return json.loads(first)["late"]

    def meet(self) -> None:
        """Wait until every process of the job is here, or was once.

        Raises:
          DeadlineExceededError: some did not come in time; they are named.
          CoordinatorLostError: nobody can be asked.
        """
        self.publish("here", self.name)
        until = time.monotonic() + self.startup
        while len(here := self._all(f"{self._root}/here")) < self.store.processes:
            self._answers.check()
            if time.monotonic() > until:
                absent = [r for r in range(self.store.processes) if str(r) not in here]
                raise DeadlineExceededError(
                    f"Worker{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of "
                    f"{self.store.processes} did not begin to train within {self.startup:g} s.",
                    ranks=absent,
                )
            time.sleep(_POLL_SECONDS)

    def enter(self, step: int, term: int = 0) -> Decision | None:
        """Take part in the first generation, or wait to be taken into a later one.

        Args:
          step: finished steps of the state that this worker brings.
          term: in which its checkpoint was written.

        Returns:
          The decision that this worker is in; None: the work ended without it.

        Raises:
          PeerLostError: nobody is left who could take it in.
        """
        if self._tell(lambda: self.store.try_get(self._key(0, "decision"))) is None:
            decision = self._decided(step, (step,), term)
        else:
            decision = self._read(0)
        while self.name not in decision.members and (decision.members or not decision.differ):
            if decision.ended:
                return None
            decision = self._waited(decision)
        return self._begin(decision)

    def decide(self, finished: int, held: Sequence[int]) -> Decision:
        """Agree on the next generation; every member of the last that can calls this.

        Args:
          finished: steps that this worker has finished.
          held: the steps after which it has the state.

        Returns:
          The decision, in whose members this worker may be missing: others took it for lost.
        """
        return self._begin(self._decided(finished, held))

    def joins_at(self, step: int) -> bool:
        """Whether somebody is to be taken in before `step`: the same answer on all members."""
        assert self.decision is not None
        said = "join" if len(self.decision.members) < self._most and self._waiting() else "go"
        if step % BLOCK < 10 and self.name == self.decision.members[0]:
            self.observe()
            self._tell(lambda: self._steps.forget(self._beats.begun(self._members, self.number)))
        return self._tell(lambda: self._steps.agree(step, said)) == "join"

    def gather(self, what: str, value: str, *, same: bool = False) -> dict[str, str]:
        """What every member says, or the end of this generation: a barrier.

        Once all have come it returns, over or not, so that all find the same.

        Args:
          what: the same on all members, once in a generation.
          value: what this one says.
          same: all have to say the same, and to be doing what this worker does.
        """
        assert self.decision is not None
        self._tell(lambda: self.store.set(self._key(self.number, f"{what}/{self.name}"), value))
        until, mine = time.monotonic() + self.startup, {self.name: self.doing}
        while True:
            self.observe()  # first: one that has ended since may have been here
            said = self._all(self._key(self.number, what))
            missing = [m for m in self.decision.members if m not in said]
            if not missing and not (same and len(set(said.values())) > 1):
                return said
            self.check()
            silent = [m for m in missing if self._beats.is_silent(m)]
            if not missing or (same and self._beats.out_of_step(self._members, mine)):
                self.ask("workers bring different programs")
            elif silent:
                self.ask(f"{words(silent)} ended")
            elif time.monotonic() > until:
                self.ask(f"{words(missing)} did not come within {self.startup:g} s", late=True)
            self.woken.wait(_POLL_SECONDS)

    def publish(self, what: str, value: str) -> None:
        """Say something for the whole run."""
        self._tell(lambda: self.store.set(f"{self._root}/{what}/{self.store.process}", value))

    def share(self, number: int, what: str, value: str) -> None:
        """Say something in a generation, by a name that no other worker uses."""
        self._tell(lambda: self.store.set(self._key(number, what), value))

    def shared(self, number: int, folder: str) -> dict[str, str]:
        """What all have said in it, by the rest of its name."""
        return self._all(self._key(number, folder))

    def observe(self) -> None:
        """Look at everybody's beat."""
        self._beats.observe(self._all(f"{self._root}/beat"))

    def finish(self) -> None:
        """Tell those who still wait that the work is done."""
        done = Decision(self.number + 1, (), 0, ended=True)
        self._tell(lambda: self.store.agree(self._key(done.number, "decision"), written(done)))

    def _decided(self, finished: int, held: Sequence[int], term: int = 0) -> Decision:
        number = self.number + 1
        doing = dataclasses.astuple(self.doing)
        broken = [sorted(pair) for pair in self.broken]
        ready = {"finished": finished, "held": list(held), "doing": doing, "term": term}
        said = json.dumps(ready | {"broken": broken, "anew": self.anew})
        key, mine = self._key(number, "decision"), self._key(number, f"ready/{self.name}")
        self._tell(lambda: self.store.set(mine, said))
        began = time.monotonic()
        while (text := self._tell(lambda: self.store.try_get(key))) is None:
            self._answers.check()
            self.observe()
            ready = {k: json.loads(v) for k, v in self._all(self._key(number, "ready")).items()}
            if self.decision is None:  # one that was started again counts once
                ready = {k: v for k, v in ready.items() if not self._beats.is_silent(k)}
            if self._is_complete(ready, time.monotonic() - began, number):
                proposed = written(self._proposal(number, ready))
                self._tell(lambda said=proposed: self.store.agree(key, said))
            else:
                time.sleep(_POLL_SECONDS)
        return read(text)

    def _is_complete(self, ready: Mapping[str, Any], waited: float, number: int) -> bool:
        """Whether nobody else is worth waiting for."""
        if self.decision is None:
            return len(ready) >= self.store.processes or waited > self.startup
        _, odd = self._differ(ready)
        if odd == self._members:
            return True
        missing = [m for m in self.decision.members if m not in ready and m not in odd]
        asked = self._tell(lambda: self.store.try_get(self._key(number, "asked")))
        patience = BEAT_SECONDS if asked and json.loads(asked)["late"] else self._patience
        if any(not self._beats.is_silent(m) for m in missing) and waited < patience:
            return False
        # Of those who wait to be taken in it must be known whether they live.
        return all(map(self._beats.is_settled, self._waiting()))

    def _differ(self, ready: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Members who bring different programs to a step, and those who end for it."""
        known = {m: Doing(*said["doing"]) for m, said in ready.items()}
        joined = () if self.decision is None else self.decision.joined
        return self._beats.differing(self._members, joined, known)

    def _proposal(self, number: int, ready: Mapping[str, Any]) -> Decision:
        asked = self._tell(lambda: self.store.try_get(self._key(number, "asked")))
        why = json.loads(asked)["why"] if asked else "a worker joined" if number else ""
        before = sorted(ready, key=rank_of) if self.decision is None else self.decision.members
        broken = {frozenset(pair) for r in ready.values() for pair in r["broken"]}
        joined = () if self.decision is None else self.decision.joined
        differ, odd = self._differ(ready)
        out = to_leave_out((pair for pair in broken if pair <= set(ready)), joined) | set(odd)
        staying = [m for m in before if m in ready and m not in out][: self._most]
        why = named_links(broken) if out - set(odd) else why
        if not staying:
            return Decision(number, (), min(r["finished"] for r in ready.values()), differ=differ)
        waiting = self._waiting()
        for name in (w for w in waiting if self._beats.is_silent(w)):
            self._tell(lambda w=name: self.store.delete(f"{self._root}/waiting/{w}"))
        taken = {rank_of(name) for name in staying}
        coming = [w for w in waiting if self._beats.is_heard(w) and rank_of(w) not in taken]
        coming = coming[: self._most - len(staying)]
        members = tuple(sorted([*staying, *coming], key=rank_of))
        if self.decision is None:
            step = max(ready[m]["finished"] for m in staying)
            term = max(ready[m]["term"] for m in staying) + 1
        else:
            step = min(ready[m]["finished"] for m in staying)
            term = self.decision.term + 1
        having = [m for m in staying if step in ready[m]["held"]]
        return Decision(
            number,
            members,
            step,
            source=having[0],
            given=any(m not in having for m in members),
            lost=tuple(m for m in before if m not in ready or m in out),
            joined=tuple(m for m in members if number and m not in before),
            why=why,
            differ=differ,
            anew=number > 0 or any(r["anew"] for r in ready.values()),
            term=term,
        )

    def _waiting(self) -> list[str]:
        """Names of those who want to be taken in, and are in no generation."""
        waiting = self._all(f"{self._root}/waiting")
        return sorted((w for w in waiting if w not in self._members), key=rank_of)

    def _waited(self, after: Decision) -> Decision:
        """The next decision, which others make."""
        self._tell(lambda: self.store.set(f"{self._root}/waiting/{self.name}", "1"))
        key = self._key(after.number + 1, "decision")
        while True:
            self.observe()
            # Asked before the decision is: who finishes writes that, and ends then.
            gone = all(map(self._beats.is_silent, after.members))
            if (text := self._tell(lambda: self.store.try_get(key))) is not None:
                return read(text)
            if gone:
                raise PeerLostError(
                    f"All who worked have ended ({words(after.members)}), and nobody is left to "
                    f"take worker {rank_of(self.name)} in. Start the job again.",
                    ranks=after.ranks,
                )
            self._answers.check()
            time.sleep(_POLL_SECONDS)

    @property
    def _members(self) -> tuple[str, ...]:
        return () if self.decision is None else self.decision.members

    def _begin(self, decision: Decision) -> Decision:
        with self._lock:
            self.decision = decision
            self._asked, self.broken = False, set()
            self.doing = Doing(decision.number, -1)
            folder = self._key(decision.number, "step")
            self._steps = StepKeys(self.store, folder, decision.step)
            self.woken.clear()
        if self.name in decision.members:
            self._tell(lambda: self.store.delete(f"{self._root}/waiting/{self.name}"))
        return decision

    def _read(self, number: int) -> Decision:
        return read(self._tell(lambda: self.store.get(self._key(number, "decision"), 1.0)))

    def _key(self, number: int, what: str) -> str:
        return f"{self._root}/{number}/{what}"

    def _all(self, folder: str) -> dict[str, str]:
        return self._tell(lambda: self.store.all(folder))

    def _store_beat(self, count: int) -> None:
        self.store.set(f"{self._root}/beat/{self.name}", beat(count, self.doing))

    def _listen(self) -> None:
        """Hear when a new generation is asked for, and say in between that this worker lives."""
        with contextlib.suppress(StoreUnreachableError, CoordinatorLostError, RuntimeError):
            for count in itertools.count(1):
                number = self.number
                try:
                    self.store.get(self._key(number + 1, "asked"), BEAT_SECONDS)
                    self._hear(number)
                    time.sleep(BEAT_SECONDS)
                except TimeoutError:
                    pass
                if self._ended:
                    return
                self._tell(lambda count=count: self._store_beat(count))
        self.lose_coordinator()

    def _hear(self, number: int) -> None:
        with self._lock:
            if number == self.number >= 0:
                self._asked = True
                self.woken.set()
