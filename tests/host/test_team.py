"""What neighbours tell one another once a second finds orders that nobody asked about."""

import types

import pytest

from jaxcoll._host import team
from jaxcoll._host.local_keys import LocalKeys
from jaxcoll._plan.errors import ProgramMismatchError


class Wired:
    """As much of a `Watch` as a beat needs; alarms go to everybody at once."""

    def __init__(self, store, members):
        self.store, self.process, self.root = store, store.process, "watch"
        self.lost, self.members = set(), members

    def alarm(self, member, processes, alarm):
        for process in processes:
            if process != self.process:
                self.members[process].alarmed(alarm)


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(team, "agreed", lambda *args: None)
    keys, members = LocalKeys(processes=3), {}
    watches = [Wired(keys.of(process), members) for process in range(3)]
    members.update({w.process: team.Team(w, (0, 1, 2)) for w in watches})
    return list(zip(watches, members.values(), strict=True))


def call(one, mark):
    one.run(
        types.SimpleNamespace(mark=mark, name=f"`{mark}`", lines=(), compiled=lambda: mark), (), {}
    )


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
