"""Coordinator requests with a timeout: the key-value store of an elastic run, and its step keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from jaxcoll._cluster.key_value import Keys
from jaxcoll._cluster.timing import COORDINATOR_REPLY_SECONDS, HEARTBEAT_SECONDS
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._elastic.generation import CoordinatorLostError
from jaxcoll._threads import Task, Worker, abandon

BLOCK = 1000
"""Steps whose keys are deleted together."""


class CoordinatorClient:
    """The keys and values of a coordinator that may have died, or be stopped.

    Each method is that of `Keys`, and raises CoordinatorLostError where there will be no reply.
    Requests are made by one thread, because JAX's client has no timeout for most of them: a thread
    that is blocked in it can only be abandoned.

    Attributes:
      lost: whether the coordinator counts as dead, or this was closed.
    """

    def __init__(self, store: Keys, patience: float, when_lost: Callable[[], None]) -> None:
        self.lost = False
        self._store, self._when_lost = store, when_lost
        self._worker = Worker("jaxcoll-client")
        self._pending: set[Task] = set()
        # Counted in heartbeats, so that a process that was stopped meanwhile has not waited.
        timeout = min(patience, COORDINATOR_REPLY_SECONDS)
        self._waits = math.ceil(timeout / HEARTBEAT_SECONDS)

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def try_get(self, key: str) -> str | None:
        return self._ask(self._store.try_get, key)

    def all(self, folder: str) -> dict[str, str]:
        return self._ask(self._store.all, folder)

    def agree(self, key: str, value: str) -> str:
        return self._ask(self._store.agree, key, value)

    def delete(self, key: str) -> None:
        self._ask(self._store.delete, key)

    def check(self) -> None:
        """Refuse to wait for values of others, who cannot write any."""
        if self.lost:
            raise CoordinatorLostError

    def lose(self) -> None:
        """Have every wait for a reply fail, from now on."""
        self.lost = True
        for task in list(self._pending):
            task.settle(CoordinatorLostError())  # no effect on one that has its reply
        self._when_lost()

    def close(self) -> None:
        """Make no more requests, and end the thread, or abandon it if it may be blocked."""
        was_lost, self.lost = self.lost, True
        self._worker.close()
        if was_lost:
            abandon(self._worker)

    def _ask(self, method: Callable[..., Any], *args: Any) -> Any:
        self.check()
        task = self._worker.submit(functools.partial(method, *args))
        self._pending.add(task)
        try:
            any(self.lost or task.wait(HEARTBEAT_SECONDS) for _ in range(self._waits))
            if not task.is_settled:
                self.lose()
            return task.result()
        except StoreUnreachableError as error:
            self.lose()
            raise CoordinatorLostError from error
        finally:
            self._pending.discard(task)


class StepKeys:
    """Keys for the steps of one generation, whose number is bounded however long it lasts."""

    def __init__(self, store: Keys | CoordinatorClient, folder: str, step: int) -> None:
        self._store, self._folder = store, folder
        self._block = step // BLOCK

    def agree(self, step: int, value: str) -> str:
        """The first value that a member wrote for this step."""
        return self._store.agree(f"{self._folder}/{step // BLOCK}/{step}", value)

    def forget(self, begun: int) -> None:
        """Delete the keys of whole blocks of steps before one that all members have begun."""
        for block in range(self._block, begun // BLOCK):
            self._store.delete(f"{self._folder}/{block}")
            self._block = block + 1
