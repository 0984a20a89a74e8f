"""Whatever strangers send, and however a coordinator ends, real processes get in or know at once."""

import contextlib
import json
import socket
import sys
import threading
import time
from unittest import mock

import pytest
from at_once import at_once, wait_for
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxcoll as jc
from jaxcoll._job import coordinator_process
from jaxcoll._job.coordinator import start_coordinator
from jaxcoll._job.coordinator_process import STRANGERS, message, parse_news
from jaxcoll._job.liveness import CoordinatorConnection
from jaxcoll._job.specs import Member, host_and_port
from jaxcoll._job.startup import arrive

HELLO = {"process_id": 1, "num_processes": 2, "patience": 60.0, "who": "there:1", "job": ""}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=9)


def is_one(name, value):
    """Whether a hello with this value in the place of its own is one that a process may send."""
    return coordinator_process._hello(hello(**{name: value})) is not None


def hello(**change):
    return json.dumps(HELLO | change).encode() + b"\n"


HELLOS = (
    st.tuples(st.sampled_from(sorted(HELLO)), VALUES)
    .filter(lambda pair: not is_one(*pair))
    .map(lambda pair: hello(**dict([pair])))
)


@pytest.fixture(scope="module")
def waiting():
    """A coordinator that has waited for two processes all the while, and gets them in the end."""
    with starting(2) as started:
        yield started
        with joined(started) as connections:
            assert [one.news() for one in connections] == [{}, {}]


@contextlib.contextmanager
def joined(started):
    members = [Member(started.address, 2, rank) for rank in range(2)]
    arrived = at_once(*(lambda m=m: arrive(m, 20).detach() for m in members))
    connections = [CoordinatorConnection(fd) for fd in arrived]
    yield connections
    for one in connections:
        one.close()


@contextlib.contextmanager
def starting(n):
    started = start_coordinator("127.0.0.1:0", n)
    yield started
    started.close()


def connection(started):
    return socket.create_connection(host_and_port(started.address), 20)


@settings(max_examples=15)
@given(st.binary() | VALUES.map(lambda x: json.dumps(x).encode() + b"\n") | HELLOS)
@example(b"[" * 1500 + b"\n")
@example(b'{"a":' * 700 + b"\n")
@example(hello(patience=float("inf")))
@example(hello().replace(b"60.0", b"1e999"))
@example(hello(patience=float("nan")))
@example(hello(patience=2.2e6))
@example(hello(num_processes=10**4000))
@example(hello(who="\x1b[2J"))
@example(b"\xff" * 5000)
@example(b"\n")
def test_coordinator_outlives_strangers(waiting, sent):
    with connection(waiting) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""  # it has read it all, hung up, and lives
    assert waiting.process.poll() is None


@settings(max_examples=25)
@given(st.binary() | VALUES.map(json.dumps))
@example("[" * 100_000)
@example('{"ended": 1, "done": {"a": "b"}, "stage": 7}')
@example('{"ended": true}')
def test_received_lines_parse_or_vanish(sent):
    assert type(message(sent)) is dict
    news = parse_news(sent)
    assert not news or type(news["ended"]) is int
    assert all(type(count) is int for count in news.get("done", {}).values())


def test_silent_connections_keep_nobody_out():
    with starting(2) as started, contextlib.ExitStack() as open_ones:
        silent = [open_ones.enter_context(connection(started)) for _ in range(STRANGERS + 40)]
        for each in silent[::2]:
            with contextlib.suppress(ConnectionError):  # the oldest were closed
                each.sendall(b'{"process')
        began = time.monotonic()
        with joined(started) as (here, there):
            assert time.monotonic() - began < 10
            for each in silent:
                with contextlib.suppress(OSError):
                    each.sendall(hello())
            there.report(done={"team": 3})
            time.sleep(0.2)
            assert not here.news()  # until it has ended
            there.close()
            wait_for(here.news)
            assert here.news()[1]["done"] == {"team": 3}
            assert not here.is_broken


def test_refusal_reaches_silent_connections():
    with starting(3) as started, connection(started) as one, connection(started) as silent:
        one.sendall(hello(num_processes=7))
        assert b"expects 7 processes" in one.recv(1000)
        with connection(started), pytest.raises(ValueError, match="expects 7 processes"):
            arrive(Member(started.address, 3, 0), 20)
        assert b"expects 7 processes" in silent.recv(1000)


def test_port_is_taken_until_service(monkeypatch):
    was_open = []

    def loaded():
        was_open.append(listener.fileno() != -1)
        return lambda *args: was_open.append(listener.fileno() != -1) or "the service"

    monkeypatch.setattr(coordinator_process, "_load_service", loaded)
    monkeypatch.setattr(coordinator_process.selectors, "DefaultSelector", mock.MagicMock)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = coordinator_process._Coordinator(
            listener, {"num_processes": 1, "address": "127.0.0.1:1", "service": {}}
        )
        begun._begin()
    assert was_open == [True, False]
    assert begun._service == "the service"


@pytest.mark.slow
def test_coordinators_early_death_ends_wait():
    began, words = time.monotonic(), "coordinator at .* died before all processes had arr"
    with starting(2) as started:
        threading.Timer(0.3, started.process.kill).start()
        with pytest.raises(jc.errors.PeerLostError, match=words) as lost:
            arrive(Member(started.address, 2, 1), 60)
    assert (lost.value.ranks, time.monotonic() - began < 20) == ((), True)


@pytest.mark.parametrize("seconds", [2_147_484, 1e9, sys.float_info.max])
def test_longest_timeouts_still_wait(seconds):
    def come(rank):
        time.sleep(0.2 * rank)
        assert started.process.poll() is None
        return arrive(Member(started.address, 2, rank), seconds)

    with starting(2) as started:
        for one in at_once(lambda: come(0), lambda: come(1)):
            one.close()
