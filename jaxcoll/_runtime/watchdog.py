"""The watchdog: a thread of each process that answers the others and publishes its progress.

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

from jaxcoll._compat.coordination import StoreUnreachableError, store
from jaxcoll._job.coordinator_process import message
from jaxcoll._job.coordinator_proxy import give_up_coordinator
from jaxcoll._job.key_value import CoordinatorClient, Keys
from jaxcoll._job.liveness import coordinator_connection
from jaxcoll._job.threads import call_at_exit, cancel_at_exit, run_in_forked_child
from jaxcoll._job.timing import (
    COORDINATOR_SECONDS,
    HEARTBEAT_SECONDS,
    POLL_SECONDS,
    SIGN_OFF_SECONDS,
)
from jaxcoll._runtime.peers import Peers
from jaxcoll._runtime.process_group import ProcessGroup

OWN_RING = 64
"""Heartbeats after which a watchdog rings its own bell. JAX 0.10 and 0.12 keep 20 kB here and 15 kB
in the coordinator for each read that timed out, until its key is written."""


class Watched(Protocol):
    """An object that a watchdog serves: a process group, or this process's elastic run."""

    def receive_alarm(self, alarm: dict[str, Any]) -> None: ...
    def beat(self) -> None: ...


class Watchdog:
    """The thread that answers for this process, whatever the process itself is doing."""

    def __init__(self, keys: Keys) -> None:
        self.keys, self.peers = keys, Peers(CoordinatorClient(keys))
        if (connection := coordinator_connection()) is not None:
            # The calls that this process finished, for the others to read when it ends
            connection.before_close.append(
                lambda: connection.report(done={g.name: g.done for g in self.groups.values()})
            )
        self.groups: dict[tuple[int, ...], ProcessGroup] = {}  # by their processes
        # Everything it serves, by names that are the same on all processes
        self.watched: dict[str, Watched] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._listen, name="jaxcoll-watchdog", daemon=True)
        self._thread.start()
        call_at_exit(self.end)

    def group(self, processes: tuple[int, ...]) -> ProcessGroup:
        if (group := self.groups.get(processes)) is None:
            group = self.groups.setdefault(processes, ProcessGroup(self.peers, processes))
            self.watched[group.name] = group
        return group

    def end(self) -> None:
        """Stop the thread: Python crashes if it exits while a thread waits in JAX's client."""
        cancel_at_exit(self.end)
        self._ended = True
        try:
            self.peers.store.request(self._sign_off, SIGN_OFF_SECONDS)
        except StoreUnreachableError:  # JAX's own shutdown would wait for minutes
            self.peers.store.lose()
            give_up_coordinator()
        except RuntimeError:
            pass
        self._thread.join(SIGN_OFF_SECONDS)
        self.peers.store.close()

    def _sign_off(self, keys: Keys) -> None:
        keys.set(self.peers.key("state", self.peers.process), self.peers.write_record(ended=True))
        keys.set(self.peers.key("bell", self.peers.process), "1")  # which wakes the thread

    def _listen(self) -> None:
        with contextlib.suppress(StoreUnreachableError, RuntimeError):  # it ends with the client
            self._serve()
        if self._ended:
            return
        self.peers.store.lose()
        until = time.monotonic() + COORDINATOR_SECONDS
        while self.keys.is_current() and not self._ended and time.monotonic() < until:
            time.sleep(POLL_SECONDS)  # JAX first shuts a client down, and then forgets it
        if not self._ended and not self.keys.is_current():
            self._release()

    def _serve(self) -> None:
        peers, keys = self.peers, self.peers.store
        inbox, bell = (peers.key(x, peers.process) for x in ("inbox", "bell"))
        keys.delete(inbox)  # messages to a process that this one replaces
        peers.publish()
        due, heartbeats = time.monotonic(), 0
        while not self._ended:
            with contextlib.suppress(TimeoutError):
                keys.get(bell, max(0.0, due - time.monotonic()))
                keys.delete(bell)  # before reading: a message that comes later rings again
                for name, text in keys.all(inbox).items():
                    # Tolerate any content, because anybody may have written it.
                    with contextlib.suppress(KeyError, TypeError, AttributeError):
                        self._handle(message(text))
                    keys.delete(f"{inbox}/{name}")
            if time.monotonic() >= due:
                due, heartbeats = time.monotonic() + HEARTBEAT_SECONDS, heartbeats + 1
                if heartbeats % OWN_RING == 0:
                    keys.set(bell, "1")
                peers.look()
                for watched in list(self.watched.values()):
                    watched.beat()
                if peers.runs:
                    peers.publish()

    def _release(self) -> None:
        """Drop a client that `jax.distributed.shutdown` ended: a reference would keep it alive."""
        global _watchdog
        cancel_at_exit(self.end)
        self.peers.store.close()
        with _lock:
            if _watchdog is self:
                _watchdog = None

    def _handle(self, received: dict[str, Any]) -> None:
        peers, to = self.peers, self.watched.get(received["to"])
        if "alarm" in received:
            peers.lost.update(received["alarm"].get("lost", ()))
            if to is not None:
                to.receive_alarm(received["alarm"])
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
    """Start this process's watchdog on first use, and return it; None if the process is alone."""
    global _watchdog
    keys = store()
    if keys is None:
        return None
    with _lock:
        if _watchdog is None or not _watchdog.keys.is_current():
            _watchdog = Watchdog(keys)
        return _watchdog


@functools.lru_cache(maxsize=256)
def _processes(devices: tuple[jax.Device, ...]) -> tuple[int, ...]:
    return tuple(sorted({d.process_index for d in devices}))


def find_group(devices: Sequence[jax.Device]) -> ProcessGroup | None:
    """Find the process group of a mesh's devices; None if all or none are in this process.

    JAX lets a process with none of the devices call a program: it runs nothing and does not wait.
    """
    processes = _processes(tuple(devices))
    if len(processes) == 1 or jax.process_index() not in processes:
        return None
    here = _watchdog
    if here is None or not here.keys.is_current():
        here = watchdog()
    return here and (here.groups.get(processes) or here.group(processes))


@run_in_forked_child
def _leave_to_parent() -> None:
    """Disable the watchdog in a forked child, which has its groups but not its threads."""
    if _watchdog is not None:
        _watchdog.peers.store.lost = True
