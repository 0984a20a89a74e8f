"""Who is lost, and when a group learns it; and what of an agreement is kept."""

import contextlib
import dataclasses
import threading

import pytest

from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._job.key_value import LocalKeys
from jaxcoll._runtime import agreement
from jaxcoll._runtime.agreement import Agreement
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import Program
from jaxcoll._runtime.process_group import ProcessGroup
from jaxcoll.errors import PeerLostError, ProgramMismatchError


class Wired:
    """As much of `Peers` as a heartbeat needs; alarms go to everybody at once."""

    def __init__(self, store, groups):
        self.store, self.process, self.root = store, store.process, "watch"
        self.lost, self.ended, self.groups = set(), {}, groups

    def describe_silence(self, process):
        return "has died"

    def alarm(self, group, processes, alarm):
        for process in processes:
            if process != self.process:
                self.groups[process].receive_alarm(alarm)


class Waiting:
    """As much of a `Task` as a process group needs."""

    has_ended = False

    def __init__(self, given_up):
        self.abandon = given_up.append

    def is_done(self):
        return self.has_ended


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(Agreement, "reach", lambda self: {})
    keys, groups = LocalKeys(processes=3), {}
    wired = [Wired(dataclasses.replace(keys, process=process), groups) for process in range(3)]
    groups.update({peers.process: ProcessGroup(peers, (0, 1, 2)) for peers in wired})
    return list(zip(wired, groups.values(), strict=True))


def call(one, digest, compiled=dict):
    one.run(Call(dict, (), (), "a call"), Program(compiled, f"`{digest}`", digest=digest))


def test_call_without_ended_gives_up(three):
    (peers, one), *_ = three
    given_up = []
    waiting = Waiting(given_up)
    one.begin(waiting)
    for _ in range(3):
        call(one, "a")
    peers.ended = {1: {one.name: 3}}  # it entered this call before it ended
    for _ in range(3):
        one.beat()
    assert not given_up
    with pytest.raises(
        PeerLostError, match="Call 4 among . processes was not started: process 1 has died"
    ):
        call(one, "a")
    peers.ended = {1: {one.name: 3}, 2: {one.name: 2}}
    one.beat()
    assert not given_up  # what is left of it may be this process's own
    one.beat()
    assert {error.ranks for error in given_up} == {(2,)}
    assert "the coordinator reported it" in str(given_up[0])
    assert peers.lost == {2}
    waiting.has_ended = True  # what has its result is left alone, and what nobody has is forgotten
    one._fail(ProgramMismatchError("another"))
    del waiting
    assert len(given_up) == 1
    assert not one._waiting


def test_dead_process_fails_next_call(three):
    (peers, one), *_ = three
    peers.ended = {2: {}}
    for _ in range(2):
        one.beat()
    assert not peers.lost  # nothing was called with it
    with pytest.raises(PeerLostError, match="process 2 has died"):
        call(one, "a")


def test_transport_error_is_a_loss(three):
    (peers, one), *_ = three

    def unreachable(*args):
        raise StoreUnreachableError("the coordinator is stopped")

    def broken():
        raise ValueError("Gloo: connection closed by peer")

    peers.look, peers.ask = lambda: None, unreachable
    call(one, "a")
    with pytest.raises(PeerLostError, match="Call 2, `a`, failed.*is stopped.*Gloo") as caught:
        call(one, "a", broken)
    assert caught.value.ranks == ()
    assert (one.position, one.done) == (2, 1)  # its part of the second is not done


def test_only_the_absent_are_blamed(three):
    (peers, one), *_ = three
    asked = []
    peers.look = lambda: None
    peers.ask = lambda name, at, processes, patience: asked.append(processes) or {}
    for _ in range(3):
        call(one, "a")
    peers.ended = {1: {one.name: 3}}
    assert one.explain(ValueError("Gloo: read error")).ranks == (2,)
    assert asked == [[2]]
    peers.ended, peers.lost = {1: {}}, set()
    assert one.explain(ValueError("Gloo: read error")).ranks == (1,)
    assert asked == [[2]]


def test_call_after_failure_is_agreed(three, monkeypatch):
    (_, one), *_ = three
    agreed = []
    monkeypatch.setattr(Agreement, "reach", lambda self: agreed.append(self.position) or {})

    def fail():
        raise ValueError("in a callback")

    for compiled in (dict, dict, fail, dict, dict):
        with contextlib.suppress(ValueError):
            call(one, "a", compiled)
    assert agreed == [1, 4], "others may wait in call 3 for this process"


def test_expected_call_awaits_earlier_ones(monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.01)
    peers, places = Wired(LocalKeys(processes=3, process=1), {}), [3, 3, 4]

    def ask(group, position, asked):
        at = {0: 5, 2: places.pop(0) if 2 in asked else None}
        return {p: {"at": at[p], "ran": "a" if p == 0 else None} for p in asked}

    peers.ask = ask
    program = Program(dict, "`a`", digest="a", is_first=False)
    assert Agreement(peers, "g", (0, 1, 2), 4, program, None, print, None, list).reach() == {}
    assert not places, "process 2 was in call 3"


def test_only_last_agreement_is_kept():
    keys = LocalKeys(processes=2)
    groups = [
        ProcessGroup(Wired(dataclasses.replace(keys, process=process), {}), (0, 1))
        for process in range(2)
    ]

    def call_often(process):
        for position in range(1, 30):
            call(groups[process], f"m{position}")  # which is never expected

    other = threading.Thread(target=call_often, args=(1,))
    other.start()
    call_often(0)
    other.join()
    assert len(keys.all("watch/agree")) == 3  # two marks and a verdict
