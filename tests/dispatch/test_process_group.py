"""What neighbours tell one another once a second finds orders that nobody asked about."""

import threading
import types

import pytest

from jaxcoll._cluster.key_value import LocalKeys
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._dispatch import process_group
from jaxcoll._dispatch.call_status import Entered
from jaxcoll._dispatch.program_check import agreed
from jaxcoll._errors import PeerLostError, ProgramMismatchError


class Wired:
    """As much of a `Watch` as a beat needs; alarms go to everybody at once."""

    def __init__(self, store, members):
        self.store, self.process, self.root = store, store.process, "watch"
        self.lost, self.gone, self.members = set(), {}, members

    def silent(self, process):
        return "has died"

    def alarm(self, member, processes, alarm):
        for process in processes:
            if process != self.process:
                self.members[process].alarmed(alarm)


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(process_group, "agreed", lambda *args: None)
    keys, members = LocalKeys(processes=3), {}
    watches = [Wired(keys.of(process), members) for process in range(3)]
    members.update({w.process: process_group.Team(w, (0, 1, 2)) for w in watches})
    return list(zip(watches, members.values(), strict=True))


def call(one, mark):
    program = types.SimpleNamespace(mark=mark, name=f"`{mark}`", lines=(), compiled=lambda: mark)
    one.run(program, (), {})


def test_an_order_that_differs_is_told_to_all(three):
    for _, one in three:
        for mark in "aab":
            call(one, mark)
    for watch, one in three * 2:
        one.beat(watch)
    assert not any(one.failure for _, one in three)
    for process, marks in enumerate(("ab", "ab", "ba")):
        for mark in marks:
            call(three[process][1], mark)
    for watch, one in three * 2:
        one.beat(watch)
    for _, one in three:
        with pytest.raises(ProgramMismatchError, match="call 4 was `b` on process 2 and `a` on pr"):
            call(one, "a")


def test_who_is_ahead_is_not_out_of_order(three):
    for process, marks in enumerate(("abab", "ab", "a")):
        for mark in marks:
            call(three[process][1], mark)
    for watch, one in three * 3:
        one.beat(watch)
    assert not any(one.failure for _, one in three)


def test_a_call_that_somebody_who_ended_did_not_enter_is_given_up_after_a_beat(three):
    (watch, one), *_ = three
    given_up = []
    one.interrupt = given_up.append
    for _ in range(3):
        call(one, "a")
    watch.gone = {1: {one.name: 3}}  # it entered this call before it ended
    for _ in range(3):
        one.beat(watch)
    assert not given_up
    with pytest.raises(PeerLostError, match="process 1 has died.*which was not begun"):
        call(one, "a")
    watch.gone = {1: {one.name: 3}, 2: {one.name: 2}}
    one.beat(watch)
    assert not given_up  # what is left of it may be this process's own
    one.beat(watch)
    assert {error.ranks for error in given_up} == {(2,)}
    assert "the coordinator told of it" in str(given_up[0])
    assert watch.lost == {2}


def test_of_who_died_without_a_word_no_call_is_known(three):
    (watch, one), *_ = three
    watch.gone = {2: {}}
    for _ in range(2):
        one.beat(watch)
    assert not watch.lost  # nothing was called with it
    with pytest.raises(PeerLostError, match="process 2 has died"):
        call(one, "a")


def test_an_error_of_the_transport_is_a_loss_also_where_nobody_can_be_asked(three):
    (watch, one), *_ = three

    def unreachable(*args):
        raise StoreUnreachableError("the coordinator is stopped")

    def broken():
        raise ValueError("Gloo: connection closed by peer")

    watch.look, watch.roll_call = lambda: None, unreachable
    call(one, "a")
    program = types.SimpleNamespace(mark="a", name="`a`", lines=(), compiled=broken)
    with pytest.raises(PeerLostError, match="Call 2, `a`, failed.*is stopped.*Gloo") as caught:
        one.run(program, (), {})
    assert caught.value.ranks == ()
    assert (one.position, one.done) == (2, 1)  # its part of the second is not done


def test_who_did_its_part_is_not_blamed_for_another_and_who_died_is_at_once(three):
    (watch, one), *_ = three
    asked = []
    watch.look = lambda: None
    watch.roll_call = lambda name, at, processes, patience: asked.append(processes) or {}
    for _ in range(3):
        call(one, "a")
    watch.gone = {1: {one.name: 3}}
    assert one.explained(ValueError("Gloo: read error")).ranks == (2,)
    assert asked == [[2]]
    watch.gone, watch.lost = {1: {}}, set()
    assert one.explained(ValueError("Gloo: read error")).ranks == (1,)
    assert asked == [[2]]


def test_of_what_was_agreed_upon_only_the_last_is_kept():
    keys, members = LocalKeys(processes=2), {}
    watches = [Wired(keys.of(process), members) for process in range(2)]
    teams = [process_group.Team(watch, (0, 1)) for watch in watches]
    program = types.SimpleNamespace(lines=())

    def agree_often(process):
        for position in range(1, 30):
            call = Entered(position, "m", "`m`", 0)
            assert agreed(watches[process], teams[process], program, call) is None

    other = threading.Thread(target=agree_often, args=(1,))
    other.start()
    agree_often(0)
    other.join()
    assert len(keys.all("watch/agree")) == 3  # two marks and a verdict
