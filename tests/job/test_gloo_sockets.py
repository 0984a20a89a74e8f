"""A connection of Gloo's is told from others by where Gloo listens; Gloo's thread waits its turn."""

import os
import socket
import threading

import pytest

from jaxcoll._compat.gloo import start_threads_that_wait
from jaxcoll._job import gloo_sockets


def test_only_given_connections_are_shut():
    before = len(os.listdir("/dev/fd"))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as others,
        socket.create_connection(listener.getsockname()) as old,
        socket.create_connection(others.getsockname()) as foreign,
    ):
        at = listener.getsockname()
        assert at not in gloo_sockets.find_listeners(), "Python's own sockets are no Gloo's"
        os.set_inheritable(listener.fileno(), True)
        assert at in gloo_sockets.find_listeners()
        before_it = gloo_sockets.find_connections([at])
        with socket.create_connection(at) as new:
            made = gloo_sockets.find_connections([at]) - before_it
            with socket.create_connection(at) as later:
                gloo_sockets.shut_down(made)
                assert new.recv(1) == b""
                for sock in (old, foreign, later):
                    sock.sendall(b"still there")
        gloo_sockets.shut_down(made)  # what has ended since is passed over
        gloo_sockets.shut_down([(foreign.fileno(), at, at)])  # as is what has the number of another
        foreign.sendall(b"still there")
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_threads_wait_their_turn_unless_told_otherwise(monkeypatch):
    def policies(own):
        """The policy of a thread that one of policy `own` starts, and that one's afterwards."""
        found = []
        note = lambda: found.append(os.sched_getscheduler(0))

        def start():
            os.sched_setscheduler(0, own, os.sched_param(0))
            with start_threads_that_wait():
                thread = threading.Thread(target=note)
                thread.start()
                thread.join()
            note()

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        return found

    assert policies(os.SCHED_OTHER) == [os.SCHED_BATCH, os.SCHED_OTHER]
    assert policies(os.SCHED_IDLE) == [os.SCHED_IDLE] * 2

    default = os.SCHED_OTHER

    def refuse(*args):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setscheduler", refuse)
        with start_threads_that_wait():
            assert os.sched_getscheduler(0) == default
    with monkeypatch.context() as patch:
        patch.delattr(os, "SCHED_OTHER")
        with start_threads_that_wait():
            assert os.sched_getscheduler(0) == default
