"""`jaxcoll inspect` over files and modules, and its errors in one line."""

import json
from pathlib import Path

import forks
import pytest

import jaxcoll as jc
from jaxcoll.cli import inspect
from jaxcoll.cli.main import main

GOLDEN = Path(__file__).parents[1] / "report" / "golden"

MODULE = """
import jax, jax.numpy as jnp
import jaxcoll as jc

@jc.data_parallel
def step(x):
    return jc.all_reduce("mean", x, "data")

step.example_args = (jax.ShapeDtypeStruct((8, 5), jnp.float32),)

def example():
    return step, step.example_args

def broken():
    return (lambda x: x @ x), step.example_args

needs = lambda x: x
number = 3
"""


def test_file_is_reported(capsys, tmp_path):
    report = tmp_path / "report.json"
    picture = tmp_path / "a.png"
    file = str(GOLDEN / "gpu-0.12.0.1-overlapped.hlo")
    assert main(["inspect", file, "--json", str(report), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "1 reduce-scatter, 1 collective-permute" in out
    assert "17.2 GFLOP, 1 op" in out
    assert json.loads(report.read_text())["count"] == 2
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("ins.py:step", "a/ins.py:byhand"), ["ins:step", "ins:byhand"]),
        (("ins.py:step", "a/ins.py:step"), ["ins.py:step", "a/ins.py:step"]),
        (("a.ins:step", "other.py:step"), ["ins:step", "other:step"]),
    ],
)
def test_columns_name_their_targets(targets, names, monkeypatch, capsys):
    report = jc.inspect((GOLDEN / "gpu-0.12.0.1-packs.hlo").read_text())
    monkeypatch.setattr(inspect, "_report", lambda *_: report)
    assert main(["inspect", targets[0], "--against", targets[1]]) == 0
    assert capsys.readouterr().out.split("\n")[0].split() == [*names, "ratio"]


def test_two_files_are_compared(capsys):
    files = [str(GOLDEN / f"gpu-0.12.0.1-{name}.hlo") for name in ("overlapped", "packs")]
    assert main(["inspect", files[0], "--against", files[1]]) == 0
    out = capsys.readouterr().out
    assert out.split("\n")[0].split() == [Path(file).name for file in files] + ["ratio"]
    assert "reductions overlapped" in out
    assert main(["inspect", files[0], "--against", files[1], "--json", "-"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert (both["count"], both["against"]["count"]) == (2, 1)
    assert main(["inspect", files[0], "--against", "nowhere.hlo"]) == 2
    assert "nowhere.hlo is not a file of HLO text" in capsys.readouterr().err


def test_modules_are_reported(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("number = 'a string'")
    script = (
        "import sys; from jaxcoll.cli.main import main\n"
        "for target in sys.argv[1:]: print(main(['inspect', target, '--json', '-']), flush=True)"
    )
    targets = [f"mine:{n}" for n in ("example", "broken", "needs", "number", "nothing")]
    targets = ["./mine.py:step", *targets, "other/mine.py:number"]
    done = forks.with_commands().run(script, "", *targets, cwd=tmp_path)
    decoder, rest = json.JSONDecoder(), done.stdout
    for _ in range(2):
        report, end = decoder.raw_decode(rest)
        assert report["count"] == 1
        assert report["rows"][0]["leaves"] == [""]
        rest = rest[end:].lstrip().removeprefix("0").lstrip()
    assert rest.split() == ["2"] * 5
    lines = [line for line in done.stderr.splitlines() if line.startswith("jaxcoll inspect")]
    for line, words in zip(
        lines,
        ("mine:broken cannot be compiled: TypeError",
         "'x'. Set its arguments, as in `needs.example_args = (jax.ShapeDtypeStruct((8, 3), "
         '"float32"),)`, or run the script: jaxcoll inspect --run -m mine.',
         "mine:number is not a function; it is int", "no 'nothing' in 'mine'",
         "other/mine.py:number is not a function; it is str"),
        strict=True,
    ):  # fmt: skip
        assert words in line
