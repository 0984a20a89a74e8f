"""`jaxcoll plan`: plans from shapes, and errors in one line."""

import io
import json

import pytest

from jaxcoll._report.shown_plan import COLUMNS
from jaxcoll.cli.main import main


def ran(capsys, *flags):
    status = main(["plan", *map(str, flags)])
    return status, *capsys.readouterr()


def test_a_plan_for_a_cluster(capsys):
    status, out, _ = ran(capsys, "--tree", "200x1KiB", "--topology", "h100:2x8")
    assert status == 0
    assert "all_reduce MEAN of 200 leaves, 204,800 bytes a replica, over 16 × gpu" in out
    assert "from Hopper" in out


def test_long_table_is_folded(capsys):
    status, out, _ = ran(capsys)
    lines = out.splitlines()
    assert (status, len(lines)) == (0, 3 + 1 + 20)
    assert lines[0].startswith("all_reduce MEAN of 161 leaves")
    assert lines[1].startswith("packs: every leaf alone, because")
    assert lines[3].split() == list(COLUMNS)
    assert lines[-1] == "… and 142 more: `plan.text()`, or --all-rows, shows them"
    whole = ran(capsys, "--all-rows")[1].splitlines()
    assert [line.split() for line in whole[3:-142]] == [line.split() for line in lines[3:-1]]
    assert whole[-1].split()[:2] == ["160", "float32"]


def test_a_plan_as_json(capsys, tmp_path):
    tree = tmp_path / "mine.json"
    tree.write_text('[{"shape": [100]}, {"shape": [3], "dtype": "bfloat16"}]')
    flags = ("--tree", tree, "--devices", 4, "--dtype", "float16", "--reduce-op", "sum")
    status, out, _ = ran(capsys, *flags, "--algorithm", "ring@all", "--json", "-")
    assert status == 0
    plan = json.loads(out)
    assert (plan["reduce_op"], plan["algorithm"], plan["replicas"]) == ("SUM", "ring", 4)
    assert [pack["dtype"] for pack in plan["packs"]] == ["float16", "bfloat16"]
    assert ran(capsys, *flags, "--json", tmp_path / "plan.json")[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text())["replicas"] == 4


def test_two_levels_and_processes(capsys):
    _, out, _ = ran(capsys, "--topology", "h100:2x8", "--algorithm", "native/ring", "--json", "-")
    assert json.loads(out)["axis_sizes"] == [2, 8]
    _, out, _ = ran(capsys, "--processes", 4, "--tree", "200x1KiB")
    assert "over 4 × cpu, 4 processes" in out


def test_small_numbers_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--devices", "0"])
    assert "argument --devices: must be at least 1; got 0" in capsys.readouterr().err


def test_a_plan_fits_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout", out := Terminal())
    assert main(["plan", "--processes", "2"]) == 0
    assert max(map(len, out.getvalue().splitlines())) <= 60
