"""`jaxcoll doctor`: check this machine, or the job that this process is one of."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import jaxcoll as jc
from jaxcoll._compat import coordination
from jaxcoll._compat.settings import configured
from jaxcoll._malloc import SETTINGS, keeps_freed_memory
from jaxcoll._show.table import Table
from jaxcoll.cli.flags import write_json

EPILOG = """\
Alone it looks at this machine. In every process of a job (`jaxcoll launch -n 4 -m jaxcoll doctor`,
`srun jaxcoll doctor`) it also compares the processes, over the coordination service and not over a
collective that may hang; process 0 prints. The exit status is 0, 1 where something could be better,
2 where something will not work.
"""

FEW_FILES, LITTLE_SHARED = 1024, 1 << 30


class Finding(NamedTuple):
    """One thing that was looked at; `fix` says what to do where `level` is "warn" or "bad"."""

    level: str
    what: str
    found: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    words = "write lines of JSON to FILE, in the place of a table; - or nothing for here"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=words)
    words = "seconds for the others to answer (default: 60)"
    parser.add_argument("--timeout-seconds", type=float, default=60, metavar="S", help=words)


def run(args: argparse.Namespace) -> int:
    """Look, compare, and say what to do; the exit status, as `EPILOG` has it."""
    limit = args.timeout_seconds
    jc.initialize(initialization_timeout_seconds=limit)
    store = coordination.store()
    if store is None or store.processes == 1:
        findings = list(machine_findings(machine_facts()))
    else:
        # Before JAX looks for devices together, and waits long for the dead.
        _reports(store, "here", {}, limit)
        processes = _reports(store, "facts", facts := machine_facts(), limit)
        findings = [*machine_findings(facts), *job_findings(processes)]
        if store.process:
            return 0
    if args.json:
        write_json(args.json, [finding._asdict() for finding in findings], as_lines=True)
    else:
        print(Table(("", "what", "found"), "<<<", [finding[:3] for finding in findings]).text())
        for finding in findings:
            if finding.fix:
                print(f"{finding.level}: {finding.what}: {finding.fix}")
    levels = {finding.level for finding in findings}
    return 2 if "bad" in levels else 1 if "warn" in levels else 0


def machine_facts() -> dict[str, Any]:
    """The machine and the devices of this process, as JSON can carry them."""
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
        "collectives": str(configured("cpu_collectives_implementation")),
        "keeps_memory": keeps_freed_memory(), "files": files,
        "malloc": [name for name in SETTINGS if name in os.environ],
        "shared": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
    }  # fmt: skip


def machine_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Report on one process and the machine it is on."""
    yield Finding("ok", "versions", ", ".join(map(" ".join, facts["versions"].items())))
    devices = f"{facts['devices']} of {facts['platform']} ({facts['kind']}) on {facts['host']}"
    yield Finding("ok", "devices", devices)
    is_cpu, found = facts["platform"] == "cpu", facts["collectives"]
    ill = is_cpu and found not in ("gloo", "mpi")
    fix = 'Set `jax.config.update("jax_cpu_collectives_implementation", "gloo")`.'
    yield _finding(ill, "bad", "collectives", found if is_cpu else "XLA's own", fix)
    ill = is_cpu and facts["processes"] > 1 and not facts["keeps_memory"]
    fix = "Exchanges over Gloo can take twice as long: "
    fix += f"`unset {' '.join(facts['malloc'])}`." if facts["malloc"] else "set JAX_PLATFORMS=cpu."
    found = f"{'keeps' if facts['keeps_memory'] else 'gives back'} memory that is freed"
    yield _finding(ill, "warn", "malloc", found, fix)
    fix = f"Each pair of processes takes connections: `ulimit -n {FEW_FILES * 8}`."
    is_few = 0 <= facts["files"] < FEW_FILES
    yield _finding(is_few, "warn", "open files", f"{facts['files']:,} allowed", fix)
    if (free := facts["shared"]) is not None:
        fix = "NCCL between GPUs of one host takes it: start containers with `--shm-size=8g`."
        found = f"{free / 1e9:.1f} GB free"
        yield _finding(free < LITTLE_SHARED, "warn", "shared memory", found, fix)


def _finding(ill: bool, level: str, what: str, found: str, fix: str) -> Finding:
    return Finding(level, what, found, fix) if ill else Finding("ok", what, found)


def job_findings(processes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Report on what the processes of a job have in common, and should."""
    hosts = len({facts["host"] for facts in processes})
    yield Finding("ok", "processes", f"{len(processes)} on {hosts} host{'s' * (hosts > 1)}")
    for name, fix in (
        ("versions", "Install the same: programs that are compiled differently do not meet."),
        ("devices", "Give every process as many devices: strategies and meshes need it."),
        ("kind", "Use one kind of device: the slowest decides, and compilers differ."),
        ("collectives", "Choose one implementation for all processes."),
    ):
        values = [json.dumps(facts[name]).replace('"', "") for facts in processes]
        ranks = {v: [str(r) for r, value in enumerate(values) if value == v] for v in values}
        found = "; ".join(f"{value} on process {', '.join(of)}" for value, of in ranks.items())
        found = found if len(ranks) > 1 else f"{values[0]} on all"
        yield _finding(len(ranks) > 1, "bad", f"{name} of each process", found, fix)


def _reports(store: Any, name: str, mine: Mapping[str, Any], timeout: float) -> list[Any]:
    """Publish one report and return those of all processes."""
    store.set(f"jaxcoll/doctor/{name}/{store.process}", json.dumps(mine))
    until, found = time.monotonic() + timeout, []
    for rank in range(store.processes):
        try:
            left = max(until - time.monotonic(), 0.1)
            found.append(json.loads(store.get(f"jaxcoll/doctor/{name}/{rank}", left)))
        except TimeoutError:
            raise ValueError(
                f"process {rank} of {store.processes} did not answer within {timeout:g} s. Look at "
                "what it printed; all must run the same command."
            ) from None
    return found
