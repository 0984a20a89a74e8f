"""Processes that do not come to JAX's own meetings are named in time."""

import socket
import threading

import pytest

import jaxcoll as jc
from jaxcoll._host import muster
from jaxcoll._host.ended import Line
from jaxcoll._host.local_keys import LocalKeys


@pytest.mark.parametrize(
    ("told", "words", "ranks"),
    [
        (
            b'{"ended": 1, "after": 1.0}\n{"ended": 2, "after": 1.1}\n{"ended": 0, "after": 5.0}\n',
            "within 0.1 s: processes 1, 2 ended meanwhile",
            (1, 2),
        ),
        (b"", "within 0.1 s: one is stopped, or cut off", ()),
    ],
)
def test_a_connection_that_does_not_come_about_ends_in_time(told, words, ranks):
    line, coordinator = socket.socketpair()
    coordinator.sendall(told)
    comes = threading.Event()
    with pytest.raises(jc.DeadlineExceededError, match=words) as caught:
        muster.connected(comes.wait, Line(line.fileno()), 0.1)
    assert caught.value.ranks == ranks
    comes.set()
    for end in (line, coordinator):
        end.close()


def test_what_fails_while_connecting_is_the_callers():
    line, coordinator = socket.socketpair()
    with line, coordinator, pytest.raises(ZeroDivisionError):
        muster.connected(lambda: 1 / 0, Line(line.fileno()), 5.0)


def test_who_has_no_devices_in_time_is_named_and_nobody_counts_on_who_gave_up(monkeypatch):
    keys = LocalKeys(0, 2)
    monkeypatch.setattr(muster, "store", lambda: keys)
    with pytest.raises(jc.DeadlineExceededError, match="Process 1 of 2 did not .* 0.1 s of the f"):
        muster.await_all(0.1)
    monkeypatch.setattr(muster, "store", lambda: keys.of(1))
    with pytest.raises(jc.DeadlineExceededError, match="when process 0 waited for it no longer"):
        muster.await_all(60)
    keys.set("jaxcoll/devices/0", "here")
    muster.await_all(0.1)
