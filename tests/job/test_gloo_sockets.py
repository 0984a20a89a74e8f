"""A connection of Gloo's is told from others by where Gloo listens, and shut from this end."""

import os
import socket

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
