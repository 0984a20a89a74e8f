"""CPU clients whose devices connect over Gloo: JAX's own, and others with new connections.

XLA keeps Gloo's connections, also broken ones, for as long as their CPU client lives, and JAX keeps
its one client. So new connections need another client: with the same device numbers, and a
key-value store of this process alone, because the coordination service's keys can be written once.
"""

from __future__ import annotations

import atexit
import shutil
import threading
import types
from collections.abc import Callable
from typing import Any

from jax.experimental import multihost_utils

from jaxcoll._compat.coordination import UNBOUNDED_SECONDS, joined_state
from jaxcoll._compat.settings import configured

_LOCAL, _GLOBAL, _ADDRESSES = "cpu:local_topology", "cpu:global_topology", "cpu:gloo"
_COUNTS = "jaxcoll/device_count"


def let_gloo_listen_at(
    host: str,
    exchange: Callable[[Callable[[], Any]], Any],
    make_folder: Callable[[str], str],
    *,
    again: bool,
) -> None:
    """Have Gloo listen at one address of this host, and not where the host's own name points.

    To be called when the processes are joined, and before there are devices.

    Args:
      host: the address.
      exchange: called with a function that makes the devices, waiting for all others; returns what
        that returns. JAX raises its exceptions as a RuntimeError with their words.
      make_folder: makes a folder for a Unix socket of a given name.
      again: this process was restarted after all had met. It reads the devices that the others
        published then, and nobody waits for it: its devices connect by `ClientAnew` only. With
        another number of devices than before it is refused by JAX's RuntimeError.
    """
    from jax.extend.backend import register_backend_factory

    if not meets_over_gloo():
        return
    state, make_client = joined_state(), _bridge().make_cpu_client

    def make() -> Any:
        if not again or _devices_of_all() is None:
            made = make_client(_gloo_over(state.client, host))
            state.client.key_value_set(
                f"{_COUNTS}/{state.process_id}", str(made.local_device_count())
            )
            return made
        _check_count()
        anew = ClientAnew(host, make_folder)
        client, anew.client = anew.client, None  # JAX alone decides how long it lives
        return client

    def client() -> Any:
        # Without a client of the coordination service the processes have separated since.
        return make_client() if state.client is None else exchange(make)

    register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def meets_over_gloo() -> bool:
    """True if processes are joined, and their CPU devices meet over Gloo."""
    is_gloo = configured("cpu_collectives_implementation") == "gloo"
    return is_gloo and joined_state().client is not None


class ClientAnew:
    """A client beside JAX's own, whose devices have the same numbers and are not connected yet.

    It has a coordination service of its own, of this process alone. To connect several processes,
    each has to receive the addresses that Gloo wrote on the others, by `addresses` and `learn`: the
    client by itself asks nobody.

    Attributes:
      client: as JAX makes its own, by the same options; its devices are those of all processes.

    Args:
      host: the address at which Gloo listens; None: where the host's own name points.
      make_folder: as in `let_gloo_listen_at`.

    Raises:
      RuntimeError: JAX's own devices are not known to all processes yet.
    """

    def __init__(self, host: str | None, make_folder: Callable[[str], str]) -> None:
        published = _devices_of_all()
        if published is None:
            raise RuntimeError("New connections need JAX's own devices first: `jax.devices()`.")
        self._lock = threading.Lock()
        self._folder = make_folder("keys")
        jaxlib, state = _jaxlib(), joined_state()
        address = f"unix:{self._folder}/keys"
        self._service: Any = jaxlib.get_distributed_runtime_service(
            address, 1, heartbeat_timeout=UNBOUNDED_SECONDS, shutdown_timeout=1, recoverable=False
        )
        self._keys: Any = jaxlib.get_distributed_runtime_client(
            address,
            0,
            init_timeout=60,
            heartbeat_timeout=UNBOUNDED_SECONDS,
            shutdown_on_destruction=False,
        )
        self._keys.connect()
        for key, value in published.items():
            self._keys.key_value_set_bytes(key, value)
        self.client: Any = None
        atexit.register(self.close)
        gloo = _gloo_over(self._keys, host)
        self.client = _made_over(self._keys, state.process_id, state.num_processes, gloo)

    def addresses(self) -> dict[str, bytes]:
        """The addresses that Gloo has written here, or received; after the end: none."""
        with self._lock:
            return dict(self._keys.key_value_dir_get_bytes(_ADDRESSES)) if self._keys else {}

    def learn(self, key: str, value: bytes) -> None:
        """Give Gloo an address that it wrote in another process; after the end: nothing."""
        with self._lock:
            if self._keys:
                self._keys.key_value_set_bytes(key, value)

    def close(self) -> None:
        """Make no more connections. Whatever waits for an address fails.

        The existing ones end with the client: when no array, program, device or cache holds it.
        """
        with self._lock:
            keys, self._keys = self._keys, None
        self.client = None
        if keys is not None:
            keys.shutdown()  # first: it ends the process if its service ends before
            self._service.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            atexit.unregister(self.close)


def _made_over(client: Any, process: int, processes: int, collectives: Any) -> Any:
    """A CPU client with the options of JAX's own, but over another coordination service."""
    # JAX's function reads a module-wide state, so a copy of it is given another module.
    made, space = _bridge().make_cpu_client, types.SimpleNamespace
    seen = space(client=client, process_id=process, num_processes=processes)
    around = {**made.__globals__, "distributed": space(global_state=seen)}
    alike = types.FunctionType(made.__code__, around, made.__name__, made.__defaults__)
    return alike(collectives)


def _check_count() -> None:
    """Refuse to come back with another number of devices, for which XLA would end the process."""
    state, count = joined_state(), _made_over(None, 0, 1, None).local_device_count()
    before = state.client.blocking_key_value_get(f"{_COUNTS}/{state.process_id}", 1000)
    if before != str(count):
        raise RuntimeError(
            f"Process {state.process_id} was started again with {count} CPU devices and had "
            f"{before} when the job began. Start it with as many: by JAX_NUM_CPU_DEVICES, or "
            "--xla_force_host_platform_device_count in XLA_FLAGS."
        )


def _devices_of_all() -> dict[str, bytes] | None:
    """The devices that processes published when they first met; None: they have not yet.

    Process 0 reads those of each process and writes them all, and the others read that.
    """
    state = joined_state()
    whole = dict(state.client.key_value_dir_get_bytes(_GLOBAL))
    each = dict(state.client.key_value_dir_get_bytes(_LOCAL))
    if not whole:
        return None
    others = {k: v for k, v in each.items() if k.rpartition("/")[2] != str(state.process_id)}
    return others if state.process_id == 0 else others | whole


def _gloo_over(client: Any, host: str | None) -> Any:
    return _jaxlib().make_gloo_tcp_collectives(client, hostname=host)


def _jaxlib() -> Any:
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    return _jax


def _bridge() -> Any:
    return multihost_utils.xla_bridge  # pyright: ignore[reportAttributeAccessIssue]
