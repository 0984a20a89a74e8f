"""Every benchmark at a tiny size, by the function that its command runs, and its arithmetic."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import all_reduce, late_rank, on_one_gpu, overlap, regret, simulation
from benchmarks.counters import transmitted_bytes
from benchmarks.ranks.data import BLOCK, Exact, block, leaf
from jaxcoll.cli.bench import BASELINE
from jaxcoll.cli.flags import parse_options

pytestmark = pytest.mark.product
PNG = b"\x89PNG"


@pytest.fixture
def tree(tmp_path):
    """The file of twenty leaves of 1 KiB."""
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([{"shape": [256], "dtype": "float32"}] * 20))
    return str(file)


@pytest.mark.processes
def test_all_reduce(tmp_path, tree):
    file, picture = tmp_path / "lines.json", tmp_path / "bench.png"
    lines = all_reduce.main([
        "--processes", "2", "--tree", tree, "--sizes", "1MiB", "--rounds", "2",
        "--algorithms", "auto,ring", "--json", str(file), "--plot", str(picture),
    ])  # fmt: skip
    assert [json.loads(line)["algorithm"] for line in file.read_text().splitlines()] == [
        line["algorithm"] for line in lines
    ]
    assert picture.read_bytes().startswith(PNG)
    for line in lines:
        assert (line["processes"], line["devices"]) == (2, 2)
        assert line["error"] < 1e-6
        if line["is_size"] and line["socket_bytes"] is not None:
            # The compiler's count and the kernel's, among whose bytes may be those of others.
            assert line["socket_bytes"] > 0.99 * line["wire_bytes"], line["algorithm"]


@pytest.mark.processes
def test_overlap(capsys, tree):
    (row,) = overlap.main(["--tree", tree, "--parts", "3", "--rounds", "2"])
    assert (row.processes, row.parts, row.bytes) == (2, 3, 20480)
    assert "exposed" in capsys.readouterr().out


@pytest.mark.processes
def test_late_rank(tmp_path, capsys):
    file = tmp_path / "late.jsonl"
    rows = late_rank.main([
        "--worlds", "2x2", "--forms", "ring", "--where", "middle", "--ms", "100", "--windows", "1",
        "--runs", "12", "--width", "16", "--json", str(file),
    ])  # fmt: skip
    (case,) = map(json.loads, file.read_text().splitlines())
    assert (case["processes"], case["form"], case["windows"][0]["late"]) == (2, "ring", 1)
    assert list(case["windows"][0]["named"]) == ["1"]
    assert rows[0].row()[0] in capsys.readouterr().out


def test_windows_count_named_ranks():
    windows = [late_rank.Window(1, named, runs, 0.1) for named, runs in (
        ({1: 0.022}, 20), ({1: 0.016, 0: 0.001}, 20), ({0: 0.002}, 20), ({}, 20), ({}, 3),
    )]  # fmt: skip
    case = late_rank.Case(2, 1, "psum", "before", 20.0)
    row = late_rank.Found(case, windows).row()
    assert row[1:6] == ["4", "2", "2", "15.0%", "-20% … +10%"], "a window of 3 runs tells nothing"
    nobody = late_rank.Found(case._replace(ms=0.0), [late_rank.Window(-1, {0: 0.002}, 20, 0.1)])
    assert nobody.row()[1:5] == ["1", "–", "1", "–"]


def test_simulation(tmp_path, capsys, tree):
    picture = tmp_path / "a.png"
    words = ["--tree", tree, "--algorithms", "native,native/native,ring"]
    lines = simulation.main([*words, "--plot", str(picture)])
    assert {name: len(line) for name, line in lines.items()} == {
        "native": 14, "native/native": 14, "ring": 14,
    }  # fmt: skip
    assert lines["native"][2] == lines["native/native"][2], "on one host"
    assert lines["ring"][-1] > lines["native"][-1]
    assert picture.read_bytes().startswith(PNG)
    assert "Predicted, not measured, from" in capsys.readouterr().out


@pytest.mark.processes
def test_one_gpu_on_cpu(tmp_path, monkeypatch):
    file = tmp_path / "one.json"
    monkeypatch.setattr(on_one_gpu, "AHEAD", on_one_gpu.AHEAD[:1])  # each takes a Python of its own
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        written = on_one_gpu.main(["--tiny", "--json", str(file)])
    assert json.loads(file.read_text()) == json.loads(json.dumps(written))
    assert (written["ran_on"]["platform"], written["ran_on"]["is_gpu"]) == ("cpu", False)
    sections = written["sections"]
    assert [name for name in sections if "reason" in sections[name]] == []
    for name in ("packing", "codecs"):
        times = sections[name]["times"]
        assert {"one copy", "one copy again"} < times.keys(), "the baseline twice"
        assert all(times[way]["GB/s"] > 0 for way in times)
    assert {f"{way} {format}" for way in ("encode", "decode") for format in on_one_gpu.FORMATS} < (
        sections["codecs"]["times"].keys()
    )
    calls = sections["step"]["leaves"]["10"]["until it returns"]
    assert list(calls) == ["jit", "jit again", "data_parallel"]
    compiled = sections["programs"][on_one_gpu.PROGRAMS[0]]["compiled"]
    assert compiled["client"]["kinds"] == {"all-reduce": 1}
    assert compiled["client"]["packs"] == [16]
    for topology in on_one_gpu.AHEAD:
        assert (
            compiled[topology].keys() >= {"kinds"}
            or "needs the compiler" in (compiled[topology]["reason"])
        )


CASE = regret.Case(0, 2, 4, "1gbit", (100, 200))
AUTO, TWIN = regret.AUTO, regret.TWIN


def test_regret_cases_cover_worlds():
    cases = regret.cases(200, seed=0)
    assert cases[:5] == regret.cases(5, seed=0) != regret.cases(5, seed=1)
    assert {(case.hosts, case.rate) for case in cases} == {
        (1, "none"), *((2, rate) for rate in regret.RATES),
    }  # fmt: skip
    assert {case.processes for case in cases} == set(regret.PROCESSES)
    for case in cases:
        assert 0.5 * regret.FEWEST_BYTES < case.nbytes < 1.1 * regret.MOST_BYTES
        names = regret.candidates(case)
        assert all(name == BASELINE or parse_options(name) for name in names)
        assert any("/" in name for name in names) == (case.processes > case.hosts > 1)


def test_regret_picks_in_other_rounds():
    seconds = {AUTO: (3.0,) * 4, TWIN: (1.0,) * 4, "a": (1.0, 3.0, 1.0, 3.0), "b": (4.0,) * 4}
    picked = regret.Regret(CASE, seconds)
    assert picked.ratio == pytest.approx(math.sqrt(2 / 3 * 2 / 1)), "2 is the median of both twins"
    assert (picked.twin, picked.best) == (3.0, "a")
    same = {AUTO: (2.0,) * 4, TWIN: (2.0,) * 4, "b": (4.0,) * 4}
    assert regret.Regret(CASE, same, ("a",)).ratio == 1.0, "a is the same program"
    assert regret.Regret(CASE, same).ratio == 0.5


def test_written_regret_is_kept(tmp_path, capsys):
    seconds = {AUTO: (1.5, 1.5), TWIN: (1.5, 1.5), "native@all": (1.0, 1.0)}
    known = [regret.Regret(case, seconds) for case in regret.cases(3, seed=7)]
    file = tmp_path / "regret.jsonl"
    file.write_text("".join(json.dumps(case.to_dict()) + "\n" for case in known))
    assert regret.main(["--cases", "2", "--seed", "7", "--json", str(file)]) == known[:2]
    assert "2 cases: the automatic choice takes 1.500 times as long" in capsys.readouterr().out


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_parts_are_even(sizes, count):
    leaves = tuple(jax.ShapeDtypeStruct((n,), "float32") for n in sizes)
    parts = overlap.parts_of(all_reduce.Workload("tree", leaves), count)
    assert [i for first, stop in parts for i in range(first, stop)] == list(range(len(sizes)))
    assert len(parts) <= count
    even = sum(sizes) / count
    assert all(sum(sizes[first:stop]) <= even + 2 * max(sizes) for first, stop in parts)


def test_exact_sum():
    blocks = [block(replica) for replica in range(3)]
    assert not np.array_equal(*blocks[:2])
    for mean, shape in itertools.product((False, True), ((), (3, 5), (BLOCK + 7,))):
        exact = Exact(blocks, mean)
        for index in (0, 1000):
            rows = [leaf(values, index, shape).astype(np.float64) for values in blocks]
            total = np.array(np.sum(rows, axis=0) / (3 if mean else 1))
            assert exact.error(index, total) < 1e-15
            assert exact.error(index + 1, total) > 0.01
            total.flat[-1] += 1
            assert exact.error(index, total) > 0.01
            total.flat[0] = np.nan
            assert exact.error(index, total) == np.inf


def test_transmitted_bytes():
    text = "    lo: 5000 12 0 0 0 0 0 0 4000 12\n  eth0:88888888 34 0 0 0 0 0 0 77 34\n"
    assert [transmitted_bytes(text, name) for name in ("lo", "eth0")] == [4000, 77]
    with pytest.raises(ValueError, match=r"expected the text of /proc/net/dev with a line for 'lo"):
        transmitted_bytes("lo: 1 2 3", "lo")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("call_cost 2 2 10", "| 10 |"),
        ("compile_cost 1 1:2", "| 1 over 2 |"),
        ("watch_cost 1 2 4", "a call of 4 KiB over 2 processes takes"),
        ("hang_cost 6", "watched ÷ unwatched"),
    ],
)
def test_costs(command, shown):
    words = [sys.executable, "-m", *f"benchmarks.{command}".split()]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=200)
    assert shown in done.stdout, done.stderr
