"""The key-value store of `jax.distributed`, used through its client.

Neither has a public name in JAX. Values are text, and are never executed or unpickled.
"""

from __future__ import annotations

import ctypes
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcoll._compat.private import cluster_env, job

UNBOUNDED_SECONDS = 10**8
"""Three years: JAX's client and service require a timeout even for unbounded waits."""


class StoreUnreachableError(ConnectionError):
    """The coordination service does not answer: its process died or cannot be reached."""


class Store:
    """The key-value store that all processes of a `jax.distributed` world share.

    Methods may be called from any thread and let other threads run while they wait. Each costs one
    round trip to the coordinator (about 0.3 ms on one host).
    """

    def __init__(self, client: Any, process: int, processes: int) -> None:
        self._client: Any = client
        self.process = process
        self.processes = processes

    def shares_client(self, other: object) -> bool:
        """Both may use the same client, of a world that was joined once."""
        return isinstance(other, Store) and self._client is other._client

    def is_current(self) -> bool:
        return job.client is self._client

    def set(self, key: str, value: str) -> None:
        """Write a value, overwriting any other."""
        self._ask("key_value_set", key, value, allow_overwrite=True)

    def get(self, key: str, timeout_seconds: float) -> str:
        """Wait for the value of a key; raise TimeoutError if it is not written in time."""
        milliseconds = max(1, math.ceil(min(timeout_seconds, UNBOUNDED_SECONDS) * 1000))
        return self._ask("blocking_key_value_get", key, milliseconds)

    def agree(self, key: str, value: str) -> str:
        """Write a value unless the key has one, and return the key's value, the same for all."""
        try:
            self._ask("key_value_set", key, value)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
            return self.get(key, 60.0)
        return value

    def try_get(self, key: str) -> str | None:
        """Get the value, or None if there is none yet."""
        try:
            return self._ask("key_value_try_get", key)
        except KeyError:
            return None

    def all(self, folder: str) -> dict[str, str]:
        """Get all values below `folder/`, by the rest of their keys."""
        pairs = self._ask("key_value_dir_get", folder)
        return {key.removeprefix(folder).lstrip("/"): value for key, value in pairs}

    def delete(self, key: str) -> None:
        """Delete a key and all keys below it."""
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


def detect_cluster(
    num_processes: int | None, process_id: int | None, timeout: int
) -> tuple[str | None, int, int, Sequence[int] | None]:
    """Find the coordinator's address, the number of processes, this one's number and its GPUs.

    They are those with which `jax.distributed.initialize` would join what JAX finds: Cloud TPU,
    Kubernetes, Open MPI 5 through mpi4py. The address is None if it finds nothing.
    """
    return cluster_env.auto_detect_unset_distributed_params(
        None, num_processes, process_id, None, None, timeout
    )


def call_after_shutdown(call: Callable[[], None]) -> None:
    """Call back when JAX has left the job, at exit or in `jax.distributed.shutdown`.

    JAX then shuts down the service that it started on process 0, so the call takes its place.
    """
    own = job.service

    def shutdown() -> None:
        if own is not None:
            own.shutdown()
        call()

    job.service = types.SimpleNamespace(shutdown=shutdown)


def store() -> Store | None:
    """Open the store of the world that this process joined; None if it joined none."""
    if job.client is None:
        return None
    return Store(job.client, int(job.process_id), int(job.num_processes))


def leave_coordinator(*, to_parent: bool = False) -> None:
    """Drop the client of a dead coordinator, for which JAX would wait minutes when Python exits.

    Args:
      to_parent: drop the service too, as in a forked process, where both belong to the parent.
    """
    for name in ("client", "preemption_sync_manager", *["service"] * to_parent):
        dropped = getattr(job, name)
        if dropped is not None:
            # Its destructor would wait too, so this reference keeps it alive forever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dropped))
            setattr(job, name, None)
