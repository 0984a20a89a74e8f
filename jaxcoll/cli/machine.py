"""Facts about the machine that a process is on, as JSON can carry them."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib

import jaxcoll
from jaxcoll._cluster.launch.local import KEEP_MEMORY
from jaxcoll._compat import configured

_SHARED = Path("/dev/shm")
_LOOPBACK_BYTES = 64 << 20


def facts() -> dict[str, Any]:
    """What this process is and has; it looks for devices."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror:
        address = None
    try:
        local = jax.local_devices()
    except AssertionError:  # what JAX says where a platform that it knows has no plugin
        asked = os.environ.get("JAX_PLATFORMS")
        raise RuntimeError(
            f"JAX found no device with JAX_PLATFORMS={asked}. Install what it needs, as "
            "`pip install 'jax[cuda13]'` for NVIDIA's, or unset the variable."
        ) from None
    return {
        "host": name,
        "address": address,
        "pid": os.getpid(),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "jaxcoll": jaxcoll.__version__,
        },
        "platform": local[0].platform,
        "kind": local[0].device_kind,
        "devices": len(local),
        "collectives": str(configured("cpu_collectives_implementation")),
        "malloc": {name: os.environ.get(name) for name in KEEP_MEMORY},
        "glibc": platform.libc_ver()[0] == "glibc",
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shared": shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def loopback_bandwidth() -> float:
    """Bytes a second from one thread of this process to another through the loopback interface.

    Raises:
      OSError: there is none.
    """
    with socket.socket() as server, contextlib.ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen()
        sender = stack.enter_context(socket.create_connection(server.getsockname(), 5))
        receiver = stack.enter_context(server.accept()[0])
        receiver.settimeout(30)
        block = bytes(1 << 20)

        def send() -> None:
            for _ in range(_LOOPBACK_BYTES // len(block)):
                sender.sendall(block)

        # A thread of its own: the kernel's buffer is smaller than what is sent.
        thread = threading.Thread(target=send, daemon=True)
        start = time.perf_counter()
        thread.start()
        left = _LOOPBACK_BYTES
        buffer = bytearray(1 << 20)
        while left:
            got = receiver.recv_into(buffer, min(left, len(buffer)))
            if not got:
                raise OSError("the loopback connection was closed")
            left -= got
        seconds = time.perf_counter() - start
        thread.join()
    return _LOOPBACK_BYTES / seconds
