"""`jc.initialize`: enter a job of several processes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import ipaddress
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxcoll._cluster.coordinator import (
    LONGEST_SECONDS,
    Coordinator,
    jax_heartbeat,
    start_coordinator,
)
from jaxcoll._cluster.coordinator_proxy import through_proxy
from jaxcoll._cluster.hosts import publish_host
from jaxcoll._cluster.launch.subprocesses import REJOIN
from jaxcoll._cluster.launchers import JAX_BIND, JAX_COORDINATOR, member_of
from jaxcoll._cluster.liveness import CoordinatorConnection, follow
from jaxcoll._cluster.resolvers import ClusterResolver
from jaxcoll._cluster.socket_folder import make_socket_folder
from jaxcoll._cluster.specs import Member, host_and_port, is_loopback
from jaxcoll._cluster.startup import arrive, connected, exchanged, reach
from jaxcoll._cluster.timing import JAX_STARTUP_SECONDS
from jaxcoll._compat import settings
from jaxcoll._compat.gloo import let_gloo_listen_at
from jaxcoll._malloc import keep_freed_memory
from jaxcoll._plan import checks
from jaxcoll.errors import DeadlineExceededError

_LOG = logging.getLogger("jaxcoll")

_CONNECTS = 5.0  # seconds at least that JAX's clients may take to connect, once all are there


@dataclasses.dataclass
class _Joined:
    """The job that this process has entered, and what must stay open as long as it is in it."""

    member: Member
    connection: CoordinatorConnection
    recoverable: bool
    coordinator: Coordinator | None

    @property
    def address(self) -> str:
        """This host's address on the way to the coordinator."""
        with socket.socket(fileno=os.dup(self.connection.fd)) as copy:
            return copy.getsockname()[0]


_joined: _Joined | None = None
_parting = threading.Lock()


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
) -> None:
    """Enter the job that this process is one of, through `jax.distributed`.

    To be called first, by every process. Arguments that are not given come from the environment,
    from the first of these launchers that left its marks: `jaxcoll launch`, `TF_CONFIG`, torchrun,
    Open MPI, Slurm, those that write torchrun's variables (`MASTER_ADDR`, `MASTER_PORT`, `RANK`,
    `WORLD_SIZE`), and then from JAX itself: Cloud TPU and Kubernetes. `JAX_COORDINATOR_ADDRESS`
    says where they meet, whoever started them. Without any mark this process is alone, and nothing
    is started; where another launcher of MPI left its marks, the arguments must be given.

    Guarantee: a job begins when all have arrived, or every process that did learns who did not, or
    what does not agree, within its `initialization_timeout_seconds`. Process 0 starts the
    coordinator as a process of its own, so that any of them may end or die; it ends after the last.
    It listens at `coordinator_address` and nowhere else, and Gloo at the address by which this host
    reaches it.
    Called again, with the same or no arguments, it does nothing.

    Args:
      coordinator_address: "host:port" at which all meet: of process 0's host, a free port.
      num_processes: how many there are.
      process_id: this one's number, from 0.
      local_device_ids: accelerators that are this process's own. None: all that it sees, or the
        one with its number on the host where a launcher says that it put several there.
      cluster_resolver: replaces the environment.
      initialization_timeout_seconds: until all must have arrived; and, over CPUs, from the first
        use of devices until all use theirs. Of these seconds, here and below, 23 days count at
        most.
      heartbeat_timeout_seconds: a process whose host does not answer for so long counts as dead;
        where `recoverable` is False, also one that is stopped.
      shutdown_timeout_seconds: how long processes wait for each other at their end, where
        `recoverable` is False.
      coordinator_bind_address: "host:port" at which the coordinator listens, where that is not
        `coordinator_address` (behind a name or a gateway of the network).
      recoverable: whether the others may go on when one dies, and get an error they can catch from
        what they did together. Without it JAX aborts them all.
      rejoin: this process replaces one that died, and the job has begun:
        nobody is waited for. `jc.Elastic` takes it in. `jaxcoll launch` says so by itself.
      keep_memory: between processes of CPU devices over Gloo, have glibc's malloc keep what is
        freed, up to the most that this process ever had in use: fresh pages for each call's results
        cost as much as the exchange. Variables such as `MALLOC_MMAP_MAX_` come first.

    Raises:
      ValueError: an argument or a variable cannot be; the coordinator's host has no address; or
        processes contradict each other.
      OSError: process 0 cannot listen there (port in use, another host's), or this is Windows.
      DeadlineExceededError: processes are missing, which are named.
      PeerLostError: one that had arrived has died, or the coordinator.
      RuntimeError: JAX has devices already, or this process has entered another job.

    Examples:
      >>> initialize()  # nobody launched this process: it is alone
    """
    timeout = _seconds("initialization_timeout_seconds", initialization_timeout_seconds)
    limits = {
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "shutdown_timeout_seconds": shutdown_timeout_seconds,
    }
    # In whole seconds, as JAX takes them.
    limits = {name: math.ceil(_seconds(name, value)) for name, value in limits.items()}
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    given = {name: value for name, value in given.items() if value is not None}
    member = _member(given, local_device_ids, cluster_resolver)
    if (left := _joined) is not None and not jax.distributed.is_initialized():
        _part(left)
    if _joined is not None or jax.distributed.is_initialized():
        if given and member is not None:
            _check_same(member)
        return
    if member is None or member.coordinator_address is None:
        limits["initialization_timeout"] = math.ceil(timeout)
        return _by_jax(member, limits, coordinator_bind_address, recoverable)
    _check_unused()
    if keep_memory:
        _keep_memory()
    coordinator, until = None, time.monotonic() + timeout
    rejoin = rejoin or (member.is_launched and os.environ.get(REJOIN) == "1")
    if member.process_id == 0 and not member.is_launched and not rejoin:
        coordinator = _start(member, coordinator_bind_address, recoverable, limits)
    try:
        arrived = reach(member, timeout) if rejoin else arrive(member, timeout)
    except BaseException as error:
        if coordinator is not None:
            coordinator.close()
            _explain_loopback(error, coordinator.address, member)
        raise
    # Both stay until the system closes them, after JAX has taken its leave at the very end.
    if coordinator is not None:
        coordinator.leave()
    joined = _Joined(member, CoordinatorConnection(arrived.detach()), recoverable, coordinator)
    _enter_jax(joined, limits, timeout, until, rejoin=rejoin)


def _enter_jax(
    joined: _Joined, limits: dict[str, int], timeout: float, until: float, *, rejoin: bool
) -> None:
    """Enter JAX's own world, now that all processes have arrived."""
    global _joined
    member = joined.member
    assert member.coordinator_address is not None
    proxy = through_proxy(
        member.coordinator_address,
        limits["heartbeat_timeout_seconds"],
        functools.partial(_part, joined),
    )
    heartbeat = jax_heartbeat(limits["heartbeat_timeout_seconds"], joined.recoverable)
    join = functools.partial(
        jax.distributed.initialize,
        proxy.address,
        member.num_processes,
        member.process_id,
        member.local_device_ids,
        # JAX has process 0 serve: it gets an idle service on the loopback interface.
        coordinator_bind_address="127.0.0.1:0",
        cluster_detection_method="deactivate",
        # At the end of this time JAX ends the process with a signal, so ours must be up before.
        initialization_timeout=JAX_STARTUP_SECONDS,
        **limits | {"heartbeat_timeout_seconds": heartbeat},
    )
    # The coordinator reports nothing on the connection of a process that was restarted.
    followed = None if rejoin else joined.connection
    try:
        connected(join, followed, max(until - time.monotonic(), _CONNECTS))
        publish_host()
    except BaseException:
        proxy.close()
        joined.connection.close()
        raise
    exchange = functools.partial(exchanged, connection=followed, timeout=timeout)
    let_gloo_listen_at(joined.address, exchange, make_socket_folder, again=rejoin)
    with _parting:
        _joined = joined
        follow(followed)


def _part(left: _Joined) -> None:
    """Let go of a job that this process has left by `jax.distributed.shutdown`, once."""
    global _joined
    with _parting:
        if _joined is not left:
            return
        _joined = None
        follow(None)
    left.connection.close()
    if left.coordinator is not None:
        left.coordinator.part()


def outlives_processes() -> bool:
    """True if the job that this process is in goes on when one of its processes dies."""
    if _joined is not None:
        return _joined.recoverable
    return bool(settings.configured("enable_recoverability"))


def own_address() -> str | None:
    """This host's address on the way to the coordinator; None: this process has not joined."""
    return None if _joined is None else _joined.address


def _member(
    given: dict[str, Any], local: int | Sequence[int] | None, resolver: ClusterResolver | None
) -> Member | None:
    """Who this is by the arguments, and for what they leave out by the resolver or environment."""
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise ValueError(
            "`cluster_resolver` must be a ClusterResolver, such as "
            f"`jc.distribute.TFConfigClusterResolver()`, or None; got {resolver!r}."
        )
    member = None
    if len(given) < 3:
        member = member_of(os.environ) if resolver is None else resolver.member()
    if member is not None:
        member = dataclasses.replace(member, **given)
    else:
        if address := os.environ.get(JAX_COORDINATOR):
            given = {"coordinator_address": address} | given
        if not given:
            return None
        names = ("coordinator_address", "num_processes", "process_id")
        if missing := [name for name in names if name not in given]:
            raise ValueError(
                f"`initialize` needs `{'` and `'.join(missing)}`, which no launcher that it knows "
                "has left in the environment. Give all three."
            )
        member = Member(**given)
    if local is not None:
        ids = (local,) if isinstance(local, int) else tuple(local)
        member = dataclasses.replace(member, local_device_ids=ids)
    member.check()
    return member


def _check_same(member: Member) -> None:
    """Refuse to enter a second job."""
    if _joined is not None:
        now = _joined.member
    else:  # JAX knows, but has to make its devices to say so
        now = Member(member.coordinator_address, jax.process_count(), jax.process_index())
    is_elsewhere = now.coordinator_address != member.coordinator_address
    here, asked = (
        f"process {each.process_id} of {each.num_processes}"
        + f" at {each.coordinator_address}" * is_elsewhere
        for each in (now, member)
    )
    if asked != here:
        raise RuntimeError(
            f"`initialize`: this is {here} already, and cannot become {asked} as well. Call it "
            "once, or `jax.distributed.shutdown()` in between."
        )


def _seconds(name: str, value: Any) -> float:
    return min(checks.seconds("initialize", name, value), LONGEST_SECONDS)


def _check_unused() -> None:
    if settings.has_backend():
        raise RuntimeError(
            "`initialize` must come before anything that uses devices (`jax.devices()`, making an "
            "array, a strategy): JAX has looked for its devices already, and found this process's "
            "alone. Move the call to the start of the program."
        )


def _keep_memory() -> None:
    """Have malloc keep what is freed, if the processes will meet over Gloo."""
    # Without being asked, JAX takes CPUs where no plugin for accelerators is installed.
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    others = plugins or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    first = (settings.configured("platforms") or ("" if others else "cpu")).split(",")[0]
    over_gloo = settings.configured("cpu_collectives_implementation") == "gloo"
    if first == "cpu" and over_gloo and keep_freed_memory():
        _LOG.debug("malloc keeps what this process frees: it never shrinks; see `keep_memory`")


def _start(
    member: Member, bind: str | None, recoverable: bool, limits: dict[str, int]
) -> Coordinator:
    """Start the coordinator, which listens at one address only."""
    assert member.coordinator_address is not None
    asked = bind or os.environ.get(JAX_BIND) or member.coordinator_address
    host, port = host_and_port(asked)
    number = _resolved("127.0.0.1" if host == "localhost" else host, member)
    at = f"[{number}]:{port}" if number.version == 6 else f"{number}:{port}"
    try:
        return start_coordinator(at, member.num_processes, recoverable=recoverable, **limits)
    except OSError as error:
        raise OSError(
            f"`initialize` on process 0 cannot listen at {at}, where the processes were to meet: "
            f"{error}. Choose a free port; where {member.coordinator_address!r} is not an address "
            "of this host's own, say what is by `coordinator_bind_address`."
        ) from None


def _resolved(host: str, member: Member) -> Any:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(
            f"`initialize` on process 0: the host {host!r}, where it is to listen, has no address "
            f"here ({error.strerror}). Check the name, which came from {member.source}."
        ) from None
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def _explain_loopback(error: BaseException, listened: str, member: Member) -> None:
    """Say so where nobody could come because a host's name is loopback to itself."""
    assert member.coordinator_address is not None
    if (
        isinstance(error, DeadlineExceededError)
        and is_loopback(listened)
        and not is_loopback(member.coordinator_address)
    ):
        error.add_note(
            f"{member.coordinator_address!r} stands for {listened} on its own host, which no other "
            "host can reach. Write the host's own address into its /etc/hosts, or set "
            f"{JAX_COORDINATOR} to that address and a port, for all processes."
        )


def _by_jax(
    member: Member | None, limits: dict[str, int], bind: str | None, recoverable: bool
) -> None:
    """Leave the rest to what JAX knows of clusters; where it knows none, this process is alone."""
    if member is None and settings.has_backend():
        return
    before = settings.configured("enable_recoverability")
    jax.config.update("jax_enable_recoverability", recoverable)
    try:
        names = ("num_processes", "process_id", "local_device_ids") if member else ()
        known = {name: getattr(member, name) for name in names}
        jax.distributed.initialize(coordinator_bind_address=bind, **limits, **known)
        publish_host()
    except ValueError as error:
        if "coordinator_address" not in str(error):
            raise
        if member is not None:
            raise ValueError(
                f"`initialize`: {member.source} does not say where the processes meet. Give "
                f"`coordinator_address`, or set {JAX_COORDINATOR}, to 'host:port' of process 0's "
                "host."
            ) from None
    finally:
        jax.config.update("jax_enable_recoverability", before)
