"""`jaxcoll demo`: that it trains one model, and what it shows."""

import re

import jax
import numpy as np
import pytest

from jaxcoll._compat.settings import numerics
from jaxcoll.cli import demo
from jaxcoll.cli.main import main

pytestmark = pytest.mark.product
BYTES = 134_956  # 33,738 parameters and the loss, in float32


def figure(printed, words):
    return float(re.search(rf"{words} ([\d.e-]+)", printed)[1])


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_run_meets_its_bars(monkeypatch, capsys):
    """A tenth of the steps, which reach less: 600 are what the command does by itself."""
    before = numerics()
    monkeypatch.setattr(demo, "STEPS", 60)
    monkeypatch.setattr(demo, "LEAST_ACCURACY", 0.8)
    assert main(["demo", "--steps", "60", "--platform", "auto", "--devices", "8"]) == 0
    printed = capsys.readouterr().out
    assert figure(printed, "test accuracy") >= 0.8
    assert 0 < figure(printed, "one device's parameters:") <= 1e-4
    assert "8 devices in 1 process, 60 steps of 256 images" in printed
    assert f"7 leaves, {BYTES:,} bytes a replica" in printed
    assert "['first']['kernel']" in printed
    assert "requested 7 all-reduces, 135.0 kB; compiled: 1 all-reduce" in printed
    monkeypatch.setattr(demo, "STEPS", 2)
    assert main(["demo", "--steps", "2", "--platform", "auto", "--devices", "2"]) == 1
    monkeypatch.setattr(demo, "STEPS", 600)
    monkeypatch.setattr(demo, "MOST_DIFFERENCE", 0.0)
    assert main(["demo", "--steps", "2", "--platform", "auto", "--devices", "2"]) == 1
    assert numerics() == before


@pytest.mark.processes
def test_processes_train_the_same_model(launched):
    done = launched("-n", "2", "-m", "jaxcoll", "demo", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "[0] 2 devices in 2 processes" in done.stdout
    assert "1 array" in done.stdout, "the leaves are one pack"
    assert figure(done.stdout, "one device's parameters:") < 1e-5


def test_seed_fixes_batches_and_parameters():
    data = demo.load()
    one, again, other = (next(demo.batches(data, 256, 1, seed)) for seed in (0, 0, 1))
    assert all(map(np.array_equal, one, again))
    assert not np.array_equal(one[1], other[1])
    seen = {image.tobytes() for image in data.images}
    assert not any(image.tobytes() in seen for image in data.test_images)


def test_missing_extras_are_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    words = "needs optax, sklearn, not installed here: pip install 'jaxcoll[train]'"
    assert words in capsys.readouterr().err
