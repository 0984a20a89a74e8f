"""A key-value store for a process that is alone, and a client for a coordinator that may die."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

from jaxcoll._compat.coordination import Store, StoreUnreachableError
from jaxcoll._job.threads import Task, Worker
from jaxcoll._job.timing import HEARTBEAT_SECONDS

_LOST = "the coordinator is dead, stopped or cut off."
_SILENT = "the coordinator is stopped or cut off: it did not answer within {limit:g} s."


@dataclasses.dataclass(eq=False)
class LocalKeys:
    """Keys and values in memory, with the methods of `Store`. Several threads may use it."""

    process: int = 0
    processes: int = 1
    _held: dict[str, str] = dataclasses.field(default_factory=dict)
    _changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)

    def is_current(self) -> bool:
        return False

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._held[key] = value
            self._changed.notify_all()

    def agree(self, key: str, value: str) -> str:
        with self._changed:
            value = self._held.setdefault(key, value)
            self._changed.notify_all()
            return value

    def get(self, key: str, timeout_seconds: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._held, timeout_seconds):
                raise TimeoutError(key)
            return self._held[key]

    def try_get(self, key: str) -> str | None:
        with self._changed:
            return self._held.get(key)

    def all(self, folder: str) -> dict[str, str]:
        start = f"{folder}/"
        with self._changed:
            return {k[len(start) :]: v for k, v in self._held.items() if k.startswith(start)}

    def delete(self, key: str) -> None:
        with self._changed:
            for k in [k for k in self._held if k == key or k.startswith(f"{key}/")]:
                del self._held[k]


Keys = Store | LocalKeys


class CoordinatorClient:
    """The keys and values of a coordinator that may be dead or stopped.

    It has the methods of `Store`; they raise StoreUnreachableError if there will be no reply. One
    thread makes all requests: JAX's client has no timeout for most of them, so a blocked request
    can only be abandoned.
    """

    def __init__(self, keys: Keys) -> None:
        self.process, self.processes = keys.process, keys.processes
        self.patience = math.inf  # seconds without a reply after which the coordinator is lost
        self.lost = False  # also True once this is closed
        self.keys = keys  # the coordinator's, whose requests have no time limit
        self._worker = Worker("jaxcoll-client")
        self._pending: set[Task] = set()

    def get(self, key: str, timeout_seconds: float) -> str:
        self.check()
        # In the caller's thread: `get` has a timeout, and would delay other requests.
        return self.keys.get(key, timeout_seconds)

    def set(self, key: str, value: str) -> None:
        self.request(lambda keys: keys.set(key, value))

    def try_get(self, key: str) -> str | None:
        return self.request(lambda keys: keys.try_get(key))

    def all(self, folder: str) -> dict[str, str]:
        return self.request(lambda keys: keys.all(folder))

    def agree(self, key: str, value: str) -> str:
        return self.request(lambda keys: keys.agree(key, value))

    def delete(self, key: str) -> None:
        self.request(lambda keys: keys.delete(key))

    def check(self) -> None:
        """Raise StoreUnreachableError if the coordinator is lost: nobody can write values."""
        if self.lost:
            raise StoreUnreachableError(_LOST)

    def lose(self) -> None:
        """Make every wait for a reply fail from now on, those in progress too."""
        self.lost = True
        for task in list(self._pending):
            task.abandon(StoreUnreachableError(_LOST))  # no effect if its reply has come

    def close(self) -> None:
        self.lost = True
        self._worker.close()

    def request(self, call: Callable[[Keys], Any], seconds: float = math.inf) -> Any:
        """Make a request. At the timeout raise, though it may still be made later."""
        self.check()
        task = self._worker.submit(lambda: call(self.keys))
        self._pending.add(task)
        try:
            left = limit = min(seconds, self.patience)
            while left > 0 and not task.wait(min(left, HEARTBEAT_SECONDS)):
                self.check()
                left -= HEARTBEAT_SECONDS  # no clock: while it is stopped a process does not wait
            if not task.is_done():
                task.abandon(StoreUnreachableError(_SILENT.format(limit=limit)))
                if limit == self.patience:
                    self.lose()
            return task.result()
        finally:
            self._pending.discard(task)
