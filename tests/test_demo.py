"""`jaxcoll demo` as its users meet it: a process of its own, what it prints, what it leaves."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import jax
import numpy as np
import pytest

import jaxcoll
from jaxcoll.cli.main import main
from jaxcoll.demos import digits, network, picture
from jaxcoll.demos.demonstration import STEPS, Outcome

LEAVES = 9  # four layers' kernels and biases, and the loss
BYTES = 153_132  # 38,282 parameters and the loss, in float32


def as_users_do(*flags):
    """Run it in a process of its own, with warnings as errors; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxcoll", "demo", *map(str, flags)],
        env={
            **os.environ,
            "COLUMNS": "100",
            "XLA_FLAGS": "",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def forked(*flags):
    """Run it in a process that has imported what it needs."""
    done = forks.with_commands().run(forks.COMMAND, "jaxcoll", "demo", *flags, cwd=Path(os.sep))
    assert done.returncode == 0, done.stdout + done.stderr


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def here(*flags):
    assert main(["demo", *map(str, flags)]) == 0


def refused(*flags):
    """The exit status, in this process: what is refused is refused before anything is set up."""
    try:
        return main(["demo", *map(str, flags)])
    except SystemExit as exit:
        return exit.code


def figures(run, folder, *flags):
    """What `run` writes to a file."""
    run("--out", folder, "--json", folder / "demo.json", *flags)
    return json.loads((folder / "demo.json").read_text())


THREE = ("--steps", 2, "--devices", 3, "--seed", 5, "--bytes-per-pack", 32_768)


@pytest.fixture(scope="module")
def over_three(tmp_path_factory):
    return figures(forked, tmp_path_factory.mktemp("three"), *THREE)


def wire_bytes(n, *sizes):
    return sum(2 * (size - size // n) * 4 for size in sizes)


@pytest.mark.slow
def test_a_full_run_meets_its_bars_and_shows_what_it_sent(tmp_path):
    out = tmp_path / "pictures"
    printed = as_users_do("--out", out, "--json", tmp_path / "demo.json")
    found = json.loads((tmp_path / "demo.json").read_text())
    assert f"jaxcoll {jaxcoll.__version__}" in printed
    assert f"{STEPS}/{STEPS}" in printed
    assert str(out / "demo.png") in printed
    assert found["picture"] == str(out / "demo.png")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in out.iterdir()] == ["demo.png"]
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["demo.json"]

    assert found["platform"] == "cpu"
    assert (found["devices"], found["steps"], found["batch_size"]) == (8, STEPS, 256)
    assert len(found["losses"]) == len(found["losses_one_device"]) == STEPS
    assert found["losses"][:5] == pytest.approx(found["losses_one_device"][:5], rel=1e-5)
    assert found["test_accuracy"] >= 0.96
    assert found["test_accuracy"] == pytest.approx(found["test_accuracy_one_device"], abs=0.005)
    assert 0 < found["largest_relative_difference"] <= 1e-4
    assert found["shortfalls"] == []

    assert found["requested"] == {
        "kinds": {"all-reduce": LEAVES},
        "all_reduces": LEAVES,
        "operands": LEAVES,
        "bytes": BYTES,
        "dtypes": ["f32"],
    }
    assert found["compiled"] == {**found["requested"], "kinds": {"all-reduce": 1}, "all_reduces": 1}
    sizes = [sum(leaf["elements"] for leaf in p["leaves"]) for p in found["plan"]["packs"]]
    assert found["wire_bytes_per_step"] == wire_bytes(8, *sizes)
    for figure in (f"{found['wire_bytes_per_step']:,}", f"{BYTES:,}", "['hidden']['kernel']"):
        assert figure in printed


@pytest.mark.slow
def test_packs_of_a_size_and_a_number_of_devices_that_nothing_divides_by(over_three):
    found = over_three
    assert (found["devices"], found["batch_size"]) == (3, 255)
    packs = found["plan"]["packs"]
    assert [pack["bytes"] for pack in packs] == [22_060, 131_072]
    assert (found["requested"]["all_reduces"], found["compiled"]["operands"]) == (2, 2)
    assert found["wire_bytes_per_step"] == wire_bytes(3, *(p["elements"] for p in packs))
    assert found["losses"] == pytest.approx(found["losses_one_device"], rel=1e-5)
    assert found["largest_relative_difference"] < 1e-5


@pytest.mark.processes
def test_over_processes_gradients_are_packed_and_the_model_is_the_same(tmp_path, capsys):
    here("--steps", 3, "--processes", 2, "--out", tmp_path, "--json", "-")
    printed, complaints = capsys.readouterr()
    found = json.loads(printed)
    assert (found["processes"], found["devices"], found["batch_size"]) == (2, 2, 256)
    (pack,) = found["plan"]["packs"]
    assert (pack["algorithm"], len(pack["leaves"]), pack["bytes"]) == (
        "halving_doubling",
        LEAVES,
        BYTES,
    )
    assert any("exchanges of our own" in reason for reason in found["plan"]["reasons"])
    assert found["largest_relative_difference"] < 1e-5
    assert "2 devices in 2 processes" in complaints
    assert (tmp_path / "demo.png").exists()


@pytest.mark.processes
def test_a_process_that_fails_is_named_with_its_last_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "neither")
    assert refused("--processes", 2, "--steps", 1, "--out", tmp_path) != 0
    captured = capsys.readouterr()
    assert "neither" in captured.out + captured.err


@pytest.mark.slow
def test_one_device_sends_nothing(tmp_path):
    found = figures(here, tmp_path, "--platform", "auto", "--steps", 2, "--devices", 1)
    assert found["largest_relative_difference"] == 0
    assert found["wire_bytes_per_step"] == 0
    assert found["requested"]["all_reduces"] == found["compiled"]["all_reduces"] == 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures(tmp_path, over_three):
    again = figures(forked, tmp_path, *THREE)
    own = dict.fromkeys(("seconds", "seconds_one_device", "picture"))
    assert {**again, **own} == {**over_three, **own}


def test_another_seed_gives_other_batches_and_parameters():
    data = digits.load()
    one, again, other = (next(digits.batches(data, 256, 1, seed)) for seed in (0, 0, 1))
    assert all(map(np.array_equal, one, again))
    assert not np.array_equal(one[1], other[1])
    kernels = [network.initial(seed)["hidden"]["kernel"] for seed in (0, 0, 1)]
    assert np.array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


def test_no_image_is_trained_on_and_tested():
    data = digits.load()
    assert data.images.shape == (digits.TRAINING_IMAGES, 8, 8)
    assert data.test_images.shape == (digits.TEST_IMAGES, 8, 8)
    seen = {image.tobytes() for image in data.images}
    assert not any(image.tobytes() in seen for image in data.test_images)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--devices 0", "--devices must be at least 1; got 0"),
        ("--processes 0", "--processes must be at least 1; got 0"),
        ("--processes 2 --platform gpu", "--processes starts CPU processes; leave --platform out"),
        ("--processes 20 --devices 90", "--processes 20 --devices 90: there are 1437 images"),
        ("--devices 5000", "--devices 5000: there are 1437 images to train on"),
        ("--steps 0", "--steps must be at least 1; got 0"),
        ("--seed -1", "--seed must be at least 0; got -1"),
        ("--bytes-per-pack -5", "must be a non-negative integer number of bytes"),
        ("--bytes-per-pack many", "argument --bytes-per-pack: invalid int value: 'many'"),
        ("--platform mars", "argument --platform: invalid choice: 'mars'"),
        ("--platform tpu", "JAX finds no such device here, only cpu. Install JAX for tpu"),
        ("--platform auto --devices 9", "--devices 9: this machine has 8 cpu devices. Ask for"),
    ],
)
def test_flags_that_cannot_be_met(flags, words, tmp_path, capsys):
    assert refused("--out", tmp_path, *flags.split()) == 2
    printed, complaint = capsys.readouterr()
    assert printed == ""
    assert words in complaint


@pytest.mark.parametrize("flag", ["--out", "--json"])
def test_a_place_that_cannot_be_written(flag, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert refused("--out", tmp_path, flag, tmp_path / "file" / "below") == 2
    complaint = capsys.readouterr().err
    assert f"{flag}: cannot write {tmp_path / 'file' / 'below'}" in complaint
    assert "name a place that can be written" in complaint
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_extras_that_are_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "optax", None)
    assert refused() == 2
    assert capsys.readouterr().err == (
        "jaxcoll demo: needs rich, optax, which are not installed: "
        "pip install 'jaxcoll[cli,train]'\n"
    )


def test_no_command():
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_bars_that_are_missed():
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Outcome))
    fields |= {"steps": STEPS, "test_accuracy": 0.5, "largest_relative_difference": 1e-3}
    outcome = Outcome(**fields)
    assert outcome.shortfalls() == [
        "test accuracy 0.5000 is below 0.96",
        "the parameters differ from one device's by 1.0e-03, more than 1e-04",
    ]
    good = {"test_accuracy": 0.97, "largest_relative_difference": 1e-5}
    assert len(dataclasses.replace(outcome, steps=STEPS - 1).shortfalls()) == 1
    assert dataclasses.replace(outcome, **good).shortfalls() == []
    nan = {**good, "largest_relative_difference": float("nan")}
    assert dataclasses.replace(outcome, **nan).shortfalls()


def test_a_batch_divides_and_leaves_have_the_names_that_people_use():
    assert [digits.batch_size(n) for n in (1, 3, 7, 8, 300)] == [256, 255, 259, 256, 300]
    assert [picture._name(path) for path in (".grads['conv1']['bias']", ".value")] == [
        "conv1 bias",
        "loss",
    ]
