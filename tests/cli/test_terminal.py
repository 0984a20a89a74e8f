"""What a person at a terminal sees, and a file does not."""

import io
import time

from jaxcoll.cli import streams as module
from jaxcoll.cli.main import main
from jaxcoll.cli.streams import patience


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_plan_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    assert main(["plan", "--processes", "2"]) == 0
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert any("…" in line for line in lines)
    assert "all_reduce MEAN of 161 leaves" in lines[0]


def test_elsewhere_lines_are_as_long_as_they_are_and_leaves_have_names(capsys):
    assert main(["plan", "--all-rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) > 120
    assert lines[-1].endswith("['out.bias']")


def test_what_takes_long_is_shown_with_its_seconds_and_erased(monkeypatch):
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(module, "AFTER", 0.0)
    monkeypatch.setattr(module, "_EVERY", 0.01)
    with patience("compiling for h100:8"):
        until = time.monotonic() + 20
        while "compiling" not in err.getvalue():
            assert time.monotonic() < until
            time.sleep(0.01)
    assert "\r\x1b[Kcompiling for h100:8 … 0 s" in err.getvalue()
    assert err.getvalue().endswith("\x1b[K")


def test_what_is_over_soon_and_what_nobody_watches_is_not_shown(monkeypatch, capsys):
    err = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", err)
        with patience("planning"):
            pass
    monkeypatch.setattr(module, "AFTER", 0.0)
    with patience("planning"):
        time.sleep(0.05)
    assert err.getvalue() == capsys.readouterr().err == ""
