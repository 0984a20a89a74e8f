"""Who is lost, and when a group learns it; and what of an agreement is kept."""

import contextlib
import dataclasses
import gc
from unittest import mock

import pytest
from at_once import at_once

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

    root, describe_silence = "watch", lambda self, process: "has died"

    def __init__(self, store, groups):
        self.store, self.process, self.groups = store, store.process, groups
        self.lost, self.ended, self.asked, self.look = set(), {}, [], lambda: None

    def ask(self, name, at, processes, patience):
        self.asked.append(processes)
        return {}

    def alarm(self, group, processes, alarm):
        for process in {*processes} - {self.process}:
            self.groups[process].receive_alarm(alarm)


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
    waiting = mock.Mock(**{"is_done.return_value": False})
    one.begin(waiting)
    for _ in range(3):
        call(one, "a")
    peers.ended = {1: {one.name: 3}}  # it entered this call before it ended
    for _ in range(3):
        one.beat()
    words = "Call 4 among . processes was not started: process 1 has died"
    with pytest.raises(PeerLostError, match=words):
        call(one, "a")
    peers.ended = {1: {one.name: 3}, 2: {one.name: 2}}
    one.beat()
    assert not waiting.abandon.called  # what is left of it may be this process's own
    one.beat()
    ((error,), _) = waiting.abandon.call_args
    assert error.ranks == (2,)
    assert "the coordinator reported it" in str(error)
    assert peers.lost == {2}
    waiting.is_done.return_value = True  # what has its result is left alone
    one.end(ProgramMismatchError("another"))
    assert waiting.abandon.call_count == 1
    del waiting  # and what nobody has is forgotten
    gc.collect()
    assert not one._waiting


def test_transport_error_is_a_loss(three):
    (peers, one), *_ = three

    peers.ask = mock.Mock(side_effect=StoreUnreachableError("the coordinator is stopped"))

    def broken():
        raise ValueError("Gloo: connection closed by peer")

    call(one, "a")
    with pytest.raises(PeerLostError, match="Call 2, `a`, failed.*is stopped.*Gloo") as caught:
        call(one, "a", broken)
    assert caught.value.ranks == ()
    assert (one.position, one.done) == (2, 1)  # its part of the second is not done


def test_only_the_absent_are_blamed(three):
    (peers, one), *_ = three
    for _ in range(3):
        call(one, "a")
    peers.ended = {1: {one.name: 3}}
    assert one.explain(ValueError("Gloo: read error")).ranks == (2,)
    assert peers.asked == [[2]]
    peers.ended, peers.lost = {1: {}}, set()
    assert one.explain(ValueError("Gloo: read error")).ranks == (1,)
    assert peers.asked == [[2]]


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
    wired = [Wired(dataclasses.replace(keys, process=process), {}) for process in range(2)]

    def call_often(peers):
        group = ProcessGroup(peers, (0, 1))
        for position in range(1, 30):
            call(group, f"m{position}")  # which is never expected
        return group.position

    assert at_once(*(lambda peers=peers: call_often(peers) for peers in wired)) == [29, 29]
    assert len(keys.all("watch/agree")) == 3  # two marks and a verdict
