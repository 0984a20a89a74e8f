"""A refusal of a command is one line on standard error and status 2, before anything runs."""

import sys
from pathlib import Path

import jax

from jaxcoll.cli.main import main

HLO = str(Path(__file__).parents[1] / "report" / "golden" / "gpu-0.12.0.1-packs.hlo")
REFUSED = {
    "plan": [
        ("--tree resnet51", "--tree resnet51: expected one of resnet50"),
        ("--dtype float33", "plan: --dtype: no dtype 'float33'"),
        ("--dtype float64", "JAX converts float64 to float32: use that, or set JAX_ENABLE"),
        (
            "--tree types.json",
            "(ValueError: no dtype 'float33': expected one such as float32 or bfloat16).",
        ),
        ("--topology h101:8", "There is no topology 'h101:8'. Nearest: 'h100:8'"),
        ("--algorithm rnig", "no algorithm 'rnig': choose auto, reproducible, native, ring"),
        ("--algorithm ring/ring", "is hierarchical"),
        ("--algorithm ring@much", "expected a size such as 1KiB, 4MiB or 1GiB; got 'much'"),
        ("--json /proc/no/a.json", "/proc/no/a.json"),
    ],
    "bench": [
        ("--tree vgg", "--tree vgg: expected one of resnet50"),
        ("--algorithms magic", "no algorithm 'magic': choose auto"),
        ("--sizes 2KiB:1KiB", "--sizes: expected SIZE"),
        ("--sizes 6B", "--sizes: 6B is not a whole number of float32 elements"),
        ("--processes 2 --platform gpu", "--processes starts CPU processes"),
        ("--platform auto --devices 9", "--devices 9: this machine has 8 cpu devices."),
    ],
    "inspect": [
        ("nowhere.hlo", "is not a file of HLO text. Name a function after its file or module"),
        ("good.py", "as in good.py:step; --run good.py runs a whole script."),
        ("empty", "as in train.py:step"),
        (f"{HLO} --against empty", "as in train.py:step"),
        ("hello.hlo", "expected HLO text, which begins with 'HloModule'"),
        ("cut.hlo", "looks truncated"),
        (f"{HLO} --topology h100:8", "--topology needs module:name"),
        (f"{HLO} --json no/a.json", "no/a.json"),
        (f"{HLO} --plot empty", "empty"),
        ("--run nowhere.py", "--run nowhere.py: No such file or directory."),
        ("--run bad.py", "--run bad.py is not Python: "),
        ("--run", "--run: no program to run: give a script.py"),
        ("--run -m no.such", "--run -m no.such: "),
        ("--run -m json.decoder.x", "--run -m json.decoder.x: "),
        ("--profile empty", "empty contains no profile"),
        ("--measure 3 a.hlo", "need --run, as in --measure 20 --run train.py."),
        ("--profile empty --run bad.py", "needs --measure"),
        ("--measure 2 --profile bad.py/x --run good.py", "bad.py/x"),
        ("--json no/a.json --run good.py", "no/a.json"),
        ("a.hlo --run good.py", "expected one of TARGET"),
        ("good.py --run", "--run goes before the script: jaxcoll inspect --run good.py"),
        ("good.py --run --measure 2", "jaxcoll inspect --measure 2 --run good.py"),
        ("--plot a.xyz --run good.py", "--plot a.xyz: a picture is one of eps, gif,"),
        ("--plot a.xyz a.hlo", "--plot a.xyz: a picture is one of eps, gif,"),
        ("--devices 4 --run good.py", "--devices needs a TARGET; a script chooses its devices"),
        ("--platform gpu --profile empty", "--platform needs a TARGET"),
        ("--topology h100:8 --run good.py", "--topology needs a TARGET"),
        ("--against a.hlo --run good.py", "--against needs a TARGET"),
        ("--limit max_cuont=0 --run good.py", "--limit: max_cuont is not a limit"),
        ("--limit max_count=-1 --run good.py", "=-1: expected a limit such as max_count=1."),
        ("--limit max_count --run good.py", "max_count: expected a limit such as max_count=1."),
        ("--limit dtypes --run good.py", "dtypes: expected a limit such as dtypes=bf16,f32."),
        ("--limit none_in_loops=no --run good.py", "expected a limit such as none_in_loops."),
    ],
}


def test_refusal_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    texts = {"types.json": '[{"shape": [1], "dtype": "float33"}]', "bad.py": "def (:", "good.py": "print('ran')", "hello.hlo": "hello",
             "cut.hlo": "HloModule jit_f\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2]"}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for command, flags, error in (
        (command, *case) for command, cases in REFUSED.items() for case in cases
    ):
        monkeypatch.setattr("sys.path", [*sys.path])
        status = main([command, *flags.split()])
        out, printed = capsys.readouterr()
        assert status == 2, (command, flags)
        assert "ran" not in out, (command, flags)
        assert error in printed
        assert printed.startswith(f"jaxcoll {command}: ")
        assert printed.count("\n") == 1, printed


def test_missing_platform_is_one_line(monkeypatch, capsys):
    for error, reason in (
        (AssertionError(), "no reason given"),
        (RuntimeError("no such backend"), "no such backend"),
    ):

        def devices(error=error):
            raise error

        monkeypatch.setattr(jax, "devices", devices)
        for command in ("bench", "demo", "inspect json:dumps"):
            assert main([*command.split(), "--platform", "auto"]) == 2
            refused = f"jaxcoll {command.split()[0]}: --platform auto: JAX finds no such device ("
            printed = capsys.readouterr().err
            assert printed.startswith(f"{refused}{reason}). Install JAX for ")
            assert printed.count("\n") == 1
