"""The start of a job: its processes report to the coordinator, and wait for each other.

Once all have arrived at the coordinator, each waits for all others twice more: when JAX's clients
connect, and when they exchange their devices. If a process is missing at one of these two barriers,
JAX aborts the others or waits for minutes; here the user's timeout applies to them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from jaxcoll._compat.coordination import Store, store
from jaxcoll._job.coordinator_process import LONGEST, LONGEST_SECONDS, message, name_processes
from jaxcoll._job.coordinator_proxy import give_up_coordinator
from jaxcoll._job.exchange import LateError, exchange
from jaxcoll._job.liveness import CONNECTED, DEVICES, LEFT, CoordinatorConnection
from jaxcoll._job.specs import Member, host_and_port
from jaxcoll._job.threads import call_with_timeout
from jaxcoll._job.timing import (
    ARRIVAL_REPLY_SECONDS,
    CANDIDATE_SECONDS,
    COORDINATOR_GONE_SECONDS,
    LEAST_DEVICES_SECONDS,
    REACH_RETRY_SECONDS,
)
from jaxcoll.errors import DeadlineExceededError, PeerLostError

_HERE, _LEFT = "jaxcoll/devices", "jaxcoll/devices_left"
_LONGER = "A larger `initialization_timeout_seconds` waits longer."


def arrive(member: Member, timeout: float) -> socket.socket:
    """Report to the coordinator, wait until all others have, and return the connection to it."""
    # Keep it open: the coordinator runs for as long as somebody is connected.
    deadline = time.monotonic() + min(timeout, LONGEST_SECONDS)
    refused, gone = "nothing listens there", float("inf")
    addresses = itertools.cycle((member.coordinator_address, *member.elsewhere))
    while (left := deadline - time.monotonic()) > 0:
        left = min(left, CANDIDATE_SECONDS) if member.elsewhere else left
        try:
            connection = socket.create_connection(host_and_port(next(addresses)), left)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise ValueError(
                    f"{title(member)}: the coordinator's host in {member.coordinator_address!r} "
                    f"cannot be resolved here ({error.strerror}). Check the name, which came from "
                    f"{member.source}."
                ) from None
            refused = f"its host cannot be resolved yet ({error.strerror})"
        except OSError as error:
            refused = error.strerror or str(error)
            if isinstance(error, ConnectionRefusedError) and time.monotonic() > gone:
                raise PeerLostError(
                    f"{title(member)}: the coordinator at {member.coordinator_address} died before "
                    "all processes had arrived: it hung up, and nothing listens there any more. "
                    "Start the job again.",
                ) from None
        else:
            reply = _reply(connection, member, deadline)
            if reply is not None:
                return _check_reply(connection, reply, member)
            connection.close()
            refused = "it hung up"
            gone = gone if member.elsewhere else time.monotonic() + COORDINATOR_GONE_SECONDS
        time.sleep(min(REACH_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    raise DeadlineExceededError(
        f"{title(member)}: could not reach the coordinator at {member.coordinator_address} within "
        f"{timeout:g} s ({refused}). Is process 0 running there, and can this host reach it? "
        f"{_LONGER}"
    )


def _reply(connection: socket.socket, member: Member, deadline: float) -> dict[str, Any] | None:
    """Await the coordinator's reply, when all have arrived or startup failed; None: it hung up."""
    hello = {
        "process_id": member.process_id,
        "num_processes": member.num_processes,
        "patience": deadline - time.monotonic(),
        "who": f"{socket.gethostname()}:{os.getpid()}",
        "job": member.job,
    }
    received = b""
    try:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        while b"\n" not in received and len(received) <= LONGEST:
            # The coordinator gives up first. A process that did not wait for its reply would miss
            # who is absent, and the others would take this process for lost.
            connection.settimeout(max(0.0, deadline - time.monotonic()) + ARRIVAL_REPLY_SECONDS)
            ahead = connection.recv(LONGEST, socket.MSG_PEEK)
            if not ahead:
                break
            # Take only the reply: the lines after it report who has ended, and are read later.
            received += connection.recv(ahead.find(b"\n") + 1 or len(ahead))
    except TimeoutError:
        text = (
            f"whatever listens at {member.coordinator_address} did not answer in time. Does "
            "another program use that port?"
        )
        return {"error": text, "kind": "deadline"}
    except OSError:
        return None
    reply = message(received)
    if reply or member.elsewhere or not received:
        return reply or None
    text = (
        f"whatever answers at {member.coordinator_address} is not a coordinator that waits for "
        "processes: another program uses that port, or the job has begun without this process. "
        "Choose another port."
    )
    return {"error": text}


def _check_reply(connection: socket.socket, reply: dict[str, Any], member: Member) -> socket.socket:
    if "go" in reply:
        connection.settimeout(None)
        return connection
    connection.close()
    text, ranks = f"{title(member)}: {reply.get('error')}", reply.get("ranks")
    ranks = [r for r in ranks if type(r) is int] if isinstance(ranks, list) else []
    match reply.get("kind"):
        case "deadline":
            raise DeadlineExceededError(text, ranks=ranks)
        case "lost":
            raise PeerLostError(text, ranks=ranks)
    raise ValueError(text)


def title(member: Member) -> str:
    return f"`initialize` on process {member.process_id} of {member.num_processes}"


def reach(member: Member, timeout: float) -> socket.socket:
    """Connect to the coordinator of a job that has begun, without sending anything."""
    try:
        address = host_and_port(member.coordinator_address)
        connection = socket.create_connection(address, min(timeout, LONGEST_SECONDS))
    except OSError as error:
        raise DeadlineExceededError(
            f"{title(member)}: cannot reach the coordinator at {member.coordinator_address} "
            f"({error.strerror or error}). A process can rejoin only a job that is still running."
        ) from None
    connection.settimeout(None)
    return connection


def connect_clients(
    connect: Callable[[], Any], connection: CoordinatorConnection | None, timeout: float
) -> None:
    """Call `connect`, in which JAX's clients wait for each other."""
    try:
        with _barrier(connection, CONNECTED, DEVICES) as check:
            call_with_timeout(connect, timeout, check)
    except (TimeoutError, KeyboardInterrupt, PeerLostError) as error:
        give_up_coordinator()
        if not isinstance(error, TimeoutError):
            raise
        raise DeadlineExceededError(
            "`initialize`: all processes arrived, but did not all connect to each other within "
            f"{timeout:g} s: one is stopped, or cut off.",
        ) from None


def exchange_devices(
    make: Callable[[], Any], connection: CoordinatorConnection | None, timeout: float
) -> Any:
    """Call `make`, in which processes exchange their devices, once all are ready to."""
    try:
        with _barrier(connection, DEVICES) as check:
            await_all(timeout, check)
            return call_with_timeout(make, max(timeout, LEAST_DEVICES_SECONDS), check)
    except DeadlineExceededError:
        raise
    except TimeoutError:
        raise DeadlineExceededError(
            f"Processes did not finish exchanging their devices within {timeout:g} s, though all "
            f"had begun to: one is stopped, or cut off. {_LONGER}"
        ) from None


@contextlib.contextmanager
def _barrier(connection: CoordinatorConnection | None, *stages: str) -> Iterator[Any]:
    """Yield a check that nobody ended before these stages; at the end report the first stage."""
    if connection is None:
        yield None
        return
    try:
        yield functools.partial(_check_live, connection, stages)
    except (TimeoutError, PeerLostError):
        connection.report(stage=LEFT)  # so that others do not blame this process when it ends
        raise
    connection.report(stage=stages[0])


def _check_live(connection: CoordinatorConnection, stages: Sequence[str]) -> None:
    lost = connection.find_lost(*stages)
    if lost or connection.is_broken:
        who = "The coordinator died, or was cut off,"
        if lost:
            who = f"{name_processes(lost).capitalize()} ended"
        raise PeerLostError(
            f"{who} during startup, after all processes had arrived, while they waited for each "
            "other. Start the job again.",
            ranks=lost,
        )


def await_all(timeout: float, check: Callable[[], None] | None = None) -> None:
    """Wait until every process is about to exchange its devices, or has done so."""
    # JAX's barrier will not do: it does not say who is missing, and a process that gives up
    # cannot withdraw its arrival.
    keys = store()
    if keys is None:
        return

    def poll(absent: list[int]) -> None:
        left = sorted(map(int, keys.all(_LEFT)))
        if left:
            _give_up(keys, absent, left, timeout)
        if check is not None:
            check()

    try:
        exchange(keys, _HERE, None, range(keys.processes), timeout, check=poll)
    except LateError as error:
        _give_up(keys, error.late, [], timeout)
    poll([])  # all have come, but perhaps when some had left


def _give_up(keys: Store, absent: Sequence[int], left: list[int], timeout: float) -> NoReturn:
    keys.set(f"{_LEFT}/{keys.process}", "")  # for processes that come later
    if absent:
        text = (
            f"{name_processes(absent).capitalize()} of {keys.processes} did not begin to use "
            f"devices within {timeout:g} s of the first; all must begin before any can."
        )
    else:
        text = (
            f"This process began to use devices after {name_processes(left)} had stopped waiting "
            "for it."
        )
    raise DeadlineExceededError(f"{text} {_LONGER}", ranks=absent or left)
