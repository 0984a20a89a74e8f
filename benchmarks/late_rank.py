"""Count how often `jaxcoll inspect --run --measure` names the rank that is late, or a wrong one.

    python -m benchmarks.late_rank --worlds 2,4,2x2 --ms 20,0 --windows 10

Each window is a separate training loop, `ranks/late_job.py`, run unchanged under `jaxcoll inspect
--run --measure`. One rank sleeps before each step, or in a host callback in the middle of it; each
window has a different late rank. With 0 ms no rank is late, so any rank that is named is wrong.
The windows of all cases are interleaved, so that a busy minute of the machine affects all cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.all_reduce import parser_of
from benchmarks.teams import HERE, ours
from jaxcoll._report.measured import LEAST_RUNS
from jaxcoll._show.table import Table
from jaxcoll.cli import flags

JOB = HERE / "ranks" / "late_job.py"
TIMED_OUT = 124  # exit status of `jaxcoll launch`
FORMS = ("psum", "ring", "halving_doubling")


class Case(NamedTuple):
    """A job, and how late one of its ranks is."""

    processes: int
    devices: int  # per process
    form: str  # psum, or a jaxcoll algorithm that sends permutes
    where: str  # "before" a step, or in its "middle"
    ms: float  # 0: no rank is late

    def __str__(self) -> str:
        late = f"{self.ms:g} ms, {self.where}" if self.ms else "none"
        return f"{self.processes} × {self.devices}, {self.form}, late: {late}"


@dataclasses.dataclass
class Window:
    """The result of one profile."""

    late: int  # the rank that was late
    named: dict[int, float]  # the ranks that were named, and their lateness in seconds
    runs: int  # compared runs; with fewer than `LEAST_RUNS`, no rank is named
    step: float  # seconds


@dataclasses.dataclass
class Found:
    """The windows of a case."""

    case: Case
    windows: list[Window]

    def line(self) -> dict[str, Any]:
        """Return the case and its windows as plain values."""
        return {**self.case._asdict(), "windows": list(map(dataclasses.asdict, self.windows))}

    def row(self) -> list[str]:
        """Return the cells of the case's row."""
        seen = [window for window in self.windows if window.runs >= LEAST_RUNS]
        right = [window.named[window.late] for window in seen if window.late in window.named]
        errors = [seconds / (self.case.ms / 1e3) - 1 for seconds in right]
        wrong = sum(bool({*window.named} - {window.late}) for window in seen)
        steps = statistics.median([window.step for window in seen] or [0.0])
        return [
            str(self.case), str(len(seen)), str(len(right)) if self.case.ms else "–", str(wrong),
            f"{statistics.median(map(abs, errors)):.1%}" if errors else "–",
            f"{min(errors):+.0%} … {max(errors):+.0%}" if errors else "–",
            f"{steps * 1e3:.1f}",
        ]  # fmt: skip


def cases(worlds: str, forms: str, wheres: str, ms: str) -> list[Case]:
    """Return all combinations of lists, without duplicates: with 0 ms, `where` has no effect.

    Examples:
      >>> [str(case) for case in cases("2x2", "psum", "before,middle", "0")]
      ['2 × 2, psum, late: none']
    """
    lists = [text.split(",") for text in (worlds, forms, ms, wheres)]
    found = []
    for world, form, late, where in itertools.product(*lists):
        processes, _, devices = world.partition("x")
        place = where if float(late) else "before"
        found.append(Case(int(processes), int(devices or 1), form, place, float(late)))
    return list(dict.fromkeys(found))


def measure(case: Case, late: int, runs: int, width: int, timeout: float) -> Window:
    """Run a job in which rank `late` is late, and read its report.

    On a busy machine a job may end before its window; then it is run again for twice as long.

    Raises:
      ValueError: the job failed.
    """
    # A window opens one second after the compilation, and its probes take two seconds.
    seconds = 3.5 + (runs + 12) * (case.ms / 1e3 + 0.02)
    for times in (1, 2, 4):
        window = _measured(case, late, runs, width, seconds * times, timeout)
        if window.runs >= LEAST_RUNS:
            break
    return window


def _measured(
    case: Case, late: int, runs: int, width: int, seconds: float, timeout: float
) -> Window:
    with tempfile.TemporaryDirectory(prefix="jaxcoll-late-") as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "jaxcoll", "launch", "-n", case.processes,
            "--devices-per-process", case.devices, "--timeout-seconds", timeout,
            "-m", "jaxcoll", "inspect", "--measure", runs, "--json", report, "--run", JOB,
            "--late", late if case.ms else -1, "--ms", case.ms, "--where", case.where,
            "--form", case.form, "--seconds", seconds, "--width", width,
        ]  # fmt: skip
        done = _ended(list(map(str, command)), ours(case.devices))
        if done.returncode == TIMED_OUT:
            return Window(late, {}, 0, 0.0)
        if done.returncode or not report.exists():
            raise ValueError(f"{case}: the job ended with {done.returncode}:\n{done.stderr}")
        (program,) = json.loads(report.read_text())["programs"]
    found, late = program["measured"], late if case.ms else -1
    if found is None or len(found["ranks"]) < case.processes:
        return Window(late, {}, 0, 0.0)
    named = {last["rank"]: last["seconds"] for last, _ in found["late"]}
    return Window(late, named, found["runs"], found["step_seconds"])


def _ended(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and stop it if this process is interrupted."""
    with subprocess.Popen(
        command, env={**os.environ, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output, error = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, error)


def text_of(found: Sequence[Found]) -> str:
    """Return a table with a row for each case."""
    columns = ("processes × devices", "windows", "named", "wrongly named", "error of lateness",
               "from … to", "step ms")  # fmt: skip
    return Table(columns, "<>>>>>>", [one.row() for one in found]).text()


def main(argv: Sequence[str] | None = None) -> list[Found]:
    """Measure, print and write the results; returns the windows of each case."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    words = "processes, or processes x devices per process (default: 2,4,8,2x2)"
    add("--worlds", default="2,4,8,2x2", metavar="LIST", help=words)
    forms = ",".join(FORMS)
    add("--forms", default=forms, metavar="LIST", help=f"collectives (default: {forms})")
    add(
        "--where",
        default="before,middle",
        metavar="LIST",
        help="when it sleeps (default: before,middle)",
    )
    add("--ms", default="100,20,5,0", metavar="LIST", help="delays in ms (default: 100,20,5,0)")
    add("--windows", type=flags.minimum(1), default=10, help="windows per case (default: 10)")
    add("--runs", type=flags.minimum(5), default=20, help="runs per window (default: 20)")
    add("--width", type=flags.minimum(1), default=256, help="N of w[N, N], float32 (default: 256)")
    add("--timeout", type=float, default=180, help="seconds per window (default: 180)")
    add("--json", metavar="FILE", help="write one JSON line per case")
    args = parser.parse_args(argv)
    found = [Found(case, []) for case in cases(args.worlds, args.forms, args.where, args.ms)]
    for k in range(args.windows):
        for one in found:
            late = (k + 1) % one.case.processes
            one.windows.append(measure(one.case, late, args.runs, args.width, args.timeout))
            print(f"window {k + 1}: {one.case}: {one.windows[-1]}", file=sys.stderr, flush=True)
            # Write after every window, so that the results survive an interruption.
            flags.write_json(args.json, [each.line() for each in found], as_lines=True)
    print(text_of(found))
    return found


if __name__ == "__main__":
    main()
