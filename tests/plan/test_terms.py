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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read: expected JSON as a calibration writes it, but .*calibrate again"),
        ("[]", "no file of cost terms: expected the format 'jaxcoll terms', got 'list'"),
        ("{}", "no file of cost terms: .* got None; calibrate again, or delete the file"),
    ],
)
def test_what_is_not_ours_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        terms_of(parsed(text))


def test_rates_of_products_by_type():
    terms = preset(World("gpu", (8,), device_kind="NVIDIA H100"))
    assert terms.rate("bf16") == pytest.approx(0.803 * 989.4e12)
    assert terms.rate("f8e4m3fn") > terms.rate("bf16") > terms.rate("f32")
    assert (terms.rate("s4"), preset(GLOO).rate("f32")) == (None, None)
    with pytest.raises(ValueError, match="`rates` of the cost terms must be above zero"):
        dataclasses.replace(terms, rates=(("bf16", 0),))


def changed(**changes):
    return json.dumps({**preset(GLOO).to_dict(), **changes})


def test_a_newer_version_is_refused():
    with pytest.raises(ValueError, match="of version 2, and this jaxcoll reads version 1: use the"):
        terms_of(parsed(changed(version=2)))


@pytest.mark.parametrize(
    "changes",
    [{"key": None}, {"within": {"step": 1.0}}, {"native": [{}]}, {"speed": 1}, {"call": -1.0}],
    ids=str,
)
def test_damaged_terms_are_refused(changes):
    with pytest.raises(ValueError, match="these cost terms are damaged: .*calibrate again"):
        terms_of(parsed(changed(**changes)))


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
