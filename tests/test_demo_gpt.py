"""`jaxcoll demo gpt`: every way to exchange gradients trains the model that one device trains."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxcoll.cli.main import main
from jaxcoll.demos import gpt, gpt_text
from jaxcoll.demos.gpt_training import MODES


def figures(tmp_path, *flags):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxcoll", "demo", "gpt", "--out", str(tmp_path),
         "--json", str(tmp_path / "gpt.json"), *flags],
        env={**os.environ, "XLA_FLAGS": "", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert (tmp_path / "gpt.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((tmp_path / "gpt.json").read_text()), done.stdout


def test_every_mode_is_one_model_and_sends_what_it_says(tmp_path):
    found, printed = figures(tmp_path, "--steps", "8")
    assert list(found["modes"]) == list(MODES)
    assert found["losses_one_device"][-1] < found["losses_one_device"][0]
    for name, mode in found["modes"].items():
        assert mode["losses"] == pytest.approx(found["losses_one_device"], rel=1e-5), name
        assert name in printed
    collectives = {name: mode["collectives"] for name, mode in found["modes"].items()}
    assert collectives["plain"] == collectives["accumulate"] == 1
    assert collectives["overlap"] > 1, "packs stay apart"
    assert collectives["sync"] == gpt.LAYERS + 1, "one a layer, in the loop, and one for the rest"
    plain = found["modes"]["plain"]
    for mode in found["modes"].values():
        assert mode["wire_bytes_per_step"] == pytest.approx(plain["wire_bytes_per_step"], rel=0.02)
    sharded = found["modes"]["sharded"]["state_bytes"]
    assert sharded / found["state_bytes_one_device"] <= 0.13
    assert found["shortfalls"] == []


@pytest.mark.slow
def test_a_full_run_over_a_prime_number_of_devices(tmp_path):
    found, _ = figures(tmp_path, "--devices", "7", "--steps", "20")
    assert found["texts"] % 7 == 0
    assert max(m["largest_relative_difference"] for m in found["modes"].values()) < 1e-4


def test_the_text_is_the_standard_librarys_and_batches_are_the_same_for_the_same_seed():
    text = gpt_text.load()
    assert b"import" in bytes(text)
    one, again, other = (next(gpt_text.batches(text, 4, gpt.LENGTH, 1, seed)) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert bytes(one[0].astype(np.uint8)) in bytes(text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["gpt", "--modes", "plain,magic"],
            "--modes: no 'magic'; choose from plain, overlap, sync",
        ),
        (["gpt", "--bytes-per-pack", "4"], "--bytes-per-pack is for digits; leave it out"),
        (["--modes", "plain"], "--modes is for gpt; leave it out"),
        (["gpt", "--steps", "0"], "--steps must be at least 1; got 0"),
    ],
)
def test_flags_that_cannot_be_met(flags, words, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err
