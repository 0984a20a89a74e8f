"""TCP among elastic workers: who can be reached, and an end to the connections that Gloo made.

A process that waits in a collective for a worker that died gets an error only if it is that one's
neighbour, and none at all if that one is merely stopped. Nothing in JAX can close the connections
that Gloo made. But the sockets are this process's own: when it shuts its ends, Gloo fails in
whatever waits there, and the thread returns. Gloo's sockets are recognised by the ports at which it
listens.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

Address = tuple[str, int]
Connection = tuple[int, Address, Address]  # a descriptor, and the addresses of both ends
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}

CONNECT_SECONDS = 4.0
"""Without a connection for so long, a worker is cut off. A lost first packet is sent twice more
within this time."""


def open_port(host: str) -> socket.socket:
    """A socket to which others connect to see whether they can: the system alone replies."""
    return socket.create_server((host, 0), family=_family(host), backlog=socket.SOMAXCONN)


def unreachable(addresses: Mapping[str, Address], seconds: float) -> list[str]:
    """Names of those whose hosts did not answer in time.

    A host that refuses has answered: the end of a process is found in other ways.
    """
    until, missing = time.monotonic() + seconds, []
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as opened:
        for name, address in addresses.items():
            connection = opened.enter_context(socket.socket(_family(address[0])))
            connection.setblocking(False)
            # As a rule it is under way: the selector tells when it is through.
            if connection.connect_ex(address) in _UNREACHABLE:
                missing.append(name)
            else:
                waiting.register(connection, selectors.EVENT_WRITE, name)
        while waiting.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _UNREACHABLE:
                    missing.append(key.data)
        return missing + [key.data for key in waiting.get_map().values()]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


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
