"""Facts about a machine or a job, and findings: what to do about them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jaxlib

import jaxcoll
from jaxcoll._cluster.machine import cores
from jaxcoll._compat import configured
from jaxcoll._malloc import SETTINGS, keeps_freed_memory

FEW_FILES = 1024
LITTLE_SHARED = 1 << 30
SLOW_LOOPBACK = 2e8
LOPSIDED = 4.0
_SHARED = Path("/dev/shm")
_LOOPBACK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    # "ok"; "warn": it works, and could do better or surprise; "bad": it will not work
    level: Literal["ok", "warn", "bad"]
    what: str  # was looked at
    found: str  # in words
    fix: str = ""  # what to do; empty where nothing is wrong


def machine_findings(facts: Mapping[str, Any], bandwidth: float | None) -> list[Finding]:
    """About one process and the machine it is on; `bandwidth` None: there is no loopback."""
    devices = f"{facts['devices']} of {facts['platform']} ({facts['kind']}), {facts['cores']} cores"
    files, shared = facts["files"], facts["shared"]
    return [
        Finding("ok", "versions", ", ".join(f"{k} {v}" for k, v in facts["versions"].items())),
        Finding("ok", "devices", devices),
        _system(facts),
        _collectives(facts),
        _malloc(facts),
        _limit(
            files >= FEW_FILES or files < 0,
            ("open files", f"{files:,} allowed"),
            f"Each pair of processes takes connections: raise it by `ulimit -n {FEW_FILES * 8}`.",
        ),
        _limit(
            shared is None or shared >= LITTLE_SHARED,
            ("shared memory", "none" if shared is None else f"{shared / 1e9:.1f} GB free"),
            "NCCL between GPUs of one host takes shared memory: start a container with "
            "`--shm-size=8g`, or mount a larger /dev/shm.",
        ),
        _name(facts),
        _loopback(bandwidth),
    ]


def _system(facts: Mapping[str, Any]) -> Finding:
    if facts["system"] == "Linux":
        return Finding("ok", "system", "Linux")
    if facts["system"] == "Windows":
        fix = "Several processes need Linux or macOS, and WSL 2 is Linux."
        return Finding("warn", "system", "Windows: one process, simulated devices", fix)
    fix = "One process with simulated devices should work; several processes were not tried here."
    return Finding("warn", "system", f"{facts['system']}: jaxcoll is tested on Linux", fix)


def _collectives(facts: Mapping[str, Any]) -> Finding:
    if facts["platform"] != "cpu":
        return Finding("ok", "collectives", f"XLA's own for {facts['platform']}")
    if facts["collectives"] in ("gloo", "mpi"):
        return Finding("ok", "collectives", f"{facts['collectives']} between processes")
    return Finding(
        "bad", "collectives", f"{facts['collectives']} between processes of CPU devices",
        'Set `jax.config.update("jax_cpu_collectives_implementation", "gloo")`.',
    )  # fmt: skip


def _malloc(facts: Mapping[str, Any]) -> Finding:
    if facts["keeps_memory"]:
        return Finding("ok", "malloc", "keeps memory that is freed")
    if facts["platform"] != "cpu" or not facts["glibc"]:
        return Finding("ok", "malloc", "of no importance here")
    found = "gives large blocks back at once"
    if facts["processes"] == 1 and not facts["malloc"]:
        return Finding("ok", "malloc", f"{found}, until `jc.initialize()` meets others over Gloo")
    fix = "Exchanges over Gloo can take twice as long: "
    if facts["malloc"]:
        fix += f"`unset {' '.join(facts['malloc'])}`, so that `jc.initialize()` can change that."
    else:
        fix += "set JAX_PLATFORMS=cpu, by which `jc.initialize()` knows that it should change that."
    return Finding("warn", "malloc", found, fix)


def _name(facts: Mapping[str, Any]) -> Finding:
    what, found = "this host's name", f"{facts['host']} is {facts['address']}"
    if facts["address"] is None:
        return Finding(
            "warn", what, f"{facts['host']} has no address",
            "Add it to /etc/hosts, and use addresses that other hosts can reach as "
            "`coordinator_address`.",
        )  # fmt: skip
    if str(facts["address"]).startswith("127.") or facts["address"] == "::1":
        found += " (loopback: other hosts need another name or address)"
    return Finding("ok", what, found)


def _loopback(bandwidth: float | None) -> Finding:
    what = "loopback"
    if bandwidth is None:
        return Finding("bad", what, "no connection", "Bring the interface up: `ip link set lo up`.")
    return _limit(
        bandwidth >= SLOW_LOOPBACK,
        (what, f"{bandwidth / 1e9:.2f} GB/s from thread to thread"),
        "The machine is very busy, or limits its own network: measure again when it is idle.",
    )


def _limit(well: bool, what: tuple[str, str], fix: str) -> Finding:
    return Finding("ok" if well else "warn", *what, "" if well else fix)


def job_findings(
    processes: Sequence[Mapping[str, Any] | None], interface: Sequence[str]
) -> list[Finding]:
    """About the processes of a job, by what each rank reported (None: nothing) and its address."""
    silent = [rank for rank, facts in enumerate(processes) if facts is None]
    if silent:
        return [
            Finding(
                "bad", "processes", f"{_ranks(silent)} of {len(processes)} did not answer",
                "Look at what they printed; all processes must run the same command.",
            )
        ]  # fmt: skip
    known = [facts for facts in processes if facts is not None]
    hosts = {facts["host"] for facts in known}
    found = [
        Finding("ok", "processes", f"{len(known)} on {len(hosts)} host{'s' * (len(hosts) > 1)}")
    ]
    for name in known[0]["versions"]:
        fix = (
            f"Install the same {name} for all processes: programs that are compiled differently do "
            "not meet."
        )
        versions = [facts["versions"][name] for facts in known]
        found.append(_alike(f"version of {name}", versions, fix))
    for name, label, fix in (
        ("devices", "devices of each process", "Give every process as many devices: strategies and "
         "meshes by process and device need it."),
        ("kind", "kind of device",
         "Use one kind of device: the slowest decides, and compilers differ."),
        ("collectives", "collectives", "Choose one implementation for all processes."),
    ):  # fmt: skip
        found.append(_alike(label, [facts[name] for facts in known], fix))
    found.append(Finding("ok", "interface", ", ".join(dict.fromkeys(interface))))
    return found


def pair_findings(bandwidths: Mapping[tuple[int, int], float]) -> list[Finding]:
    """About bytes per second between pairs of ranks, in one direction."""
    if not bandwidths:
        return []
    low, high = min(bandwidths.values()), max(bandwidths.values())
    slow = [pair for pair, value in bandwidths.items() if value * LOPSIDED < high]
    links = f"{len(bandwidths)} link{'s' * (len(bandwidths) > 1)}"
    words = f"{low / 1e9:.2f} … {high / 1e9:.2f} GB/s over {links}"
    if not slow:
        return [Finding("ok", "between ranks", words)]
    named = ", ".join(f"{a} → {b}" for a, b in slow[:4])
    return [
        Finding(
            "warn", "between ranks", f"{words}; slow: {named}",
            "The ring waits for its slowest link: look at these hosts' interface and load.",
        )
    ]  # fmt: skip


def _alike(what: str, values: Sequence[Any], fix: str) -> Finding:
    """The same on every rank, or who has what."""
    if len(set(values)) == 1:
        return Finding("ok", what, f"{values[0]} on all")
    groups = {v: [rank for rank, value in enumerate(values) if value == v] for v in values}
    words = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())
    return Finding("bad", what, words, fix)


def _ranks(ranks: Sequence[int]) -> str:
    return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def machine_facts() -> dict[str, Any]:
    """What this process runs on, as JSON can carry it; JAX looks for its devices."""
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows
        files = -1
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
        "system": platform.system(),
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
        "processes": jax.process_count(),
        "keeps_memory": keeps_freed_memory(),
        "malloc": [name for name in SETTINGS if name in os.environ],
        "glibc": platform.libc_ver()[0] == "glibc",
        "files": files,
        "shared": shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
        "cores": cores(),
    }


def loopback_bandwidth() -> float:
    """Bytes per second from a thread of this process to another through the loopback interface."""
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
