"""What travels behind matrix products: shares of bytes, and exposed seconds."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._hlo.collective import Collective, Matmul, Meanwhile, Operand
from jaxcoll._plan.world import World
from jaxcoll._report.cost.overlap import Share, add_overlap, compute_exposed
from jaxcoll._report.cost.rates import find_rates
from jaxcoll._report.report import make_report, side_by_side

GOLDEN = Path(__file__).parent / "golden"
H100 = find_rates(World("gpu", (8,), device_kind="NVIDIA H100"))
ONE = dataclasses.replace(H100, products=(("bf16", 1.0),))
"""One operation of bfloat16 takes a second."""


def sends(at, until, n=100, kind="all-reduce", trips=1, is_async=True):
    during = Meanwhile(1, 1, 1) if is_async else None
    data = (Operand("f32", (n,)),)
    return Collective(
        kind, f"c{at}", data, 8, (tuple(range(8)),), "main", trips, is_async,
        at=at, until=until, meanwhile=during,
    )  # fmt: skip


def product(at, flops=1, trips=1, dtype="bf16"):
    return Matmul(f"dot{at}", flops, trips, at, dtype)


def most_hidden(spans, seconds, places):
    """By trying every assignment of whole seconds of products to collectives."""
    choices = [
        [k for k, (start, end) in enumerate(spans) if start < at < end] or [None] for at in places
    ]
    best = 0
    for taken in itertools.product(*choices):
        best = max(best, sum(min(s, taken.count(k)) for k, s in enumerate(seconds)))
    return best


@given(
    spans=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=4),
    places=st.lists(st.integers(0, 14), max_size=6),
    seconds=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_law_no_assignment_hides_more(spans, places, seconds):
    spans = [(2 * start, 2 * (start + length)) for start, length in spans]
    places = [2 * at + 1 for at in places]
    seconds = seconds[: len(spans)]
    left = compute_exposed([sends(*s) for s in spans], seconds, [product(at) for at in places], ONE)
    assert all(0 <= after <= before for after, before in zip(left, seconds, strict=True))
    assert sum(seconds) - sum(left) == most_hidden(spans, seconds, places)


def test_synchronous_turns_are_exposed():
    looped = [sends(2, 6, trips=3), sends(8, 8, trips=3, is_async=False)]
    inside = [product(4, flops=2, trips=3), product(9, flops=50)]
    assert compute_exposed(looped, [5.0, 1.0], inside, ONE) == [3 * 5.0 - 3 * 2, 3 * 1.0]
    found = add_overlap([*looped, sends(10, 10, kind="all-gather", is_async=False)], inside)
    assert found.shares == (Share("all-reduce", 2400, 1200), Share("all-gather", 400, 0))
    assert (found.reduced, found.flops) == (Share("", 2400, 1200), 6)


def test_unknown_rate_hides_nothing():
    spans, inside = [sends(0, 4)], [product(1, dtype="s8"), product(2)]
    assert compute_exposed(spans, [5.0], inside, ONE) == [4.0]


@pytest.fixture(scope="module")
def report():
    text = (GOLDEN / "gpu-0.12.0.1-overlapped.hlo").read_text()
    return make_report(text, where="h100:8", rates=H100)


def test_a_compiled_program(report):
    assert report.overlapped == 1.0
    assert report.overlap.flops == sum(m.flops for m in report.matmuls)
    assert 0 <= report.exposed_seconds < report.seconds == sum(row.seconds for row in report.rows)
    line = "FLOP): 100 % of 8.39 MB in reduce-scatter, 100 % of 1.05 MB in"
    assert line in " ".join(str(report).split())
    assert report.to_dict()["exposed_seconds"] == report.exposed_seconds


def test_no_prices_no_seconds(report):
    bare = make_report((GOLDEN / "gpu-0.12.0.1-overlapped.hlo").read_text())
    assert (bare.seconds, bare.exposed_seconds, bare.rows[0].seconds) == (None, None, None)
    assert bare.overlap == report.overlap


def test_programs_side_by_side(report):
    plain = make_report((GOLDEN / "gpu-0.12.0.1-packs.hlo").read_text(), rates=H100)
    rows = side_by_side({"ours": report, "plain": plain}).splitlines()
    assert rows[0].split() == ["ours", "plain", "ratio"]
    assert rows[-1].split()[:2] == ["exposed", "share"]
    assert "reductions overlapped" in rows[6]
    assert rows[6].split()[-2:] == ["0", "%"]
    three = side_by_side({"a": report, "b": plain, "c": report}).splitlines()
    assert three[0].split() == ["a", "b", "c"]
    assert three[1].split()[3:] == ["2", "collectives", "1", "collective", "2", "collectives"]
