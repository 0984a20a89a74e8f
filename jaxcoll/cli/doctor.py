"""`jaxcoll doctor`: check this machine, or the job that this process belongs to."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import jaxcoll as jc
from jaxcoll._compat import coordination
from jaxcoll._compat.settings import read_option
from jaxcoll._job.exchange import LateError, exchange
from jaxcoll._job.malloc import SETTINGS, keeps_freed_memory
from jaxcoll._show.table import Table
from jaxcoll.cli.flags import write_json

EPILOG = """\
Run alone, it checks this machine. Run in every process of a job (`jaxcoll launch -n 4 -m jaxcoll
doctor`, `srun jaxcoll doctor`), it also compares the processes, through the coordination service
instead of a collective that may hang; process 0 prints. The exit status is 0 if all is well, 1 if
something could be better, 2 if something will not work.
"""

_PLACE = (
    ("--coordinator-address", str, "where the job's processes meet, if no launcher says it"),
    ("--num-processes", int, "how many they are"),
    ("--process-id", int, "which of them this is"),
)

FEW_FILES, LITTLE_SHARED = 1024, 1 << 30
"""Warn below this many open files, and this many bytes of free shared memory."""


class Finding(NamedTuple):
    """The result of one check; `fix` says what to do if `level` is "warn" or "bad"."""

    level: str
    what: str
    found: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    text = "write JSON lines to FILE instead of a table; - or no FILE for standard output"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
    for name, kind, text in _PLACE:
        parser.add_argument(name, type=kind, help=text)
    text = "seconds to wait for the other processes (default: 60)"
    parser.add_argument("--timeout-seconds", type=float, default=60, metavar="S", help=text)


def run(args: argparse.Namespace) -> int:
    """Check, compare, print what to fix, and return the exit status that `EPILOG` describes."""
    limit = args.timeout_seconds
    place = args.coordinator_address, args.num_processes, args.process_id
    jc.initialize(*place, initialization_timeout_seconds=limit)
    store = coordination.store()
    if store is None or store.processes == 1:
        findings = list(machine_findings(machine_facts()))
    else:
        # Check that all processes answer first: JAX would wait long for dead ones to show devices.
        ranks = range(store.processes)
        try:
            exchange(store, "jaxcoll/doctor/here", {}, ranks, limit)
            facts = machine_facts()
            processes = [*exchange(store, "jaxcoll/doctor/facts", facts, ranks, limit).values()]
        except LateError as error:
            raise ValueError(
                f"{error} Read its output; all processes must run the same command."
            ) from None
        findings = [*machine_findings(facts), *job_findings(processes)]
        if store.process:
            return 0
    if args.json:
        write_json(args.json, [finding._asdict() for finding in findings], as_lines=True)
    else:
        print(Table(("", "check", "found"), "<<<", [finding[:3] for finding in findings]).text())
        for finding in findings:
            if finding.fix:
                print(f"{finding.level}: {finding.what}: {finding.fix}")
    levels = {finding.level for finding in findings}
    return 2 if "bad" in levels else 1 if "warn" in levels else 0


def machine_facts() -> dict[str, Any]:
    """Collect facts about this machine and this process's devices, as JSON values."""
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows
        files = -1
    devices = jax.local_devices()
    return {
        "versions": {"python": platform.python_version(), "jax": jax.__version__,
                     "jaxlib": jax.lib.__version__, "jaxcoll": jc.__version__},
        "host": socket.gethostname(), "processes": jax.process_count(), "devices": len(devices),
        "platform": devices[0].platform, "kind": devices[0].device_kind,
        "collectives": str(read_option("cpu_collectives_implementation")),
        "keeps_memory": keeps_freed_memory(), "files": files, "cores": [_cores(), os.cpu_count()],
        "malloc": [name for name in SETTINGS if name in os.environ],
        "shared": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
    }  # fmt: skip


def _cores() -> int | None:
    is_linux = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if is_linux else os.cpu_count()


def machine_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on one process and its machine."""
    yield Finding("ok", "versions", ", ".join(map(" ".join, facts["versions"].items())))
    devices = f"{facts['devices']} × {facts['platform']} ({facts['kind']}) on {facts['host']}"
    yield Finding("ok", "devices", devices)
    is_cpu, found = facts["platform"] == "cpu", facts["collectives"]
    is_wrong = is_cpu and found not in ("gloo", "mpi")
    fix = 'Set `jax.config.update("jax_cpu_collectives_implementation", "gloo")`.'
    yield _finding(is_wrong, "bad", "collectives", found if is_cpu else "XLA's own", fix)
    if is_cpu and found == "mpi":
        fix = "MPI serves only the thread that made the devices. " + fix.replace("Set", "Or set")
        yield Finding("warn", "deadlines", "not over MPI: steps run in the calling thread", fix)
    (own, all_cores), several = facts["cores"], facts["processes"] > 1
    fix = "Computing and communicating need more: `mpirun --bind-to none`, `srun --cpus-per-task=8`"
    # A machine with one core is not the launcher's mistake.
    is_bound = several and own == 1 < (all_cores or 1)
    yield _finding(is_bound, "warn", "cores", f"may use {own} of {all_cores}", f"{fix}.")
    is_slow = is_cpu and facts["processes"] > 1 and not facts["keeps_memory"]
    fix = "Collectives over Gloo can take twice as long: "
    fix += f"`unset {' '.join(facts['malloc'])}`." if facts["malloc"] else "set JAX_PLATFORMS=cpu."
    found = f"{'keeps' if facts['keeps_memory'] else 'returns'} freed memory"
    yield _finding(is_slow, "warn", "malloc", found, fix)
    fix = f"Each pair of processes needs connections: `ulimit -n {FEW_FILES * 8}`."
    is_few = 0 <= facts["files"] < FEW_FILES
    yield _finding(is_few, "warn", "open files", f"{facts['files']:,} allowed", fix)
    if (free := facts["shared"]) is not None:
        fix = "NCCL needs it between the GPUs of a host: start containers with `--shm-size=8g`."
        found = f"{free / 1e9:.1f} GB free"
        yield _finding(free < LITTLE_SHARED, "warn", "shared memory", found, fix)


def _finding(is_problem: bool, level: str, what: str, found: str, fix: str) -> Finding:
    return Finding(level, what, found, fix) if is_problem else Finding("ok", what, found)


def job_findings(processes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield findings on properties that should be the same in all processes of a job."""
    hosts = len({facts["host"] for facts in processes})
    yield Finding("ok", "processes", f"{len(processes)} on {hosts} host{'s' * (hosts > 1)}")
    for name, fix in (
        ("versions", "Install the same versions: different programs cannot exchange data."),
        ("devices", "Give every process the same number: strategies and meshes need it."),
        ("kind", "Use one kind of device: the slowest sets the pace, and compilers differ."),
        ("collectives", "Choose one implementation for all processes."),
    ):
        values = [json.dumps(facts[name]).replace('"', "") for facts in processes]
        ranks = {v: [str(r) for r, value in enumerate(values) if value == v] for v in values}
        found = "; ".join(f"{value} on process {', '.join(of)}" for value, of in ranks.items())
        found = found if len(ranks) > 1 else f"{values[0]} on all"
        yield _finding(len(ranks) > 1, "bad", f"{name} of each process", found, fix)
