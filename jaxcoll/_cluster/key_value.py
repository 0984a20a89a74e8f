"""The key-value store of a coordination service, and one for a process that is alone."""

from __future__ import annotations

import threading

from jaxcoll._compat.coordination import Store


class LocalKeys:
    """Keys and values in memory, safe to use from several threads."""

    def __init__(self, process: int = 0, processes: int = 1) -> None:
        self.process = process
        self.processes = processes
        self._held: dict[str, str] = {}
        self._changed = threading.Condition()

    def of(self, process: int) -> LocalKeys:
        """The same keys and values, as another process sees them."""
        other = LocalKeys(process, self.processes)
        other._held, other._changed = self._held, self._changed
        return other

    def set(self, key: str, value: str) -> None:
        """Write a value, also over another one."""
        with self._changed:
            self._held[key] = value
            self._changed.notify_all()

    def agree(self, key: str, value: str) -> str:
        """Write unless there is a value; the value then."""
        with self._changed:
            value = self._held.setdefault(key, value)
            self._changed.notify_all()
            return value

    def get(self, key: str, timeout_seconds: float) -> str:
        """The value, waited for; TimeoutError: nobody wrote it in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._held, timeout_seconds):
                raise TimeoutError(key)
            return self._held[key]

    def try_get(self, key: str) -> str | None:
        """The value, or None where there is none yet."""
        with self._changed:
            return self._held.get(key)

    def all(self, folder: str) -> dict[str, str]:
        """Every value below `folder/`, by the rest of its key."""
        start = f"{folder}/"
        with self._changed:
            return {k[len(start) :]: v for k, v in self._held.items() if k.startswith(start)}

    def delete(self, key: str) -> None:
        """Forget a key, and all below it."""
        with self._changed:
            for k in [k for k in self._held if k == key or k.startswith(f"{key}/")]:
                del self._held[k]


Keys = Store | LocalKeys
