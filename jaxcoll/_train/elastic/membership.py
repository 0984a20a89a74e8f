"""Membership of an elastic run, agreed through the key-value store and never through a collective.

A run is a chain of generations. Each begins with one record: its members, in order, and the step
from which it continues. The first worker that is ready writes the record, once, and all others read
it. So even workers that disagree on who is alive agree on who continues, and a worker that was
dropped finds out.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._job.exchange import LateError, agree, exchange
from jaxcoll._job.liveness import list_ended
from jaxcoll._job.timing import COORDINATOR_REPLY_SECONDS, HEARTBEAT_SECONDS, POLL_SECONDS
from jaxcoll._runtime.peers import parse_rank
from jaxcoll._runtime.watchdog import Watchdog
from jaxcoll._train.elastic.generation import Generation, RegroupError, describe
from jaxcoll._train.elastic.member_group import MemberGroup, find_ejected
from jaxcoll.errors import DeadlineExceededError, PeerLostError

KEPT_STEPS = 100
"""Number of steps whose keys are kept. No member is so far behind: they meet in most steps."""


class Membership:
    """One worker's part in a run."""

    def __init__(
        self,
        watchdog: Watchdog,
        root: str,
        *,
        patience: float,
        startup: float,
        most: int | None,
        after: str = "",
    ) -> None:
        self._watchdog, self._peers, self._keys = watchdog, watchdog.peers, watchdog.peers.store
        self.name = self._peers.name
        self.generation = Generation(-1, (), 0)  # the present one
        self.group: MemberGroup | None = None  # of the present generation
        self.mismatch = ""  # the error, if this generation's processes have different programs
        self.startup = startup  # seconds to wait for a live worker in a generation
        self.reconnects = False  # whether JAX's own connections may be broken here
        self.woken = threading.Event()  # set when something happened that a waiting worker must see
        self._root, self._patience = root, patience
        self._after = after  # the root of the run before this one
        self._most = most or self._keys.processes
        self._is_over = self._ended = False  # this generation; this worker's part
        self._join_steps: deque[int] = deque(maxlen=KEPT_STEPS)  # when workers could join
        self._lock = threading.Lock()
        self._keys.patience = min(patience, COORDINATOR_REPLY_SECONDS)
        self._peers.runs.add(root)
        self._peers.publish()
        watchdog.watched[root] = self

    def close(self) -> None:
        """Leave the run, so that the others know at once that this worker has left."""
        self._watchdog.watched.pop(self._root, None)
        with self._lock:  # the watchdog may be waking the group
            self._ended = True
            self._close_group()
        self._peers.runs.discard(self._root)
        with contextlib.suppress(StoreUnreachableError, RuntimeError):
            self._peers.publish()
        self._keys.patience = math.inf

    def check(self) -> None:
        """Raise RegroupError if a worker has requested a new generation, or a member has ended."""
        self._keys.check()
        if self._is_over:
            raise RegroupError
        if self.group is not None and isinstance(self.group.failure, PeerLostError):
            self.request_regroup(str(self.group.failure))
            raise RegroupError

    def lose_coordinator(self) -> None:
        """Make every wait fail, because the coordinator no longer answers."""
        self._keys.lose()
        self._wake(StoreUnreachableError("the coordinator is lost"))

    def request_regroup(self, why: str, late: bool = False) -> bool:
        """End this generation on all its members, and say why.

        If the reason is a deadline (`late`), members that do not answer at once are dropped.

        Returns:
          Whether the first reason, here or elsewhere, was a deadline; it causes later failures.
        """
        request = {"why": why, "late": late, "by": self.name, "mismatch": self.mismatch}
        first = agree(self._keys, self._key(self.generation.number + 1, "request"), request)
        self._is_over = True
        # Many members may ask at once: the one whose request counts wakes all.
        if first == request:
            self._peers.alarm(self._root, map(parse_rank, self.generation.members), {})
        return first["late"]

    def meet(self) -> None:
        """Wait until all workers have begun this run, or raise an error that names the late."""
        self._keys.set(f"{self._root}/here/{self._keys.process}", self.name)
        until = time.monotonic() + self.startup
        while late := sorted(
            self._find_starters() - {*map(int, self._keys.all(f"{self._root}/here"))}
        ):
            if time.monotonic() > until:
                raise DeadlineExceededError(
                    f"Worker{'s' * (len(late) > 1)} {', '.join(map(str, late))} of "
                    f"{self._keys.processes} did not start training within {self.startup:g} s.",
                    ranks=late,
                )
            time.sleep(POLL_SECONDS)

    def _find_starters(self) -> set[int]:
        """Find who starts this run: all who finished the previous one, if any, and still live."""
        finished = self._keys.try_get(f"{self._after}/finished") if self._after else None
        ranks = json.loads(finished) if finished else range(self._keys.processes)
        return set(ranks) - list_ended().keys()

    def enter(self, step: int, term: int = 0) -> Generation | None:
        """Join the first generation, or wait to join a later one.

        Returns:
          The generation that this worker is in; None: training ended without it.
        """
        generation = self._agree(step, (step,), term)
        while not (self.name in generation.members or generation.ends_for_its_program(self.name)):
            if generation.ended:
                return None
            generation = self._wait_for_next(generation)
        return self._begin(generation)

    def regroup(self, finished: int, held: Sequence[int], residual: float = 0.0) -> Generation:
        """Agree on the next generation. It lacks this worker if the others took it for lost."""
        return self._begin(self._agree(finished, held, residual=residual))

    def joins_at(self, step: int) -> bool:
        """Agree on whether a worker joins before `step`: all members get the same answer."""
        has_place = len(self.generation.members) < self._most
        answer = "join" if has_place and self._waiting() else "go"
        if len(self._join_steps) == KEPT_STEPS and self.name == self.generation.members[0]:
            self._keys.delete(self._key(self.generation.number, f"step/{self._join_steps[0]}"))
        self._join_steps.append(step)
        key = self._key(self.generation.number, f"step/{step}")
        return agree(self._keys, key, answer) == "join"

    def gather(self, what: str, value: Any) -> dict[str, Any]:
        """Wait for the values of all members, and return them by name.

        Once all values are there it returns, even if the generation is over, so that all members
        get the same result.

        `what` is used only once in a generation, and `value` as JSON can have it.

        Raises:
          RegroupError: the generation is over.
        """
        self._peers.observe()  # before reading values: a worker may write its value and end

        def check(late: list[str]) -> None:
            self.check()
            if over := [m for m in late if self._has_left(m)]:
                self.request_regroup(f"{describe(over)} ended")
                raise RegroupError
            self._peers.observe()

        name = self._key(self.generation.number, what)
        members, limits = self.generation.members, {"me": self.name, "seconds": self.startup}
        try:
            return exchange(
                self._keys, name, value, members, check=check, woken=self.woken, **limits
            )
        except LateError as error:
            why = f"{describe(error.late)} did not arrive within {self.startup:g} s"
            self.request_regroup(why, late=True)
            raise RegroupError from error

    def share(self, number: int, what: str, value: str) -> None:
        """Write a value for a generation, by a name that no other worker uses."""
        self._keys.set(self._key(number, what), value)

    def read_shared(self, number: int, folder: str) -> dict[str, str]:
        return self._keys.all(self._key(number, folder))

    def _has_left(self, name: str) -> bool:
        return self._peers.has_left(name, self._root)

    def finish(self) -> None:
        """Tell waiting workers that training is done."""
        done = Generation(self.generation.number + 1, (), 0, ended=True)
        self._keys.set(f"{self._root}/finished", json.dumps(self.generation.ranks))
        self._keys.agree(self._key(done.number, "generation"), done.encode())

    def _agree(
        self, finished: int, held: Sequence[int], term: int = 0, residual: float = 0.0
    ) -> Generation:
        number = self.generation.number + 1
        offer = {
            "finished": finished,
            "held": list(held),
            "program": self.group.latest if self.group is not None else (0, ""),
            "term": term,
            "reconnects": self.reconnects,
            "residual": residual,
        }
        self._keys.set(self._key(number, f"ready/{self.name}"), json.dumps(offer))
        key, began = self._key(number, "generation"), time.monotonic()
        while (text := self._keys.try_get(key)) is None:
            self._peers.observe()
            offers = self._keys.all(self._key(number, "ready"))
            ready = {name: json.loads(text) for name, text in offers.items()}
            if self.generation.number < 0:  # a restarted worker counts only once
                ready = {k: v for k, v in ready.items() if not self._has_left(k)}
            if self._is_complete(ready, time.monotonic() - began, number):
                # Proposals may differ; the first one counts, and the loop reads it.
                self._keys.agree(key, self._propose(number, ready).encode())
            else:
                time.sleep(POLL_SECONDS)
        return Generation.decode(text)

    def _is_complete(self, ready: Mapping[str, Any], waited: float, number: int) -> bool:
        if self.generation.number < 0:
            return self._find_starters() <= {*map(parse_rank, ready)} or waited > self.startup
        ejected = self._find_ejected(ready)
        if ejected == self.generation.members:
            return True
        late = [m for m in self.generation.members if m not in {*ready, *ejected}]
        request = self._keys.try_get(self._key(number, "request"))
        patience = HEARTBEAT_SECONDS if request and json.loads(request)["late"] else self._patience
        if not all(map(self._has_left, late)) and waited < patience:
            return False
        # Waiting workers become members, so it must be known whether they live.
        return all(self._peers.is_settled(w, self._root) for w in self._waiting())

    def _find_ejected(self, ready: Mapping[str, Any]) -> tuple[str, ...]:
        programs = {m: tuple(offer["program"]) for m, offer in ready.items()}
        return find_ejected(self.generation.members, self.generation.joined, programs)

    def _propose(self, number: int, ready: Mapping[str, Any]) -> Generation:
        request = json.loads(self._keys.try_get(self._key(number, "request")) or "{}")
        why = request.get("why", "a worker joined" if number else "")
        last = self.generation
        before = last.members if number else sorted(ready, key=parse_rank)
        ejected = self._find_ejected(ready)
        mismatch = request.get("mismatch") or "Workers have different programs."
        staying = [m for m in before if m in ready and m not in ejected][: self._most]
        if not staying:
            step = min(r["finished"] for r in ready.values())
            return Generation(number, (), step, ejected=ejected, mismatch=mismatch)
        coming = self._find_newcomers(staying)
        members = tuple(sorted([*staying, *coming], key=parse_rank))
        # All survivors can go back to the slowest one's step; at the start the newest state counts.
        # A newcomer has an older state if the generation ended before the state was sent to it.
        choose, since = (min, last.step) if number else (max, 0)
        had = [m for m in staying if ready[m]["finished"] >= since] or staying
        step = choose(ready[m]["finished"] for m in had)
        term = last.term if number else max(ready[m]["term"] for m in staying)
        having = [m for m in staying if step in ready[m]["held"]]
        return Generation(
            number,
            members,
            step,
            source=having[0],
            sends_state=any(m not in having for m in members),
            lost=tuple(m for m in before if m not in ready or m in ejected),
            joined=tuple(m for m in members if number and m not in before),
            why=why,
            ejected=ejected,
            mismatch=mismatch if ejected else "",
            reconnects=number > 0 or any(r["reconnects"] for r in ready.values()),
            term=term + 1,
            residual=math.sqrt(sum(ready[m]["residual"] ** 2 for m in staying) / len(staying)),
        )

    def _find_newcomers(self, staying: Sequence[str]) -> list[str]:
        """Choose waiting workers that live, as many as have room, and forget those that ended."""
        waiting = self._waiting()
        for name in filter(self._has_left, waiting):
            self._keys.delete(f"{self._root}/waiting/{name}")
        taken = {parse_rank(name) for name in staying}
        live = [w for w in waiting if self._peers.is_alive(w, self._root)]
        return [w for w in live if parse_rank(w) not in taken][: self._most - len(staying)]

    def _waiting(self) -> list[str]:
        waiting = self._keys.all(f"{self._root}/waiting")
        return sorted((w for w in waiting if w not in self.generation.members), key=parse_rank)

    def _wait_for_next(self, after: Generation) -> Generation:
        self._keys.set(f"{self._root}/waiting/{self.name}", "1")
        key = self._key(after.number + 1, "generation")
        while True:
            self._peers.observe()
            # Check this before reading the record: a worker that finishes writes it and then ends.
            over = all(map(self._has_left, after.members))
            if (text := self._keys.try_get(key)) is not None:
                return Generation.decode(text)
            if over:
                raise PeerLostError(
                    f"All workers have ended ({describe(after.members)}), so worker "
                    f"{parse_rank(self.name)} has no run to join. Start the job again.",
                    ranks=after.ranks,
                )
            time.sleep(POLL_SECONDS)

    def _begin(self, generation: Generation) -> Generation:
        # A newcomer may have joined since the last heartbeat: its predecessor's end is not its own.
        self._peers.look()
        with self._lock:  # the watchdog must not apply a request from the last generation
            self.generation = generation
            self._is_over = False
            self.mismatch = ""
            self._join_steps.clear()
            self.woken.clear()
            self._close_group()
            if is_member := self.name in generation.members:
                peers, name = self._peers, f"{self._root}/{generation.number}"
                peers.lost.difference_update(generation.ranks)  # who was lost before is back
                self.group = MemberGroup(peers, tuple(sorted(generation.ranks)), name)
                self._watchdog.watched[name] = self.group
        if is_member:
            self._keys.delete(f"{self._root}/waiting/{self.name}")
        return generation

    def _close_group(self) -> None:
        if self.group is not None:
            self._watchdog.watched.pop(self.group.name)
            self.group.worker.close()
            self.group = None

    def _wake(self, error: Exception) -> None:
        """End every wait of this worker; calls in progress and later ones raise `error`."""
        if self.group is not None:
            self.group.end(error)
        self.woken.set()

    def _key(self, number: int, what: str) -> str:
        return f"{self._root}/{number}/{what}"

    def receive_alarm(self, alarm: dict[str, Any]) -> None:
        self.beat()

    def beat(self) -> None:
        """Check for a request for a new generation, as its alarm may be lost."""
        with self._lock:
            if self._ended:
                return
            request = self._keys.try_get(self._key(self.generation.number + 1, "request"))
            if request and self.generation.number >= 0:
                self._is_over = True
                self._wake(RegroupError())
