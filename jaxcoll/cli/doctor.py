"""`jaxcoll doctor`: check this machine, or the job that this process is one of."""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import time
from typing import Any

from jaxcoll.bench.terminal import new_console, new_table
from jaxcoll.cli import diagnosis
from jaxcoll.cli.flags import check_results, write_lines
from jaxcoll.cli.streams import complain, patience

EPILOG = """\
Alone it looks at this machine. In every process of a job (`jaxcoll launch -n 4 -m jaxcoll doctor`,
`srun jaxcoll doctor`) it also compares the processes, over the coordination service and not over a
collective that may hang, and measures the links between neighbours; process 0 prints. The exit
status is 0, 1 where something could be better, 2 where something will not work.
"""

_BLOCK = 16 << 20  # bytes that go from a rank to the next
_CALLS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    words = "write lines of JSON to FILE, in the place of a table; - or nothing for here"
    add = parser.add_argument
    add("--json", nargs="?", const="-", metavar="FILE", help=words)
    add("--timeout", type=float, default=60, help="seconds for the others to answer (default: 60)")


def run(args: argparse.Namespace) -> int:
    """Look, compare, and say what to do; the exit status, as `EPILOG` has it."""
    check_results(args.json)
    if not args.json and not importlib.util.find_spec("rich"):
        raise ValueError("needs rich: pip install 'jaxcoll[cli]', or --json")
    try:
        with patience("looking"):
            findings = _findings(args.timeout)
    except RuntimeError as error:
        complain("doctor", error)
        return 2
    if findings is None:
        return 0
    if args.json:
        write_lines(args.json, "".join(json.dumps(vars(each)) + "\n" for each in findings))
    else:
        _show(findings)
    levels = {finding.level for finding in findings}
    return 2 if "bad" in levels else 1 if "warn" in levels else 0


def _findings(timeout: float) -> list[diagnosis.Finding] | None:
    """All findings; None: process 0 reports them."""
    import jax

    from jaxcoll._cluster.initialize import initialize, own_address
    from jaxcoll._compat import coordination

    initialize(initialization_timeout=timeout)
    store = coordination.store()
    if store is not None:
        _meet(store, timeout)  # before JAX looks for devices together, and waits long for the dead
    mine = diagnosis.machine_facts()
    try:
        bandwidth = diagnosis.loopback_bandwidth()
    except OSError:
        bandwidth = None
    here = diagnosis.machine_findings(mine, bandwidth)
    if store is None or store.processes == 1:
        return here
    address = own_address() or socket.gethostname()  # on the way to the coordinator
    store.set(f"jaxcoll/doctor/{store.process}", json.dumps({**mine, "interface": address}))
    others = _reports(store, "jaxcoll/doctor", timeout)
    # A collective among processes that differ may hang: links are measured only between equals.
    alike = None not in others and len({facts["devices"] for facts in others if facts}) == 1
    measured = diagnosis.pair_findings(_between_neighbours()) if alike else []
    if store.process == 0:
        addresses = [facts["interface"] for facts in others if facts]
        assert jax.process_count() == store.processes
        return [*here, *diagnosis.job_findings(others, addresses), *measured]
    return None


def _meet(store: Any, timeout: float) -> None:
    store.set(f"jaxcoll/doctor/here/{store.process}", "{}")
    here = _reports(store, "jaxcoll/doctor/here", timeout)
    if silent := [str(rank) for rank, report in enumerate(here) if report is None]:
        raise RuntimeError(
            f"process {', '.join(silent)} of {store.processes} did not answer within {timeout:g} s "
            "after it had arrived. Look at what it printed; all must run the same command."
        )


def _reports(store: Any, folder: str, timeout: float) -> list[dict[str, Any] | None]:
    """What each process has set under `folder`; None: it did not within the time."""
    until = time.monotonic() + timeout
    found: list[dict[str, Any] | None] = []
    for rank in range(store.processes):
        try:
            left = max(until - time.monotonic(), 0.1)
            found.append(json.loads(store.get(f"{folder}/{rank}", left)))
        except TimeoutError:
            found.append(None)
    return found


def _between_neighbours() -> dict[tuple[int, int], float]:
    """Bytes a second from each process's first device to that of the next, two at a time.

    One pair exchanges while the others wait, so that a slow link has a name.
    """
    import jax
    import numpy as np
    from jax import lax
    from jax.experimental.multihost_utils import process_allgather
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    count = jax.process_count()
    firsts = [next(d for d in jax.devices() if d.process_index == rank) for rank in range(count)]
    mesh = Mesh(np.array(firsts, dtype=object), ("process",))
    rows = PartitionSpec("process")
    values = jax.make_array_from_callback(
        (count, _BLOCK // 4), NamedSharding(mesh, rows),
        lambda index: np.ones((1, _BLOCK // 4), np.float32),
    )  # fmt: skip
    found = {}
    for a in range(count):
        b = (a + 1) % count
        if (b, a) in found:
            continue

        def send(x: jax.Array, pair: tuple[int, int] = (a, b)) -> jax.Array:
            return lax.ppermute(x, "process", [pair])

        step = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=rows, out_specs=rows))
        compiled = step.lower(values).compile()
        seconds = []
        for _ in range(_CALLS):
            start = time.perf_counter()
            jax.block_until_ready(compiled(values))
            seconds.append(time.perf_counter() - start)
        # Every process takes the slower of the two ends: only these took part.
        medians = process_allgather(np.array([sorted(seconds)[_CALLS // 2]], np.float32))
        found[a, b] = _BLOCK / float(np.max(np.asarray(medians)))
    return found


def _show(findings: list[diagnosis.Finding]) -> None:
    from rich.text import Text

    console = new_console(highlight=False)
    table = new_table(("", "what", "found"), "<<<", overflow="fold")
    marks = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "bad": ("bad", "bold red")}
    for finding in findings:
        table.add_row(Text(*marks[finding.level]), finding.what, Text(finding.found))
    console.print(table)
    for finding in findings:
        if finding.fix:
            mark, style = marks[finding.level]
            console.print(Text(f"{mark}: {finding.what}: {finding.found}", style))
            console.print(Text(f"  {finding.fix}"))
    if not any(finding.fix for finding in findings):
        console.print("nothing to fix")
