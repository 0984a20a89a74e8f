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


@pytest.mark.parametrize("name", RUNS)
def test_a_full_disk_at_standard_output_is_one_line_and_status_2(name, tmp_path):
    done = ran(name, FULL, tmp_path)
    assert done.returncode == 2
    assert f"jaxcoll {name}: [Errno 28] No space left on device" in done.stderr


def test_who_reads_no_further_is_no_verdict(tmp_path):
    assert ran("plan", LEFT, tmp_path).returncode == 141


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interruption_is_one_line(name, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"jaxcoll.cli.{name}"), "run", interrupted)
    needed = {"inspect": ["x"], "coordinator": ["a:1", "-n1"]}.get(name, [])
    assert main([name, *needed]) == 130
    assert capsys.readouterr().err == f"jaxcoll {name}: interrupted.\n"


def test_no_command():
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_a_command_that_there_is_not_is_told_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["inspct", "--run", "a.py"])
    error = capsys.readouterr().err
    assert "jaxcoll: error: no command 'inspct'; nearest: inspect; there are demo, plan," in error


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["inspect", "--mesure", "20", "--run", "a.py"], "--mesure; nearest: --measure\n"),
        (["bench", "--ruonds=3"], "--ruonds=3; nearest: --rounds\n"),
        (["doctor", "--zzz"], "--zzz\n"),
    ],
)
def test_a_flag_that_there_is_not_is_told_the_nearest(words, nearest, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert error.startswith(f"usage: jaxcoll {words[0]}")
    assert error.endswith(f"jaxcoll {words[0]}: error: unrecognized arguments: {nearest}")
