"""Several real processes over Gloo: the same laws where something leaves the process."""

import sys
from pathlib import Path

import pytest
from processes.ranks import results

pytestmark = pytest.mark.processes
WORLD = Path(__file__).with_name("world.py")


def in_world(what, processes, env=None):
    """What each process found, by the names in `what`, which run one after another."""
    return results([sys.executable, WORLD, *what.split()], processes, timeout=180, env=env)


@pytest.fixture(scope="module")
def pair():
    """One world of two processes for all tests that need no more."""
    return in_world("train first_values in_shards numbers local coded forked failing", 2)


def test_training_equals_one_device(pair):
    trained = [found["train"] for found in pair]
    assert len({r["bits"] for r in trained}) == 1
    for r in trained:
        assert r["world"] == "2 × cpu, 2 processes"
        assert "leaves over 4 MiB alone" in r["reason"]
        assert r["packs"] == 1
        assert r["scatters"] == 0, "the compiler's own over Gloo is reported to go wrong"
        assert r["rows"] == [[1, 128]]


def test_shards_train_over_processes(pair):
    first, second = (found["in_shards"] for found in pair)
    assert first["bits"] == second["bits"]
    for found in (first, second):
        assert sum(found["rows"]) * 2 == found["of"]
        assert found["restored"]
        assert "Call `whole = jc.unshard(tree)` in all processes" in found["refused"]


def test_weak_types_cross_processes(pair):
    for found in pair:
        end, restored = found["numbers"]
        assert end == restored
        assert end["w"][:2] == ["bfloat16", False]
        assert end["rate"][:2] == ["float32", True]


@pytest.fixture(scope="module")
def three():
    """Likewise of three processes of two devices."""
    return in_world("outside algorithms", 3, env={"JAX_NUM_CPU_DEVICES": "2"})


def test_process_without_devices_may_call(three):
    parts = [found["outside"]["parts"] for found in three]
    assert parts == [[], [[6.0, 7.0, 8.0, 9.0]] * 2, [[6.0, 7.0, 8.0, 9.0]] * 2]
    assert [found["outside"]["after"] for found in three] == [3.0] * 3
    absent, *checked = (found["outside"]["checked"] for found in three)
    assert "all copies of these leaves lie in other processes" in absent
    assert checked == [{}, {}]


def test_others_learn_failed_process(pair):
    failed, waited = (found["failing"] for found in pair)
    assert "no such host" in failed["error"]
    assert waited["ranks"] == [0]
    assert "Process 0 of 2 failed in it: process 0 raised OSError: no such host." in waited["error"]


def test_forked_child_saves_alone(pair):
    assert [found["forked"] for found in pair] == [{"status": 0, "w": [0, 1, 2]}] * 2


def test_codes_travel_narrow(pair):
    first, second = (found["coded"] for found in pair)
    assert first == second
    blocks = {"default": 3000 * 2, "int4": 48 * 34}
    bars = {"default": 0.002, "int4": 0.13}
    for name, result in first.items():
        kind = "u8" if name.startswith("int") else "u16"
        assert result["wire"] == [["all-gather", kind], ["all-to-all", kind]]
        assert result["bytes"] == blocks[name]
        assert 0 < result["error"] < bars[name]


def test_first_arguments_are_compared(pair):
    first, second = (found["first_values"] for found in pair)
    for found in (first, second):
        (warned,) = found["same rows"]["warned"]
        assert "all 2 processes pass the same rows in x." in warned
        assert found["again"]["warned"] == []
        assert found["own rows"]["warned"] == found["ones"]["warned"] == []
        error, groups = found["other state"]["error"], [["0"], ["1"]]
        assert "different values in 2 of 3 leaves" in error
        assert "The first is p['key']: processes 0 | 1. Nothing was run." in error
        leaves = {f"p['{k}']": groups for k in ("key", "w")}
        assert found["other state"]["divergent"] == leaves
        assert "The first is args[0][0]:" in found["strategy"]["error"]
        assert "in 1 of 1 leaf that must be equal" in found["strategy"]["error"]
        for name in ("anew", "refused 0", "refused 1"):  # a mark that ran before
            assert "The first is p['w']: processes 0 | 1" in found[name]["error"]
        for name in ("mended", "anew on 0", "anew on 1", "other names"):
            assert found[name]["result"] == found["own rows"]["result"]
    assert first["after"] == second["after"]  # both can go on
    assert first["after"]["result"] == pytest.approx(first["own rows"]["result"])


def test_diloco_is_its_simulation(pair):
    first, second = (found["local"] for found in pair)
    assert first["bits"] == second["bits"]
    for found in (first, second):
        assert found["difference"] <= 1e-5
        errors = found["errors"]
        assert "pass different values in 1 of 5 leaves" in errors["differ"]
        assert "The first is shared['w']: processes 0 | 1. Nothing was run." in errors["differ"]
        assert "that are split by rows over the mesh; got float32(4, 4)" in errors["batch"]
        assert "the same on every device of the mesh; got float32(2, 2)" in errors["params"]
        assert "no device of the mesh belongs to this process, number" in errors["absent"]


def test_every_algorithm_over_processes(three):
    each = [one["algorithms"] for one in three]
    for options, first in each[0].items():
        assert first["error"] <= 6 * 2.0**-23, options
        assert len({bits for r in each for bits in r[options]["bits"]}) == 1, options
    planned = {name: r["planned"] for name, r in each[0].items()}
    assert len(planned) == 11
    assert planned["CommunicationOptions(algorithm='native/ring')"] == "shuffle/ring"


@pytest.mark.usefixtures("optimized")
def test_reproducible_sums_ignore_processes():
    """Those of one process are in tests/collectives/test_reproducible.py."""
    found = in_world("reproducible", 2, env={"JAX_NUM_CPU_DEVICES": "2"})
    for result in (one["reproducible"] for one in found):
        want, native = result["reference"], result.pop("native")
        for way, bits in result.items():
            assert bits == {leaf: want[leaf] for leaf in bits}, way
        assert native["long float32"] != want["long float32"], "the compiler's own keeps no law"
