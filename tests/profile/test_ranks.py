"""`jaxcoll inspect --run` over several processes: one table, and the rank that comes late."""

import functools
import json
import re
from pathlib import Path

import forks
import pytest

from jaxcoll._job.key_value import LocalKeys
from jaxcoll._report.profile import measure

pytestmark = pytest.mark.processes

JOB = Path(__file__).parents[2] / "benchmarks/ranks/late_job.py"


def inspect(launch, folder, n, *words, measure=20):
    """Run the job in n processes, and return what it printed and the report."""
    own = ["-m", "jaxcoll", "inspect", "--json", folder / "report.json"]
    own += ["--measure", measure] if measure else []
    done = launch("-n", n, *own, "--run", JOB, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((folder / "report.json").read_text())


def test_only_late_rank_is_named(launched, tmp_path):
    done, report = inspect(launched, tmp_path, 4, "--form", "shift", "--late", 3, "--ms", 100)
    assert len(report["late"]) == 1, (report["late"], done.stderr)
    assert report["late"][0].startswith("jit_step: rank 3 arrives late: last at ")
    (measured,) = (program["measured"] for program in report["programs"])
    assert measured["ranks"] == [*range(4)]
    assert measured["runs"] >= 5
    (last, _), *_ = measured["late"]
    assert 0.05 < last["seconds"] < 1
    assert {len(t["waiting"]) for t in measured["times"]} == {4}
    assert len(measured["lanes"]) == 4
    # One table, of the first rank.
    assert re.search(r"^\[0\] program ", done.stderr, re.M)
    assert not re.search(r"^\[[1-9]\] program ", done.stderr, re.M)
    assert {f"[{k}] ended {k}" for k in range(4)} <= set(done.stdout.splitlines())


def test_cached_ranks_are_compared(tmp_path):
    # Of the two the first alone writes what it compiles, so later it loads what the other compiles.
    (tmp_path / "cache").mkdir()
    cached = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    launch = functools.partial(
        forks.with_jaxcoll().run, forks.COMMAND, "jaxcoll", "launch", cwd=tmp_path, timeout=200,
        **cached,
    )  # fmt: skip
    inspect(launch, tmp_path, 2, "--seconds", 0.01, measure=0)
    assert list((tmp_path / "cache").iterdir())
    _, report = inspect(launch, tmp_path, 2, "--late", 1, "--ms", 100)
    assert [text.split(":")[1] for text in report["late"]] == [" rank 1 arrives late"]


def test_silent_rank_is_named(monkeypatch):
    keys = LocalKeys(processes=3)
    write = keys.set
    keys.set = lambda key, value: (write(key, value), write(key.replace("/0", "/2"), value))
    monkeypatch.setattr(measure, "store", lambda: keys)
    monkeypatch.setattr(measure, "_ANSWER_SECONDS", 0.2)
    own = {"notes": ["x"]}
    found = measure.gather(own, "name", everywhere=False)
    assert found == ({0: own, 2: own}, "rank 1 did not answer within 0.2 s.")
