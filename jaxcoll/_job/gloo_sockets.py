"""Shut down the connections that Gloo made among elastic workers.

When a worker dies, only its neighbours get an error from the collective, and when it is merely
stopped, nobody does. JAX cannot close the connections that Gloo made. But this process owns its
sockets: when it shuts them down, Gloo's waits fail and the waiting threads return. It recognises
Gloo's sockets by the ports on which Gloo listens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import Any

Address = tuple[str, int]
Connection = tuple[int, Address, Address]  # a file descriptor, and the addresses of both ends


def find_listeners() -> list[Address]:
    """Find the addresses at which Gloo listens in this process.

    Python's and gRPC's sockets are closed on exec, Gloo's are not; this tells them apart.
    """
    return [
        _address(sock.getsockname())
        for fd, sock in _sockets()
        if os.get_inheritable(fd) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def find_connections(listening: Collection[Address]) -> set[Connection]:
    """Find this process's present connections to or from these addresses."""
    addresses, found = set(listening), set()
    for fd, sock in _sockets():
        with contextlib.suppress(OSError):  # it is not connected
            ends = _address(sock.getsockname()), _address(sock.getpeername())
            if addresses.intersection(ends):
                found.add((fd, *ends))
    return found


def shut_down(connections: Iterable[Connection]) -> None:
    """Shut connections down if they still exist, so that whatever waits on them fails.

    Compare both addresses first, because another socket may have the file descriptor by now.
    """
    for fd, *ends in connections:
        with contextlib.suppress(OSError), _socket(fd) as sock:
            if [_address(sock.getsockname()), _address(sock.getpeername())] == ends:
                sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield each TCP socket of this process and its descriptor; nothing without /dev/fd."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return
    for fd in descriptors:
        with contextlib.suppress(OSError), _socket(fd) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield fd, sock


def _socket(fd: int) -> socket.socket:
    """Duplicate a descriptor's socket. OSError: it is closed, or not a socket."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(f"{fd} is not a socket")
    return socket.socket(fileno=os.dup(fd))


def _address(name: Any) -> Address:
    return name[0], name[1]
