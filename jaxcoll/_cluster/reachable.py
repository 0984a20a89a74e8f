"""Which addresses a process can connect to, within a timeout."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Mapping

CONNECT_SECONDS = 4.0
"""Without a connection for so long, a worker is cut off. A lost first packet is sent twice more
within this time."""

Address = tuple[str, int]
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


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
