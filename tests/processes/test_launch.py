"""`jaxcoll launch` and `jaxcoll doctor`: what is passed on, what listens, and that all end."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from at_once import wait_for

from benchmarks.teams import free_port
from jaxcoll._job.launch import supervisor
from jaxcoll.cli.main import main

pytestmark = pytest.mark.processes

JOB = """
import contextlib, os, platform, pytest, sys, time, warnings
warnings.simplefilter("ignore")
import jaxcoll as jc
from jaxcoll._job.malloc import keeps_freed_memory
from jaxcoll.cli.main import main
jc.initialize()
assert keeps_freed_memory() == (platform.libc_ver()[0] == "glibc")
import jax, numpy as np
jc.initialize()
with pytest.raises(RuntimeError, match="and cannot also become process 0 of 3 at 127.0.0.1:1."):
    jc.initialize("127.0.0.1:1", 3, 0)
assert len(jax.local_devices()) == 2
if hasattr(os, "SCHED_BATCH"):
    policies = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            policies.append(os.sched_getscheduler(int(thread)))
    assert policies.count(os.SCHED_BATCH) == 1, "Gloo's thread, and no other"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
print("devices", jax.device_count(), *sys.argv[1:])
print("aside", file=sys.stderr)
asked = jc.CommunicationOptions(timeout_seconds=60)
step = jc.data_parallel(lambda x: jc.all_reduce("sum", x.sum(), "data"), options=asked)
assert step(np.ones(2, "f")) == 4
child = os.fork()
if child == 0:
    sys.exit(0)  # which must not speak for its parent
until = time.monotonic() + 8  # JAX itself may crash or hang at the end of a forked child
while time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0):
    time.sleep(0.05)
for _ in range(3):
    assert step(np.ones(2, "f")) == 4
assert main(["doctor", "--json"]) in (0, 1)
if jax.process_index() == 0:
    rows = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name)]
    mine = {os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.lexists(f.path)}
    at = {words[1].split(":")[0] for words in rows if words[3] == "0A" and f"socket:[{words[9]}]" in mine}
    assert at, "Gloo listens"
    assert at <= {"0100007F", "0000000000000000FFFF00000100007F"}, "127.0.0.1 and nothing else"
else:
    time.sleep(1)  # process 0 has ended by then
    print("late, and well")
"""

STUCK = """
import os, pathlib, signal, subprocess, sys, time
how, rank = sys.argv[1], os.environ["JAXCOLL_RANK"]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
here = pathlib.Path(__file__).parent
(here / rank).touch()
while rank == "1" and how in ("status", "SIGKILL", "SIGUSR1") and not (here / "0").exists():
    time.sleep(0.01)
if how == "status" and rank == "1":
    sys.exit(7)
if how in ("SIGKILL", "SIGUSR1") and rank == "1":
    os.kill(os.getpid(), getattr(signal, how))
if how == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if how == "survive":
    time.sleep(rank == "0")
    sys.exit(5 * (rank == "1"))
time.sleep(600)
"""

# Process 1 fails so often before it ends well; the other waits for it, or fails, too.
FAILS = """
import os, pathlib, sys, time
rank, folder = os.environ["JAXCOLL_RANK"], pathlib.Path(__file__).parent
before = len(list(folder.glob(rank + ".*")))
(folder / f"{rank}.{before}").write_text(os.environ.get("JAXCOLL_REJOIN", ""))
how, times = sys.argv[1], int(sys.argv[2])
while rank == "0" and not (folder / f"1.{times if how == 'alone' else before}").exists():
    time.sleep(0.01)
time.sleep(0.5 * int(rank))
sys.exit(3 if before < times and (rank == "1" or how == "all") else 0)
"""


def script(tmp_path, text):
    file = tmp_path / "job.py"
    file.write_text(text)
    return str(file)


def run(*flags, **variables):
    command = ("jaxcoll", "launch", *flags)
    return forks.with_jaxcoll().run(forks.COMMAND, *command, cwd=Path(), timeout=120, **variables)


def started(tmp_path, *flags, out=None, err=None, code=forks.COMMAND):
    """A launch that goes on by itself, and where its output goes."""
    out, err = out or tmp_path / "out", err or tmp_path / "err"
    command = ("jaxcoll", "launch", *flags)
    child = forks.with_jaxcoll().start(code, command, dict(os.environ), out, err, Path.cwd())
    return child, out, err


def test_job_listens_on_loopback_only(tmp_path, launched):
    logs = tmp_path / "logs"
    flags = ["-n", "2", "--devices-per-process", "2", "--logs", logs]
    done = launched(*flags, script(tmp_path, JOB), "--a", "b")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    doctors = [json.loads(line[4:]) for line in lines if line[4:5] == "{"]
    assert [f["found"] for f in doctors if f["what"] == "processes"] == ["2 on 1 host"]
    printed = {line for line in lines if line[4:5] != "{"}
    assert printed == {"[0] devices 4 --a b", "[1] devices 4 --a b", "[1] late, and well"}
    assert {"[0] aside", "[1] aside"} <= set(done.stderr.splitlines())
    assert "late, and well" in (logs / "1.log").read_text()
    assert sorted(p.name for p in logs.iterdir()) == ["0.log", "1.log", "coordinator.log"]


@pytest.mark.parametrize(
    ("how", "flags", "status", "message"),
    [
        ("status", [], 7, "process 1 of 2 ended with status 7; the others were ended."),
        ("SIGKILL", [], 137, "process 1 of 2 was ended by SIGKILL; the others were ended."),
        ("SIGUSR1", [], 138, "process 1 of 2 was ended by SIGUSR1; the others were ended."),
        ("late", ["--timeout-seconds", "2"], 124, "not all processes ended within 2 s; they were ended."),
        ("survive", ["--keep-going"], 0, "process 1 of 2 ended with status 5."),
    ],
)  # fmt: skip
def test_first_failure_ends_all(tmp_path, how, flags, status, message):
    done = run("-n", "2", *flags, script(tmp_path, STUCK), how)
    assert (done.returncode, done.stderr) == (status, f"jaxcoll launch: {message}\n")
    pids = [int(pid) for line in re.findall("pids (.*)", done.stdout) for pid in line.split()]
    assert len(pids) == 4 or how == "late"  # where 2 s may pass before they could print
    assert forks.gone(pids)


@pytest.mark.tensorflow("K25", "K26")
def test_failures_are_restarted(tmp_path, launched, monkeypatch):
    monkeypatch.setattr(supervisor, "SETTLE_SECONDS", 60.0)
    file = script(tmp_path, FAILS)
    lives = lambda: {path.name: path.read_text() for path in tmp_path.glob("[01].[0-9]")}
    done = launched("-n", "2", "--keep-going", "--restarts", "1", file, "all", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ended with status 3") == 2
    assert "jaxcoll launch: restarting all 2 processes (restart 1 of 1)." in done.stderr
    assert set(lives().values()) == {""}, "nobody was left to rejoin"
    for path in map(tmp_path.joinpath, lives()):
        path.unlink()
    monkeypatch.setattr(supervisor, "SETTLE_SECONDS", 1.0)
    done = launched("-n", "2", "--keep-going", "--restarts", "1", file, "alone", "1")
    text = "process 1 of 2 ended with status 3; restarting it, to rejoin the others"
    assert done.returncode == 0
    assert done.stderr.startswith(f"jaxcoll launch: {text} (restart 1 of 1).\n")
    assert lives() == {"0.0": "", "1.0": "", "1.1": "1"}


@pytest.mark.parametrize(
    ("numbers", "how", "status"),
    [
        ([signal.SIGINT], "wait", 130),
        ([signal.SIGINT, signal.SIGINT], "deaf", 130),
        ([signal.SIGTERM], "wait", 143),
        ([signal.SIGKILL], "deaf", -signal.SIGKILL),
    ],
)
def test_nothing_outlives_the_launcher(tmp_path, numbers, how, status):
    child, out, err = started(tmp_path, "-n", "2", script(tmp_path, STUCK), how)
    printed = lambda: re.findall(r"\d+", " ".join(re.findall("pids (.*)\n", read(out))))
    wait_for(lambda: len(printed()) == 4)
    pids = [*map(int, (*printed(), *children(child.pid)))]  # the coordinator and the watch, too
    for number in numbers:
        os.kill(child.pid, number)
        time.sleep(0.2 * len(numbers))
    assert child.wait(30) == status, read(err)
    assert forks.gone(pids)
    if status > 0:
        name = signal.Signals(status - 128).name
        assert f"jaxcoll launch: {name}: all processes were ended." in read(err)


def read(file):
    return file.read_text() if file.exists() else ""


NOISY = "while True: print('x' * 100)"


@pytest.mark.parametrize(
    ("number", "flags", "status"),
    [(signal.SIGTERM, [], 143), (None, ["--timeout-seconds", "1.5"], 124)],
    ids=["SIGTERM", "timeout, one file"],
)
def test_blocked_reader_blocks_no_end(tmp_path, number, flags, status):
    os.mkfifo(pipe := tmp_path / "pipe")
    errors = pipe if number is None else None
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb"):
        child, _, err = started(tmp_path, *flags, script(tmp_path, NOISY), out=pipe, err=errors)
        wait_for(lambda: is_full(pipe))
        pids = [int(x) for x in children(child.pid)]
        if number is not None:
            os.kill(child.pid, number)
        assert child.wait(60) == status
    if number is not None:
        assert f"jaxcoll launch: {number.name}" in read(err)
    assert forks.gone(pids)


def is_full(pipe):
    """True if a writer has to wait."""
    fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [fd], [], 0)[1]
    finally:
        os.close(fd)


def test_full_disk_ends_no_job(tmp_path):
    file = script(tmp_path, "import os; print('x', flush=True); os.write(2, b'done\\n')")
    child, _, err = started(tmp_path, file, out="/dev/full")
    assert child.wait(60) == 0, read(err)
    message = "standard output cannot be written (No space left on device); the job continues"
    assert read(err).count(f"{message} without") == 1
    assert {"[0] done", "[1] done"} <= set(read(err).splitlines())


def test_long_lines_pass(tmp_path):
    bars = "import sys\nfor _ in range(20): sys.stdout.write(('\\r' + 'x' * 1023) * 1024)"
    done = run(script(tmp_path, bars))
    assert (done.returncode, done.stdout.count("x")) == (0, 2 * 20 * 1023 * 1024)


def test_ignored_hangup_stays_ignored(tmp_path):
    file = script(tmp_path, "import time; print('begins', flush=True); time.sleep(1)")
    as_nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + forks.COMMAND
    child, out, _ = started(tmp_path, file, code=as_nohup)
    wait_for(lambda: "begins" in read(out))
    os.kill(child.pid, signal.SIGHUP)
    assert child.wait(60) == 0


def test_nested_job_inherits_nothing(tmp_path):
    show = "print(sorted(k for k in __import__('os').environ if k.startswith('JAXCOLL_')))"
    outer = {"JAXCOLL_REJOIN": "1", "JAXCOLL_RANK": "7", "JAXCOLL_PROCESSES": "9"}
    own = "['JAXCOLL_COORDINATOR', 'JAXCOLL_OTHER', 'JAXCOLL_PROCESSES', 'JAXCOLL_RANK']"
    for n in (1, 2):
        done = run("-n", str(n), script(tmp_path, show), **outer, JAXCOLL_OTHER="kept")
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] {own}" for rank in range(n)]
        told = r"jaxcoll launch: the 2 processes did not join .*`import jaxcoll as jc; jc.init"
        assert re.match(told if n > 1 else "$", done.stderr)


def children(pid):
    return subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(pid)], text=True).split()


def test_bad_flags_are_refused(capsys):
    for flags, message in (
        (["--timeout-seconds", "nan", "x.py"], "--timeout-seconds must be a number above 0; got nan"),
        (["no-such.py"], "there is no file no-such.py"),
        (["python", __file__], "leave 'python' out"),
        ([sys.executable, __file__], "out."),
        (["--logs", __file__, __file__], "test_launch.py: File exists"),
        ([], "no program to run"),
    ):  # fmt: skip
        assert main(["launch", *flags]) == 2
        text = capsys.readouterr().err
        assert text.startswith("jaxcoll launch: ")
        assert message in text
    for flag, least in (("-n", 1), ("--devices-per-process", 1), ("--restarts", 0)):
        with pytest.raises(SystemExit, match="2"):
            main(["launch", flag, str(least - 1), "x.py"])
        assert f": must be at least {least}; got {least - 1}\n" in capsys.readouterr().err


def test_doctor_checks_this_machine(capsys):
    assert main(["doctor"]) in (0, 1)
    text = capsys.readouterr().out
    for what in ("versions", "devices", "collectives", "open files", "shared memory"):
        assert what in text
    assert os.uname().nodename in text


def test_doctor_takes_a_jobs_place(tmp_path):
    flags = ["--json", "--num-processes", 2, "--coordinator-address", f"127.0.0.1:{free_port()}"]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    with forks.running() as running:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "jaxcoll", "doctor", *flags, "--process-id", rank]
            with log.open("wb") as out:
                running.start(command, {"JAX_PLATFORMS": "cpu"}, stdout=out)
        assert {process.wait(90) for process in running.processes} <= {0, 1}
    lines = (line for log in logs for line in log.read_text().splitlines() if line[:1] == "{")
    said = [each["found"] for each in map(json.loads, lines) if each["what"] == "processes"]
    assert said == ["2 on 1 host"], "process 0 prints"
