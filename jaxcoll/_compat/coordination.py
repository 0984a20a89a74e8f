"""The key-value store of `jax.distributed`, through the client that `initialize` made.

JAX gives neither a public name. What is read is text, which is never run or unpickled.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import jax
from jax.experimental import multihost_utils

UNBOUNDED_SECONDS = 10**8
"""Three years: JAX's client and service want a timeout, also where there is none."""


class StoreUnreachableError(ConnectionError):
    """The coordination service does not answer: its process has died, or cannot be reached."""


class Store:
    """The keys and values that all processes of one `jax.distributed` world share.

    Every method may be called from any thread, lets other threads run while it waits, and costs
    one message to the coordinator and back (about 0.3 ms on one host).
    """

    def __init__(self, client: Any, process: int, processes: int) -> None:
        self._client: Any = client
        self._state = joined_state()
        self.process = process
        self.processes = processes

    def is_of(self, other: object) -> bool:
        """True if both use one client: of one world, joined once."""
        return isinstance(other, Store) and self._client is other._client

    def is_current(self) -> bool:
        """True if it is the store of the world that this process is in now."""
        return self._state.client is self._client

    def set(self, key: str, value: str) -> None:
        """Write a value, also over another one."""
        self._ask("key_value_set", key, value, allow_overwrite=True)

    def get(self, key: str, timeout_seconds: float) -> str:
        """The value, waited for; TimeoutError: nobody wrote it in time."""
        milliseconds = max(1, math.ceil(min(timeout_seconds, UNBOUNDED_SECONDS) * 1000))
        return self._ask("blocking_key_value_get", key, milliseconds)

    def agree(self, key: str, value: str) -> str:
        """Write unless there is a value; the value then, which is the same for all."""
        try:
            self._ask("key_value_set", key, value)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
            return self.get(key, 60.0)
        return value

    def try_get(self, key: str) -> str | None:
        """The value, or None where there is none yet."""
        try:
            return self._ask("key_value_try_get", key)
        except KeyError:
            return None

    def all(self, folder: str) -> dict[str, str]:
        """Every value below `folder/`, by the rest of its key."""
        found = self._ask("key_value_dir_get", folder)
        return {key.removeprefix(folder).lstrip("/"): value for key, value in found}

    def delete(self, key: str) -> None:
        """Forget a key, and all below it."""
        self._ask("key_value_delete", key)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._client, method)(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            if text.startswith("NOT_FOUND"):
                raise KeyError(args[0]) from None
            if text.startswith("DEADLINE_EXCEEDED"):
                raise TimeoutError(f"{method} {args[0]}: {text}") from None
            if text.startswith(("UNAVAILABLE", "CANCELLED", "FAILED_PRECONDITION")):
                raise StoreUnreachableError(f"{method} {args[0]}: {text}") from error
            raise


def joined_state() -> Any:
    """Return JAX's state of the world that this process has joined."""
    return multihost_utils.distributed.global_state  # pyright: ignore[reportAttributeAccessIssue]


def store() -> Store | None:
    """The store of the world that this process has joined; None: it is alone."""
    state = joined_state()
    if state.client is None:
        return None
    return Store(state.client, int(state.process_id), int(state.num_processes))


def leave_coordinator(*, to_parent: bool = False) -> None:
    """Forget a coordinator that has died: JAX would wait for it for minutes when Python ends.

    Args:
      to_parent: it lives, but belongs to the parent that forked this process, as the service may.
    """
    state = joined_state()
    for name in ("client", "preemption_sync_manager", *["service"] * to_parent):
        left = getattr(state, name)
        if left is not None:
            # Its destructor would wait as well, so it is never destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
            setattr(state, name, None)
