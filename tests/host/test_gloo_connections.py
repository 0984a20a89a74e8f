"""A connection of Gloo's is told from others by where Gloo listens, and shut from this end."""

import os
import socket

from jaxcoll._host import gloo


def test_only_the_connections_that_are_meant_are_shut():
    before = len(os.listdir("/dev/fd"))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as others,
        socket.create_connection(listener.getsockname()) as old,
        socket.create_connection(others.getsockname()) as foreign,
    ):
        at = listener.getsockname()
        assert at not in gloo.listening(), "Python's own sockets are no Gloo's"
        os.set_inheritable(listener.fileno(), True)
        assert at in gloo.listening()
        earlier = gloo.connections([at])
        with socket.create_connection(at) as new:
            made = gloo.connections([at]) - earlier
            assert new.fileno() in {fd for fd, *_ in made}
            gloo.shut([*made, (foreign.fileno(), at, at)])
            assert new.recv(1) == b""
        for line in (old, foreign):
            line.sendall(b"still there")
        gloo.shut(made)  # what has ended since is passed over
    assert len(os.listdir("/dev/fd")) == before
