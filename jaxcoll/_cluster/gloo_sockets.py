"""An end to the connections that Gloo made among elastic workers.

A process that waits in a collective for a worker that died gets an error only if it is that one's
neighbour, and none at all if that one is merely stopped. Nothing in JAX can close the connections
that Gloo made. But the sockets are this process's own: when it shuts its ends, Gloo fails in
whatever waits there, and the thread returns. Gloo's sockets are recognised by the ports at which it
listens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import Any

Address = tuple[str, int]
Connection = tuple[int, Address, Address]  # a descriptor, and the addresses of both ends


def listening() -> list[Address]:
    """Return the addresses at which Gloo listens in this process.

    Python's own sockets and gRPC's are closed when another program is executed; Gloo's are not.
    """
    return [
        _address(sock.getsockname())
        for fd, sock in _sockets()
        if os.get_inheritable(fd) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def connections(listening: Collection[Address]) -> set[Connection]:
    """The connections of this process to or from those addresses, as they are now."""
    known, found = set(listening), set()
    for fd, sock in _sockets():
        with contextlib.suppress(OSError):  # it is not connected
            ends = _address(sock.getsockname()), _address(sock.getpeername())
            if known.intersection(ends):
                found.add((fd, *ends))
    return found


def shut(made: Iterable[Connection]) -> None:
    """Have whatever waits in connections fail, if they are still there.

    A descriptor may be another socket's by now.
    """
    for fd, *ends in made:
        with contextlib.suppress(OSError), _socket(fd) as sock:
            if [_address(sock.getsockname()), _address(sock.getpeername())] == ends:
                sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every TCP socket of this process, beside its descriptor; none where that cannot be known."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return
    for fd in descriptors:
        with contextlib.suppress(OSError), _socket(fd) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield fd, sock


def _socket(fd: int) -> socket.socket:
    """A descriptor's socket, by a descriptor of its own; OSError: it is closed, or no socket."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(f"{fd} is not a socket")
    return socket.socket(fileno=os.dup(fd))


def _address(name: Any) -> Address:
    return name[0], name[1]
