"""The watchdog: one thread per process that replies to the others, and publishes its own progress.

It sleeps in a blocking read of its bell, which costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jaxcoll._cluster.coordinator import message
from jaxcoll._cluster.coordinator_proxy import current_proxy, give_up_coordinator
from jaxcoll._cluster.key_value import CoordinatorClient, Keys
from jaxcoll._cluster.liveness import followed
from jaxcoll._cluster.timing import COORDINATOR_SECONDS, HEARTBEAT_SECONDS
from jaxcoll._compat.coordination import Store, StoreUnreachableError, store
from jaxcoll._dispatch.peers import Peers
from jaxcoll._dispatch.process_group import ProcessGroup
from jaxcoll._threads import at_exit, in_forked_child, not_at_exit

_END_SECONDS = 2.0  # how long the end waits for the coordinator, and for the thread

OWN_RING = 64
"""Heartbeats after which a watchdog rings its own bell. Of each read that timed out JAX keeps 20 kB
here and 15 kB in the coordinator until the key is written (0.10 and 0.12)."""


class Watched(Protocol):
    """The party of a watchdog: a process group, or this process's part in an elastic run."""

    def alarmed(self, alarm: dict[str, Any]) -> None: ...
    def beat(self) -> None: ...


class Watchdog:
    """The thread that speaks for this process, whatever the process itself is doing."""

    def __init__(self, keys: Keys) -> None:
        self.peers = Peers(CoordinatorClient(keys))
        self._proxy, self._connection = current_proxy(), followed()  # of the job that it is of
        self.groups: dict[tuple[int, ...], ProcessGroup] = {}  # by their processes
        # All that it speaks for, by names that the other processes use, too
        self.watched: dict[str, Watched] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._listen, name="jaxcoll-watchdog", daemon=True)
        self._thread.start()
        at_exit(self.end)

    def group(self, processes: tuple[int, ...]) -> ProcessGroup:
        """The group of these processes."""
        if (found := self.groups.get(processes)) is None:
            found = self.groups.setdefault(processes, ProcessGroup(self.peers, processes))
            self.watched[found.name] = found
        return found

    def end(self) -> None:
        """Stop listening: a thread that waits in the client while Python ends takes it down."""
        not_at_exit(self.end)
        self._ended = True
        self._say_farewell()
        try:
            self.peers.store.request(self._sign_off, _END_SECONDS)
        except StoreUnreachableError:  # JAX's own farewell would wait for minutes
            self.peers.store.lose()
            give_up_coordinator()
        except RuntimeError:
            pass
        self._thread.join(_END_SECONDS)
        self.peers.store.close()

    def _say_farewell(self) -> None:
        """Tell the coordinator, on the connection that ends with this process, what was done."""
        if self._connection is not None:
            self._connection.report(done={group.name: group.done for group in self.groups.values()})

    def _sign_off(self, keys: Keys) -> None:
        keys.set(self.peers.key("state", self.peers.process), "ended")
        keys.set(self.peers.key("bell", self.peers.process), "1")  # which wakes the thread

    def _listen(self) -> None:
        with contextlib.suppress(StoreUnreachableError, RuntimeError):  # it ends with the client
            self._serve()
        if self._ended:
            return
        self.peers.store.lose()
        until = time.monotonic() + COORDINATOR_SECONDS
        while self.is_current() and not self._ended and time.monotonic() < until:
            time.sleep(0.02)  # JAX forgets a client after it has shut it down
        if not self._ended and not self.is_current():
            self._let_go()

    def is_current(self) -> bool:
        """True if this process is still in the world in which it speaks for it."""
        keys = self.peers.store.keys
        return isinstance(keys, Store) and keys.is_current()

    def _serve(self) -> None:
        """Handle messages, with a heartbeat in between, until this process ends."""
        peers, keys = self.peers, self.peers.store
        inbox, bell, state = (peers.key(x, peers.process) for x in ("inbox", "bell", "state"))
        keys.delete(inbox)  # what others sent to a predecessor
        keys.set(state, "here")
        due, heartbeats = time.monotonic(), 0
        while not self._ended:
            with contextlib.suppress(TimeoutError):
                keys.get(bell, max(0.0, due - time.monotonic()))
                keys.delete(bell)  # first: what comes after the next look rings again
                for name, text in keys.all(inbox).items():
                    # Anybody may have written it.
                    with contextlib.suppress(KeyError, TypeError, AttributeError):
                        self._handle(message(text))
                    keys.delete(f"{inbox}/{name}")
            if time.monotonic() >= due:
                due, heartbeats = time.monotonic() + HEARTBEAT_SECONDS, heartbeats + 1
                if heartbeats % OWN_RING == 0:
                    keys.set(bell, "1")
                peers.look()
                for each in list(self.watched.values()):
                    each.beat()

    def _let_go(self) -> None:
        """Forget a client that `jax.distributed.shutdown` has ended: it lives while it is known."""
        global _watchdog
        not_at_exit(self.end)
        self._say_farewell()
        self.peers.store.close()
        if self._proxy is not None:
            self._proxy.cut()
        with _lock:
            if _watchdog is self:
                _watchdog = None

    def _handle(self, received: dict[str, Any]) -> None:
        peers, to = self.peers, self.watched.get(received["to"])
        if "alarm" in received:
            peers.lost.update(received["alarm"].get("lost", ()))
            if to is not None:
                to.alarmed(received["alarm"])
        else:
            reply = (
                to.status(received["position"], received["lines"])
                if isinstance(to, ProcessGroup)
                else {"at": 0}
            )
            peers.store.set(f"{received['ask']}/{peers.process}", json.dumps(reply))


_watchdog: Watchdog | None = None
_lock = threading.Lock()


def watchdog() -> Watchdog | None:
    """The watchdog of this process, started when it is first asked for; None: it is alone."""
    global _watchdog
    found = store()
    if found is None:
        return None
    with _lock:
        if _watchdog is None or not _watchdog.is_current():
            _watchdog = Watchdog(found)
        return _watchdog


@functools.lru_cache(maxsize=256)
def _processes(devices: tuple[jax.Device, ...]) -> tuple[int, ...]:
    return tuple(sorted({d.process_index for d in devices}))


def group_of(devices: Sequence[jax.Device]) -> ProcessGroup | None:
    """The process group of a mesh's devices; None: they are all in this process, or all in others.

    JAX lets a process without any of them call a program: it runs nothing, and waits for nobody.
    """
    processes = _processes(tuple(devices))
    if len(processes) == 1 or jax.process_index() not in processes:
        return None
    here = _watchdog
    if here is None or not here.is_current():
        here = watchdog()
    return here and (here.groups.get(processes) or here.group(processes))


@in_forked_child
def _leave_to_parent() -> None:
    """A forked child has the groups, and none of the threads that could ask for it."""
    if _watchdog is not None:
        _watchdog.peers.store.lost = True
