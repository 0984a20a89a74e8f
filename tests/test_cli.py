"""Every command where standard output is closed, full or left, and where Ctrl-C ends it."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest

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


# What a new interpreter finds at its standard output, made in one that is forked.
CLOSED = "os.close(1); sys.stdout = None"
FULL = """
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
file = open(1, "wb", {buffering}, closefd=False)
sys.stdout = io.TextIOWrapper(file, write_through={buffering} == 0)
"""
LEFT = "reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader); os.close(writer)"


def ran(name, output, folder):
    setup = f"import io, os, sys\n{output}\n"
    done = forks.with_commands().run(setup + forks.COMMAND, "jaxcoll", *RUNS[name], cwd=folder)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("name", EACH)
def test_standard_output_that_is_closed_is_no_error(name, tmp_path):
    done = ran(name, CLOSED, tmp_path)
    assert done.returncode in ((0, 1) if name == "doctor" else (0,)), done.stderr


# What prints by itself and what prints by a console fail at their end, or at their first write.
@pytest.mark.parametrize(
    ("name", "buffering"),
    [pytest.param(name, buffering, marks=[pytest.mark.slow] * (name in SLOW))
     for name in RUNS if name != "help"
     for buffering in (-1, *[0] * (name in ("inspect", "bench")))],
)  # fmt: skip
def test_a_full_disk_at_standard_output_is_one_line_and_status_2(name, buffering, tmp_path):
    done = ran(name, FULL.format(buffering=buffering), tmp_path)
    words = f"jaxcoll {name}: standard output cannot be written: No space left on device."
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, words)


@pytest.mark.parametrize("name", EACH)
def test_who_reads_no_further_is_no_verdict(name, tmp_path):
    assert ran(name, LEFT, tmp_path).returncode == 141


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "words"),
    [(">/dev/full", "jaxcoll plan: standard output cannot be written: No space left on device.\n"),
     ("--tree no-such >&- 2>&-", "")],
)  # fmt: skip
def test_an_interpreter_that_is_started_so_has_the_same_status(redirection, words, tmp_path):
    command = f'"{sys.executable}" -m jaxcoll plan {redirection}'
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, words)


@pytest.mark.parametrize("closed", ["os.close(2); sys.stderr = None",
                                    'os.dup2(os.open("/dev/full", os.O_WRONLY), 2)'])  # fmt: skip
def test_a_standard_error_that_is_closed_or_full_changes_no_status(closed, tmp_path):
    code = f"import os, sys\n{closed}\n{forks.COMMAND}"
    refused = "jaxcoll plan --tree no-such".split()
    assert forks.with_commands().run(code, *refused, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_an_interruption_is_one_line(name, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(COMMANDS[name][0]), "run", interrupted)
    assert main([name, *{"inspect": ["x"], "completion": ["bash"]}.get(name, [])]) == 130
    assert capsys.readouterr().err == f"jaxcoll {name}: interrupted.\n"


@pytest.mark.slow
def test_the_demo_is_interrupted_while_it_trains(tmp_path):
    # Also where Python began in the background, and was to ignore it.
    listens = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    flags = ["demo", "--steps", "100000", "--devices", "2", "--out", str(tmp_path)]
    with forks.running() as running, (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", listens + forks.COMMAND, *flags]
        started = running.start(command, {"PYTHONUNBUFFERED": "1"}, stdout=log)
        sent, until = 0, time.monotonic() + 100
        while started.poll() is None and time.monotonic() < until:
            text = (tmp_path / "log").read_text()
            # Python reports and drops one that comes within JAX's callback of the garbage collector.
            if "handwritten digits" in text and sent == text.count("Exception ignored"):
                os.kill(started.pid, signal.SIGINT)
                sent += 1
            time.sleep(0.05)
    text = (tmp_path / "log").read_text()
    assert started.poll() == 130, text
    assert text.endswith("jaxcoll demo: interrupted.\n")


def test_a_console_tells_its_program_that_nobody_reads():
    reader, writer = os.pipe()
    os.close(reader)
    nobody = open(writer, "w")
    with pytest.raises(BrokenPipeError):
        new_console(file=nobody).print("words")
    with pytest.raises(BrokenPipeError):
        nobody.close()
