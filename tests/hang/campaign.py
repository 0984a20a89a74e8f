"""Programs that hang in many ways, each under `jaxcoll launch --hang-seconds`: who is named?

    python -m tests.hang.campaign [--only KINDS] [--processes 2,4] [--styles jit,pmap]

Prints one line for each run, and ends with the number of those that named nobody, or the wrong
process, or that reported a hang where there was none.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

PROGRAM = Path(__file__).with_name("program.py")
STYLES = "jit", "shard_map", "pmap", "flax", "executor"
LIMIT = 4.0

# What a report must say of the process that is missing: its place in program.py, or words.
LAST = {
    "sleep": "in sleep:", "all work": "in sleep:", "loop": "in spin:", "lock": "lock.acquire(", "queue": "queue.Queue().get(",
    "subprocess": "subprocess.run(", "socket": "sockets[0].recv(1)", "input": "input()",
    "GIL held": "ctypes.PyDLL(None).sleep(", "GIL busy": "sum(range(", "stopped": "is stopped",
    "raised": "ValueError at program.py", "future": ".result()", "thread": "in join:",
    "poll": ")): time.sleep(SECONDS)", "event loop": "asyncio.run(",
    "file lock": "in lock_file:", "signal": "signal.pause()", "loader": "in __next__:",
    "in a library": "sorted([1, 2]", "left": "has ended its program",
    "exit": "time.sleep(SECONDS)", "fewer": "has ended its program", "callback": "in sleep:",
    "slow once": "went on", "barrier": "in sleep:",
}  # fmt: skip
FIRST = {"stopped 0": "is stopped", "raised 0": "ValueError at program.py",
         "sleep 0": "in sleep:", "saves": "in save:", "evaluates": "in evaluate_alone:"}  # fmt: skip
OTHERS = {"more": "has ended its program"}
NOBODY = {"order": "in different programs", "branch": "branch_step"}
QUIET = ("none", "all slow", "all load", "all evaluate", "all compile", "all stop", "long program",
         "one debugs")  # fmt: skip
LOUD = (*LAST, *FIRST, *OTHERS, *NOBODY)


def words_of_launch(kind, style, processes, limit=LIMIT):
    """Return what follows `jaxcoll launch`; the last word is the address of the job."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    ends = ["--hang-exit"] * (kind in LOUD and kind != "slow once")
    flags = ["-n", processes, "--hang-seconds", limit, *ends, "--timeout-seconds", 60]
    return [*flags, PROGRAM, kind, style, address]


def run(kind, style, processes, limit=LIMIT):
    """Run a program; return what became of it, and its output."""
    words = words_of_launch(kind, style, processes, limit)
    command = [*map(str, [sys.executable, "-m", "jaxcoll", "launch", *words])]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        if kind == "all stop":
            threading.Timer(3 * limit + 6, _go_on, (words[-1],)).start()
        output = job.stdout.read()
    return judge_output(kind, style, processes, output), output


def judge_output(kind, style, processes, output):
    """Return "right", or what is wrong with a report."""
    reports = re.findall(r"jaxcoll hang:.* and a report: (.*)", output)
    if "no longer reported" in output:
        return "the watch failed"
    if kind in QUIET:
        return "false alarm" if reports else "right" if "ended" in output else "failed"
    if not reports:
        return "JAX ended it" if "jaxcoll launch: process" in output else "silent"
    rows = [json.loads(file.read_text()) for file in sorted(Path(reports[0]).glob("report-*"))]
    missing, everybody = rows[0]["verdict"]["missing"], [*range(processes)]
    want, words = {
        **{k: (everybody[-1:], v) for k, v in LAST.items()},
        **{k: ([0], v) for k, v in FIRST.items()},
        **{k: (everybody[:-1], v) for k, v in OTHERS.items()},
        **{k: (missing, v) for k, v in NOBODY.items()},
    }[kind]
    if kind == "callback" and style in ("jit", "flax", "executor"):
        want = [0]
    if missing != want:
        return f"wrong: {missing}" if missing else "nobody named"
    return "right" if words in output else f"without {words!r}"


def _go_on(address):
    """Continue the stopped processes of one job."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if address.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGCONT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join((*LOUD, *QUIET)), help="kinds, with commas")
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--styles", help="default: each kind takes the next of all")
    args = parser.parse_args()
    bad, turn = 0, itertools.cycle(STYLES)
    for kind in args.only.split(","):
        for processes in map(int, args.processes.split(",")):
            for style in args.styles.split(",") if args.styles else [next(turn)]:
                result, output = run(kind, style, processes)
                bad += result != "right"
                print(f"{kind:14} {style:10} {processes}  {result}", flush=True)
                if result != "right":
                    print(*("    " + x for x in output.splitlines() if "hang" in x), sep="\n")
    print(f"{bad} not right")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
