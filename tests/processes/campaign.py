"""The campaign: faults are injected into processes, and what becomes of the others is checked.

    python -m tests.processes.campaign [--only WORDS] [--times N]

Runs the rows of campaign_faults.py, prints them as docs/hangs.md shows some, and ends with the
number of those that failed. The tests run some rows.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxcoll._job.coordinator import start_coordinator
from jaxcoll._job.launch.subprocesses import killed_on_exit
from jaxcoll._job.launch.supervisor import world_variables
from jaxcoll._train.elastic.checkpoint import read_stamp

from .campaign_faults import DEADLINE, FAULTS, LATE, TIMEOUT

JOBS = Path(__file__).with_name("campaign_jobs.py")
TIMES = "noticed", "next step"
DEFAULTS = {"steps": 40, "timeout": TIMEOUT, "arrival": 20, "pause": 0.0, "odd": ""}
DEFAULTS |= {"leaves": 0, "again with": "", "slow": 0.0}
STEP = 5.0  # seconds from the fault to the next finished step


class Became:
    """What became of one process, from what it printed."""

    def __init__(self, status, log):
        self.status, self.log = status, log
        said = {"FAULT": [], "TRAINING": [], "CHANGES": [], "ENDED": []}
        for word, result in _LINES.findall(log):
            said[word].append(json.loads(result))
        self.hits = [result["at"] for result in said["FAULT"]]
        self.training = bool(said["TRAINING"])
        self.changes = [change for result in said["CHANGES"] for change in result["changes"]]
        self.result = {"outcome": "silent", "at": 0.0, "message": "", "expired": 0.0}
        self.result |= dict(pair for result in said["ENDED"] for pair in result.items())
        self.outcome, self.at = self.result["outcome"], self.result["at"]
        self.words = self.result["message"] + "".join(c["why"] for c in self.changes)


# Gloo's own words may stand before it, but not in it.
_LINES = re.compile(r"\b(FAULT|TRAINING|CHANGES|ENDED) (\{.*\})\n")


class Ran:
    """A row that was run.

    Attributes:
      became: of each process.
      hits: when something was done to one of them, or to the coordinator.
      orphans: processes of the row that lived when they should not.
      last: the step of its checkpoint, if there is one.

    Args:
      started: like `killed_on_exit`, which starts new Pythons.
    """

    def __init__(self, fault, folder, limit=60.0, started=killed_on_exit):
        self.fault, self.folder = fault, Path(folder).resolve()
        self.hits, self.orphans = [], set()
        faults = [dict(zip(("rank", "when", "what"), f, strict=True)) for f in fault.faults]
        spec = DEFAULTS | {"job": fault.job, "faults": faults} | fault.spec
        self._command = [sys.executable, str(JOBS), json.dumps(spec)]
        with (
            contextlib.closing(start_coordinator("127.0.0.1:0", fault.processes)) as coordinator,
            started() as running,
        ):
            self._coordinator, self._running = coordinator, running
            self._variables = world_variables(coordinator.address, fault.processes)
            self._processes = [self._start(rank) for rank in range(fault.processes)]
            self._wait(time.monotonic() + limit)
            with contextlib.suppress(ProcessLookupError):
                os.kill(coordinator.process.pid, signal.SIGCONT)
            stuck = {self._processes[rank].pid for rank in fault.stuck}
            self.orphans |= _living(self.folder, but=stuck)
            self.became = self._look()
        self.orphans |= _living(self.folder)
        self.hits += [at for b in self.became for at in b.hits]
        file = self.folder / "last.npz"
        self.last = read_stamp(file).step if file.exists() else None

    def _start(self, rank, *more):
        devices = self.fault.spec.get("devices", 1)
        variables = dict(self._variables[rank])
        flags = self.fault.spec.get("flags", {}).get(rank, "")
        variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} {flags}"
        with (self.folder / f"{rank}.log").open("ab") as log:
            out = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": self.folder}
            return self._running.start([*self._command, *more], variables, **out)

    def _look(self):
        logs = [self.folder / f"{rank}.log" for rank in range(self.fault.processes)]
        texts = [log.read_text("utf8", "replace") for log in logs]
        return [Became(p.poll(), t) for p, t in zip(self._processes, texts, strict=True)]

    def _wait(self, until):
        acts, began = list(self.fault.acts), None
        while time.monotonic() < until:
            if acts and began is None:
                seen = self._look()
                is_training = not self.fault.faults and all(b.training for b in seen)
                began = time.monotonic() if is_training or any(b.hits for b in seen) else None
            while acts and began is not None and time.monotonic() - began >= acts[0][0]:
                self._act(*acts.pop(0)[1:])
            alive = {rank for rank, p in enumerate(self._processes) if p.poll() is None}
            if not acts and alive <= self.fault.stuck:
                return
            time.sleep(0.03)

    def _act(self, what, who):
        if what == "again":
            self._processes[who] = self._start(who, "again")
            return
        if what != "SIGCONT":
            self.hits.append(time.time())
        process = self._coordinator.process if who == "C" else self._processes[who]
        os.kill(process.pid, getattr(signal, what))

    def wrong(self):
        """What is not as the row says, in words; nothing: all is."""
        fault, complaints = self.fault, []
        for rank, want in fault.wants.items():
            b, seen = self.became[rank], []
            if b.outcome != want:
                seen.append(f"{b.outcome} instead of {want}")
            elif rank not in fault.hit and want == fault.want:
                seen += [f"no {w!r} in {b.words!r}" for w in fault.words if w not in b.words]
                lost = sorted(r for c in b.changes for r in c["lost"])  # each in one change
                named = lost if want == "trained" else b.result["ranks"]
                if named != fault.named:
                    seen.append(f"{named} is named, and not {fault.named}")
            if b.status != (fault.spec.get("leaves", 0) if want == "trained" else 3):
                seen.append(f"its status is {b.status}")
            if "good" in fault.spec and [c["good"] for c in b.changes] != [fault.spec["good"]]:
                seen.append(f"the checkpoint after the fault is not the last good one: {b.changes}")
            if b.result.get("again") != b.result.get("bits"):
                seen.append(f"not what the smaller world gives: {b.result}")
            if b.result.get("seen", fault.spec.get("steps", 40)) != fault.spec.get("steps", 40):
                seen.append(f"not every step once: {b.result}")
            if seen:
                complaints.append(f"process {rank}: {'; '.join(seen)}\n{b.log[-2000:]}")
        if len({b.result["bits"] for b in self.became if "bits" in b.result}) > 1:
            complaints.append(f"not the same bits: {[b.result for b in self.became]}")
        if self.last != fault.spec.get("last", self.last):
            complaints.append(f"the checkpoint is of step {self.last}")
        if self.orphans:
            complaints.append(f"processes of it live: {self.orphans}")
        return complaints

    def times(self):
        """Seconds until all others knew, and until they had finished a step again; NaN: never."""
        others = {r: b for r, b in enumerate(self.became) if r not in self.fault.hit}
        events = [
            (c["noticed"], LATE in c["why"] and c["expired"], c["again"], rank in c["joined"])
            for rank, b in others.items()
            for c in b.changes
            if c["lost"]
        ]
        events += [
            (b.at, b.outcome == DEADLINE and b.result["expired"], math.nan, False)
            for b in others.values()
            if b.outcome not in ("trained", "silent")
        ]
        passed = min((expired for _, expired, _, _ in events if expired), default=math.nan)
        knew, again = [math.nan], [math.nan]
        for at, expired, next_step, joined in events:
            zero = passed if expired else max((h for h in self.hits if h <= at), default=math.nan)
            knew.append(math.nan if joined else at - zero)  # a spare knows when it is taken in
            again.append(next_step - zero)
        return np.fmax.reduce(knew).item(), np.fmax.reduce(again).item()

    def late(self):
        """What took longer than the row says, in words."""
        (knew, went_on), within = self.times(), self.fault.within
        found = {
            f"known after {knew:.1f} s, not {within:g}": knew > within,
            f"the next step after {went_on:.1f} s": went_on > within + STEP,
        }
        return [words for words, is_late in found.items() if is_late]


def _living(folder, but=(), patience=3.0):
    """Processes that a row has started, directly or not, and that do not end within `patience`.

    They run in its folder.
    """
    until = time.monotonic() + patience
    while True:
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # of a zombie there is nothing to read
                if (process / "cwd").readlink() == folder:
                    found.add(int(process.name))
        found -= set(but)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _seconds(x):
    return "" if math.isnan(x) else f"{x:.1f} s"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows in whose names this stands")
    parser.add_argument("--times", type=int, default=1, help="how often; the longest times count")
    args = parser.parse_args()
    names = ("fault", "processes", "ends in", *(f"{x}, {jax.__version__}" for x in TIMES))
    print(_line(names), _line(["---"] * len(names)), sep="\n")
    failed = 0
    for fault in (fault for fault in FAULTS if args.only in fault.name):
        times, wrong = [math.nan] * 2, []
        for _ in range(args.times):
            with tempfile.TemporaryDirectory() as folder:
                ran = Ran(fault, folder)
            times = [np.fmax(*pair).item() for pair in zip(times, ran.times(), strict=True)]
            wrong += ran.wrong() + ran.late()
        want = "training goes on" if fault.want == "trained" else f"`{fault.want}`"
        print(_line((fault.name, str(fault.processes), want, *map(_seconds, times))), flush=True)
        print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr, flush=True)
        failed += bool(wrong)
    print(f"{failed} did not end as they should")
    return min(failed, 100)


def _line(cells):
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
