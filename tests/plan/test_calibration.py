"""Terms that are fitted to measurements: known terms come back from the times they predict."""

import dataclasses

import pytest

from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.fit import SIZES, Probe, exchange, fitted, probes_of
from jaxcoll._plan.cost.model import Prices
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Link
from jaxcoll._plan.world import World

KiB, MiB = 1 << 10, 1 << 20
WORLDS = {
    "pairs": World("cpu", (4,), processes=4),
    "odd": World("cpu", (3,), processes=3),
    "memory": World("cpu", (8,)),
    "h200": World("gpu", (8,), device_kind="NVIDIA H200"),
    "two axes": World("cpu", (2, 2), processes=2),
}


def faster(link, by):
    return Link(link.step * by, link.per_byte / by, link.torus)


def truth(world):
    """Terms that differ from the preset in everything that is measured."""
    usual = preset(world)
    islands = world.processes if world.platform == "cpu" else world.hosts
    curve = Curve(tuple((size, 3e-3 + 2e-9 * size) for size in SIZES), world.replicas, islands)
    link = "between" if islands > 1 else "within"
    scaled = len(world.sizes) == 1
    return dataclasses.replace(
        usual,
        call=usual.call * (2 if scaled else 1),
        reduce=usual.reduce / (2 if scaled else 1),
        **({link: faster(getattr(usual, link), 2)} if scaled else {}),
        array=40e-6,
        copy=0.3e-9,
        slice=7e-6,
        native=(curve,),
    )


def seconds(probe, terms, sizes):
    """What a program takes in a world of these terms; a single array's own time is its curve's."""
    one = probe.algorithm == "native" and probe.count == 1
    alone = 0.0 if terms.combine else terms.array
    # Where arrays are taken one by one, the curve is what one of them costs by itself.
    return Prices(terms, sizes).predict([probe.load(sizes)]).seconds - one * alone


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_known_terms_come_back(world):
    known = truth(world)
    times = {p: seconds(p, known, world.sizes) for p in probes_of(len(world.sizes), preset(world))}
    found = fitted(preset(world), world.sizes, times)
    for name in ("call", "reduce", "array", "copy", "slice"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.1), name
    for name in ("within", "between"):
        assert dataclasses.astuple(getattr(found, name)) == pytest.approx(
            dataclasses.astuple(getattr(known, name)), rel=0.05
        )
    for size in (KiB, 100 * KiB, 2 * MiB, 50 * MiB):
        wanted, got = (
            Prices(t, world.sizes).of(stages("native", 0, world.sizes), size).seconds
            for t in (known, found)
        )
        assert got == pytest.approx(wanted, rel=0.02)
    assert (found.key, found.combine) == (known.key, known.combine)


def test_what_is_not_measured_stays_as_the_preset_has_it():
    world = WORLDS["two axes"]
    usual = preset(world)
    probes = probes_of(2, usual)
    assert {p.algorithm for p in probes} == {"native"}, "exchanges are over one axis"
    found = fitted(usual, world.sizes, {p: seconds(p, truth(world), (2, 2)) for p in probes})
    assert (found.within, found.between) == (usual.within, usual.between)
    assert (found.call, found.reduce) == (usual.call, usual.reduce)


def test_curves_of_other_worlds_stay():
    world = WORLDS["pairs"]
    times = {p: seconds(p, truth(world), (4,)) for p in probes_of(1, preset(WORLDS["pairs"]))}
    found = fitted(preset(world), (4,), times)
    assert sorted(c.replicas for c in found.native) == [2, 4, 8]
    assert found.native[0].replicas == 4


@pytest.mark.parametrize("large", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("small", [0.5, 1.0, 3.0])
def test_noise_makes_no_term_negative(large, small):
    world = WORLDS["pairs"]
    times = {p: 1e-3 + 1e-9 * p.nbytes for p in probes_of(1, preset(WORLDS["pairs"]))}
    few, many = sorted((p for p in times if p.packed), key=lambda p: p.count)
    for pack, factor in ((few, large), (many, small)):
        times[pack] = factor * times[Probe("native", 1, pack.count * pack.nbytes)]
    found = fitted(preset(world), (4,), times)
    assert (found.copy > 0 or found.slice > 0) == (max(large, small) > 1)


def test_an_exchange_that_does_not_grow_keeps_the_slope_of_the_preset():
    world = WORLDS["pairs"]
    times = dict.fromkeys(probes_of(1, preset(world)), 1e-3)
    found, usual = fitted(preset(world), (4,), times), preset(world)
    assert found.between.per_byte == usual.between.per_byte
    assert found.call / usual.call == pytest.approx(found.between.step / usual.between.step)


def test_the_probes():
    assert exchange(8) == "halving_doubling"
    assert exchange(6) == "shuffle"
    for probe in probes_of(1, preset(WORLDS["pairs"])):
        if probe.packed:
            assert probe.count * probe.nbytes in SIZES, "a flat array to compare with"
    sizes = [p.count for p in probes_of(1, preset(WORLDS["memory"])) if p.nbytes == 16 * MiB]
    assert sizes == [1, 4, 1], "64 MiB are four arrays where the compiler combines them"
    assert Probe("native", 3, 8).load((2,)).times == 3
    assert Probe("native", 3, 8, packed=True).load((2,))[1:] == (24, 3, 1)
