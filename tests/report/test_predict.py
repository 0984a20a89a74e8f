"""Predicted seconds: of one array, of a plan, of a compiled collective, and of a growing world."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxcoll as jc
from jaxcoll._hlo.collective import KINDS, Collective, Operand
from jaxcoll._plan.algorithms import DESCRIPTIONS, stages
from jaxcoll._plan.world import World
from jaxcoll._report.cost.overlap import predict_seconds
from jaxcoll._report.cost.predict import price_array, price_loads
from jaxcoll._report.cost.rates import Curve, Link, Rates, find_rates
from jaxcoll._report.shown_plan import Cost

PUBLISHED = Path(__file__).parent / "published"
WORLDS = [
    World("gpu", (8,), device_kind="NVIDIA H100 80GB HBM3"),
    World("gpu", (4, 8), processes=4, hosts=4, device_kind="NVIDIA H200"),
    World("gpu", (2, 8), processes=16, hosts=2, device_kind="NVIDIA A100-SXM4-80GB"),
    World("gpu", (32,), processes=4, hosts=4, device_kind="NVIDIA B200"),
    World("tpu", (4, 4), processes=4, device_kind="TPU v5 lite"),
    World("tpu", (64,), processes=16, device_kind="TPU v5p"),
    World("tpu", (2, 256), processes=128, hosts=2, device_kind="TPU v6 lite"),
]
worlds = pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w}, {w.device_kind}")
FLAT = tuple(sorted(DESCRIPTIONS))
SIZES = [1, 1 << 10, 1 << 15, 100_000, 1 << 20, 1 << 22, 5_000_001, 1 << 26, 1 << 30, 1 << 35]


def compositions(world):
    names = FLAT if len(world.sizes) == 1 else (*FLAT, *(f"{a}/{b}" for a in FLAT for b in FLAT))
    return {name: stages(name, 0, world.sizes) for name in names}


@worlds
def test_more_bytes_never_cost_less(world):
    rates, alone = find_rates(world), (1,) * len(world.sizes)
    for name, composed in compositions(world).items():
        costs = [price_array(composed, nbytes, world.sizes, rates) for nbytes in SIZES]
        assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(costs))
        assert all(min(c.latency, c.bandwidth, c.reduction, c.copy) >= 0 for c in costs)
        assert price_array(stages(name, 0, alone), 1 << 20, alone, rates) == Cost()


def example(**changes):
    rates = Rates("a test", 8, Link(1e-6, 1e-9), Link(1e-5, 1e-8), 1e-7, 0.0, 1e-10, 0.0, 0.0, 0)
    return dataclasses.replace(rates, **changes)


def cost(name, sizes, nbytes, rates=None, shards=0):
    return price_array(stages(name, shards, sizes), nbytes, sizes, rates or example())


def test_the_standard_formulas():
    for name, n, calls, steps in [
        ("native", 8, 1, 6), ("ring", 8, 14, 14), ("halving_doubling", 8, 5, 5),
        ("shuffle", 8, 2, 6), ("ring", 6, 10, 10),
    ]:  # fmt: skip
        found = cost(name, (n,), 48_000_000)
        assert found.latency == pytest.approx(calls * 1e-7 + steps * 1e-6)
        assert found.bandwidth == pytest.approx(2 * (n - 1) / n * 48e6 * 1e-9)
        assert found.reduction == pytest.approx((n - 1) / n * 48e6 * 1e-10)


def test_hierarchy_sends_shards_between_hosts():
    few = cost("shuffle", (8,), 8_000_000, shards=2)  # few owners send more
    assert (few.latency, few.bandwidth) == pytest.approx((14 * 1.1e-6, (1 + 7) * 4e6 * 1e-9))
    nbytes = 64_000_000
    two = cost("native/ring", (4, 8), nbytes)
    assert two.bandwidth == pytest.approx(1.75 * nbytes * 1e-9 + 1.5 * nbytes / 8 * 1e-8)
    assert two.latency == pytest.approx(2e-7 + 6e-6 + 6 * 1.01e-5)
    around = 2 * 31 / 32 * nbytes * 1e-8
    assert cost("ring", (4, 8), nbytes).bandwidth == pytest.approx(around)
    assert cost("native", (32,), nbytes).bandwidth == pytest.approx(around / 8)
    tree = cost("native", (16,), nbytes, example(between=Link(0.0, 2e-8)))
    assert tree.bandwidth == pytest.approx(nbytes * 2e-8 / 8)


def test_pairs_send_least_between_hosts():
    rates = example(per_island=2, within=Link(0.0, 0.0), between=Link(0.0, 1.0))
    names = ("halving_doubling", "shuffle", "ring")
    assert [cost(name, (4,), 4, rates).bandwidth for name in names] == [2.0, 4.0, 6.0]


def test_curve_scales_from_its_measurement():
    few, many = (Curve(((1000, t), (10**6, 2 * t)), n) for n, t in ((4, 1e-3), (16, 5e-3)))
    hosts = Curve(((1000, 9e-3), (10**6, 1e-1)), 32, islands=4)
    rates = example(per_island=16, native=(few, many, hosts))
    for nbytes in (10, 1000, 30_000, 10**9):
        assert cost("native", (16,), nbytes, rates).seconds == pytest.approx(many.seconds(nbytes))
    half = cost("native", (8,), 10**6, rates)
    assert half.latency == pytest.approx(5e-3 - 2e-6)
    assert half.bandwidth == pytest.approx(5e-3 * (7 / 8) / (15 / 16))
    assert cost("native", (64,), 10**6, rates).latency == pytest.approx(9e-3 + 2e-6)


NATIVE = stages("native", 0, (8,))


def test_plan_pays_for_copies():
    rates = example(array=1e-3, copy=1e-9, slice=1e-5)
    one = cost("native", (8,), 10**6, rates)
    found = price_loads({(NATIVE, 10**6, 4): 3, (NATIVE, 10**6, 0): 1}, (8,), rates)
    assert found.copy == pytest.approx(3 * (2e-3 + 4e-5))
    assert found.latency == pytest.approx(4 * (one.latency + 1e-3))
    assert found.bandwidth == pytest.approx(4 * one.bandwidth)


def test_single_leaf_is_not_copied():
    tree = [np.zeros(n, "f") for n in (6, 6, 6, 100)]
    options = jc.CommunicationOptions(bytes_per_pack=50, algorithm="ring")
    plan = jc.plan(tree, topology="h100:4", options=options)
    assert [pack.nbytes for pack in plan.packs] == [48, 24, 400]
    rates = find_rates(plan.world)
    assert plan.predicted.copy == pytest.approx(2 * rates.slice + 2 * 48 * rates.copy)


def test_combined_arrays_are_one_call():
    rates = example(array=1e-9, combine=10**7)
    for nbytes, times, calls, of in [
        (1000, 200, 1, 200_000),
        (8, 600, 3, 1600),  # 256 operands at most
        (10**8, 1, 1, 10**8),
        (5 * 10**6, 4, 2, 10**7),
    ]:
        found = price_loads({(NATIVE, nbytes, 0): times}, (8,), rates)
        together = calls * cost("native", (8,), of, rates).seconds
        assert found.seconds == pytest.approx(together + times * 1e-9)


@given(
    st.sampled_from([w for w in WORLDS if len(w.sizes) == 1]),
    st.integers(1, 10**9),
    st.sampled_from([8, 64, 16384]),
)
def test_larger_world_has_more_latency(world, nbytes, n):
    for name in FLAT:
        a, b = (cost(name, (size,), nbytes, find_rates(world)) for size in (n, 2 * n))
        assert a.latency <= b.latency * (1 + 1e-9)


def test_pricing_work_ignores_replicas():
    tree = [np.zeros((k % 17 + 1, 64), "f") for k in range(300)]

    def calls(hosts):
        count = 0

        def on(frame, event, arg):
            nonlocal count
            count += event == "call"

        sys.setprofile(on)
        for name in ("native", "ring", "halving_doubling", "shuffle", "native/ring"):
            options = jc.CommunicationOptions(algorithm=name, bytes_per_pack=1 << 22)
            plan = jc.plan(tree, axis_size=(hosts, 8), options=options)
            assert plan.wire_bytes > 0
        sys.setprofile(None)
        return count

    calls(2)
    assert calls(2048) <= 1.01 * calls(2)


PREDICTED = [
    (WORLDS[0], (221.4, 215.07, 1399.9)),
    (World("gpu", (4,), device_kind="NVIDIA H100"), (239.68, 151.42, 1237)),
    (WORLDS[1], (341.77, 701.1, 2430.9)),
    (WORLDS[2], (481.63, 639.89, 3626.8)),
    (WORLDS[3], (570.08, 913.48, 7249.1)),
    (WORLDS[4], (525.02, 163.56, 3838.2)),
    (WORLDS[5], (213.39, 160.11, 1313.1)),
    (WORLDS[6], (425.48, 2725.57, 2482.8)),
]


@pytest.mark.parametrize(("world", "want"), PREDICTED)
def test_predictions_are_recorded(world, want):
    """Microseconds of three packs of seven pieces each, of 8, 1 and 64 MiB."""
    last = "shuffle" if len(world.sizes) == 1 else "native/shuffle"
    for name, nbytes, us in zip(
        ("native", "halving_doubling", last), (1 << 23, 1 << 20, 1 << 26), want, strict=True
    ):
        load = stages(name, 0, world.sizes), nbytes, 7
        found = price_loads({load: 3}, world.sizes, find_rates(world))
        assert found.seconds * 1e6 == pytest.approx(us, rel=1e-4)


def test_cpus_have_no_prediction():
    assert find_rates(World("cpu", (4,), processes=4)) is None
    assert jc.plan(np.zeros(9, "f"), axis_size=4).predicted is None


def test_the_table_knows_devices():
    for platform, kind, source in [
        ("gpu", "NVIDIA H200", "Hopper"),
        ("gpu", "", "Hopper"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "Ampere"),
        ("gpu", "NVIDIA GB200", "Blackwell"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v99", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
    ]:
        rates = find_rates(World(platform, (16,), device_kind=kind, hosts=2))
        assert source in rates.source
        assert rates.product_rate("bf16") > 1e14
        assert rates.product_rate("s4") is None


@given(
    st.lists(st.integers(1, 1 << 40), min_size=2, max_size=12, unique=True).map(sorted),
    st.data(),
    st.integers(1, 1 << 41),
    st.integers(1, 1 << 41),
)
def test_curve_rises_between_points(at, data, one, other):
    many = st.lists(st.floats(1e-7, 1e3), min_size=len(at), max_size=len(at))
    curve = Curve(tuple(zip(at, data.draw(many.map(sorted)), strict=True)), 8)
    few, more = sorted((one, other))
    assert curve.seconds(few) <= curve.seconds(more) * (1 + 1e-9)
    for size, t in curve.points:
        assert curve.seconds(size) == pytest.approx(t)


def test_table_holds_published_curves():
    for name, kind, mean in [
        ("h200x8-queued", "NVIDIA H200", 0.02),
        ("a100x8", "NVIDIA A100", 0.04),
        ("b200x4x8-queued", "NVIDIA B200", 0.04),
    ]:
        data = json.loads((PUBLISHED / f"{name}.json").read_text())
        n, hosts = data["replicas"], data["hosts"]
        world = World("gpu", (n,), hosts, False, kind, hosts)
        rates = find_rates(world)
        off = [abs(cost("native", (n,), size, rates).seconds / t - 1) for size, t in data["points"]]
        assert sum(off) / len(off) <= mean


# Of compiled collectives.
TWO_HOSTS = find_rates(World("gpu", (16,), processes=2, device_kind="NVIDIA H100", hosts=2))
ALL, INNER, OUTER = (
    (tuple(range(16)),),
    (tuple(range(8)), tuple(range(8, 16))),
    tuple((k, k + 8) for k in range(8)),
)


def seconds(kind, groups, size=1 << 24, rates=TWO_HOSTS):
    c = Collective(kind, "c", (Operand("f32", (size,)),), max(map(len, groups)), groups, "main")
    return predict_seconds(c, rates)


@pytest.mark.parametrize(
    ("groups", "sizes", "over"),
    [(ALL, (16,), (16,)), (INNER, (2, 8), (1, 8)), (OUTER, (2, 8), (2, 1))],
    ids=["all", "inner", "outer"],
)
def test_all_reduce_costs_its_plan(groups, sizes, over):
    planned = price_array(stages("native", 0, over), 4 << 24, sizes, TWO_HOSTS)
    assert seconds("all-reduce", groups) == pytest.approx(planned.seconds + TWO_HOSTS.array)


@pytest.mark.parametrize("kind", KINDS)
def test_law_hosts_bytes_cost_more(kind):
    pairs = {"near": ((0, 1),), "far": ((0, 8),)}
    assert 0 < seconds(kind, pairs["near"]) < seconds(kind, pairs["far"])
    assert seconds(kind, INNER) < seconds(kind, INNER, size=1 << 26)


def test_halves_cost_one_call_more():
    rates = dataclasses.replace(TWO_HOSTS, native=())  # what was measured is of all-reduces alone
    for size in (256, 1 << 26):
        halves = (("reduce-scatter", size), ("all-gather", size // 16))
        found = sum(seconds(kind, ALL, each, rates) for kind, each in halves)
        want = seconds("all-reduce", ALL, size, rates) + rates.call + rates.array
        assert found == pytest.approx(want, rel=1e-9)
    parts = [
        seconds(kind, ALL, n) for kind, n in (("reduce-scatter", 1 << 26), ("all-gather", 1 << 22))
    ]
    added = 15 / 16 * (4 << 26) * TWO_HOSTS.reduce  # a gather adds nothing up
    assert parts[0] == pytest.approx(parts[1] + added)


def test_group_of_one_costs_nothing():
    assert seconds("all-reduce", ((0,), (1,))) == 0.0
