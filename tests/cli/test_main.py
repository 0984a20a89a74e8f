"""Every command where standard output is full or left, where Ctrl-C ends it, and mistyped."""

import importlib
from pathlib import Path

import forks
import pytest

from jaxcoll.cli.main import COMMANDS, main

HLO = str(Path(__file__).parents[1] / "report" / "golden" / "gpu-0.12.0.1-overlapped.hlo")
RUNS = {
    "plan": ["plan", "--json", "-"],
    "inspect": ["inspect", HLO, "--json", "-"],
    "doctor": ["doctor", "--json"],
}
FULL = """
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False))
"""
LEFT = "reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader); os.close(writer)"


def ran(name, output, folder):
    setup = f"import io, os, sys\n{output}\n"
    done = forks.with_commands().run(setup + forks.COMMAND, "jaxcoll", *RUNS[name], cwd=folder)
    assert "Traceback" not in done.stderr
    return done


def test_full_disk_is_one_line(tmp_path):
    for name in RUNS:
        done = ran(name, FULL, tmp_path)
        assert done.returncode == 2
        assert f"jaxcoll {name}: [Errno 28] No space left on device" in done.stderr


def test_closed_pipe_is_no_verdict(tmp_path):
    assert ran("plan", LEFT, tmp_path).returncode == 141


def test_interruption_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    for name in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"jaxcoll.cli.{name}"), "run", interrupted)
        needed = {"inspect": ["x"], "coordinator": ["a:1", "-n1"]}.get(name, [])
        assert main([name, *needed]) == 130
        assert capsys.readouterr().err == f"jaxcoll {name}: interrupted.\n"


def test_mistyped_word_is_told_nearest(capsys):
    for words, error in (
        ([], "the following arguments are required: "),
        (["inspct", "--run", "a.py"], "no command 'inspct'; nearest: inspect; there are demo, plan,"),
        (["inspect", "--mesure", "20", "--run", "a.py"], "unrecognized arguments: --mesure; nearest: --measure\n"),
        (["bench", "--ruonds=3"], "unrecognized arguments: --ruonds=3; nearest: --rounds\n"),
        (["doctor", "--zzz"], "unrecognized arguments: --zzz\n"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert f"error: {error}" in capsys.readouterr().err
