"""The devices of one generation, and the connections among them."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import threading
import time
from typing import Self

import jax

from jaxcoll._cluster import gloo_sockets
from jaxcoll._cluster.initialize import own_address
from jaxcoll._cluster.socket_folder import make_socket_folder
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._compat.gloo import ClientAnew, meets_over_gloo
from jaxcoll._elastic.membership import Membership
from jaxcoll._threads import any_blocked

_OFTEN, _SELDOM = 0.02, 0.25  # seconds between two looks for addresses
_CONNECTS = 60.0  # seconds at most that Gloo needs to connect; XLA ends it after 30

_jax_broken = False


def may_be_broken() -> bool:
    """True if connections of JAX's own devices may be broken, so that new ones are needed."""
    return _jax_broken


class Connections:
    """Devices of all processes, and the connections that one generation makes among its own.

    Guarantee: a generation uses no connection of another one, and its ends find each other under
    names that no other generation has. So a connection that is broken, or is still waited for
    elsewhere, cannot disturb it, and there may be as many generations as there are losses. The
    first generation has the devices of `jax.devices()`, unless their connections may be broken;
    over another transport than Gloo all generations have them.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership, generation = membership, membership.generation
        self._number = generation.number  # which the thread needs when the next one has begun
        self._listening: set[gloo_sockets.Address] = set()  # where all members do
        self._before: set[gloo_sockets.Connection] = set()
        self._made: set[gloo_sockets.Connection] | None = None
        self._until = float("inf")  # how long addresses of others are looked for
        self._ended = threading.Event()
        self._client: ClientAnew | None = None
        self._thread: threading.Thread | None = None
        self.devices: list[jax.Device] = jax.devices()  # of all processes
        if generation.reconnects and meets_over_gloo():
            self._client = ClientAnew(own_address(), make_socket_folder)
            self.devices = self._client.client.devices()
            self._thread = threading.Thread(
                target=self._exchange, name="jaxcoll-connect", daemon=True
            )
            self._thread.start()

    def begin(self) -> None:
        """Learn where the others listen."""
        mine = json.dumps(gloo_sockets.listening())
        texts = self._membership.gather("listening", mine)
        self._listening = {(h, p) for text in texts.values() for h, p in json.loads(text)}
        self._before = gloo_sockets.connections(self._listening)

    def forget_others(self) -> None:
        """Have JAX drop its caches, which keep the clients of earlier generations alive.

        Each has threads and descriptors. The user's own functions are compiled again.
        """
        if self._client is not None:
            jax.clear_caches()
            gc.collect()

    def settle(self) -> None:
        """Note that a program has run: later connections belong to others."""
        if self._made is None:
            self._made = gloo_sockets.connections(self._listening) - self._before
        self._until = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Have whatever waits for a connection fail, and make no more."""
        global _jax_broken
        if any_blocked():  # in a collective of this generation, which only this ends
            self.settle()
            gloo_sockets.shut(self._made or ())
        # After an error connections may be broken, here or elsewhere.
        _jax_broken = _jax_broken or (kind is not None and self._client is None)
        self._ended.set()
        if self._client is not None:
            self._client.close()
            self._client = None
        self.devices = []

    def _exchange(self) -> None:
        """Copy the addresses that Gloo writes here to the others, and theirs here.

        A collective connects on first use, on whichever worker comes first: so this is a thread.
        """
        client, folder = self._client, "connect"
        assert client is not None
        known: set[str] = set()
        with contextlib.suppress(StoreUnreachableError, RuntimeError):
            while not self._ended.wait(_OFTEN if time.monotonic() < self._until else _SELDOM):
                for key, value in client.addresses().items():
                    if key not in known:
                        known.add(key)
                        self._until = time.monotonic() + _CONNECTS
                        text = base64.b64encode(value).decode()
                        self._membership.share(self._number, f"{folder}/{key}", text)
                if not known or time.monotonic() > self._until:
                    continue
                for key, text in self._membership.shared(self._number, folder).items():
                    if key not in known:
                        known.add(key)
                        client.learn(key, base64.b64decode(text))
