"""Which workers cannot connect to each other, though each of them reaches the coordinator."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from jaxcoll._elastic.generation import rank_of

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


def broken(cut_from: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """The links that at least one end cannot use, from whom each worker cannot reach."""
    return {frozenset((name, other)) for name, others in cut_from.items() for other in others}


def to_leave_out(links: Iterable[frozenset[str]], newcomers: Iterable[str]) -> set[str]:
    """So few workers, about, that those who are left can all reach each other.

    Again and again whoever has the most broken links is left out: of several a newcomer, and else
    the one with the highest number.
    """
    rest, out, new = set(links), set(), set(newcomers)
    while rest:
        times = Counter(name for link in rest for name in link)
        worst = max(times, key=lambda name: (times[name], name in new, rank_of(name)))
        out.add(worst)
        rest = {link for link in rest if worst not in link}
    return out


def named_links(links: Iterable[frozenset[str]]) -> str:
    """The links, for a message."""
    pairs = sorted(sorted(map(rank_of, link)) for link in links)
    each = [f"workers {one} and {other}" for one, other in pairs[:3]]
    more = f", nor {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
    return f"{', and '.join(each)} cannot connect to each other{more}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
