"""A job's coordinator, as seen by the process that starts it."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from jaxcoll._job import coordinator_process
from jaxcoll._job.coordinator_process import message
from jaxcoll._job.launchers import JAX_COORDINATOR
from jaxcoll._job.specs import Member, host_and_port, is_loopback
from jaxcoll.errors import DeadlineExceededError


def jax_heartbeat(seconds: int, recoverable: bool) -> int:
    """Choose the heartbeat timeout of JAX's client and service, in seconds.

    JAX aborts a process that was stopped for longer than this, as soon as it continues. In a
    recoverable job closed connections show who has ended, so JAX's timeout is practically off.
    """
    return 10**8 if recoverable else seconds


@dataclasses.dataclass
class Coordinator:
    address: str  # where it listens, "host:port"
    process: subprocess.Popen[bytes]
    replies: IO[bytes]  # our end of a pipe on which it reports that a process has arrived
    # Our end of another pipe. While it is open the coordinator keeps running even if nobody is
    # connected; the operating system closes it when this process ends
    lifeline: int
    members: Sequence[int] = ()  # after `release`: those that have not left
    _follower: threading.Thread | None = None

    def detach(self) -> None:
        """Let the coordinator outlive this process if others need it."""
        self.process.returncode = 0  # Python does not wait for it, or warn, when this process ends

    def has_arrivals(self) -> bool:
        """Tell whether a process has arrived, or the coordinator has ended."""
        return bool(select.select((self.replies,), (), (), 0)[0])

    def release(self) -> None:
        """Let the coordinator end once every process has left."""
        os.close(self.lifeline)
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def await_end(self, seconds: float | None = None) -> bool:
        """Wait, after `release`, until the coordinator ends. Return whether it has."""
        assert self._follower is not None
        self._follower.join(seconds)
        return not self._follower.is_alive()

    def _follow(self) -> None:
        with self.replies:
            for line in self.replies:
                self.members = message(line).get("members", self.members)
        self.process.returncode = None
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.replies.close()
        os.close(self.lifeline)


def start_coordinator(
    address: str,
    num_processes: int,
    *,
    job: str = "",
    recoverable: bool = True,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    log: Any = subprocess.DEVNULL,
) -> Coordinator:
    """Start a coordinator on this host that listens at "host:port" and nowhere else."""
    # Port 0 means any free port. `log` is a file for the service's messages. Without the name of a
    # `job`, the first process to arrive gives it.
    settings = {
        "address": address,
        "num_processes": num_processes,
        "job": job,
        "silence": heartbeat_timeout_seconds,
        "service": {
            "heartbeat_timeout": jax_heartbeat(heartbeat_timeout_seconds, recoverable),
            "shutdown_timeout": shutdown_timeout_seconds,
            "recoverable": recoverable,
        },
    }
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    theirs, lifeline = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", coordinator_process.__file__, json.dumps(settings)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    assert process.stdout is not None
    reply = json.loads(process.stdout.readline() or b"{}")
    started = Coordinator(reply.get("address", ""), process, process.stdout, lifeline)
    if "address" not in reply:
        started.close()
        raise OSError(reply.get("error", f"its process ended with status {process.returncode}"))
    return started


def listen_at(address: str | None, member: Member, **options: Any) -> Coordinator:
    """Start the coordinator of a member's job, which listens at one address only."""
    host, port = host_and_port(address)
    number = _resolve("127.0.0.1" if host == "localhost" else host, member)
    at = f"[{number}]:{port}" if number.version == 6 else f"{number}:{port}"
    try:
        return start_coordinator(at, member.num_processes, job=member.job, **options)
    except OSError as error:
        raise OSError(
            f"The coordinator cannot listen at {at}, where the processes should meet: "
            f"{error}. Choose a free port; if {member.coordinator_address!r} is not an address of "
            "this host, pass one that is as `coordinator_bind_address`."
        ) from None


def _resolve(host: str, member: Member) -> Any:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(
            f"The host {host!r}, where the coordinator should listen, has no address "
            f"here ({error.strerror}). Check the name, which came from {member.source}."
        ) from None
    return ipaddress.ip_address(str(addresses[0][4][0]).partition("%")[0])


def explain_loopback(error: BaseException, listened: str, member: Member) -> None:
    """Add a note if nobody could connect because the host's name resolves to loopback there."""
    assert member.coordinator_address is not None
    if (
        isinstance(error, DeadlineExceededError)
        and is_loopback(listened)
        and not is_loopback(member.coordinator_address)
    ):
        error.add_note(
            f"{member.coordinator_address!r} resolves to {listened} on its own host, and no other "
            "host can reach that. Put the host's network address into its /etc/hosts, or set "
            f"{JAX_COORDINATOR} to that address and a port, for all processes."
        )
