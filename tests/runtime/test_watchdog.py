"""Watchdogs speak with each other over keys and values alone, by threads in the place of processes."""

import dataclasses
import threading

import pytest
from at_once import wait_for

from jaxcoll._job.key_value import LocalKeys
from jaxcoll._runtime import watchdog
from jaxcoll._runtime.watchdog import Watchdog


class Recorder:
    """Something that a watchdog speaks for."""

    def __init__(self):
        self.alarms, self.heard, self.beaten = [], threading.Event(), threading.Event()

    def receive_alarm(self, alarm):
        self.alarms.append(alarm)
        self.heard.set()

    def beat(self):
        self.beaten.set()


@pytest.fixture
def meet(monkeypatch):
    """Starts the watchdog of a process over some keys, which ends after the test."""
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.05)
    met = []

    def start(keys, process=0, *, listens=True):
        met.append(
            Watchdog(dataclasses.replace(keys, process=process) if keys.processes > 1 else keys)
        )
        if listens:
            wait_for(lambda: met[-1].peers.find_state(process) == "here")
        return met[-1]

    yield start
    for each in met:
        each.end()
        assert not each._thread.is_alive()


def test_question_is_answered_at_once(meet):
    keys = LocalKeys(processes=3)
    one, other = meet(keys), meet(keys, 1)
    group = other.group((0, 1))
    assert other.group((0, 1)) is group
    assert one.peers.ask(group.name, 1, [1])[1]["name"] == "nothing"
    assert one.peers.ask("0-2-unknown", 1, [1, 2], patience=0.5) == {1: {"at": 0}}
    assert keys.all("jaxcoll/watch/replies") == keys.all("jaxcoll/watch/inbox/1") == {}


def test_alarm_reaches_its_addressee_only(meet):
    keys, found, others = LocalKeys(processes=2), Recorder(), Recorder()
    one, other = meet(keys), meet(keys, 1)
    other.watched |= {"a run": found, "another": others}
    one.watched["a run"] = others
    one.peers.alarm("unknown", [0, 1], {"lost": [7]})
    one.peers.alarm("a run", [0, 1], {"lost": [8]})
    assert found.heard.wait(5)
    assert (found.alarms, others.alarms) == ([{"lost": [8]}], [])
    assert (other.peers.lost, one.peers.lost) == ({7, 8}, set())


def test_heartbeat_needs_no_message(meet):
    keys, quiet = LocalKeys(processes=2), Recorder()
    one = meet(keys)
    one.watched["quiet"] = quiet
    assert quiet.beaten.wait(5)
    ringing = threading.Event()

    def ring():
        while not ringing.wait(0.001):
            keys.set("jaxcoll/watch/bell/0", "1")

    thread = threading.Thread(target=ring)
    thread.start()
    quiet.beaten.clear()
    assert quiet.beaten.wait(5)
    ringing.set()
    thread.join()


def test_few_reads_time_out_running(meet, monkeypatch):
    monkeypatch.setattr(watchdog, "OWN_RING", 3)
    keys, rows = LocalKeys(), [0]
    read = keys.get

    def get(key, seconds):
        try:
            rows.append(0)
            return read(key, seconds)
        except TimeoutError:
            rows[-1] = rows[-2] + 1
            raise

    keys.get = get
    meet(keys, listens=False)
    wait_for(lambda: len(rows) >= 20)
    assert 0 < max(rows) <= 6


def test_successor_gets_no_old_messages(meet):
    keys, found = LocalKeys(processes=2), Recorder()
    asking = meet(keys)
    Watchdog(dataclasses.replace(keys, process=1)).end()
    asking.peers.alarm("a run", [1], {"lost": [1]})  # while process 1 is not there
    again = meet(keys, 1)
    again.watched["a run"] = found
    asking.peers.alarm("a run", [1], {"lost": [2]})
    assert found.heard.wait(5)
    assert (found.alarms, again.peers.lost) == ([{"lost": [2]}], {2})
    assert asking.peers.find_state(1) == "here"


def test_nonsense_in_inbox_is_harmless(meet):
    keys, found = LocalKeys(processes=2), Recorder()
    one, other = meet(keys), meet(keys, 1)
    other.watched["a run"] = found
    for number, text in enumerate(
        ("[", "[1]", "{}", '{"to": []}', '{"to": "a run", "ask": 1}', '{"to": "x", "alarm": 5}')
    ):
        keys.set(f"jaxcoll/watch/inbox/1/{number}", text)
    one.peers.alarm("a run", [1], {"lost": []})
    assert found.heard.wait(5)
    assert one.peers.find_state(1) == "here"
    other.end()
    assert one.peers.find_state(1) == "ended"
