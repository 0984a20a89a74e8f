"""The devices of one generation, and the connections between them."""

from __future__ import annotations

import base64
import contextlib
import gc
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax

from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._compat.gloo import SecondClient, meets_over_gloo
from jaxcoll._job import gloo_sockets
from jaxcoll._job.initialize import own_address
from jaxcoll._job.socket_folder import make_socket_folder
from jaxcoll._job.threads import any_blocked
from jaxcoll._job.timing import GLOO_CONNECT_SECONDS, IDLE_POLL_SECONDS, POLL_SECONDS
from jaxcoll._train.elastic.membership import Membership

_jax_broken = False


def may_be_broken() -> bool:
    return _jax_broken


class Connections:
    """The devices of all processes, and the connections of one generation.

    Guarantee: a generation uses no connection of another one, and its workers publish addresses
    under names that no other generation uses. So a connection that is broken, or that somebody
    still waits for, cannot disturb it, and there can be any number of generations. The first
    generation uses `jax.devices()`, unless their connections may be broken. With a transport other
    than Gloo all generations do.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership, generation = membership, membership.generation
        self._number = generation.number  # the thread may still run when the next one begins
        self._listening: set[gloo_sockets.Address] = set()  # addresses of all members
        self._before: set[gloo_sockets.Connection] = set()
        self._made: set[gloo_sockets.Connection] | None = None
        self._until = float("inf")  # when to stop checking often for others' addresses
        self._ended = threading.Event()
        self._client: SecondClient | None = None
        self._thread: threading.Thread | None = None
        self.devices: list[jax.Device] = jax.devices()  # of all processes
        if generation.reconnects and meets_over_gloo():
            self._client = SecondClient(own_address(), make_socket_folder)
            self.devices = self._client.client.devices()
            self._thread = threading.Thread(
                target=self._exchange, name="jaxcoll-connect", daemon=True
            )
            self._thread.start()

    def begin(self, listening: Iterable[Sequence[Any]]) -> None:
        """Note the addresses at which members listen, each one's by `find_listeners`."""
        self._listening = {(host, port) for each in listening for host, port in each}
        self._before = gloo_sockets.find_connections(self._listening)

    def forget_others(self) -> None:
        """Clear JAX's caches, which keep the clients of earlier generations alive.

        Each client has threads and file descriptors. The user's other functions compile again.
        """
        if self._client is not None:
            jax.clear_caches()
            gc.collect()

    def settle(self) -> None:
        """Record that a program has run: connections made later belong to others."""
        if self._made is None:
            self._made = gloo_sockets.find_connections(self._listening) - self._before
        self._until = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Make whatever waits for a connection fail, and make no more connections."""
        global _jax_broken
        if any_blocked():  # in a collective of this generation, which nothing else can end
            self.settle()
            gloo_sockets.shut_down(self._made or ())
        # After an error, connections may be broken, here or on other workers.
        _jax_broken = _jax_broken or (kind is not None and self._client is None)
        self._ended.set()
        if self._client is not None:
            self._client.close()
            self._client = None
        self.devices = []

    def _exchange(self) -> None:
        """Send the addresses that Gloo writes here to the others, and receive theirs.

        This is a thread, because a collective connects on first use, and any worker may be first.
        """
        client, folder = self._client, "connect"
        assert client is not None
        copied: set[str] = set()
        with contextlib.suppress(StoreUnreachableError, RuntimeError):
            while not self._ended.wait(self._pause()):
                for key, value in client.addresses().items():
                    if key not in copied:
                        copied.add(key)
                        self._until = time.monotonic() + GLOO_CONNECT_SECONDS
                        text = base64.b64encode(value).decode()
                        self._membership.share(self._number, f"{folder}/{key}", text)
                if not copied or time.monotonic() > self._until:
                    continue
                for key, text in self._membership.read_shared(self._number, folder).items():
                    if key not in copied:
                        copied.add(key)
                        client.learn(key, base64.b64decode(text))

    def _pause(self) -> float:
        return POLL_SECONDS if time.monotonic() < self._until else IDLE_POLL_SECONDS
