"""The campaign: what is done to processes, and what must become of the others.

    python -m tests.processes.campaign [--only NAME] [--markdown]

runs every row and prints the table of docs/faults.md. The tests run some of them.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxcoll.bench.launch import coordinated, world_variables
from jaxcoll.bench.processes import surely_ended

JOBS = Path(__file__).with_name("campaign_jobs.py")


@dataclasses.dataclass
class Became:
    """What became of one process."""

    status: int | None
    outcome: str
    said: dict
    changes: list
    at: float
    log: str


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row: what is done, and what is expected of whom."""

    name: str
    processes: int
    faults: tuple = ()  # (rank, when, what)
    want: str = "trained"
    words: str = ""
    job: str = "elastic"
    within: float = 5.0  # seconds from the fault to what is wanted, compilation left out
    others: dict = dataclasses.field(default_factory=dict)  # rank: outcome
    spec: dict = dataclasses.field(default_factory=dict)
    acts: tuple = ()  # (seconds after all have been heard of, signal or "again", rank or "C")


def run(fault, folder=None, limit=90.0):
    """Run one row; returns what became of each process, and the seconds until the last was told."""
    faults = [dict(zip(("rank", "when", "what"), f, strict=True)) for f in fault.faults]
    spec = {"job": fault.job, "faults": faults, "steps": 40, **fault.spec}
    if "checkpoint" in spec.get("settings", {}):
        spec["settings"] = {**spec["settings"], "checkpoint": f"{folder}/last.npz"}
    logs = [""] * fault.processes
    with coordinated(fault.processes) as coordinator, surely_ended() as running:
        variables = world_variables(coordinator.address, fault.processes)
        files = [Path(folder, f"{rank}.log").open("w+b") for rank in range(fault.processes)]
        command = [sys.executable, str(JOBS), json.dumps(spec)]

        def start(rank, *more):
            out = {"stdin": subprocess.DEVNULL, "stdout": files[rank], "stderr": files[rank]}
            return running.start([*command, *more], variables[rank], **out)

        processes = [start(rank) for rank in range(fault.processes)]
        acts, began, hit = list(fault.acts), None, None
        until = time.monotonic() + limit
        while time.monotonic() < until:
            logs = [
                Path(folder, f"{rank}.log").read_text("utf8", "replace")
                for rank in range(fault.processes)
            ]
            if began is None and (hit := _faulted(logs)):
                began = time.monotonic()
            if (
                fault.acts
                and began is None
                and fault.acts[0][2] == "C"
                and all("TRAINING" in t for t in logs)
            ):
                began = time.monotonic()
            while acts and began is not None and time.monotonic() - began >= acts[0][0]:
                _, what, who = acts.pop(0)
                hit = hit or time.time()
                if what == "again":
                    processes[who] = start(who, "again")
                else:
                    pid = coordinator.process.pid if who == "C" else processes[who].pid
                    os.kill(pid, getattr(signal, what))
            stuck = (
                {f[0] for f in fault.faults if f[2] in ("sleep", "SIGSTOP")}
                if not fault.acts
                else set()
            )
            if not acts and all(
                p.poll() is not None or r in stuck for r, p in enumerate(processes)
            ):
                break
            time.sleep(0.03)
        statuses = [p.poll() for p in processes]
    logs = [
        Path(folder, f"{rank}.log").read_text("utf8", "replace") for rank in range(fault.processes)
    ]
    for file in files:
        file.close()
    return [_became(s, t) for s, t in zip(statuses, logs, strict=True)], hit


def _faulted(logs):
    found = [json.loads(x[6:])[0] for t in logs for x in t.splitlines() if x.startswith("FAULT ")]
    return min(found, default=None)


def _became(status, log):
    told = [json.loads(x[5:]) for x in log.splitlines() if x.startswith("TOLD ")]
    changes = [c for t in told for c in t.get("changes", ())]
    ends = [t for t in told if t["outcome"] != "changes"] or [{"outcome": "silent", "at": 0.0}]
    return Became(status, ends[-1]["outcome"], ends[-1], changes, ends[-1]["at"], log)


def wrong(fault, became):
    """What is not as the row says, in words; nothing: all is."""
    hit = {f[0] for f in fault.faults if f[2] != "full disk"}
    complaints = []
    wants = {r: fault.want for r in range(fault.processes) if r not in hit} | fault.others
    for rank, want in wants.items():
        b = became[rank]
        if b.outcome != want:
            complaints.append(f"{rank}: {b.outcome} instead of {want}: {b.log[-1500:]}")
        elif (
            want == fault.want
            and fault.words
            and fault.words not in b.said.get("message", "") + str(b.changes)
        ):
            complaints.append(f"{rank}: no {fault.words!r} in {b.said} {b.changes}")
        if b.status not in (0, 3):
            complaints.append(f"{rank}: ended with status {b.status}: {b.log[-1500:]}")
    trained = [b for b in became if b.outcome == "trained" and "bits" in b.said]
    if len({b.said["bits"] for b in trained}) > 1:
        complaints.append(f"not the same bits: {[b.said for b in trained]}")
    for b in trained:
        if b.said["again"] not in (None, b.said["bits"]) or (
            b.said["seen"] != 40 and "steps" not in fault.spec
        ):
            complaints.append(f"not what the smaller world gives: {b.said}")
    return complaints


def seconds(fault, became, hit):
    """From the fault to the next finished step, or to the error."""
    changes = [b.changes[0][5] for b in became if b.changes]
    if changes and fault.want == "trained":
        return max(changes)
    ends = [b.at for r, b in enumerate(became) if b.outcome == fault.want]
    return max(ends) - hit if ends and hit else float("nan")


CK = {"checkpoint": "here"}
FAULTS = [
    Fault("SIGKILL of one of four", 4, ((1, 20, "SIGKILL"),)),
    Fault("SIGKILL of process 0", 3, ((0, 20, "SIGKILL"),)),
    Fault("SIGKILL of one of two", 2, ((1, 20, "SIGKILL"),)),
    Fault("SIGKILL of two at once", 4, ((0, 20, "SIGKILL"), (2, 20, "SIGKILL"))),
    Fault("SIGKILL of one, then of another", 4, ((3, 12, "SIGKILL"), (1, 25, "SIGKILL"))),
    Fault("SIGKILL in the first step", 3, ((1, 0, "SIGKILL"),)),
    Fault("SIGKILL in the last step", 3, ((1, 39, "SIGKILL"),)),
    Fault("SIGKILL while compiling", 3, ((2, "while compiling", "SIGKILL"),)),
    Fault("SIGKILL before training", 2, ((1, "before training", "SIGKILL"),),
          "DeadlineExceededError", "Worker 1 of 2 did not begin", spec={"settings": {"startup_seconds": 4.0}}),
    Fault("SIGKILL before the meeting", 2, ((1, "before the meeting", "SIGKILL"),),
          "DeadlineExceededError", "process 1 of 2", spec={"arrival": 6}),
    Fault("SIGSEGV", 3, ((1, 20, "SIGSEGV"),)),
    Fault("exit without a word", 3, ((1, 20, "exit"),)),
    Fault("an exception in the batch function", 3, ((1, 20, "raise"),), others={1: "KeyError"}),
    Fault("an exception while compiling", 3, ((1, "while compiling", "raise"),), others={1: "KeyError"}),
    Fault("SIGSTOP", 3, ((1, 20, "SIGSTOP"),), words="did not finish within 3 s"),
    Fault("SIGSTOP, continued later", 3, ((1, 20, "SIGSTOP"),), acts=((9.0, "SIGCONT", 1),),
          others={1: "PeerLostError"}),
    Fault("asleep in Python", 3, ((1, 20, "sleep"),), words="did not finish within 3 s"),
    Fault("SIGSTOP of one and SIGKILL of another", 4, ((1, 20, "SIGSTOP"), (2, 20, "SIGKILL"))),
    Fault("too few are left", 3, ((1, 20, "SIGKILL"),), "PeerLostError", "`min_workers` is 3",
          spec={"settings": {"min_workers": 3, **CK}}),
    Fault("a spare steps in", 3, ((1, 20, "SIGKILL"),), spec={"settings": {"max_workers": 2}}),
    Fault("started again and taken in", 3, ((1, 20, "SIGKILL"),), acts=((1.0, "again", 1),),
          others={1: "trained"}, spec={"pause": 0.6, "until": 3, "steps": 100}),
    Fault("death of the coordinator", 3, (), "PeerLostError", "The coordinator died",
          acts=((1.0, "SIGKILL", "C"),), spec={"pause": 0.05, "steps": 4000, "settings": CK}),
    Fault("full disk at a checkpoint", 2, ((0, 20, "full disk"),), others={0: "OSError"},
          want="trained", spec={"settings": {**CK, "every": 10}}),
    Fault("SIGKILL while another writes checkpoints", 3, ((1, 20, "SIGKILL"),), spec={"settings": {**CK, "every": 1}}),
    Fault("plain step: asleep", 2, ((1, 6, "sleep"),), "DeadlineExceededError", "1", "plain", 4.0),
    Fault("plain step: SIGSTOP", 2, ((1, 6, "SIGSTOP"),), "DeadlineExceededError", "1", "plain", 4.0),
    Fault("plain step: SIGKILL", 2, ((1, 6, "SIGKILL"),), "PeerLostError", "1", "plain", 4.0),
    *(
        Fault(f"plain step: another {odd}", 2, (),
              "ProgramMismatchError", job="plain", spec={"odd": odd}, within=2.0)
        for odd in ("shape", "dtype", "options")
    ),
    Fault("plain step: a call is skipped", 2, (), "PeerLostError", others={1: "trained"}, job="plain", spec={"odd": "skip"}),
    *(
        Fault(f"another {odd} on one", 3, (), "ProgramMismatchError", words, "odd_elastic", spec={"odd": odd})
        for odd, words in (
            ("function", "process 1: program `<lambda>`"),
            ("options", "process 1: options CommunicationOptions(algorithm='ring')"),
            ("rows", "process 0: argument args[1][0]: float32[24,16]\nprocess 1: argument args[1][0]: float32[12,16]"),
            ("slow rows", "bring different programs to step 20"),
            ("steps", "process 0: program `step`\nprocess 1: no program: its training ends here"),
        )
    ),
    Fault("SIGKILL while connecting", 3, ((1, "while connecting", "SIGKILL"),), "DeadlineExceededError",
          "process 1 ended meanwhile", spec={"arrival": 5}),
    Fault("SIGKILL before there are devices", 3, ((1, "after the meeting", "SIGKILL"),), "RuntimeError",
          "Process 1 of 3 did not begin to use devices within 5 s", "plain", spec={"arrival": 5}),
]  # fmt: skip


def main():
    import tempfile

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--begin", default=FAULTS[0].name, help="the first row")
    args = parser.parse_args()
    failed = 0
    print("| fault | processes | ends in | after | |\n| --- | --- | --- | --- | --- |")
    names = [fault.name for fault in FAULTS]
    for fault in FAULTS[names.index(args.begin) :]:
        if args.only not in fault.name:
            continue
        fault = dataclasses.replace(fault, spec={"odd": "", **fault.spec})
        with tempfile.TemporaryDirectory() as folder:
            became, hit = run(fault, folder)
        bad = wrong(fault, became)
        failed += bool(bad)
        took = seconds(fault, became, hit)
        print(
            f"| {fault.name} | {fault.processes} | {fault.want} | {took:.1f} s | {'ok' if not bad else bad[0]} |",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
