"""A proxy between JAX's client and the coordinator: this process survives the coordinator's death.

JAX kills a process with a signal, without calling Python, when its connection to the coordinator
breaks. So the client connects to a Unix socket in its own process, and this proxy copies all bytes
to the coordinator and back. When the coordinator dies, or is silent for so long that it must be
cut off, and a callback is registered for that, the proxy keeps the socket open and silent. JAX
notices nothing until its heartbeat timeout, which leaves time to save and to report the error.

The callback that JAX's client takes for this (`missed_heartbeat_callback`) ends the process too: it
cannot convert its argument (std::bad_cast, JAX 0.10.2 and 0.12.0.1).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator

from jaxcoll._compat.coordination import leave_coordinator
from jaxcoll._job.coordinator_process import break_when_silent
from jaxcoll._job.socket_folder import make_socket_folder
from jaxcoll._job.threads import call_at_exit, cancel_at_exit
from jaxcoll._job.timing import LEAST_CONNECT_SECONDS, LEAST_SILENCE_SECONDS

_CHUNK = 1 << 16
_proxy: CoordinatorProxy | None = None


class CoordinatorProxy:
    """A connection to the coordinator at `upstream` that reports its loss to Python first.

    JAX takes the coordinator for dead after `heartbeat` seconds of silence, and so does the proxy
    unless `hurry` sets a shorter time.
    """

    def __init__(self, upstream: str, heartbeat: float) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host.strip("[]"), int(port))
        self._heartbeat = self._silence = heartbeat
        self._pairs: list[tuple[socket.socket, socket.socket]] = []  # to JAX, and upstream
        self._lost = threading.Event()
        self.callbacks: list[Callable[[], None]] = []  # called when the coordinator is lost
        self.is_given_up = False  # this process needs it no longer, and JAX must not see it end
        self._listener = socket.socket(socket.AF_UNIX)
        self._folder = ""
        if sys.platform == "linux":  # an abstract name: it has no file to clean up
            name = f"jaxcoll-{os.getpid()}-{os.urandom(8).hex()}"
            self._listener.bind(f"\0{name}")
            self.address = f"unix-abstract:{name}"
        else:
            self._folder = make_socket_folder("coordinator")
            self._listener.bind(f"{self._folder}/coordinator")
            self.address = f"unix:{self._folder}/coordinator"
            call_at_exit(self._remove)
        self._listener.listen()
        self._start(self._accept)

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):  # on Linux `accept` returns after this, not on `close`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._folder:
            self._remove()
            cancel_at_exit(self._remove)

    def hurry(self, seconds: float) -> None:
        """Report silence after so many seconds from now on, and always before JAX does."""
        self._silence = max(LEAST_SILENCE_SECONDS, min(seconds, self._heartbeat / 2))
        for _, far in self._pairs:
            with contextlib.suppress(OSError):  # it is closed already
                break_when_silent(far, self._silence)

    def end(self) -> None:
        """End with a client that JAX has shut down, unless it was given up.

        References may keep the client and its connections, which others take for a member's. And
        without this, JAX may deadlock: it does not cancel a read that begins during the shutdown,
        and waits for the reply while it destroys the client and holds the interpreter lock. Nobody
        sends that reply, and if somebody did, this proxy's threads would need the lock to pass it.
        """
        if self.is_given_up:
            return
        self.close()
        for near, _ in self._pairs:
            with contextlib.suppress(OSError):  # it is closed already
                near.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        threading.Thread(target=target, args=args, name="jaxcoll-proxy", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not _is_own(near):
                near.close()
                continue
            try:
                far = socket.create_connection(self._upstream, LEAST_CONNECT_SECONDS)
            except OSError:
                if self.is_given_up or (self._lost.is_set() and self.callbacks):
                    near.detach()  # keep it open and silent, as in `_copy_in`
                else:
                    near.close()
                continue
            far.settimeout(None)
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            break_when_silent(far, self._silence)
            self._pairs = [pair for pair in self._pairs if pair[1].fileno() >= 0] + [(near, far)]
            self._start(self._copy_out, near, far)
            self._start(self._copy_in, far, near)

    def _copy_out(self, near: socket.socket, far: socket.socket) -> None:
        if _copy(near, far):  # otherwise the coordinator has gone, which `_copy_in` handles
            near.close()
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def _copy_in(self, far: socket.socket, near: socket.socket) -> None:
        _copy(far, near)
        far.close()
        if near.fileno() < 0:  # JAX's client has hung up
            return
        self._lost.set()
        if not (self.callbacks or self.is_given_up):
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            return
        near.detach()  # keep it open and silent until the process ends
        for callback in list(self.callbacks):
            callback()


def _is_own(near: socket.socket) -> bool:
    """Tell this process's connection from those of others on this host."""
    if sys.platform != "linux":
        return True
    peer = near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", peer)[0] == os.getpid()


def _copy(source: socket.socket, target: socket.socket) -> bool:
    """Copy until either socket is closed. Return whether it was the source."""
    while True:
        try:
            chunk = source.recv(_CHUNK)
        except OSError:
            return True
        if not chunk:
            return True
        try:
            target.sendall(chunk)
        except OSError:
            return False


def start_proxy(address: str, heartbeat: float) -> CoordinatorProxy:
    global _proxy
    _proxy = CoordinatorProxy(address, heartbeat)
    return _proxy


def current_proxy() -> CoordinatorProxy | None:
    """Get the proxy of the job that this process entered last; None if there was none."""
    return _proxy


def give_up_coordinator() -> None:
    """Forget a coordinator that died or does not answer, so that this process can end normally."""
    if _proxy is not None:
        _proxy.is_given_up = True
    leave_coordinator()


@contextlib.contextmanager
def when_coordinator_is_lost(callback: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call back, from another thread, if the coordinator dies or is silent for so many seconds."""
    if _proxy is None:
        yield
        return
    _proxy.callbacks.append(callback)
    _proxy.hurry(seconds)
    try:
        yield
    finally:
        _proxy.callbacks.remove(callback)
