"""Keys and values of a process that is alone, or of a coordinator that may have died."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

from jaxcoll._cluster.timing import HEARTBEAT_SECONDS
from jaxcoll._compat.coordination import Store, StoreUnreachableError
from jaxcoll._threads import Task, Worker

_LOST = "the coordinator is dead, stopped or cut off."
_SILENT = "the coordinator is stopped or cut off: it did not answer within {limit:g} s."


@dataclasses.dataclass(eq=False)
class LocalKeys:
    """Keys and values in memory, with the methods of `Store`; safe to use from several threads."""

    process: int = 0
    processes: int = 1
    _held: dict[str, str] = dataclasses.field(default_factory=dict)
    _changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)

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
    """The keys and values of a coordinator that may have died, or be stopped.

    It has the methods of `Store`, which raise StoreUnreachableError where there will be no reply.
    One thread makes all requests, because JAX's client has no timeout for most: what is blocked in
    it can only be abandoned.
    """

    def __init__(self, keys: Keys) -> None:
        self.process, self.processes = keys.process, keys.processes
        self.patience = math.inf  # seconds without a reply after which the coordinator is lost
        self.lost = False  # or this was closed
        self.keys = keys  # of the coordinator, where requests wait without a limit
        self._worker = Worker("jaxcoll-client")
        self._pending: set[Task] = set()

    def get(self, key: str, timeout_seconds: float) -> str:
        self.check()
        # In the caller's thread: it has a timeout of its own, and would hold up other requests.
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
        """Refuse to wait for values of others, who cannot write any."""
        if self.lost:
            raise StoreUnreachableError(_LOST)

    def lose(self) -> None:
        """Have every wait for a reply fail, from now on."""
        self.lost = True
        for task in list(self._pending):
            task.abandon(StoreUnreachableError(_LOST))  # no effect on one that has its reply

    def close(self) -> None:
        """Make no more requests, and end the thread."""
        self.lost = True
        self._worker.close()

    def request(self, call: Callable[[Keys], Any], seconds: float = math.inf) -> Any:
        """`call(keys)`, waited for so long; after that it is made once the coordinator goes on."""
        self.check()
        task = self._worker.submit(lambda: call(self.keys))
        self._pending.add(task)
        try:
            left = limit = min(seconds, self.patience)
            while left > 0 and not task.wait(min(left, HEARTBEAT_SECONDS)):
                self.check()
                left -= HEARTBEAT_SECONDS  # no clock: a process that is stopped has not waited
            if not task.done():
                task.abandon(StoreUnreachableError(_SILENT.format(limit=limit)))
                if limit == self.patience:
                    self.lose()
            return task.result()
        finally:
            self._pending.discard(task)
