"""The coordinator: a program of its own, so that any process of the job may die.

    python -P coordinator_process.py '{"address": "127.0.0.1:0", "num_processes": 4, ...}'

It waits for all processes on the port of the coordination service, then starts the service there.
It ends when nobody needs it any more: its standard input is closed, and every process has left.
SIGTERM and SIGINT, which a scheduler sends to a whole job, do not end it: processes may catch them
to save together.
If a process does not arrive, JAX alone kills the others with a signal; here they get an error.
Messages are lines of JSON.

It runs as a file: importing the package would import JAX, which a coordinator does not need.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

LONGEST = 4096
"""Most bytes in a process's first line; a longer line comes from another program."""

LONGEST_SECONDS = 2_000_000.0
"""Longest wait, 23 days: the system counts milliseconds in 31 bits."""

_LONGEST_REPORT = 1 << 16  # bytes that a process may write after its first line
_MOST_PROCESSES = 1 << 20

LINGERS = 2.0
"""Seconds for which the coordinator of a job that cannot begin tells late processes why."""

STRANGERS = 256
"""Most open connections that have sent no first line; another one closes the oldest of them."""

_NAMELESS = "a job without a name (JAXCOLL_JOB)"

_LOOK_SECONDS = 0.1  # between two checks for clients of the service, once all members have left

_LONGEST_IDLE = 32767  # seconds: the most that Linux accepts for TCP_KEEPIDLE


def break_when_silent(connection: socket.socket, seconds: float) -> None:
    """Make a TCP connection fail after so many seconds of silence, if its other end is cut off.

    It stays while the operating system at the other end replies, whatever the process there does.
    Outside Linux the operating system chooses the time.
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


class _Coordinator:
    def __init__(self, listener: socket.socket, settings: dict[str, Any]) -> None:
        self._listener, self._settings = listener, settings
        self._expected: int = settings["num_processes"]
        self._arrived: dict[int, dict[str, Any]] = {}  # what each process reported, by its number
        self._refused = ""  # the process of another job that came last
        self._deadline = float("inf")  # the earliest among the processes that have arrived
        self._received: dict[socket.socket, bytes] = {}  # from each connection
        self._members: dict[socket.socket, int] = {}  # process numbers
        self._service: Any = None
        self._starter_lives = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._lifeline)

    def run(self) -> None:
        """Serve until nobody needs the coordinator, or a process does not arrive in time."""
        while self._starter_lives or self._members or self._has_clients():
            timeout = None if self._starter_lives or self._members else _LOOK_SECONDS
            if self._service is None and self._members:
                timeout = self._deadline - time.monotonic()
                if timeout <= 0:
                    self._refuse(self._missing())
            for key, _ in self._selector.select(timeout):
                key.data(key.fileobj)

    def _has_clients(self) -> bool:
        """Tell whether the service has a client. A restarted process is one, but no member."""
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
        """Note that the process that started this one has ended: nobody else closes the pipe."""
        if not os.read(fd, LONGEST):
            self._selector.unregister(fd)
            self._starter_lives = False
            self._list_members()

    def _list_members(self) -> None:
        """Tell the process that started this one, if it waits for the end, who is still there."""
        if not self._starter_lives:
            _reply(self._settings["replies"], {"members": sorted(self._members.values())})

    def _strangers(self) -> list[socket.socket]:
        """List the connections that have not sent a first line, oldest first."""
        return [connection for connection in self._received if connection not in self._members]

    def _accept(self, listener: socket.socket) -> None:
        strangers = self._strangers()
        if len(strangers) >= STRANGERS:  # a process of the job sends its first line at once
            self._close(strangers[0])
        try:
            connection, _ = listener.accept()
            connection.setblocking(False)
            break_when_silent(connection, self._settings["silence"])
        except OSError:  # it has hung up already, or no file descriptors are left
            if strangers:
                return self._close(strangers[0])
            return time.sleep(0.01)
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, self._read)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._received:  # it was closed after this `select`
            return None
        try:
            chunk = connection.recv(LONGEST)
        except OSError:
            chunk = b""
        if not chunk:
            return self._close(connection)
        if connection in self._members:  # the stages that it reached, and what it did
            self._received[connection] = (self._received[connection] + chunk)[:_LONGEST_REPORT]
            return None
        line = self._received[connection] = self._received[connection] + chunk
        if b"\n" in line or len(line) > LONGEST:
            hello = _hello(line)
            if hello is None:
                return self._close(connection)
            if wrong := self._other_job(hello):
                _send({"error": wrong, "kind": "world"}, (connection,))
                return self._close(connection)
            self._members[connection] = hello["process_id"]
            self._received[connection] = b""
            if wrong := self._arrive(hello):
                return self._refuse({"error": wrong, "kind": "world"})
            if len(self._arrived) == self._expected:
                return self._begin()

    def _other_job(self, hello: dict[str, Any]) -> str:
        """Make an error message if a process comes from another job at this address, else ""."""
        job = self._settings["job"] = self._settings["job"] or hello["job"] or _NAMELESS
        other = hello["job"] or _NAMELESS
        if job == other:
            return ""
        self._refused = f"process {hello['process_id']} of {other} ({hello['who']})"
        return (
            f"the coordinator at this address serves {job}, and {self._refused} is not part of it. "
            "Give each job its own address (JAX_COORDINATOR_ADDRESS)."
        )

    def _arrive(self, hello: dict[str, Any]) -> str:
        """Record an arrival. Return an error message if something is wrong with it, else ""."""
        rank, who = hello["process_id"], hello["who"]
        if hello["num_processes"] != self._expected:
            return (
                f"process {rank} ({who}) expects {hello['num_processes']} processes, but the "
                f"coordinator expects {self._expected}: give every process the same number."
            )
        if rank in self._arrived:
            return (
                f"two processes claim to be process {rank} of {self._expected}: "
                f"{self._arrived[rank]['who']} and {who} (host:pid)."
            )
        if not self._arrived:
            _reply(self._settings["replies"], {"arrived": rank})
        self._arrived[rank] = hello
        # Nobody can start without the least patient process, so all learn when it gives up.
        self._deadline = min(self._deadline, time.monotonic() + hello["patience"])
        return ""

    def _missing(self) -> dict[str, Any]:
        absent = [rank for rank in range(self._expected) if rank not in self._arrived]
        patience = min(hello["patience"] for hello in self._arrived.values())
        text = (
            f"{name_processes(absent)} of {self._expected} did not arrive within {patience:.1f} s, "
            "when the first timeout expired."
        )
        if self._refused:
            text += f" This is {self._settings['job']}; {self._refused} came and was refused."
        return {"error": text, "kind": "deadline", "ranks": absent}

    def _close(self, connection: socket.socket) -> None:
        """Close a connection. If it was a member's, tell the others that this process has ended."""
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
        _send({"ended": rank} | _parse_report(report), self._members)
        self._list_members()

    def _begin(self) -> None:
        start_service = _load_service()  # takes a while, so do it before the port is free
        self._selector.unregister(self._listener)
        self._listener.close()  # the service listens on the same port
        try:
            self._service = start_service(
                self._settings["address"], self._expected, **self._settings["service"]
            )
        except RuntimeError as error:
            return self._refuse({"error": f"the service did not start: {error}", "kind": "world"})
        for stranger in self._strangers():  # the job is already complete
            self._close(stranger)
        _send({"go": True}, self._members)

    def _refuse(self, reply: dict[str, Any]) -> NoReturn:
        """Tell all processes, also those that connect a little later, the error, and exit."""
        # To members, and to those that have not sent a line yet. Process 0 is last, because it may
        # have started this process, and then kills it.
        _send(reply, sorted(self._received, key=lambda each: self._members.get(each) == 0))
        until, late = time.monotonic() + LINGERS, []
        while self._listener.fileno() >= 0 and (left := until - time.monotonic()) > 0:
            try:
                self._listener.settimeout(left)
                late.append(self._listener.accept()[0])
                late[-1].setblocking(False)
                _send(reply, late[-1:])  # closing it before the reply is read would lose the reply
            except OSError:
                time.sleep(0.001)
        os._exit(1)


def _send(fields: dict[str, Any], connections: Iterable[socket.socket]) -> None:
    line = json.dumps(fields).encode() + b"\n"
    for connection in connections:
        with contextlib.suppress(OSError):  # the process has ended, or does not read
            connection.sendall(line)


def _reply(fd: int, fields: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the process that started this one has ended, or is stopped
        os.write(fd, json.dumps(fields).encode() + b"\n")


def _load_service() -> Callable[..., Any]:
    """Load `start_service` of `_compat` from its file: importing the package would import JAX."""
    path = Path(__file__).parents[1] / "_compat" / "service.py"
    return runpy.run_path(str(path))["start_service"]


def name_processes(ranks: Sequence[int]) -> str:
    return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def message(line: bytes | str) -> dict[str, Any]:
    """Parse a line, which anybody may have sent. Return {} if it is not a JSON object."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # the latter for a thousand nested brackets
        return {}
    return fields if isinstance(fields, dict) else {}


def _hello(line: bytes) -> dict[str, Any] | None:
    """Parse a process's first line. Return None if the line comes from another program."""
    kinds = {"process_id": int, "num_processes": int, "patience": float, "who": str, "job": str}
    fields = message(line)
    if any(type(fields.get(name)) is not kind for name, kind in kinds.items()):
        return None
    # Anything may connect: these numbers become sizes and waits, and the names are printed.
    counts = 0 <= fields["process_id"] < fields["num_processes"] <= _MOST_PROCESSES
    named = all(len(name) <= 300 and name.isprintable() for name in (fields["who"], fields["job"]))
    if not (counts and named and 0 < fields["patience"] <= LONGEST_SECONDS):
        return None
    return {name: fields[name] for name in kinds}


def _parse_report(lines: bytes) -> dict[str, Any]:
    """Parse the lines that a process sent after its first; one that died may have sent none."""
    fields: dict[str, Any] = {}
    for line in lines.splitlines():
        fields |= message(line)
    return {"stage": fields.get("stage")} | ({"done": fields["done"]} if "done" in fields else {})


def parse_news(line: bytes) -> dict[str, Any]:
    """Parse the coordinator's line about a process that has ended. Return {} for any other line.

    The result has `ended`, the process's number; `stage`, the last stage that it reached, or None;
    and `done`, what it had done (see `CoordinatorConnection`), unless it died.
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
    with contextlib.suppress(ImportError, OSError, ValueError):  # it needs one per process
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    host, _, port = settings["address"].rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    # The service takes over the port while processes are connected here. Linux would let gRPC run
    # two services on one port; listening without SO_REUSEPORT makes the second one fail.
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
    os.set_blocking(settings["replies"], False)
    os.dup2(2, 1)
    if "error" not in reply:
        _Coordinator(listener, settings).run()
    os._exit(0)  # the service's threads need no shutdown


if __name__ == "__main__":
    main()
