"""`jaxcoll bench`: what is written on the command line, and what it measures."""

import json
import math

import pytest

import jaxcoll as jc
from jaxcoll.cli import bench, flags
from jaxcoll.cli.main import main


def test_algorithms():
    options = {n: flags.parse_options(n) for n in ("auto", "auto@2KiB", "ring", "nccl/rechd@all")}
    assert [o.algorithm for o in options.values()] == [
        *(None, None, "ring", "native/halving_doubling")
    ]
    assert [o.bytes_per_pack for o in options.values()] == [0, 2048, 0, 1 << 60]
    coded = flags.parse_options("shuffle/shuffle+int8@4MiB")
    assert (coded.algorithm, coded.bytes_per_pack) == ("shuffle/shuffle", 4 << 20)
    assert coded.compression == jc.compression.Int8()
    assert flags.parse_options("reproducible@all").reproducible


def test_sizes():
    assert bench.parse_sizes("1KiB:8KiB") == {f"{2**k}KiB": 1024 << k for k in range(4)}
    assert [*bench.parse_sizes("1KiB:1MiB:32").values()] == [1 << 10, 1 << 15, 1 << 20]
    assert bench.parse_sizes("1MiB") == {"1MiB": 1 << 20}
    assert [flags.parse_bytes(text) for text in ("4MiB", "1.5KiB", "512")] == [4 << 20, 1536, 512]
    assert len(bench.parse_sizes("1KiB:1GiB")) == 21
    for size in (1, 999, 1024, 5 << 20, 3 << 29):
        assert flags.parse_bytes(bench.spell_size(size)) == size
    for bad in ("2KiB:1KiB", "1KiB:2KiB:1", "1KiB:2KiB:2:2", "1KiB:2KiB:x"):
        with pytest.raises(ValueError, match=r"--sizes: expected SIZE, FIRST:LAST or FIRST:LAST:F"):
            bench.parse_sizes(bad)


def test_trees_have_known_sizes():
    count = {name: (len(s()), sum(map(math.prod, s().values()))) for name, s in flags.TREES.items()}
    assert count["resnet50"] == (161, 25_557_032)
    assert count["gpt2-small"] == (148, 124_439_808)
    assert (count["many-small"][0], count["200x1KiB"]) == (1000, (200, 200 * 256))


def test_a_tree_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('[{"shape": [2, 3], "dtype": "int32"}, {"shape": [], "name": "b"}]')
    tree = flags.read_tree(str(file), "float16")
    assert {k: (x.shape, x.dtype.name) for k, x in tree.items()} == {
        "0": ((2, 3), "int32"), "b": ((), "float16"),
    }  # fmt: skip
    for bad in ("[", "{}", "[]", '[{"dtype": "f4"}]', '[{"shape": 3}]', '[{"shape": [1.5]}]',
                '[{"shape": [-1]}]', '[{"shape": [], "dtype": "x"}]', "[1]",
                '[{"shape": [], "name": "b"}, {"shape": [2], "name": "b"}]'):  # fmt: skip
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"mine\.json: expected one of resnet50.*or a file of"):
            flags.read_tree(str(file), "float32")


def test_rounds_alternate_and_ratios_pair():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert len(list(bench.interleave(calls, 3))) == 3
    assert order == list("abbaab")
    assert bench.ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]).median == 2.0
    assert str(bench.ratio([2.0, 2.0, 4.0], [1.0, 2.0, 2.0])) == "2 [1, 2]"


def check(lines, workloads, algorithms, devices):
    names = [bench.BASELINE, bench.BASELINE + bench.AGAIN, *algorithms]
    assert [(x["workload"], x["algorithm"]) for x in lines] == [
        (workload, name) for workload in workloads for name in names
    ]
    for x in lines:
        assert x["devices"] == devices
        assert x["algbw"] == pytest.approx(x["bytes"] / x["seconds"]["median"] / 1e9)
        assert x["busbw"] == pytest.approx(x["algbw"] * 2 * (devices - 1) / devices)
        assert x["error"] < (3e-2 if "int8" in x["algorithm"] else 1e-2)
        assert x["compile_seconds"] > 0


@pytest.mark.product
def test_lines_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SHORTEST", 1e-4)
    tree = tmp_path / "mine.json"
    tree.write_text('[{"shape": [100]}, {"shape": [3], "dtype": "bfloat16"}]')
    words = ["bench", "--platform", "auto", "--devices", "3", "--tree", str(tree), "--rounds", "2",
             "--sizes", "1KiB:2KiB", "--algorithms", "auto,ring@all,auto+int8"]  # fmt: skip
    assert main([*words, "--json", "-"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    check(lines, [str(tree), "1KiB", "2KiB"], ["auto", "ring@all", "auto+int8"], 3)
    assert [x["operands"] for x in lines[:4]] == [2, 2, 2, 8]
    text = bench.format_lines(lines)
    assert text.startswith("mean over 3 devices (cpu) of 1 process, JAX ")
    assert len(text.splitlines()) == 2 + len(lines)


@pytest.mark.product
@pytest.mark.processes
@pytest.mark.usefixtures("forked")
def test_one_process_shows(tmp_path, capsys):
    file = tmp_path / "lines.json"
    words = ["bench", "--processes", "2", "--devices", "2", "--sizes", "4KiB", "--rounds", "2"]
    assert main([*words, "--algorithms", "ring/halving_doubling", "--json", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    check(lines, ["4KiB"], ["ring/halving_doubling"], 4)
    assert {x["processes"] for x in lines} == {2}
    assert capsys.readouterr().out.count("mean over 4 devices (cpu) of 2 processes") == 1
