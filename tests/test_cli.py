"""Every command where standard output is closed, full or left, and where Ctrl-C ends it."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcoll._cluster.launch.subprocesses import surely_ended
from jaxcoll.bench.terminal import new_console
from jaxcoll.cli.main import COMMANDS, main

HLO = str(Path(__file__).parent / "observe" / "golden" / "gpu-0.12.0.1-overlapped.hlo")
RUNS = {
    "plan": ["plan", "--simulate", "--json", "-"],
    "inspect": ["inspect", HLO, "--json", "-"],
    "help": ["launch", "--help"],
    "doctor": ["doctor", "--json"],
    "bench": ["bench", "--devices", "1", "--sizes", "1KiB", "--rounds", "1", "--algorithms", "auto",
              "--json", "-"],
    "demo": ["demo", "--steps", "1", "--devices", "1"],
}  # fmt: skip
SLOW = ("bench", "demo")
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]


def ran(name, redirection, folder, unbuffered="", **more):
    command = [sys.executable, "-m", "jaxcoll", *RUNS[name]]
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "-", *command],
        cwd=folder, stderr=subprocess.PIPE, text=True, timeout=120,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_standard_output_that_is_closed_is_no_error(name, tmp_path):
    done = ran(name, ">&-", tmp_path)
    assert done.returncode in ((0, 1) if name == "doctor" else (0,)), done.stderr
    assert "Traceback" not in done.stderr


# What prints by itself and what prints by a console fail at their end, or at their first write.
@pytest.mark.parametrize(
    ("name", "unbuffered"),
    [pytest.param(name, unbuffered, marks=[pytest.mark.slow] * (name in SLOW))
     for name in RUNS if name != "help"
     for unbuffered in ("", *["1"] * (name in ("inspect", "bench")))],
)  # fmt: skip
def test_a_full_disk_at_standard_output_is_one_line_and_status_2(name, unbuffered, tmp_path):
    done = ran(name, ">/dev/full", tmp_path, unbuffered)
    words = f"jaxcoll {name}: standard output cannot be written: No space left on device."
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, words)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", EACH)
def test_who_reads_no_further_is_no_verdict(name, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nowhere:
        done = ran(name, "", tmp_path, stdout=nowhere)
    assert done.returncode == 141, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_standard_error_that_is_closed_or_full_changes_no_status(tmp_path):
    for redirection in ("2>&-", "2>/dev/full"):
        command = f'"{sys.executable}" -m jaxcoll plan --tree no-such {redirection}'
        assert subprocess.run(["sh", "-c", command], cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_an_interruption_is_one_line(name, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(COMMANDS[name][0]), "run", interrupted)
    assert main([name, *{"inspect": ["x"], "completion": ["bash"]}.get(name, [])]) == 130
    assert capsys.readouterr().err == f"jaxcoll {name}: interrupted.\n"


@pytest.mark.slow
def test_the_demo_is_interrupted_while_it_trains(tmp_path):
    command = [sys.executable, "-u", "-m", "jaxcoll", "demo", "--steps", "100000", "--devices", "2"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with surely_ended() as running:
        try:
            started = running.start(command, {}, cwd=tmp_path, **streams)
        finally:
            signal.signal(signal.SIGINT, before)
        assert "handwritten digits" in started.stdout.readline()
        # Python reports and drops one that comes within JAX's callback of the garbage collector.
        for _ in range(6):
            started.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = started.communicate(timeout=10)
                break
    assert started.returncode == 130, errors
    *dropped, last = errors.strip().split("\n")
    assert last == "jaxcoll demo: interrupted."
    assert not dropped or "_xla_gc_callback" in dropped[0], errors


def test_a_console_tells_its_program_that_nobody_reads():
    reader, writer = os.pipe()
    os.close(reader)
    nobody = open(writer, "w")
    with pytest.raises(BrokenPipeError):
        new_console(file=nobody).print("words")
    with pytest.raises(BrokenPipeError):
        nobody.close()
