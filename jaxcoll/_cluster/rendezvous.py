"""How a process arrives at the coordinator, before JAX's own meeting."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from jaxcoll._cluster.coordinator import LONGEST, LONGEST_SECONDS, message
from jaxcoll._cluster.launchers import Member, host_and_port
from jaxcoll._errors import DeadlineExceededError, PeerLostError

_AGAIN = 0.05  # seconds between two attempts to reach a coordinator that is not there yet
_GONE_SECONDS = 2.0  # for which nobody listens any more where a coordinator did


def arrive(member: Member, timeout: float) -> socket.socket:
    """Report to the coordinator and wait until all others have.

    Args:
      member: who this is, and where the coordinator is.
      timeout: seconds after which to wait no longer; then all others are told so as well.

    Returns:
      The connection, to be kept open for as long as this process lives: the coordinator stays for
      as long as somebody is connected.

    Raises:
      ValueError: the coordinator's host has no address; what answers there is no coordinator; or
        two processes have one number, or count the others differently.
      DeadlineExceededError: nobody listens there, or processes are missing, which are named.
      PeerLostError: a process that had arrived has died, or the coordinator.
    """
    deadline = time.monotonic() + min(timeout, LONGEST_SECONDS)
    refused, gone = "nobody listens there", float("inf")
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = socket.create_connection(host_and_port(member.coordinator_address), left)
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
            answer = _answer(line, member, deadline)
            if answer is not None:
                return _accepted(line, answer, member)
            line.close()
            refused, gone = "it hung up", time.monotonic() + _GONE_SECONDS
        time.sleep(min(_AGAIN, max(0.0, deadline - time.monotonic())))
    raise DeadlineExceededError(
        f"{here(member)}: the coordinator at {member.coordinator_address} was not reached within "
        f"{timeout:g} s ({refused}). Is process 0 running there, and can this host reach it? A "
        "larger `initialization_timeout` waits longer."
    )


def _answer(line: socket.socket, member: Member, deadline: float) -> dict[str, Any] | None:
    """What the coordinator says once it knows; None: it hung up."""
    hello = {
        "process_id": member.process_id,
        "num_processes": member.num_processes,
        "patience": deadline - time.monotonic(),
        "who": f"{socket.gethostname()}:{os.getpid()}",
    }
    heard = b""
    try:
        line.sendall(json.dumps(hello).encode() + b"\n")
        while b"\n" not in heard and len(heard) <= LONGEST:
            # It speaks first where time is up; half a second more is for its words to arrive.
            line.settimeout(max(0.0, deadline - time.monotonic()) + 0.5)
            ahead = line.recv(LONGEST, socket.MSG_PEEK)
            if not ahead:
                break
            # Who has ended since stands in lines after this one, and is read later.
            heard += line.recv(ahead.find(b"\n") + 1 or len(ahead))
        if not heard:
            return None
        if answer := message(heard):
            return answer
    except TimeoutError:
        said = (
            f"what listens at {member.coordinator_address} did not answer in time. Does another "
            "program have that port?"
        )
        return {"error": said, "kind": "deadline"}
    except OSError:
        return None
    line.close()
    raise ValueError(
        f"{here(member)}: what answers at {member.coordinator_address} is no coordinator "
        "that waits for processes: another program has that port, or the job has begun without "
        "this one. Choose another port."
    )


def _accepted(line: socket.socket, answer: dict[str, Any], member: Member) -> socket.socket:
    if "go" in answer:
        line.settimeout(None)
        return line
    line.close()
    words, ranks = f"{here(member)}: {answer.get('error')}", answer.get("ranks")
    ranks = [r for r in ranks if type(r) is int] if isinstance(ranks, list) else []
    match answer.get("kind"):
        case "deadline":
            raise DeadlineExceededError(words, ranks=ranks)
        case "lost":
            raise PeerLostError(words, ranks=ranks)
    raise ValueError(words)


def here(member: Member) -> str:
    """Which process this is, for messages."""
    return f"`initialize` on process {member.process_id} of {member.num_processes}"


def reach(member: Member, timeout: float) -> socket.socket:
    """A connection to the coordinator of a job that has begun; it is told nothing.

    Raises:
      DeadlineExceededError: nobody listens there any more.
    """
    try:
        address = host_and_port(member.coordinator_address)
        line = socket.create_connection(address, min(timeout, LONGEST_SECONDS))
    except OSError as error:
        raise DeadlineExceededError(
            f"{here(member)}: the coordinator at {member.coordinator_address} is not there "
            f"({error.strerror or error}). Only a job that goes on can be joined again."
        ) from None
    line.settimeout(None)
    return line
