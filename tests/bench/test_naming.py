"""What is written on the command line, and what it means."""

import math

import pytest

import jaxcoll as jc
from jaxcoll.bench.chart import _short, _spread
from jaxcoll.bench.naming import bytes_of, duration, options_of, significant, sizes_of, spelled
from jaxcoll.bench.table import _bytes
from jaxcoll.bench.timing import estimate, interleaved, ratio
from jaxcoll.bench.workloads import TREES, array_of, tree_of


def test_algorithms():
    options = {name: options_of(name) for name in ("auto", "auto@2KiB", "ring", "nccl/rechd@all")}
    assert [o.algorithm for o in options.values()] == [
        None,
        None,
        "ring",
        "native/halving_doubling",
    ]
    assert [o.bytes_per_pack for o in options.values()] == [0, 2048, 0, 1 << 60]
    assert options_of("halving-doubling") == options_of("halving_doubling")
    assert options_of("auto+int8") == jc.CommunicationOptions(compression=jc.Int8())
    coded = options_of("shuffle/shuffle+int8@4MiB")
    assert (coded.algorithm, coded.bytes_per_pack) == ("shuffle/shuffle", 4 << 20)
    assert coded.compression == jc.Int8()
    assert options_of("auto+int8+feedback@all") == options_of("auto+int8@all")
    with pytest.raises(ValueError, match="compression.*int9"):
        options_of("auto+int9")
    with pytest.raises(
        ValueError,
        match=r"no algorithm 'magic': choose per-leaf, auto, reproducible, native, ring, ",
    ):
        options_of("magic")
    with pytest.raises(ValueError, match=r"expected a size such as 1KiB, 4MiB or 1GiB; got 'much'"):
        options_of("ring@much")


def test_sizes():
    assert [spelled(s) for s in sizes_of("1KiB:8KiB")] == ["1KiB", "2KiB", "4KiB", "8KiB"]
    assert [spelled(s) for s in sizes_of("1KiB:1MiB:32")] == ["1KiB", "32KiB", "1MiB"]
    assert sizes_of("1MiB") == [1 << 20]
    assert [bytes_of(text) for text in ("4MiB", "1.5KiB", "512")] == [4 << 20, 1536, 512]
    assert sizes_of("100:1000:3") == [100, 300, 900]
    assert len(sizes_of("1KiB:1GiB")) == 21
    for size in (1, 999, 1024, 5 << 20, 3 << 29):
        assert bytes_of(spelled(size)) == size
    for bad in ("2KiB:1KiB", "1KiB:2KiB:1", "1KiB:2KiB:2:2", "1KiB:2KiB:x"):
        with pytest.raises(
            ValueError, match=r"--sizes: expected SIZE, FIRST:LAST or FIRST:LAST:FACTOR"
        ):
            sizes_of(bad)
    for bad in ("", "0", "1KB", "-1KiB"):
        with pytest.raises(ValueError, match="expected a size such as"):
            sizes_of(bad)


def test_the_trees_have_the_sizes_they_are_known_for():
    count = {name: (len(s()), sum(map(math.prod, s().values()))) for name, s in TREES.items()}
    assert count["resnet50"] == (161, 25_557_032)
    assert count["gpt2-small"] == (148, 124_439_808)
    assert count["many-small"][0] == 1000
    assert count["one-big"] == (1, 1 << 24)
    assert count["200x1KiB"] == (200, 200 * 256)
    assert tree_of("resnet50", "bfloat16").nbytes == 2 * 25_557_032


def test_a_tree_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('[{"shape": [2, 3], "dtype": "int32"}, {"shape": []}]')
    found = tree_of(str(file), "float16")
    assert [(x.shape, x.dtype.name) for x in found.leaves] == [((2, 3), "int32"), ((), "float16")]
    assert (found.name, found.nbytes, *found.tree) == ("mine", 26, "0", "1")
    for bad in ("[", "{}", "[]", '[{"dtype": "f4"}]', '[{"shape": 3}]', '[{"shape": [-1]}]',
                '[{"shape": [1.5]}]', '[{"shape": [], "dtype": "x"}]',
                '[{"shape": [], "name": "a"}, {"shape": [], "name": "a"}]', "[1]"):  # fmt: skip
        file.write_text(bad)
        with pytest.raises(ValueError, match="is not a tree: expected a list of"):
            tree_of(str(file), "float32")
    with pytest.raises(ValueError, match=r"missing.json is not a tree.*FileNotFoundError"):
        tree_of("missing.json", "float32")
    with pytest.raises(ValueError, match="no tree 'vgg': choose resnet50"):
        tree_of("vgg", "float32")


def test_an_array_of_a_size():
    found = array_of(4096, "bfloat16")
    assert (found.name, found.leaves[0].shape, found.nbytes) == ("4KiB", (2048,), 4096)
    with pytest.raises(
        ValueError, match="--sizes: 6 bytes are not a whole number of elements of float32"
    ):
        array_of(6, "float32")
    with pytest.raises(ValueError, match="no dtype 'float33': expected one such as float32"):
        array_of(4, "float33")
    with pytest.raises(ValueError, match="JAX holds int64 as int32: ask for that, or set JAX_EN"):
        array_of(8, "int64")  # whose bytes no device would send


def test_rounds_are_reversed_every_other_time_and_ratios_are_paired():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert len(list(interleaved(calls, 3))) == 3
    assert order == list("abbaab")
    assert ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]).median == 2.0
    assert str(ratio([2.0, 2.0, 4.0], [1.0, 2.0, 2.0])) == "2 [1, 2]"
    assert str(estimate([2.0, 1.0, 2.0])) == "2 [1, 2]"
    assert ratio([1.0], [0.0]) is None


def test_reproducible_is_spelled_like_an_algorithm():
    assert options_of("reproducible@all").reproducible
    assert options_of("reproducible").algorithm is None


@pytest.mark.parametrize(
    ("written", "numbers", "expected"),
    [
        (spelled, (1024, 1536, 1000, 4 << 20), "1KiB 1.5KiB 1000B 4MiB"),
        (duration, (0.000123, 0.0123, 0.9996, 1.5), "123_µs 12.3_ms 1,000_ms 1.50_s"),
        (significant, (1234.5, 12.34, 0.01234, 0.0), "1,234 12.3 0.0123 0"),
        (_bytes, (None, 0, 704, 43_690, 153_342_192), "– 0 704 43.7k 153M"),
        (_short, (0.0341, 1.038, 12.34, 140.0), "0.034 1.04 12.3 140"),
    ],
)
def test_figures_as_people_read_them(written, numbers, expected):
    assert [written(number).replace(" ", "_") for number in numbers] == expected.split()


def test_names_beside_curves_keep_their_distance():
    assert _spread([0.5, 0.5, 0.5, 1.0], 0.1) == pytest.approx([0.4, 0.5, 0.6, 1.0])
