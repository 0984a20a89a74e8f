"""CPU clients that connect their devices over Gloo: JAX's own, and more for new connections.

XLA keeps Gloo's connections, even broken ones, as long as their CPU client lives, and JAX has only
one client. New connections therefore need another client with the same device ids. It uses a
key-value store inside this process, because keys of the coordination service can be written once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from jaxcoll._compat import private
from jaxcoll._compat.coordination import UNBOUNDED_SECONDS
from jaxcoll._compat.private import jaxlib, job
from jaxcoll._compat.settings import read_option

_LOCAL, _GLOBAL, _ADDRESSES = "cpu:local_topology", "cpu:global_topology", "cpu:gloo"
_COUNTS = "jaxcoll/device_count"


def let_gloo_listen_at(
    host: str,
    exchange: Callable[[Callable[[], Any]], Any],
    make_folder: Callable[[str], str],
    *,
    again: bool,
) -> None:
    """Make Gloo listen at a given address of this host instead of the address of its host name.

    Call it after the processes joined and before devices are created.

    Args:
      host: the address.
      exchange: a function that calls its argument, which makes the devices and waits for all other
        processes, and returns the result. JAX raises its exceptions as RuntimeErrors with the same
        message.
      make_folder: a function that makes a folder for a Unix socket with a given name.
      again: True if this process was restarted after the rendezvous. It then reads the devices that
        the others published, and no process waits for it: its devices connect only by
        `SecondClient`. If its number of devices has changed, JAX raises a RuntimeError.
    """
    from jax.extend.backend import register_backend_factory

    if not meets_over_gloo():
        return
    make_client = private.make_cpu_client

    def make() -> Any:
        if not again or _devices_of_all() is None:
            created = make_client(_gloo_over(job.client, host))
            count = str(created.local_device_count())
            job.client.key_value_set(f"{_COUNTS}/{job.process_id}", count)
            return created
        _check_count()
        second = SecondClient(host, make_folder)
        client, second.client = second.client, None  # JAX alone decides how long it lives
        return client

    def client() -> Any:
        # Without a client of the coordination service, the processes have left their world.
        return make_client() if job.client is None else exchange(make)

    register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def meets_over_gloo() -> bool:
    is_gloo = read_option("cpu_collectives_implementation") == "gloo"
    return is_gloo and job.client is not None


class SecondClient:
    """A second CPU client, with the device ids of JAX's client and no connections yet.

    It has a coordination service of its own, used only by this process. To connect several
    processes, copy the addresses that Gloo wrote in each to all others, by `addresses` and `learn`.

    Its `client` has the options of JAX's own, and the devices of all processes. Gloo listens at
    `host`; None: at the address of the host name. `make_folder` is as in `let_gloo_listen_at`.

    Raises:
      RuntimeError: JAX's own devices are not yet known to all processes.
    """

    def __init__(self, host: str | None, make_folder: Callable[[str], str]) -> None:
        published = _devices_of_all()
        if published is None:
            raise RuntimeError("New connections need JAX's own devices first: `jax.devices()`.")
        self._lock = threading.Lock()
        self._folder = make_folder("keys")
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
        self.client = _make_client(self._keys, job.process_id, job.num_processes, gloo)

    def addresses(self) -> dict[str, bytes]:
        """List the addresses that Gloo wrote here or received; none after `close`."""
        with self._lock:
            return dict(self._keys.key_value_dir_get_bytes(_ADDRESSES)) if self._keys else {}

    def learn(self, key: str, value: bytes) -> None:
        """Give Gloo an address that it wrote in another process; after `close`, do nothing."""
        with self._lock:
            if self._keys:
                self._keys.key_value_set_bytes(key, value)

    def close(self) -> None:
        """Stop making connections. Everything that waits for an address fails.

        Existing connections end with the client: when no array, program, device or cache holds it.
        """
        with self._lock:
            keys, self._keys = self._keys, None
        self.client = None
        if keys is not None:
            keys.shutdown()  # before its service, or it would end the process
            self._service.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            atexit.unregister(self.close)


def _make_client(client: Any, process: int, processes: int, collectives: Any) -> Any:
    """Make a CPU client with the options of JAX's own, over another coordination service."""
    # JAX's function reads a global state, so this calls a copy of it with other globals.
    original, space = private.make_cpu_client, types.SimpleNamespace
    state = space(client=client, process_id=process, num_processes=processes)
    others = {**original.__globals__, "distributed": space(global_state=state)}
    make = types.FunctionType(original.__code__, others, original.__name__, original.__defaults__)
    return make(collectives)


def _check_count() -> None:
    """Refuse to restart with another number of devices, for which XLA would end the process."""
    count = _make_client(None, 0, 1, None).local_device_count()
    before = job.client.blocking_key_value_get(f"{_COUNTS}/{job.process_id}", 1000)
    if before != str(count):
        raise RuntimeError(
            f"Process {job.process_id} was restarted with {count} CPU devices, but had {before} "
            "when the job began. Start it with the same number, by JAX_NUM_CPU_DEVICES, or by "
            "--xla_force_host_platform_device_count in XLA_FLAGS."
        )


def _devices_of_all() -> dict[str, bytes] | None:
    """Get the devices that all processes published at the rendezvous; None before it.

    Process 0 reads the local devices of each process and writes the list that the others read.
    """
    global_list = dict(job.client.key_value_dir_get_bytes(_GLOBAL))
    local = dict(job.client.key_value_dir_get_bytes(_LOCAL))
    if not global_list:
        return None
    others = {k: v for k, v in local.items() if k.rpartition("/")[2] != str(job.process_id)}
    return others if job.process_id == 0 else others | global_list


def _gloo_over(client: Any, host: str | None) -> Any:
    with start_threads_that_wait():
        return jaxlib.make_gloo_tcp_collectives(client, hostname=host)


@contextlib.contextmanager
def start_threads_that_wait() -> Iterator[None]:
    """On Linux, let threads that this one starts wait their turn when they wake (SCHED_BATCH).

    Gloo's thread polls a connection for as long as another thread holds it to send. If it wakes in
    that thread's place, it polls in vain until the scheduler takes the core away again, for
    milliseconds. A thread of SCHED_BATCH has the same share of the cores. A policy that this
    thread was given stays.
    """
    policy = getattr(os, "SCHED_OTHER", None)
    try:
        is_default = policy is not None and os.sched_getscheduler(0) == policy
        if is_default:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # the sandbox forbids it, or the C library lacks it
        is_default = False
    try:
        yield
    finally:
        if is_default:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
