"""The benchmark measures what it says, over worlds that it starts itself."""

import json
import math
import subprocess
import sys

import pytest

from jaxcoll.bench.timing import interleaved, ratio
from jaxcoll.bench.trees import TREES, tree_of


def bench(*flags, timeout=240):
    return subprocess.run(
        [sys.executable, "-m", "jaxcoll", "bench", *flags],
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def test_the_trees_have_the_sizes_they_are_known_for():
    count = {name: (len(s()), sum(map(math.prod, s()))) for name, s in TREES.items()}
    assert count["resnet50"] == (161, 25_557_032)
    assert count["gpt2-small"] == (148, 124_439_808)
    assert count["many-small"][0] == 1000
    assert count["one-big"] == (1, 1 << 24)
    assert count["200x1KiB"] == (200, 200 * 256)


def test_a_tree_from_a_file(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text('[{"shape": [2, 3], "dtype": "int32"}, {"shape": []}]')
    found = tree_of(str(file), "float16")
    assert [(x.shape, x.dtype.name) for x in found] == [((2, 3), "int32"), ((), "float16")]
    for bad in ("[", "{}", '[{"dtype": "f4"}]', '[{"shape": 3}]', '[{"shape": [], "dtype": "x"}]'):
        file.write_text(bad)
        with pytest.raises(ValueError, match="is no tree: expected a list of"):
            tree_of(str(file), "float32")
    with pytest.raises(ValueError, match=r"missing.json is no tree.*FileNotFoundError"):
        tree_of("missing.json", "float32")
    with pytest.raises(ValueError, match="no tree 'vgg': choose resnet50"):
        tree_of("vgg", "float32")


def test_rounds_are_reversed_every_other_time_and_ratios_are_paired():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert len(list(interleaved(calls, 3))) == 3
    assert order == list("abbaab")
    assert ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]).median == 2.0


def test_one_line_a_result(tmp_path):
    file = tmp_path / "lines.json"
    tree = tmp_path / "tree.json"
    tree.write_text('[{"shape": [100]}, {"shape": [3]}]')
    done = bench("--devices", "3", "--tree", str(tree), "--variants", "auto,ring", "--rounds", "3",
                 "--json", str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [x["variant"] for x in lines] == ["per-leaf", "per-leaf again", "auto", "ring"]
    for x in lines:
        assert (x["devices"], x["processes"], x["bytes"]) == (3, 1, 412)
        assert x["algbw"] == pytest.approx(412 / x["seconds"] / 1e9)
        assert x["busbw"] == pytest.approx(x["algbw"] * 4 / 3)
        assert x["error"] < 3e-7
    assert "halving" not in done.stdout
    assert "per-leaf again" in done.stdout
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


@pytest.mark.processes
def test_starts_its_own_processes(tmp_path):
    file = tmp_path / "lines.json"
    tree = tmp_path / "tree.json"
    tree.write_text('[{"shape": [100]}, {"shape": [3]}]')
    done = bench("--processes", "2", "--tree", str(tree), "--rounds", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert {json.loads(x)["processes"] for x in file.read_text().splitlines()} == {2}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tree", "vgg"], "no tree 'vgg': choose resnet50"),
        (["--variants", "magic", "--tree", "200x1KiB"], "no variant 'magic': choose from per-leaf"),
        (["--processes", "1"], "--processes must be at least 2; got 1"),
        (["--devices", "0"], "--devices must be at least 1; got 0"),
        (["--rounds", "0"], "--rounds must be at least 1; got 0"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(flags, words):
    done = bench(*flags)
    assert done.returncode == 2
    assert done.stderr.startswith("jaxcoll bench: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
