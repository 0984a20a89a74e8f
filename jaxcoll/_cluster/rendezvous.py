"""Rendezvous: a process reports to the coordinator and waits until all others have."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from jaxcoll._cluster.coordinator import LONGEST, LONGEST_SECONDS, message
from jaxcoll._cluster.launchers import Member, host_and_port
from jaxcoll._errors import DeadlineExceededError, PeerLostError

_RETRY_SECONDS = 0.05  # between two attempts to reach a coordinator that is not there yet
_GONE_SECONDS = 2.0  # after which a coordinator that hung up, and listens no longer, has died


def arrive(member: Member, timeout: float) -> socket.socket:
    """Report to the coordinator, and wait until all others have; the connection to it."""
    # It is to be kept open: the coordinator stays for as long as somebody is connected.
    deadline = time.monotonic() + min(timeout, LONGEST_SECONDS)
    refused, gone = "nobody listens there", float("inf")
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(host_and_port(member.coordinator_address), left)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise ValueError(
                    f"{here(member)}: the coordinator's host in "
                    f"{member.coordinator_address!r} has no address here ({error.strerror}). Check "
                    f"the name, which came from {member.source}."
                ) from None
            refused = f"its host has no address yet ({error.strerror})"
        except OSError as error:
            refused = error.strerror or str(error)
            if isinstance(error, ConnectionRefusedError) and time.monotonic() > gone:
                raise PeerLostError(
                    f"{here(member)}: the coordinator at {member.coordinator_address} died before "
                    "all had arrived: it hung up, and nobody listens there any more. Start the job "
                    "again.",
                    ranks=(),
                ) from None
        else:
            reply = _reply(connection, member, deadline)
            if reply is not None:
                return _accepted(connection, reply, member)
            connection.close()
            refused, gone = "it hung up", time.monotonic() + _GONE_SECONDS
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    raise DeadlineExceededError(
        f"{here(member)}: the coordinator at {member.coordinator_address} was not reached within "
        f"{timeout:g} s ({refused}). Is process 0 running there, and can this host reach it? A "
        "larger `initialization_timeout` waits longer."
    )


def _reply(connection: socket.socket, member: Member, deadline: float) -> dict[str, Any] | None:
    """The coordinator's reply once all have arrived or cannot; None: it hung up."""
    hello = {
        "process_id": member.process_id,
        "num_processes": member.num_processes,
        "patience": deadline - time.monotonic(),
        "who": f"{socket.gethostname()}:{os.getpid()}",
    }
    received = b""
    try:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        while b"\n" not in received and len(received) <= LONGEST:
            # The coordinator gives up first; half a second more is for its reply to arrive.
            connection.settimeout(max(0.0, deadline - time.monotonic()) + 0.5)
            ahead = connection.recv(LONGEST, socket.MSG_PEEK)
            if not ahead:
                break
            # No more than the reply: the lines after it tell who has ended, and are read later.
            received += connection.recv(ahead.find(b"\n") + 1 or len(ahead))
        if not received:
            return None
        if reply := message(received):
            return reply
    except TimeoutError:
        text = (
            f"what listens at {member.coordinator_address} did not answer in time. Does another "
            "program have that port?"
        )
        return {"error": text, "kind": "deadline"}
    except OSError:
        return None
    connection.close()
    raise ValueError(
        f"{here(member)}: what answers at {member.coordinator_address} is not a coordinator "
        "that waits for processes: another program has that port, or the job has begun without "
        "this one. Choose another port."
    )


def _accepted(connection: socket.socket, reply: dict[str, Any], member: Member) -> socket.socket:
    if "go" in reply:
        connection.settimeout(None)
        return connection
    connection.close()
    words, ranks = f"{here(member)}: {reply.get('error')}", reply.get("ranks")
    ranks = [r for r in ranks if type(r) is int] if isinstance(ranks, list) else []
    match reply.get("kind"):
        case "deadline":
            raise DeadlineExceededError(words, ranks=ranks)
        case "lost":
            raise PeerLostError(words, ranks=ranks)
    raise ValueError(words)


def here(member: Member) -> str:
    """Which process this is, for messages."""
    return f"`initialize` on process {member.process_id} of {member.num_processes}"


def reach(member: Member, timeout: float) -> socket.socket:
    """A connection to the coordinator of a job that has begun, on which nothing is sent."""
    try:
        address = host_and_port(member.coordinator_address)
        connection = socket.create_connection(address, min(timeout, LONGEST_SECONDS))
    except OSError as error:
        raise DeadlineExceededError(
            f"{here(member)}: the coordinator at {member.coordinator_address} is not there "
            f"({error.strerror or error}). Only a job that goes on can be joined again."
        ) from None
    connection.settimeout(None)
    return connection
