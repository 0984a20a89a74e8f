"""Terms of the cost model: written, read back, and refused in words."""

import dataclasses
import json

import pytest

from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Key, Link, Terms, parsed, terms_of
from jaxcoll._plan.world import World

GLOO = World("cpu", (4,), processes=4)
POINTS = ((1000, 1e-3), (2000, 2e-3))


@pytest.mark.parametrize(
    "world",
    [GLOO, World("cpu", (8,)), World("gpu", (4, 8), 4, False, "NVIDIA B200", 4)],
    ids=["gloo", "memory", "b200"],
)
def test_terms_read_back(world):
    terms = preset(world)
    again = terms_of(parsed(terms.to_json()))
    assert again == terms
    assert hash(again) == hash(terms)
    assert json.loads(terms.to_json()) == json.loads(json.dumps(terms.to_dict()))


def test_rates_of_products_by_type():
    terms = preset(World("gpu", (8,), device_kind="NVIDIA H100"))
    assert terms.rate("bf16") == pytest.approx(0.803 * 989.4e12)
    assert terms.rate("f8e4m3fn") > terms.rate("bf16") > terms.rate("f32")
    assert (terms.rate("s4"), preset(GLOO).rate("f32")) == (None, None)
    with pytest.raises(ValueError, match="`rates` of the cost terms must be above zero"):
        dataclasses.replace(terms, rates=(("bf16", 0),))


@pytest.mark.parametrize(
    ("world", "call", "within", "between"),
    [
        (World("gpu", (2, 8), 2, device_kind="NVIDIA H200", hosts=2), 9.2e-6, 361e9, 47.5e9),
        (World("gpu", (2, 8), 2, device_kind="NVIDIA B200", hosts=2), 17.4e-6, 668e9, 47.5e9),
        (World("gpu", (2, 8), 2, device_kind="NVIDIA A100", hosts=2), 12e-6, 235e9, 23.75e9),
        (World("tpu", (4, 4), 4, device_kind="TPU v5 lite"), 2e-6, 200e9, 3.1e9),
        (World("tpu", (4, 4), 4, device_kind="TPU v6 lite"), 2e-6, 400e9, 12.5e9),
        (World("tpu", (4, 4), 4, device_kind="TPU v5p"), 2e-6, 600e9, 6.25e9),
        (World("tpu", (4, 4), 4, device_kind="TPU7x"), 2e-6, 300e9, 6.25e9),
        (World("cpu", (2,), processes=2), 0.05e-3, 1 / 0.185e-9, 1 / 0.55e-9),
    ],
    ids=str,
)
def test_a_preset_has_the_figures_of_its_sources(world, call, within, between):
    """Seconds of a call, bytes per second within and between hosts; the rest by its size."""
    terms = preset(world)
    assert terms.call == pytest.approx(call)
    assert 1 / terms.within.per_byte == pytest.approx(within)
    assert 1 / terms.between.per_byte == pytest.approx(between)
    dimensions = {"TPU v5 lite": 2, "TPU v6 lite": 2, "TPU v5p": 3, "TPU7x": 3}
    assert terms.within.torus == dimensions.get(world.device_kind, Link(0.0, 0.0).torus)
    for seconds in (terms.within.step, terms.between.step, terms.array, terms.slice):
        assert 5e-7 <= seconds <= 5e-4
    for per_byte in (terms.reduce, terms.copy):
        assert 1e-13 <= per_byte <= 1e-9


def test_a_curve_for_fewer_devices_ends_at_their_bandwidth_and_keeps_its_latency():
    eight, four = preset(World("gpu", (8,), device_kind="NVIDIA H200")).native[:2]
    size, seconds = four.points[-1]
    assert size * 2 * 3 / 4 / seconds == pytest.approx(363.3e9)
    latency = eight.points[0][1]
    assert four.points[0][1] == pytest.approx(latency)
    pairs = zip(eight.points[1:], four.points[1:], strict=True)
    factors = [(b - latency) / (a - latency) for (_, a), (_, b) in pairs]
    assert factors == pytest.approx([factors[0]] * len(factors))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), True, "1", None])
def test_terms_are_finite_and_not_negative(bad):
    link = Link(0.0, 0.0)
    with pytest.raises(ValueError, match="`copy` of the cost terms must be a finite number"):
        Terms(Key.of(GLOO), "a test", link, link, copy=bad)
    with pytest.raises(ValueError, match="`between.step` of the cost terms must be a finite"):
        Terms(Key.of(GLOO), "a test", link, Link(bad, 0.0))


@pytest.mark.parametrize(
    ("points", "replicas", "islands", "words"),
    [
        (POINTS[:1], 8, 1, "needs two measured sizes or more; got 1"),
        (((0, 1.0), (1, 2.0)), 8, 1, "pairs of positive bytes and positive seconds; got"),
        (((1, 1.0), (2, float("nan"))), 8, 1, "pairs of positive bytes and positive seconds"),
        (POINTS[::-1], 8, 1, r"must rise from point to point; got \[2000, 1000\]"),
        (POINTS, 1, 1, "over two replicas or more.*got 1 replica on 1 island"),
        (POINTS, 4, 5, "on at most as many islands; got 4 replicas on 5 islands"),
    ],
)
def test_bad_curves_are_refused(points, replicas, islands, words):
    with pytest.raises(ValueError, match=words):
        Curve(points, replicas, islands)


def changed(**changes):
    return json.dumps({**preset(GLOO).to_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read: expected JSON as a calibration writes it, but .*calibrate again"),
        ("[]", "no file of cost terms: expected the format 'jaxcoll terms', got 'list'"),
        ("{}", "no file of cost terms: .* got None; calibrate again, or delete the file"),
        (changed(version=2), "of version 2, and this jaxcoll reads version 1: use the"),
        *((changed(**{name: value}), "these cost terms are damaged: .*calibrate again")
          for name, value in (("key", None), ("within", {"step": 1.0}), ("native", [{}]),
                              ("speed", 1), ("call", -1.0))),
    ],
)  # fmt: skip
def test_what_is_not_ours_or_damaged_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        terms_of(parsed(text))
