"""The coordinator: a process of its own, so that any other process of a job may die.

    python -P coordinator.py '{"address": "127.0.0.1:0", "num_processes": 4, ...}'

It waits for all processes on the port of the coordination service, then starts the service there,
and ends when nobody needs it any more: its standard input is closed, and every process has left.
JAX by itself ends a process with a signal if another one does not arrive; here all that did arrive
get an error. Messages are lines of JSON.

It is run as a file: importing the package would import JAX, which a coordinator does not need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import select
import selectors
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NoReturn

LONGEST = 4096
"""Bytes of a process's first line; a longer one comes from another program."""

LONGEST_SECONDS = 2_000_000.0
"""Longest wait, 23 days: the system counts milliseconds in 31 bits."""

_LONGEST_REPORT = 1 << 16  # bytes that a process may write after its first line
_MOST_PROCESSES = 1 << 20

LINGERS = 2.0
"""Seconds for which a job that cannot begin says so to processes that come later."""

STRANGERS = 256
"""Connections that may be open without a first line; one more closes the oldest of them."""

_LOOK_SECONDS = 1.0  # between two looks for clients of the service, where there are no members

_LONGEST_IDLE = 32767  # seconds: what Linux takes for TCP_KEEPIDLE


def break_when_silent(connection: socket.socket, seconds: float) -> None:
    """Have a TCP connection break after so much silence, if its other end is cut off.

    It does not break while the other end's system replies, whatever its process does. Outside Linux
    the system chooses the time.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    often = min(max(1, int(seconds / 4)), _LONGEST_IDLE)
    for name, value in (
        ("TCP_KEEPIDLE", often),
        ("TCP_KEEPINTVL", often),
        ("TCP_USER_TIMEOUT", min(int(seconds * 1000), (1 << 31) - 1)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def jax_heartbeat(seconds: int, recoverable: bool) -> int:
    """Return the heartbeat timeout that JAX's client and service are given.

    JAX aborts a process that was stopped for longer, once it goes on. Where the others may go on
    without it, closed connections tell who has ended, and JAX's heartbeats have nothing to tell.
    """
    return 10**8 if recoverable else seconds


@dataclasses.dataclass
class Coordinator:
    """A coordinator that was started here."""

    address: str  # where it listens, "host:port"
    process: subprocess.Popen[bytes]
    replies: IO[bytes]  # the end of a pipe, on which it tells that a process has arrived
    # The end of a pipe. While it is open the coordinator stays though nobody is connected; the
    # system closes it when this process ends
    lifeline: int

    def leave(self) -> None:
        """Let it live for as long as any process needs it."""
        self.process.returncode = 0  # if this process ends, nobody waits for it

    def is_met(self) -> bool:
        """True once a process has arrived, or the coordinator has ended."""
        return bool(select.select((self.replies,), (), (), 0)[0])

    def part(self) -> None:
        """Stop needing it."""
        self.replies.close()
        os.close(self.lifeline)
        self.process.returncode = None
        threading.Thread(target=self.process.wait, name="jaxcoll-coordinator", daemon=True).start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.replies.close()
        os.close(self.lifeline)


def start_coordinator(
    address: str,
    num_processes: int,
    *,
    recoverable: bool = True,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    log: Any = subprocess.DEVNULL,
) -> Coordinator:
    """Start a coordinator on this host, which listens at "host:port" and nowhere else."""
    # Port 0 stands for any that is free. `log` is a file for the service's messages.
    settings = {
        "address": address,
        "num_processes": num_processes,
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
        [sys.executable, "-P", __file__, json.dumps(settings)],
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


class _Coordinator:
    def __init__(self, listener: socket.socket, settings: dict[str, Any]) -> None:
        self._listener, self._settings = listener, settings
        self._expected: int = settings["num_processes"]
        self._arrived: dict[int, dict[str, Any]] = {}  # what each process reported, by its number
        self._deadline = float("inf")  # of the first that waits no longer
        self._received: dict[socket.socket, bytes] = {}  # of each connection
        self._members: dict[socket.socket, int] = {}
        self._service: Any = None
        self._wanted = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._lifeline)

    def run(self) -> None:
        """Serve until nobody needs it, or a process does not arrive in time."""
        while self._wanted or self._members or self._has_clients():
            waits = None if self._wanted or self._members else _LOOK_SECONDS
            if self._service is None and self._members:
                waits = self._deadline - time.monotonic()
                if waits <= 0:
                    self._refuse(self._missing())
            for key, _ in self._selector.select(waits):
                key.data(key.fileobj)

    def _has_clients(self) -> bool:
        """Return whether anybody is connected to the service: one that came back is no member."""
        port = self._settings["address"].rpartition(":")[2]
        found = False
        for name in os.listdir("/dev/fd") if self._service is not None else ():
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    copy.getpeername()  # OSError: it is not connected
                    if str(copy.getsockname()[1]) == port:
                        break_when_silent(copy, self._settings["silence"])
                        found = True
        return found

    def _lifeline(self, fd: int) -> None:
        """Nobody writes to it: it is readable when the process that started this has ended."""
        if not os.read(fd, LONGEST):
            self._selector.unregister(fd)
            self._wanted = False

    def _strangers(self) -> list[socket.socket]:
        """Connections without a first line, the oldest first."""
        return [known for known in self._received if known not in self._members]

    def _accept(self, listener: socket.socket) -> None:
        strangers = self._strangers()
        if len(strangers) >= STRANGERS:  # a process of the job says at once who it is
            self._close(strangers[0])
        try:
            connection, _ = listener.accept()
            connection.setblocking(False)
            break_when_silent(connection, self._settings["silence"])
        except OSError:  # it has hung up already; or there are no descriptors left
            if strangers:
                return self._close(strangers[0])
            return time.sleep(0.01)
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, self._read)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._received:  # closed in the same turn
            return None
        try:
            chunk = connection.recv(LONGEST)
        except OSError:
            chunk = b""
        if not chunk:
            return self._close(connection)
        if connection in self._members:  # the stages that it reaches, and its farewell
            self._received[connection] = (self._received[connection] + chunk)[:_LONGEST_REPORT]
            return None
        line = self._received[connection] = self._received[connection] + chunk
        if b"\n" in line or len(line) > LONGEST:
            hello = _hello(line)
            if hello is None:
                return self._close(connection)
            self._members[connection] = hello["process_id"]
            self._received[connection] = b""
            if wrong := self._arrive(hello):
                return self._refuse({"error": wrong, "kind": "world"})
            if len(self._arrived) == self._expected:
                return self._begin()

    def _arrive(self, hello: dict[str, Any]) -> str:
        """Note an arrival; the text of what is wrong with it, or ""."""
        rank, who = hello["process_id"], hello["who"]
        if hello["num_processes"] != self._expected:
            return (
                f"process {rank} ({who}) expects {hello['num_processes']} processes, and the "
                f"coordinator {self._expected}: give all the same number."
            )
        if rank in self._arrived:
            return (
                f"two processes say that they are process {rank} of {self._expected}: "
                f"{self._arrived[rank]['who']} and {who} (host:pid)."
            )
        if not self._arrived:
            with contextlib.suppress(OSError):  # whoever started this reads no longer
                os.write(self._settings["replies"], b"arrived\n")
        self._arrived[rank] = hello
        self._deadline = min(self._deadline, time.monotonic() + hello["patience"])
        return ""

    def _missing(self) -> dict[str, Any]:
        """The reply that names the processes that did not come."""
        absent = [rank for rank in range(self._expected) if rank not in self._arrived]
        patience = min(hello["patience"] for hello in self._arrived.values())
        words = (
            f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} of {self._expected} "
            f"did not arrive within the {patience:.1f} s of the first that waits no longer."
        )
        return {"error": words, "kind": "deadline", "ranks": absent}

    def _close(self, connection: socket.socket) -> None:
        """Forget a stranger; report the end of a process."""
        self._selector.unregister(connection)
        connection.close()
        report = self._received.pop(connection)
        rank = self._members.pop(connection, None)
        if rank is None:
            return
        if self._service is None:
            who = self._arrived[rank]["who"]
            wrong = f"process {rank} ({who}) ended before all {self._expected} had arrived."
            self._refuse({"error": wrong, "kind": "lost", "ranks": [rank]})
        _send({"ended": rank} | _reported(report), self._members)

    def _begin(self) -> None:
        start_service = _loaded_service()  # before the port is free, for it takes a while
        self._selector.unregister(self._listener)
        self._listener.close()  # the service listens at the same port
        try:
            self._service = start_service(
                self._settings["address"], self._expected, **self._settings["service"]
            )
        except RuntimeError as error:
            return self._refuse({"error": f"the service did not start: {error}", "kind": "world"})
        for stranger in self._strangers():  # the job is complete without them
            self._close(stranger)
        return _send({"go": True}, self._members)

    def _refuse(self, reply: dict[str, Any]) -> NoReturn:
        """Say why the job cannot begin, for a moment also to those who come later, and end."""
        _send(reply, self._received)  # members, and those about to say that they are
        until, late = time.monotonic() + LINGERS, []
        while self._listener.fileno() >= 0 and (left := until - time.monotonic()) > 0:
            try:
                self._listener.settimeout(left)
                late.append(self._listener.accept()[0])
                late[-1].setblocking(False)
                _send(reply, late[-1:])  # and stays open: to close what is not read loses it
            except OSError:
                time.sleep(0.001)
        os._exit(1)


def _send(fields: dict[str, Any], connections: Iterable[socket.socket]) -> None:
    line = json.dumps(fields).encode() + b"\n"
    for connection in connections:
        with contextlib.suppress(OSError):  # it has ended, or does not read
            connection.sendall(line)


def _loaded_service() -> Callable[..., Any]:
    """`start_service` of `_compat`, loaded as a file: the package would import JAX."""
    path = Path(__file__).parents[1] / "_compat" / "service.py"
    return runpy.run_path(str(path))["start_service"]


def message(line: bytes | str) -> dict[str, Any]:
    """The fields of a line, whoever sent it; {}: it is not a JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the latter: of a thousand brackets
        return {}
    return found if isinstance(found, dict) else {}


def _hello(line: bytes) -> dict[str, Any] | None:
    """The fields of a process's first line; None: it comes from another program."""
    kinds = {"process_id": int, "num_processes": int, "patience": float, "who": str}
    fields = message(line)
    if any(type(fields.get(name)) is not kind for name, kind in kinds.items()):
        return None
    counts = 0 <= fields["process_id"] < fields["num_processes"] <= _MOST_PROCESSES
    named = len(fields["who"]) <= 300 and fields["who"].isprintable()
    if not (counts and named and 0 < fields["patience"] <= LONGEST_SECONDS):
        return None
    return {name: fields[name] for name in kinds}


def _reported(lines: bytes) -> dict[str, Any]:
    """Parse a process's report after its arrival; a dead one may have reported nothing."""
    fields: dict[str, Any] = {}
    for line in lines.splitlines():
        fields |= message(line)
    return {"stage": fields.get("stage")} | ({"done": fields["done"]} if "done" in fields else {})


def news_of(line: bytes) -> dict[str, Any]:
    """The report in a line of the coordinator's of a process that has ended; {}: there is none.

    That is `ended`, its number; `stage`, the last that it reached, or None; and, if it wrote a
    farewell, `done` (see `CoordinatorConnection`).
    """
    fields = message(line)
    stage, done = fields.get("stage"), fields.get("done")
    if type(fields.get("ended")) is not int:
        return {}
    news = {"ended": fields["ended"], "stage": stage if isinstance(stage, str) else None}
    if isinstance(done, dict) and all(type(count) is int for count in done.values()):
        news["done"] = done
    return news


def main() -> None:
    """Listen, print the address on standard output, and serve."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # a descriptor for each process
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = json.loads(sys.argv[1])
    host, _, port = settings["address"].rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    # The service takes the port over while processes are connected here. Linux would let gRPC run
    # two services on one port; listening without SO_REUSEPORT finds that out.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(1024)
        settings["address"] = f"{host}:{listener.getsockname()[1]}"
        reply = {"address": settings["address"]}
    except OSError as error:
        reply = {"error": error.strerror or str(error)}
    print(json.dumps(reply), flush=True)
    settings["replies"] = os.dup(1)
    os.dup2(2, 1)
    if "error" not in reply:
        _Coordinator(listener, settings).run()
    os._exit(0)  # the service's threads need no leave


if __name__ == "__main__":
    main()
