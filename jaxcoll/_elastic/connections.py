"""The devices that one generation of workers computes on, and the connections among them."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import threading
import time
from collections.abc import Sequence

import jax

from jaxcoll._cluster import gloo_sockets, reachable
from jaxcoll._cluster.initialize import own_address
from jaxcoll._cluster.socket_folder import make_socket_folder
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._compat.gloo import ClientAnew, meets_over_gloo
from jaxcoll._elastic import reachability
from jaxcoll._elastic.generation import CoordinatorLostError, Decision, RegroupError
from jaxcoll._elastic.membership import Crew
from jaxcoll._threads import any_blocked

_OFTEN, _SELDOM = 0.02, 0.25  # seconds between two looks for addresses
_CONNECTS = 60.0  # seconds at most that Gloo needs to connect; XLA ends it after 30


_spoiled = False


def are_spoiled() -> bool:
    """Whether connections of JAX's own devices may be broken, so that new ones are needed."""
    return _spoiled


class Connections:
    """Devices of all processes, which those of one generation connect.

    Law: a generation uses no connection that another one made, and its ends find each other under
    a name that no other generation has. So what was broken, or is still waited for elsewhere,
    cannot reach into it, and there may be as many generations as there are losses. The first
    generation has the devices of `jax.devices()`, unless their connections may be broken; over
    another transport than Gloo all have.

    Attributes:
      devices: of all processes.
    """

    def __init__(self, crew: Crew, decision: Decision) -> None:
        self._crew, self._number = crew, decision.number
        self._made = gloo_sockets.Made(())
        self._until = float("inf")  # how long addresses of others are looked for
        self._ended = threading.Event()
        self._client: ClientAnew | None = None
        self._thread: threading.Thread | None = None
        self.devices: list[jax.Device] = jax.devices()
        if decision.anew and meets_over_gloo():
            self._client = ClientAnew(own_address(), make_socket_folder)
            self.devices = self._client.devices
            self._thread = threading.Thread(
                target=self._exchange, name="jaxcoll-connect", daemon=True
            )
            self._thread.start()

    def of(self, ranks: Sequence[int]) -> list[jax.Device]:
        """The devices of these processes, in their order."""
        return [d for rank in ranks for d in self.devices if d.process_index == rank]

    def begin(self) -> None:
        """Learn where the others listen, and whether all can be reached.

        Raises:
          RegroupError: a member was lost over it, or two cannot reach each other.
        """
        listening = gloo_sockets.listening()
        with contextlib.ExitStack() as open_here:
            port = None
            if self._client is not None and listening:
                port = open_here.enter_context(reachable.open_port(listening[-1][0]))
            said = {"gloo": listening, "port": port and port.getsockname()[:2]}
            told = self._crew.gather("listening", json.dumps(said))
            there = {name: json.loads(text) for name, text in told.items()}
            self._made = gloo_sockets.Made((h, p) for one in there.values() for h, p in one["gloo"])
            if self._client is not None:
                ports = {name: tuple(one["port"]) for name, one in there.items() if one["port"]}
                self._check_links(ports)

    def _check_links(self, ports: dict[str, tuple[str, int]]) -> None:
        others = {name: port for name, port in ports.items() if name != self._crew.name}
        missing = reachable.unreachable(others, reachable.CONNECT_SECONDS)
        told = self._crew.gather("unreachable", json.dumps(missing))
        broken = reachability.broken({name: json.loads(text) for name, text in told.items()})
        if broken:
            self._crew.broken = broken
            self._crew.ask(reachability.named_links(broken))
            raise RegroupError

    def forget_others(self) -> None:
        """Have JAX drop what it keeps for clients of generations that are over.

        Each would stay, with its threads and descriptors. Functions of the user's compile again.
        """
        if self._client is not None:
            jax.clear_caches()
            gc.collect()

    def settle(self) -> None:
        """A program has run: what is connected later is another's."""
        self._made.settle()
        self._until = time.monotonic()

    def end(self, *, broken: bool) -> None:
        """Have whatever waits for a connection fail, and connect no more.

        Args:
          broken: whether connections may be, here or elsewhere.
        """
        global _spoiled
        if any_blocked():
            self._made.cut()
        _spoiled = _spoiled or (broken and self._client is None)
        self._ended.set()
        if self._client is not None:
            self._client.close()
            self._client = None
        self.devices = []

    def _exchange(self) -> None:
        """Carry what Gloo writes of its ends here to the others, and theirs here."""
        client, folder = self._client, "connect"
        assert client is not None
        known: set[str] = set()
        with contextlib.suppress(CoordinatorLostError, StoreUnreachableError, RuntimeError):
            while not self._ended.wait(_OFTEN if time.monotonic() < self._until else _SELDOM):
                for key, value in client.addresses().items():
                    if key not in known:
                        known.add(key)
                        self._until = time.monotonic() + _CONNECTS
                        text = base64.b64encode(value).decode()
                        self._crew.share(self._number, f"{folder}/{key}", text)
                if not known or time.monotonic() > self._until:
                    continue
                for key, text in self._crew.shared(self._number, folder).items():
                    if key not in known:
                        known.add(key)
                        client.learn(key, base64.b64decode(text))
