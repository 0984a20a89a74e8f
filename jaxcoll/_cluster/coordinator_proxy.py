"""A proxy between JAX's client and the coordinator, so that its death does not end this process.

JAX ends a process with a signal, without asking Python, when its connection to the coordinator
breaks. So the client connects to a Unix socket of its own process, and all bytes are copied to the
coordinator and back. When the coordinator dies while somebody here listens for that, the socket
stays open, silent: JAX notices nothing until its heartbeat timeout, and until then there is time to
save and to say why. The same happens when the proxy finds the coordinator cut off, by silence.
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

from jaxcoll._cluster.coordinator import break_when_silent
from jaxcoll._cluster.socket_folder import make_socket_folder
from jaxcoll._compat.coordination import leave_coordinator, store
from jaxcoll._threads import at_exit, not_at_exit

_CHUNK = 1 << 16
_LEAST = 2.0  # seconds for which a healthy network may be silent
_proxy: CoordinatorProxy | None = None


class CoordinatorProxy:
    """A way to the coordinator at `upstream` whose loss is reported to Python first.

    After `heartbeat` seconds of silence JAX takes the coordinator for dead, and so does the proxy
    unless `hurry` asks for less. When JAX's client has ended, and the proxy with it, another thread
    calls `when_parted`.
    """

    def __init__(
        self, upstream: str, heartbeat: float, when_parted: Callable[[], None] = lambda: None
    ) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host.strip("[]"), int(port))
        self._heartbeat = self._silence = heartbeat
        self._pairs: list[tuple[socket.socket, socket.socket]] = []  # towards JAX, and upstream
        self._lost = threading.Event()
        self.callbacks: list[Callable[[], None]] = []  # for when the coordinator has died
        self.is_left = False  # this process has given it up, and JAX must not notice its end
        self._when_parted = when_parted
        self._listener = socket.socket(socket.AF_UNIX)
        self._folder = ""
        if sys.platform == "linux":  # a name without a file, of which nothing can be left
            name = f"jaxcoll-{os.getpid()}-{os.urandom(8).hex()}"
            self._listener.bind(f"\0{name}")
            self.address = f"unix-abstract:{name}"
        else:
            self._folder = make_socket_folder("coordinator")
            self._listener.bind(f"{self._folder}/coordinator")
            self.address = f"unix:{self._folder}/coordinator"
            at_exit(self._remove)
        self._listener.listen()
        self._start(self._accept)

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Let nobody connect any more."""
        with contextlib.suppress(OSError):  # on Linux this, and not `close`, ends `accept`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._folder:
            self._remove()
            not_at_exit(self._remove)

    def hurry(self, seconds: float) -> None:
        """Notice silence sooner, from now on, and in any case before JAX does."""
        self._silence = max(_LEAST, min(seconds, self._heartbeat / 2))
        for _, far in self._pairs:
            with contextlib.suppress(OSError):  # one that is closed
                break_when_silent(far, self._silence)

    def cut(self) -> None:
        """Break the connections of a client that JAX has shut down, unless it was given up.

        JAX does not cancel a read that begins during the shutdown, and destroys the client while
        it holds Python's lock. There it waits for the reply, which nobody sends; and if somebody
        did, it would come through this proxy's threads, which need the lock.
        """
        for near, _ in () if self.is_left else self._pairs:
            with contextlib.suppress(OSError):  # one that is closed
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
                far = socket.create_connection(self._upstream, 5.0)
            except OSError:
                if self.is_left or (self._lost.is_set() and self.callbacks):
                    near.detach()  # stays open and silent, as in `_copy_in`
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
        if _copy(near, far):  # else the coordinator has gone: `_copy_in` alone deals with that
            near.close()
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)
        if near.fileno() < 0 and not self.is_left and (store() is None or _proxy is not self):
            self.close()
            self._when_parted()

    def _copy_in(self, far: socket.socket, near: socket.socket) -> None:
        _copy(far, near)
        far.close()
        if near.fileno() < 0:  # this process has hung up
            return
        self._lost.set()
        if not (self.callbacks or self.is_left):
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            return
        near.detach()  # open and silent for as long as the process lives
        for callback in list(self.callbacks):
            callback()


def _is_own(near: socket.socket) -> bool:
    """True if this process has connected, and not another one of this host."""
    if sys.platform != "linux":
        return True
    found = near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[0] == os.getpid()


def _copy(source: socket.socket, target: socket.socket) -> bool:
    """Copy until one of both is closed; whether it was the source."""
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


def through_proxy(
    address: str, heartbeat: float, when_parted: Callable[[], None]
) -> CoordinatorProxy:
    """The proxy of this process, to the coordinator's `address`."""
    global _proxy
    _proxy = CoordinatorProxy(address, heartbeat, when_parted)
    return _proxy


def current_proxy() -> CoordinatorProxy | None:
    """The proxy of the job that this process has entered last; None: it never had one."""
    return _proxy


def give_up_coordinator() -> None:
    """Forget a coordinator that died or does not answer, so that this process can end normally."""
    if _proxy is not None:
        _proxy.is_left = True
    leave_coordinator()


@contextlib.contextmanager
def when_coordinator_is_lost(callback: Callable[[], None], seconds: float) -> Iterator[None]:
    """In here, call this from another thread if the coordinator dies, or is silent for so long."""
    if _proxy is None:
        yield
        return
    _proxy.callbacks.append(callback)
    _proxy.hurry(seconds)
    try:
        yield
    finally:
        _proxy.callbacks.remove(callback)
