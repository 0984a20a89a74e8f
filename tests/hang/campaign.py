"""Programs that hang in many ways, each under `jaxcoll launch --hang-seconds`: who is named?

    python -m tests.hang.campaign [--only WORDS] [--processes 2,4] [--styles jit,pmap] [--times N]

Prints one line for each run, and ends with the number of those that named nobody, or the wrong
process, or that reported a hang where there was none; and with how late reports came: from the last
line that the process that reports printed before its first report, and the limit, to that report.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
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
    """Run a program, and return (what became of it, its output, how late its report came)."""
    words = words_of_launch(kind, style, processes, limit)
    command = [*map(str, [sys.executable, "-m", "jaxcoll", "launch", *words])]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        if kind == "all stop":
            threading.Timer(3 * limit + 6, _go_on, (words[-1],)).start()
        lines = [(time.monotonic(), line) for line in job.stdout]
    output = "".join(line for _, line in lines)
    return judge_output(kind, style, processes, output), output, measure_delay(lines, limit)


def measure_delay(lines, limit):
    """Return the seconds from when a report was due until it came; None if there is none.

    The process that reports printed its last line just before it began to wait.
    """
    reported = next(((at, line) for at, line in lines if "jaxcoll hang: process" in line), None)
    if reported is None:
        return None
    rank = reported[1].partition("]")[0]
    began = max(at for at, line in lines if at < reported[0] and line.startswith(rank))
    return reported[0] - began - limit


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
    parser.add_argument("--only", help="kinds, separated by commas")
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--styles", help="default: each kind takes the next of all four")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="only programs that do not hang")
    parser.add_argument("--show", action="store_true", help="print the reports")
    args = parser.parse_args()
    kinds = args.only.split(",") if args.only else QUIET if args.quiet else (*LOUD, *QUIET)
    bad, turn, delays = 0, 0, []
    for kind in kinds * args.times:
        for processes in map(int, args.processes.split(",")):
            turn += 1
            styles = args.styles.split(",") if args.styles else [STYLES[turn % len(STYLES)]]
            for style in styles:
                began = time.monotonic()
                result, output, delay = run(kind, style, processes)
                delays += [delay] * (delay is not None)
                bad += result != "right"
                seconds = time.monotonic() - began
                late = f", {delay:.1f} s late" if delay is not None else ""
                line = f"{kind:14} {style:10} {processes}  {result}  ({seconds:.0f} s{late})"
                print(line, flush=True)
                if args.show or result != "right":
                    lines = output.splitlines()
                    print(
                        "\n".join("    " + x for x in lines if args.show or "hang" in x), flush=True
                    )
    print(f"{bad} not right")
    if delays:
        print(f"reports {statistics.median(delays):.1f} s late, at most {max(delays):.1f} s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
