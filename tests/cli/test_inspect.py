"""`jaxcoll inspect` over files and modules, and its errors in one line."""

import json
from pathlib import Path

import forks
import pytest

from jaxcoll.cli.main import main

GOLDEN = Path(__file__).parents[1] / "observe" / "golden"

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


def test_a_file(capsys, tmp_path):
    report = tmp_path / "report.json"
    picture = tmp_path / "a.png"
    file = str(GOLDEN / "gpu-0.12.0.1-overlapped.hlo")
    assert main(["inspect", file, "--json", str(report), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "1 reduce-scatter, 1 collective-permute" in out
    assert "17.2 GFLOP, 1 op" in out
    assert json.loads(report.read_text())["count"] == 2
    assert picture.stat().st_size > 10_000


def test_two_files_side_by_side(capsys):
    files = [str(GOLDEN / f"gpu-0.12.0.1-{name}.hlo") for name in ("overlapped", "packs")]
    assert main(["inspect", files[0], "--against", files[1]]) == 0
    out = capsys.readouterr().out
    assert out.split("\n")[0].split() == [Path(file).name for file in files] + ["ratio"]
    assert "reduced behind products" in out
    assert main(["inspect", files[0], "--against", files[1], "--json", "-"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert (both["count"], both["against"]["count"]) == (2, 1)
    assert main(["inspect", files[0], "--against", "nowhere.hlo"]) == 2
    assert "nowhere.hlo is no file of HLO text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is no file of HLO text"),
        ("hello", "expected HLO text, which begins with 'HloModule'"),
        ("HloModule jit_f\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2]", "looks cut off"),
    ],
    ids=["missing", "no HLO", "cut off"],
)
def test_bad_files_are_one_line(content, words, capsys, tmp_path):
    file = tmp_path / "a.hlo"
    if content is not None:
        file.write_text(content)
    assert main(["inspect", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxcoll inspect: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "mine",
            "mine is no file of HLO text. A function is named behind its file or module, as in",
        ),
        ("here/mine.py", "as in here/mine.py:step; --run here/mine.py runs a whole script."),
        ("here", "as in train.py:step"),
    ],
)
def test_a_target_that_is_no_text_says_how_a_function_is_named(
    target, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text(MODULE)
    for flags in ([target], [str(GOLDEN / "gpu-0.12.0.1-packs.hlo"), "--against", target]):
        assert main(["inspect", *flags]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert "Errno" not in error


def test_a_topology_is_not_for_a_file(capsys):
    file = str(GOLDEN / "gpu-0.12.0.1-kinds.hlo")
    assert main(["inspect", file, "--topology", "h100:8"]) == 2
    assert "--topology is for module:name" in capsys.readouterr().err


def test_modules(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    script = (
        "import sys; from jaxcoll.cli.main import main\n"
        "for target in sys.argv[1:]: print(main(['inspect', target, '--json', '-']), flush=True)"
    )
    targets = [f"mine:{n}" for n in ("example", "broken", "needs", "number", "nothing")]
    targets = ["./mine.py:step", *targets]
    done = forks.with_commands().run(script, "", *targets, cwd=tmp_path)
    decoder, rest = json.JSONDecoder(), done.stdout
    for _ in range(2):
        report, end = decoder.raw_decode(rest)
        assert report["count"] == 1
        assert report["rows"][0]["leaves"] == [""]
        rest = rest[end:].lstrip().removeprefix("0").lstrip()
    assert rest.split() == ["2"] * 4
    lines = [line for line in done.stderr.splitlines() if line.startswith("jaxcoll inspect")]
    for line, words in zip(
        lines,
        ("mine:broken cannot be compiled: TypeError",
         "'x'. Say what it takes, as in `needs.example_args = (jax.ShapeDtypeStruct((8, 3), "
         '"float32"),)`, or run the script: jaxcoll inspect --run -m mine.',
         "mine:number is not a function; it is int", "no 'nothing' in 'mine'"),
        strict=True,
    ):  # fmt: skip
        assert words in line


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_place_that_cannot_be_written_is_named(flag, tmp_path, capsys):
    file = str(GOLDEN / "gpu-0.12.0.1-kinds.hlo")
    assert (
        main(
            [
                "inspect",
                file,
                flag,
                str(tmp_path / "no" / "a.png" if flag == "--json" else tmp_path),
            ]
        )
        == 2
    )
    assert str(tmp_path) in capsys.readouterr().err
