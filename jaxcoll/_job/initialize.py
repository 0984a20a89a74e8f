"""`jc.initialize`: join a job of several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import math
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxcoll._compat import settings
from jaxcoll._compat.coordination import call_after_shutdown, detect_cluster
from jaxcoll._compat.gloo import let_gloo_listen_at
from jaxcoll._job.coordinator import Coordinator, explain_loopback, jax_heartbeat, listen_at
from jaxcoll._job.coordinator_process import LONGEST_SECONDS
from jaxcoll._job.coordinator_proxy import current_proxy, start_proxy
from jaxcoll._job.gloo_sockets import find_connections, find_listeners, shut_down
from jaxcoll._job.hosts import publish_host
from jaxcoll._job.launch.subprocesses import COORDINATOR, JOB, REJOIN
from jaxcoll._job.launchers import JAX_BIND, JAX_COORDINATOR, read_member
from jaxcoll._job.liveness import CoordinatorConnection, use_connection
from jaxcoll._job.malloc import keep_freed_memory
from jaxcoll._job.resolvers import ClusterResolver
from jaxcoll._job.socket_folder import make_socket_folder
from jaxcoll._job.specs import Member
from jaxcoll._job.startup import arrive, connect_clients, exchange_devices, reach
from jaxcoll._job.timing import JAX_STARTUP_SECONDS, LEAST_CONNECT_SECONDS, SILENT_EXIT_SECONDS
from jaxcoll._plan import checks

_LOG = logging.getLogger("jaxcoll")


@dataclasses.dataclass
class _Joined:
    """The job that this process has joined, and what must stay open while it is a member."""

    member: Member
    connection: CoordinatorConnection
    recoverable: bool
    coordinator: Coordinator | None

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses of this host, and of the coordinator with its port, where they connect."""
        with socket.socket(fileno=os.dup(self.connection.fd)) as copy:
            host, port = copy.getpeername()[:2]
            return copy.getsockname()[0], f"[{host}]:{port}"


report_hangs: Callable[[float], Any] | None = None
"""Started by `hang_seconds`. The package sets it: a watch of programs stands above processes."""

_PLACE = ("coordinator_address", "num_processes", "process_id")
_joined: _Joined | None = None
_leaving = threading.Lock()


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    cluster_resolver: ClusterResolver | None = None,
    initialization_timeout_seconds: float = 300,
    heartbeat_timeout_seconds: float = 100,
    shutdown_timeout_seconds: float = 300,
    coordinator_bind_address: str | None = None,
    recoverable: bool = True,
    rejoin: bool = False,
    keep_memory: bool = True,
    hang_seconds: float | None = None,
) -> None:
    """Join the job that this process belongs to, through `jax.distributed`.

    Call it first, in every process. Missing arguments come from the environment, from the first of
    these launchers that set its variables: `jaxcoll launch`, `TF_CONFIG`, torchrun, Kubeflow, Open
    MPI, MPICH and Intel MPI, Slurm, any that sets torchrun's variables (`MASTER_ADDR`,
    `MASTER_PORT`, `RANK`, `WORLD_SIZE`); then from JAX's detection, for Cloud TPU and Kubernetes.
    `JAX_COORDINATOR_ADDRESS` overrides the meeting place. If no launcher set anything, this process
    is alone, and nothing is started, nor in a data loader's process that imports the main script
    again. Under other MPI launchers, the arguments must be given.

    Guarantee: the job begins when all processes have arrived. Otherwise every process that arrived
    raises an error, within its `initialization_timeout_seconds`, that says who is missing or what
    does not agree. Process 0 starts the coordinator as a separate process, so that any process of
    the job may end or die; the coordinator ends after the last one. Process 0 waits for that when
    it ends, because a scheduler may end the coordinator with it. The coordinator listens only at
    `coordinator_address`, and Gloo at the address from which this host connects to it.
    A second call, with the same arguments or none, does nothing.

    Args:
      coordinator_address: "host:port" where all processes meet: a free port of process 0's host.
      num_processes: number of processes in the job.
      process_id: number of this process, from 0.
      local_device_ids: accelerators of this process. None: all that it sees, or, if a launcher
        says that several processes of this host see the same ones, its share of them.
      cluster_resolver: replaces the environment.
      initialization_timeout_seconds: timeout for all processes to arrive, and again, over CPUs, for
        all to use their devices after the first one does. Here and below, longer timeouts than 23
        days count as 23 days.
      heartbeat_timeout_seconds: a process counts as dead if its host does not answer for so long,
        or, if `recoverable` is False, if the process itself is stopped for so long.
      shutdown_timeout_seconds: timeout for process 0 to wait for the others when it ends, or in
        `jax.distributed.shutdown`, and, if `recoverable` is False, for all to wait for each other.
      coordinator_bind_address: "host:port" at which the coordinator listens, if that differs from
        `coordinator_address` (behind a DNS name or a gateway).
      recoverable: when a process dies, the others go on, and calls that it took part in raise an
        error that they can catch. If False, JAX aborts them all.
      rejoin: this process replaces one that died in a running job, so it waits for nobody.
        `jc.Elastic` lets it in. `jaxcoll launch` sets this itself.
      keep_memory: over Gloo, make glibc's malloc keep freed memory for reuse, up to the most that
        this process ever had in use: fresh pages for the results of each call cost as much as the
        exchange. Variables such as `MALLOC_MMAP_MAX_` take precedence.
      hang_seconds: when processes wait for others for so long, in any program, write to standard
        error who waits for whom, and where each is in its Python. None: never.

    Raises:
      ValueError: an argument or a variable is invalid, the coordinator's host has no address, or
        processes contradict each other.
      OSError: process 0 cannot listen at the address (the port is in use, or the address is
        another host's), or this is Windows.
      DeadlineExceededError: processes are missing; the message names them.
      PeerLostError: a process that had arrived, or the coordinator, died.
      RuntimeError: JAX has devices already, or this process has joined another job.

    Examples:
      >>> initialize()  # no launcher started this process: it is alone
    """
    # multiprocessing sets this while a new process imports the main script again, before it runs
    # what it was started for.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    timeout = _seconds("initialization_timeout_seconds", initialization_timeout_seconds)
    if hang_seconds is not None:
        assert report_hangs is not None
        report_hangs(_seconds("hang_seconds", hang_seconds))
    limits = {
        name: math.ceil(_seconds(name, value))  # in whole seconds, as JAX takes them
        for name, value in (
            ("heartbeat_timeout_seconds", heartbeat_timeout_seconds),
            ("shutdown_timeout_seconds", shutdown_timeout_seconds),
        )
    }
    place = zip(_PLACE, (coordinator_address, num_processes, process_id), strict=True)
    given = {
        name: int(value) if checks.is_integer(value) else value
        for name, value in place
        if value is not None
    }
    member = _member(given, local_device_ids, cluster_resolver)
    if (previous := _joined) is not None and not jax.distributed.is_initialized():
        _leave(previous)
    if _joined is not None or jax.distributed.is_initialized():
        if given and member is not None:
            _check_same(member)
        return
    if member is None or member.coordinator_address is None:
        member = _detect_member(member, timeout)
    if member is None:
        return
    _check_unused()
    if keep_memory:
        _keep_memory()
    coordinator, until = None, time.monotonic() + timeout
    is_served = member.coordinator_address == os.environ.get(COORDINATOR)
    rejoin = rejoin or (is_served and os.environ.get(REJOIN) == "1")
    if member.process_id == 0 and not is_served and not rejoin:
        bind = coordinator_bind_address or os.environ.get(JAX_BIND) or member.coordinator_address
        coordinator = listen_at(bind, member, recoverable=recoverable, **limits)
    try:
        arrived = reach(member, timeout) if rejoin else arrive(member, timeout)
    except BaseException as error:
        if coordinator is not None:
            coordinator.close()
            explain_loopback(error, coordinator.address, member)
        raise
    if coordinator is not None:
        coordinator.detach()
    joined = _Joined(member, CoordinatorConnection(arrived.detach()), recoverable, coordinator)
    _enter_jax(joined, limits, timeout, until, rejoin=rejoin)
    call_after_shutdown(functools.partial(_end, joined, limits["shutdown_timeout_seconds"]))


def _enter_jax(
    joined: _Joined, limits: dict[str, int], timeout: float, until: float, *, rejoin: bool
) -> None:
    """Initialize `jax.distributed`, now that all processes have arrived."""
    global _joined
    member = joined.member
    own, coordinator = joined.addresses
    proxy = start_proxy(coordinator, limits["heartbeat_timeout_seconds"])
    heartbeat = jax_heartbeat(limits["heartbeat_timeout_seconds"], joined.recoverable)
    join = functools.partial(
        jax.distributed.initialize,
        proxy.address,
        member.num_processes,
        member.process_id,
        member.local_device_ids,
        # JAX starts a service on process 0: give it an idle one on the loopback interface.
        coordinator_bind_address="127.0.0.1:0",
        cluster_detection_method="deactivate",
        # JAX kills the process with a signal at this timeout, so ours must expire first.
        initialization_timeout=JAX_STARTUP_SECONDS,
        **limits | {"heartbeat_timeout_seconds": heartbeat},
    )
    # The coordinator sends no reports to a process that was restarted.
    reporting = None if rejoin else joined.connection
    try:
        connect_clients(join, reporting, max(until - time.monotonic(), LEAST_CONNECT_SECONDS))
        publish_host()
    except BaseException:
        proxy.close()
        joined.connection.close()
        raise
    exchange = functools.partial(exchange_devices, connection=reporting, timeout=timeout)
    let_gloo_listen_at(own, exchange, make_socket_folder, again=rejoin)
    with _leaving:
        _joined = joined
        use_connection(reporting)


def _leave(job: _Joined) -> None:
    """Release what a job holds, once, after `jax.distributed.shutdown` has left it."""
    global _joined
    with _leaving:
        if _joined is not job:
            return
        _joined = None
        use_connection(None)
        job.connection.close()
        if job.coordinator is not None:
            job.coordinator.release()


def _end(job: _Joined, seconds: int) -> None:
    """Leave, now that JAX has; process 0 then waits until the other members have left too.

    When process 0 ends as the first process of a container, or as the last one of a Slurm step on
    its host, the coordinator is killed. Its clients would abort.
    """
    if getattr(sys, "last_value", None) is not None:  # its exception ends this process
        # As the operating system does: others may be in a call.
        shut_down(find_connections(find_listeners()))
    _leave(job)
    proxy, coordinator = current_proxy(), job.coordinator
    if proxy is not None:
        proxy.end()
    if coordinator is None or proxy is None or proxy.is_given_up:
        return
    with contextlib.suppress(KeyboardInterrupt):
        if coordinator.await_end(min(seconds, SILENT_EXIT_SECONDS)):
            return
        ranks = f" {', '.join(map(str, coordinator.members))}".rstrip()
        _say(f"process 0 is done, and waits up to {seconds} s (`shutdown_timeout_seconds`) for the "
             f"others{ranks}: the coordinator, which they need, may end with it.")  # fmt: skip
        if coordinator.await_end(seconds - SILENT_EXIT_SECONDS):
            return
    _say("process 0 ends before the other processes. If that ends the coordinator, they abort.")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no such stream
        print(f"jaxcoll: {text}", file=sys.stderr, flush=True)


def outlives_processes() -> bool:
    """Tell whether this job goes on when one of its processes dies."""
    if _joined is not None:
        return _joined.recoverable
    return bool(settings.read_option("enable_recoverability"))


def own_address() -> str | None:
    """Get this host's address on its connection to the coordinator; None outside a job."""
    return None if _joined is None else _joined.addresses[0]


def _member(
    given: dict[str, Any], local: int | Sequence[int] | None, resolver: ClusterResolver | None
) -> Member | None:
    """Find this process's place: in the arguments, then in the resolver or the environment."""
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise ValueError(
            "`cluster_resolver` must be a ClusterResolver, such as "
            f"`jc.distribute.TFConfigClusterResolver()`, or None; got {resolver!r}."
        )
    member = None
    if len(given) < 3:
        address = {JAX_COORDINATOR: at} if (at := given.get("coordinator_address")) else {}
        member = read_member({**os.environ, **address}) if resolver is None else resolver.member()
    if member is not None:
        member = dataclasses.replace(member, **given)
    else:
        if address := os.environ.get(JAX_COORDINATOR):
            given = {"coordinator_address": address} | given
        if not given:
            return None
        if missing := [name for name in _PLACE if name not in given]:
            raise ValueError(
                f"`initialize` needs `{'` and `'.join(missing)}`, which no known launcher has set "
                "in the environment. Pass all three arguments."
            )
        member = Member(**given)
    if local is not None:
        ids = tuple(local) if isinstance(local, Iterable) else (local,)
        if not all(map(checks.is_integer, ids)):
            raise ValueError(
                f"`local_device_ids` must be an integer, or a sequence of them; got {local!r}."
            )
        member = dataclasses.replace(member, local_device_ids=tuple(map(int, ids)))
    member = dataclasses.replace(member, job=os.environ.get(JOB, member.job))
    member.check()
    return member


def _check_same(member: Member) -> None:
    if _joined is not None:
        now = _joined.member
    else:  # JAX knows, but only with its devices
        now = Member(member.coordinator_address, jax.process_count(), jax.process_index())
    is_elsewhere = now.coordinator_address != member.coordinator_address
    here, requested = (
        f"process {each.process_id} of {each.num_processes}"
        + f" at {each.coordinator_address}" * is_elsewhere
        for each in (now, member)
    )
    if requested != here:
        raise RuntimeError(
            f"`initialize`: this is already {here}, and cannot also become {requested}. Call it "
            "only once, or call `jax.distributed.shutdown()` in between."
        )


def _seconds(name: str, value: Any) -> float:
    return min(checks.seconds("initialize", name, value), LONGEST_SECONDS)


def _check_unused() -> None:
    if settings.has_backend():
        raise RuntimeError(
            "`initialize` must come before anything that uses devices (`jax.devices()`, making an "
            "array, a strategy): JAX has already made its devices, those of this process only. "
            "Move the call to the start of the program."
        )


def _keep_memory() -> None:
    """Make malloc keep freed memory, if the processes will communicate over Gloo."""
    # By default JAX uses CPUs if no plugin for accelerators is installed.
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    accelerators = plugins or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    first = (settings.read_option("platforms") or ("" if accelerators else "cpu")).split(",")[0]
    over_gloo = settings.read_option("cpu_collectives_implementation") == "gloo"
    if first == "cpu" and over_gloo and keep_freed_memory():
        _LOG.debug("malloc keeps freed memory, so this process never shrinks; see `keep_memory`")


def _detect_member(member: Member | None, timeout: float) -> Member | None:
    """Find this process's place in a cluster that JAX detects; None if it is alone."""
    if member is None and settings.has_backend():
        return None
    if member is None:
        address, count, rank, local = detect_cluster(None, None, math.ceil(timeout))
        ids = tuple(local) if local else None
        return Member(address, count, rank, ids, "JAX's detection") if address else None
    address = None
    with contextlib.suppress(RuntimeError):  # JAX misses a package, such as mpi4py
        address = detect_cluster(member.num_processes, member.process_id, math.ceil(timeout))[0]
    if address is None:
        raise ValueError(
            f"`initialize`: {member.source} does not say where the processes meet. Pass "
            f"`coordinator_address`, or set {JAX_COORDINATOR}, as 'host:port' of process 0's host."
        )
    return dataclasses.replace(member, coordinator_address=address)
