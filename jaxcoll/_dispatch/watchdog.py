"""The watchdog: one thread per process that replies to the other processes, and notices their ends.

It sleeps in a blocking read of its inbox, which costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxcoll._cluster.coordinator import message
from jaxcoll._cluster.coordinator_proxy import give_up_coordinator
from jaxcoll._cluster.liveness import followed
from jaxcoll._cluster.timing import COORDINATOR_SECONDS, PROGRESS_SECONDS
from jaxcoll._compat.coordination import Store, StoreUnreachableError, store
from jaxcoll._dispatch.peers import Peers, bounded
from jaxcoll._dispatch.process_group import ProcessGroup
from jaxcoll._threads import at_exit, not_at_exit


class Watchdog:
    """The thread that speaks for this process's groups, whatever the process itself is doing.

    Attributes:
      peers: the processes that it speaks to.
      groups: the groups that it speaks for, by their processes.
    """

    def __init__(self, store: Store) -> None:
        self.peers = Peers(store)
        self.groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._ended = False
        me, root = self.peers.process, self.peers.root
        self._read = store.increment(f"{root}/sent/{me}", 0)
        store.set(f"{root}/here/{me}", "1")
        self._thread = threading.Thread(target=self._listen, name="jaxcoll-watchdog", daemon=True)
        self._thread.start()
        at_exit(self.end)

    def group(self, processes: tuple[int, ...]) -> ProcessGroup:
        """The group of these processes."""
        found = self.groups.get(processes)
        return found or self.groups.setdefault(processes, ProcessGroup(self.peers, processes))

    def end(self) -> None:
        """Stop listening: a thread that waits in the client while Python ends takes it down."""
        not_at_exit(self.end)
        self._ended = True
        self._say_farewell()
        try:
            if store() is not None:  # None: it has died, and it was given up
                bounded(self._sign_off, 2 * PROGRESS_SECONDS)
        except StoreUnreachableError:  # JAX's own farewell would wait for minutes
            give_up_coordinator()
        except RuntimeError:
            pass
        self._thread.join(2 * PROGRESS_SECONDS)

    def _say_farewell(self) -> None:
        """Tell the coordinator, on the connection that ends with this process, what was done."""
        if connection := followed():
            connection.say_farewell({group.name: group.done for group in self.groups.values()})

    def _sign_off(self) -> None:
        peers = self.peers
        peers.store.set(f"{peers.root}/ended/{peers.process}", "1")
        peers.send(peers.process, {"end": True})

    def _listen(self) -> None:
        with contextlib.suppress(StoreUnreachableError, RuntimeError):  # it ends with the client
            self._serve()
        until = time.monotonic() + COORDINATOR_SECONDS
        while store() is not None and not self._ended and time.monotonic() < until:
            time.sleep(0.02)  # JAX forgets a client after it has shut it down
        if not self._ended and store() is None:
            self._let_go()

    def _serve(self) -> None:
        """Answer messages until one says that this process ends, and beat in between."""
        beaten, peers = time.monotonic(), self.peers
        while not self._ended:
            key = f"{peers.root}/inbox/{peers.process}/{self._read + 1}"
            with contextlib.suppress(TimeoutError):
                received = message(peers.store.get(key, PROGRESS_SECONDS))
                self._read += 1
                peers.store.delete(key)
                if received.get("end"):  # `_sign_off` sent it, to wake this read
                    return
                with contextlib.suppress(KeyError, TypeError):  # anybody may have written it
                    self._handle(received)
            if time.monotonic() - beaten >= PROGRESS_SECONDS:
                beaten = time.monotonic()
                peers.look()
                for group in list(self.groups.values()):
                    group.beat()

    def _let_go(self) -> None:
        """Forget a client that `jax.distributed.shutdown` has ended: it lives while it is known."""
        global _watchdog
        not_at_exit(self.end)
        self._say_farewell()
        with _lock:
            if _watchdog is self:
                _watchdog = None

    def _handle(self, received: dict[str, Any]) -> None:
        peers, name = self.peers, received["group"]
        group = next((each for each in list(self.groups.values()) if each.name == name), None)
        if "alarm" in received:
            peers.lost.update(received["alarm"].get("lost", ()))
            if group:
                group.alarmed(received["alarm"])
        else:
            reply = group.status(received["position"]) if group else {"at": 0}
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
        if _watchdog is None or not _watchdog.peers.store.is_of(found):
            _watchdog = Watchdog(found)
        return _watchdog


@functools.lru_cache(maxsize=256)
def _processes(devices: tuple[jax.Device, ...]) -> tuple[int, ...]:
    return tuple(sorted({d.process_index for d in devices}))


def group_of(devices: Sequence[jax.Device]) -> ProcessGroup | None:
    """The process group of a mesh's devices; None: they are all in this process."""
    if jax.process_count() == 1:
        return None
    processes = _processes(tuple(devices))
    here = watchdog() if len(processes) > 1 else None
    return None if here is None else here.group(processes)


def confirm() -> None:
    """Ask the processes that answer whether they ran the same programs as this one."""
    if _watchdog is not None:
        with contextlib.suppress(StoreUnreachableError):
            for group in list(_watchdog.groups.values()):
                group.confirm()
