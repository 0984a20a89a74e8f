"""What the cost model says of one array, of a plan, and of a growing world."""

import dataclasses
import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxcoll as jc
from jaxcoll._plan.algorithms import DESCRIPTIONS, stages
from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.model import Cost, Load, Met, Prices, collective, loads
from jaxcoll._plan.cost.presets import NETWORKS, preset
from jaxcoll._plan.cost.terms import Key, Link, Terms
from jaxcoll._plan.world import World

WORLDS = [
    World(),
    World("cpu", (8,)),
    World("cpu", (4,), processes=4),
    World("cpu", (2, 4), processes=2),
    World("cpu", (16,), processes=16, hosts=2),
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
    prices = Prices(preset(world), world.sizes)
    for composed in compositions(world).values():
        costs = [prices.of(composed, nbytes) for nbytes in SIZES]
        assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(costs))
        assert all(min(dataclasses.astuple(cost)) >= 0 for cost in costs)


@worlds
def test_one_replica_costs_nothing(world):
    alone = (1,) * len(world.sizes)
    for name in compositions(world):
        assert Prices(preset(world), alone).of(stages(name, 0, alone), 1 << 20) == Cost()


@worlds
def test_the_parts_of_a_cost_come_to_all_of_it(world):
    prices = Prices(preset(world), world.sizes)
    for composed in compositions(world).values():
        cost = prices.predict([Load(composed, 1 << 20, 3, 5), Load(composed, 1 << 12)])
        assert cost.seconds == pytest.approx(sum(dataclasses.astuple(cost)))
        assert (cost + cost).seconds == pytest.approx((2 * cost).seconds)


@pytest.mark.parametrize("outer", FLAT)
@pytest.mark.parametrize("inner", FLAT)
def test_a_hierarchy_over_one_host_is_flat(inner, outer):
    world = World("gpu", (1, 8), device_kind="NVIDIA H100")
    prices = Prices(preset(world), world.sizes)
    for nbytes in SIZES:
        both = prices.of(stages(f"{inner}/{outer}", 0, (1, 8)), nbytes)
        assert both == Prices(preset(world), (8,)).of(stages(inner, 0, (8,)), nbytes)


def example(per_island=8, **changes):
    key = Key("nccl", "", per_island, 1, 1)
    terms = Terms(key, "a test", Link(1e-6, 1e-9), Link(1e-5, 1e-8), call=1e-7, reduce=1e-10)
    return dataclasses.replace(terms, **changes)


@pytest.mark.parametrize(
    ("name", "n", "calls", "steps"),
    [
        ("native", 8, 1, 6),
        ("native", 6, 1, 6),
        ("ring", 6, 10, 10),
        ("halving_doubling", 6, 6, 6),
        ("shuffle", 6, 2, 6),
    ],
)
def test_the_standard_formulas(name, n, calls, steps):
    cost = Prices(example(), (n,)).of(stages(name, 0, (n,)), 48_000_000)
    assert cost.latency == pytest.approx(calls * 1e-7 + steps * 1e-6)
    assert cost.bandwidth == pytest.approx(2 * (n - 1) / n * 48e6 * 1e-9)
    assert cost.reduction == pytest.approx((n - 1) / n * 48e6 * 1e-10)


def test_few_owners_of_a_shuffle_send_more():
    cost = Prices(example(), (8,)).of(stages("shuffle", 2, (8,)), 8_000_000)
    assert cost.latency == pytest.approx(14 * 1.1e-6)
    assert cost.bandwidth == pytest.approx((1 + 7) * 4e6 * 1e-9)


def test_a_hierarchy_sends_its_shards_alone_between_hosts():
    nbytes, prices = 64_000_000, Prices(example(), (4, 8))
    cost = prices.of(stages("native/ring", 0, (4, 8)), nbytes)
    assert cost.bandwidth == pytest.approx(1.75 * nbytes * 1e-9 + 1.5 * nbytes / 8 * 1e-8)
    assert cost.latency == pytest.approx(2e-7 + 6e-6 + 6 * 1.01e-5)
    flat = prices.of(stages("ring", 0, (4, 8)), nbytes)
    assert flat.bandwidth == pytest.approx(2 * 31 / 32 * nbytes * 1e-8)


def test_the_backend_crosses_by_all_links_of_a_host_at_once():
    nbytes = 32_000_000
    four = Prices(example(), (32,)).of(stages("native", 0, (32,)), nbytes)
    assert four.bandwidth == pytest.approx(2 * 31 / 32 * nbytes * 1e-8 / 8)
    two = Prices(example(between=Link(0.0, 2e-8)), (16,)).of(stages("native", 0, (16,)), nbytes)
    assert two.bandwidth == pytest.approx(nbytes * 2e-8 / 8)
    assert four.latency == pytest.approx(1e-7 + 6e-6 + 4e-5)


def test_a_curve_holds_where_it_was_measured():
    curve = Curve(((1000, 1e-3), (1_000_000, 2e-3)), 8)
    prices = Prices(example(native=(curve,)), (8,))
    for nbytes in (10, 1000, 30_000, 1_000_000, 10**9):
        cost = prices.of(stages("native", 0, (8,)), nbytes)
        assert cost.seconds == pytest.approx(curve.seconds(nbytes))
        assert cost.latency == pytest.approx(1e-3)


def test_elsewhere_the_nearest_curve_is_brought_to_the_number_of_replicas():
    few, many = (Curve(((1000, t), (10**6, 2 * t)), n) for n, t in ((4, 1e-3), (16, 5e-3)))
    hosts = Curve(((1000, 9e-3), (10**6, 1e-1)), 32, islands=4)
    terms = example(per_island=16, native=(few, many, hosts))
    cost = Prices(terms, (8,)).of(stages("native", 0, (8,)), 10**6)
    assert cost.latency == pytest.approx(5e-3 - 2e-6)
    assert cost.bandwidth == pytest.approx(5e-3 * (7 / 8) / (15 / 16))
    cost = Prices(terms, (64,)).of(stages("native", 0, (64,)), 10**6)
    assert cost.latency == pytest.approx(9e-3 + 2e-6)
    alone = Prices(dataclasses.replace(terms, native=(few,)), (64,))
    cost = alone.of(stages("native", 0, (64,)), 10**6)
    assert cost.latency == pytest.approx(1e-3 + 4e-6 + 4e-5)


def test_a_plan_pays_for_its_copies_and_its_arrays():
    composed = stages("native", 0, (8,))
    terms = example(array=1e-3, copy=1e-9, slice=1e-5)
    prices = Prices(terms, (8,))
    one = prices.of(composed, 10**6)
    cost = prices.predict([Load(composed, 10**6, pieces=4, times=3), Load(composed, 10**6)])
    assert cost.copy == pytest.approx(3 * (2e-3 + 4e-5))
    assert cost.latency == pytest.approx(4 * (one.latency + 1e-3))
    assert cost.bandwidth == pytest.approx(4 * one.bandwidth)
    ring = stages("ring", 0, (8,))
    assert prices.predict([Load(ring, 10**6)]) == prices.of(ring, 10**6)


def test_what_the_compiler_combines_is_one_call():
    composed = stages("native", 0, (8,))
    prices = Prices(example(array=1e-9, combine=10**7), (8,))
    cost = prices.predict([Load(composed, 1000, times=200)])
    together = prices.of(composed, 200_000)
    assert cost.seconds == pytest.approx(together.seconds + 200e-9)
    many = prices.predict([Load(composed, 8, times=600)])
    assert many.latency == pytest.approx(3 * together.latency + 600e-9)
    large = prices.predict([Load(composed, 10**8)])
    assert large.seconds == pytest.approx(prices.of(composed, 10**8).seconds + 1e-9)


def test_what_the_compiler_combines_ends_at_its_threshold():
    terms = preset(WORLDS[5])
    prices, alone = Prices(terms, (8,)), stages("native", 0, (8,))
    four = prices.predict([Load(alone, terms.combine // 2, times=4)])
    want = 2 * prices.of(alone, terms.combine).seconds + 4 * terms.array
    assert four.seconds == pytest.approx(want)


def test_packs_that_cost_the_same_are_counted_together():
    tree = [np.zeros(6, "f"), np.zeros(6, "f"), np.zeros(6, "f"), np.zeros(100, "f")]
    options = jc.CommunicationOptions(bytes_per_pack=50, algorithm="ring")
    plan = jc.plan(tree, axis_size=4, options=options)
    ring = stages("ring", 0, (4,))
    found = loads(plan.packs, plan.leaves, plan.stages)
    assert set(found) == {Load(ring, 48, 2), Load(ring, 24), Load(ring, 400)}
    alone = jc.plan(tree, axis_size=4, options=jc.CommunicationOptions(algorithm="ring"))
    assert set(loads(alone.packs, alone.leaves, alone.stages)) == {
        Load(ring, 24, times=3),
        Load(ring, 400),
    }
    halves = jc.plan(np.zeros(8), axis_size=2, options=jc.CommunicationOptions(shards=2))
    assert [load[1:] for load in loads(halves.packs, halves.leaves, halves.stages)] == [(16, 1, 2)]


def predicted(name, nbytes, terms, sizes):
    return Prices(terms, sizes).of(stages(name, 0, sizes), nbytes)


FLAT_ACCELERATORS = [w for w in WORLDS if w.platform != "cpu" and len(w.sizes) == 1]


@given(st.sampled_from(FLAT_ACCELERATORS), st.integers(1, 10**9), st.sampled_from([8, 64, 16384]))
def test_a_larger_world_never_has_less_latency(world, nbytes, n):
    for name in FLAT:
        a, b = (predicted(name, nbytes, preset(world), (size,)) for size in (n, 2 * n))
        assert a.latency <= b.latency * (1 + 1e-9)


def test_scaling_over_hosts_of_eight():
    terms = preset(World("gpu", (8,), device_kind="NVIDIA H100"))
    found = [predicted("native/ring", 1 << 30, terms, (hosts, 8)) for hosts in (1, 2, 2048)]
    assert found[0].seconds < found[1].seconds < found[2].seconds
    ring, trees = (
        predicted(name, 1 << 20, terms, (16384,)) for name in ("ring", "halving_doubling")
    )
    assert ring.latency > 1000 * trees.latency


def python_calls(work):
    count = 0

    def on(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(on)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_planning_and_pricing_16384_replicas_is_as_much_work_as_16():
    tree = [jc_leaf(k) for k in range(300)]
    world = World("gpu", (8,), device_kind="NVIDIA H100")

    def work(hosts):
        for name in ("native", "ring", "halving_doubling", "shuffle", "native/ring"):
            options = jc.CommunicationOptions(algorithm=name, bytes_per_pack=1 << 22)
            plan = jc.plan(tree, axis_size=(hosts, 8), options=options)
            Prices(preset(world), (hosts, 8)).predict(loads(plan.packs, plan.leaves, plan.stages))
            assert plan.wire_bytes > 0

    work(2)
    few, many = python_calls(lambda: work(2)), python_calls(lambda: work(2048))
    assert many <= 1.01 * few
    assert many < 1_000_000


def jc_leaf(k):
    return np.zeros((k % 17 + 1, 64), "f")


def test_a_search_prices_each_size_once():
    composed = stages("ring", 0, (8,))
    prices = Prices(example(), (8,))
    many = [Load(composed, 1000 + k % 20) for k in range(1000)]
    prices.predict(many)
    calls = python_calls(lambda: prices.predict(many))
    assert calls < 2100


def test_an_unknown_network_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="`network` must be None or one of infiniband-400.*'dial'"):
        preset(World("gpu", (8,)), network="dial")


def test_presets_know_devices_networks_and_cores():
    def source(platform, kind, **more):
        return preset(World(platform, (16,), device_kind=kind, hosts=2), **more).source

    assert "Hopper" in source("gpu", "NVIDIA H200")
    assert "Hopper" in source("gpu", "")
    assert "Ampere" in source("gpu", "NVIDIA A100-SXM4-40GB")
    assert "Blackwell" in source("gpu", "NVIDIA GB200")
    assert "v5e" in source("tpu", "TPU v5 lite")
    assert "v5e" in source("tpu", "TPU v99")
    assert "v5p" in source("tpu", "TPU v5")
    assert "v6e" in source("tpu", "TPU v6 lite")
    assert "ethernet-100" in source("gpu", "NVIDIA H100", network="ethernet-100")
    assert (
        NETWORKS["ethernet-100"].link(8).per_byte == 8 * NETWORKS["ethernet-100"].link(1).per_byte
    )
    crowded, idle = (
        Prices(preset(World("cpu", (8,), processes=8), cores=c), (8,)).of(
            stages("native", 0, (8,)), 1 << 20
        )
        for c in (2, 8)
    )
    assert crowded.seconds > 2 * idle.seconds


PREDICTED = [
    (WORLDS[0], {}, (15225, 2013.4, 120920)),
    (WORLDS[1], {}, (98656, 14658, 780420)),
    (WORLDS[2], {}, (97963, 17419, 720360)),
    (WORLDS[2], {"cores": 8, "keeps_memory": True}, (20527, 6948.1, 247440)),
    (WORLDS[3], {}, (43178, 9871.5, 337760)),
    (WORLDS[4], {}, (288629.88, 54344, 3305700)),
    (WORLDS[4], {"network": "ethernet-10", "keeps_memory": True}, (232258.43, 47297, 2854700)),
    (WORLDS[5], {}, (221.4, 245.67, 1399.9)),
    (World("gpu", (4,), device_kind="NVIDIA H100"), {}, (239.68, 182.02, 1237)),
    (WORLDS[6], {}, (341.77, 770.7, 2430.9)),
    (WORLDS[6], {"network": "ethernet-100"}, (6496.3, 2248.6, 28328)),
    (WORLDS[7], {}, (481.63, 717.89, 3626.8)),
    (WORLDS[8], {}, (570.08, 1007.7, 7249.1)),
    (WORLDS[9], {}, (525.02, 172.56, 3838.2)),
    (WORLDS[10], {}, (213.39, 169.11, 1313.1)),
    (WORLDS[11], {}, (425.48, 2881.6, 2482.8)),
]


@pytest.mark.parametrize(("world", "more", "want"), PREDICTED)
def test_figures_of_presets_change_on_purpose_only(world, more, want):
    """Microseconds of three packs of seven pieces each, of 8, 1 and 64 MiB."""
    prices = Prices(preset(world, **more), world.sizes)
    last = "shuffle" if len(world.sizes) == 1 else "native/shuffle"
    for name, nbytes, us in zip(
        ("native", "halving_doubling", last), (1 << 23, 1 << 20, 1 << 26), want, strict=True
    ):
        load = Load(stages(name, 0, world.sizes), nbytes, pieces=7, times=3)
        assert prices.predict([load]).seconds * 1e6 == pytest.approx(us, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["native", "shuffle/native", "shuffle/halving_doubling"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2)])
def test_between_cpu_hosts_nothing_is_faster_than_their_links(algorithm, sizes):
    hosts, per_host = sizes
    n, nbytes = hosts * per_host, 1 << 26
    world = World("cpu", sizes, processes=n, hosts=hosts, inner=1)
    # What leaves a host: of a ring one neighbour's part, of levels each process's.
    crossing = 2 * (n - 1) / n if algorithm == "native" else 2 * (hosts - 1) / hosts
    before = 0.0
    for network in ("ethernet-100", "ethernet-10", "ethernet-1"):
        wire = crossing * nbytes / (NETWORKS[network].gb_per_s * 1e9)
        prices = Prices(preset(world, network=network), sizes)
        seconds = prices.of(stages(algorithm, 0, sizes), nbytes).seconds
        assert seconds >= max(wire, before)
        before = seconds
    assert seconds < 2 * wire, "a slow network takes nearly all of it"


def test_cpu_processes_are_islands_on_one_host_and_hosts_are_on_several():
    one, several = (Key.of(World("cpu", (8,), processes=8, hosts=hosts)) for hosts in (1, 2))
    assert (one.islands, one.per_island) == (8, 1)
    assert (several.islands, several.per_island) == (2, 4)


def test_halves_of_an_all_reduce_without_a_curve_take_together_what_it_takes():
    terms = dataclasses.replace(preset(WORLDS[4]), native=())
    for met in (Met(8, 8, 1), Met(8, 4, 2)):
        whole = collective("all-reduce", 1 << 20, met, terms)
        scatter = collective("reduce-scatter", 1 << 20, met, terms)
        gather = collective("all-gather", 1 << 17, met, terms)
        assert (scatter + gather).latency == pytest.approx(whole.latency + terms.call)
        assert (scatter + gather).bandwidth == pytest.approx(whole.bandwidth)
        assert (scatter.reduction, gather.reduction) == pytest.approx((whole.reduction, 0))
        assert whole.reduction > 0
