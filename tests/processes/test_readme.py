"""The elastic run of the README, of which a worker dies."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.product, pytest.mark.processes]
README = (Path(__file__).parents[2] / "README.md").read_text("utf8")

PREAMBLE = """\
import os, signal
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import numpy as np
import jaxcoll as jc
from jaxcoll._train.batches import Batches

share = Batches.share

def share_or_die(self, step, worker, workers):
    if step == 5 and os.environ["JAXCOLL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return share(self, step, worker, workers)

Batches.share = share_or_die
"""


def take(pattern):
    return re.search(pattern, README, re.DOTALL | re.MULTILINE)[0]


def test_elastic_example_survives_a_death(launched, tmp_path, monkeypatch):
    start, *lines = take(r"^jc\.initialize\(\)  # first.*?1000\)").splitlines()
    lines = [line.replace("1000", "10") for line in lines]
    function = take(r"^def loss\(.*?(?=\n\n)")
    data = take(r"^x = np\.random.*?y = [^\n]*")
    params = take(r"^params = \{[^\n]*")
    step = take(r"^@jc\.data_parallel\n.*?(?=\n\n)")
    script = tmp_path / "train.py"
    parts = [PREAMBLE, start, function, data, params, step, *lines, "print('DONE')"]
    script.write_text("\n".join(parts))
    monkeypatch.chdir(tmp_path)
    done = launched("-n", 4, "--keep-going", "--timeout-seconds", 120, script)
    finished = re.findall(r"^\[(\d)\] DONE", done.stdout, re.MULTILINE)
    assert (sorted(finished), done.returncode) == (["0", "2", "3"], 0), done
    assert "A batch of 64 rows does not divide over 3 replicas" in done.stderr
