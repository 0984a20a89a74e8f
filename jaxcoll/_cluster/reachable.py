"""Which addresses a process can connect to, in a bounded time."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Mapping

CONNECT_SECONDS = 4.0
"""A worker to which no connection comes about for so long is cut off. In it a first packet that is
lost is sent twice more."""

Address = tuple[str, int]
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


def open_port(host: str) -> socket.socket:
    """A socket to which others connect to see whether they can: the system answers, nobody else."""
    return socket.create_server((host, 0), family=_family(host), backlog=socket.SOMAXCONN)


def unreachable(addresses: Mapping[str, Address], seconds: float) -> list[str]:
    """Names of those whose hosts did not answer in time.

    One that refuses has answered: that a process has ended is found in other ways.
    """
    until, missing = time.monotonic() + seconds, []
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as lines:
        for name, address in addresses.items():
            line = lines.enter_context(socket.socket(_family(address[0])))
            line.setblocking(False)
            if line.connect_ex(address) in _UNREACHABLE:
                missing.append(name)
            else:
                waiting.register(line, selectors.EVENT_WRITE, name)
        while waiting.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                line = key.fileobj
                assert isinstance(line, socket.socket)
                if line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _UNREACHABLE:
                    missing.append(key.data)
        return missing + [key.data for key in waiting.get_map().values()]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
