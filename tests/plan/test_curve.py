"""Measured curves: laws of what lies between the points, and published curves from a few of them."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.model import Prices
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.world import World

PUBLISHED = Path(__file__).parent / "published"
POINTS = 6

seconds = st.floats(1e-7, 1e3)
sizes = st.lists(st.integers(1, 1 << 40), min_size=2, max_size=12, unique=True).map(sorted)


@given(sizes, st.data(), st.integers(1, 1 << 41), st.integers(1, 1 << 41))
def test_between_points_a_curve_rises_and_keeps_to_them(at, data, one, other):
    times = data.draw(st.lists(seconds, min_size=len(at), max_size=len(at)).map(sorted))
    curve = Curve(tuple(zip(at, times, strict=True)), 8)
    few, many = sorted((one, other))
    assert curve.seconds(few) <= curve.seconds(many) * (1 + 1e-9)
    low, high = curve.chords(few)
    assert low <= high * (1 + 1e-9)
    for size, t in curve.points:
        assert curve.seconds(size) == pytest.approx(t)


def test_beyond_its_ends_a_curve_goes_on():
    curve = Curve(((100, 1.0), (200, 3.0), (400, 4.0)), 8)
    assert [curve.seconds(n) for n in (0, 50, 800)] == [1.0, 1.0, 6.0]
    flat = Curve(((100, 2.0), (200, 2.0)), 8)
    assert flat.seconds(400) == 4.0


def test_seconds_that_fall_are_noise():
    noisy = Curve(((100, 1.0), (200, 3.0), (300, 2.0), (400, 4.0)), 8)
    assert noisy.seconds(300) == noisy.seconds(200) == pytest.approx(6**0.5)
    assert (noisy.seconds(100), noisy.seconds(400)) == (1.0, 4.0)


def published(name):
    data = json.loads((PUBLISHED / f"{name}.json").read_text())
    return data, [tuple(point) for point in data["points"]]


def held_out(name, count=POINTS):
    """Errors at the other sizes, of a curve through `count` sizes evenly spaced among all."""
    data, points = published(name)
    kept = {round(k * (len(points) - 1) / (count - 1)) for k in range(count)}
    curve = Curve(tuple(points[k] for k in sorted(kept)), data["replicas"], data["hosts"])
    others = [point for k, point in enumerate(points) if k not in kept]
    return [abs(curve.seconds(size) / t - 1) for size, t in others]


@pytest.mark.parametrize(
    ("name", "mean", "most"),
    [
        ("h200x8", 0.02, 0.06),
        ("h200x8-queued", 0.03, 0.12),
        ("b200x4x8-queued", 0.04, 0.15),
        # Tables with jumps that no smooth curve has, such as 16 MiB no slower than 8 MiB.
        ("a100x8", 0.07, 0.21),
        ("h100x2x8", 0.09, 0.39),
        ("b200x8", 0.11, 0.31),
        ("b200x4x8", 0.11, 0.30),
    ],
)
def test_six_points_of_a_published_curve_tell_the_others(name, mean, most):
    errors = held_out(name)
    assert sum(errors) / len(errors) <= mean
    assert max(errors) <= most


@pytest.mark.parametrize("name", ["h200x8", "h200x8-queued", "b200x4x8-queued"])
def test_a_latency_and_a_bandwidth_do_not(name):
    _, points = published(name)
    size, t = np.array(points).T
    weighted = np.stack([1 / t, size / t], axis=1)
    (fit, *_) = np.linalg.lstsq(weighted, np.ones(len(t)), rcond=None)
    assert np.max(np.abs(weighted @ fit - 1)) > 1.3 * max(held_out(name))


def from_one_host(curve, world, network):
    """Prices of a world of several hosts, from a curve of one host and the speed of its NICs."""
    terms = preset(world, network=network)
    alone = (curve,) if curve else tuple(c for c in terms.native if c.islands == 1)
    return Prices(dataclasses.replace(terms, native=alone), world.sizes)


@pytest.mark.parametrize(
    ("name", "kind", "network", "mean", "from_64_mib", "largest"),
    [
        ("b200x4x8-queued", "NVIDIA B200", "efa-400", 0.13, 0.07, 0.01),
        # One call at a time: small sizes cost the source up to five times the queued ones.
        ("b200x4x8", "NVIDIA B200", "efa-400", 0.36, 0.13, 0.02),
        # GPUDirect-TCPX: a hop costs several times what NCCL's model says.
        ("h100x2x8", "NVIDIA H100", "infiniband-200", 0.56, 0.26, 0.05),
    ],
)
def test_several_hosts_from_one_host_and_its_nics(name, kind, network, mean, from_64_mib, largest):
    data, points = published(name)
    n, hosts = data["replicas"], data["hosts"]
    curve = None
    if kind == "NVIDIA B200":
        one, at = published("b200x8")
        curve = Curve(tuple(at), one["replicas"])
    prices = from_one_host(curve, World("gpu", (n,), hosts, False, kind, hosts), network)
    composed = stages("native", 0, (n,))
    errors = [(size, abs(prices.of(composed, size).seconds / t - 1)) for size, t in points]
    large = [error for size, error in errors if size >= 64 << 20]
    assert sum(error for _, error in errors) / len(errors) <= mean
    assert sum(large) / len(large) <= from_64_mib
    assert errors[-1][1] <= largest


def test_four_hosts_of_h200_at_the_two_sizes_published():
    world = World("gpu", (32,), 4, False, "NVIDIA H200", 4)
    prices = Prices(preset(world), world.sizes)
    for size, busbw in ((4 << 30, 364.87e9), (16 << 30, 369.06e9)):
        found = size * 2 * 31 / 32 / prices.of(stages("native", 0, (32,)), size).seconds
        assert math.isclose(found, busbw, rel_tol=0.03)


@pytest.mark.parametrize(
    ("name", "kind", "mean"),
    [
        ("h200x8-queued", "NVIDIA H200", 0.02),
        ("a100x8", "NVIDIA A100", 0.04),
        ("b200x4x8-queued", "NVIDIA B200", 0.04),
    ],
)
def test_presets_hold_the_curves_they_are_from(name, kind, mean):
    data, points = published(name)
    n, hosts = data["replicas"], data["hosts"]
    world = World("gpu", (n,), hosts, False, kind, hosts)
    prices = Prices(preset(world), world.sizes)
    found = [abs(prices.of(stages("native", 0, (n,)), size).seconds / t - 1) for size, t in points]
    assert sum(found) / len(found) <= mean
