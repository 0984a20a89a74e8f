"""What travels behind matrix products: shares of bytes, exposed seconds, and the timeline."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._observe.overlap import Share, exposed, overlap
from jaxcoll._observe.parse.calls import Matmul
from jaxcoll._observe.parse.collective import Collective, Meanwhile, Operand
from jaxcoll._observe.report import Report, report_of
from jaxcoll._observe.report_text import against, summary
from jaxcoll._observe.timeline import timeline, trace
from jaxcoll._plan.world import World
from jaxcoll._prices.rates import rates_of

GOLDEN = Path(__file__).parent / "golden"
H100 = rates_of(World("gpu", (8,), device_kind="NVIDIA H100"))
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
    left = exposed([sends(*s) for s in spans], seconds, [product(at) for at in places], ONE)
    assert all(0 <= after <= before for after, before in zip(left, seconds, strict=True))
    assert sum(seconds) - sum(left) == most_hidden(spans, seconds, places)


def test_loops_count_each_turn_and_what_is_synchronous_is_exposed():
    looped = [sends(2, 6, trips=3), sends(8, 8, trips=3, is_async=False)]
    inside = [product(4, flops=2, trips=3), product(9, flops=50)]
    assert exposed(looped, [5.0, 1.0], inside, ONE) == [3 * 5.0 - 3 * 2, 3 * 1.0]
    found = overlap([*looped, sends(10, 10, kind="all-gather", is_async=False)], inside)
    assert found.shares == {"all-reduce": Share(2400, 1200), "all-gather": Share(400, 0)}
    assert (found.reduced, found.flops) == (Share(2400, 1200), 6)


def test_what_products_of_an_unknown_rate_hide_is_not_claimed():
    spans, inside = [sends(0, 4)], [product(1, dtype="s8"), product(2)]
    assert exposed(spans, [5.0], inside, ONE) == [4.0]
    without = dataclasses.replace(ONE, products=())
    assert exposed(spans, [5.0], inside, without) is None
    assert exposed([sends(0, 0, is_async=False)], [5.0], inside, without) == [5.0]


@pytest.fixture(scope="module")
def report():
    text = (GOLDEN / "gpu-0.12.0.1-overlapped.hlo").read_text()
    return report_of(text, where="h100:8", terms=H100)


def test_a_compiled_program(report):
    assert report.overlapped == 1.0
    assert report.overlap.flops == sum(m.flops for m in report.matmuls)
    assert 0 <= report.exposed_seconds < report.seconds
    assert summary(report).startswith("behind matrix products: 100 % of ")
    assert summary(report) in " ".join(str(report).split())
    assert summary(report) in report._repr_html_()
    again = Report.from_json(report.to_json())
    assert (again, again.exposed_seconds) == (report, report.exposed_seconds)
    assert report.to_dict()["overlap"]["exposed_seconds"] == report.exposed_seconds


def test_law_a_timeline_waits_for_what_is_exposed_where_one_travels_at_a_time(report):
    played = timeline(report)
    assert played.waited == pytest.approx(report.exposed_seconds)
    assert played.seconds == pytest.approx(
        played.waited + sum(end - start for start, end in played.products)
    )
    looped = report_of((GOLDEN / "gpu-0.12.0.1-loop.hlo").read_text(), terms=H100)
    assert len(timeline(looped).sent) == looped.runs
    assert timeline(looped).waited == pytest.approx(looped.exposed_seconds)


def test_two_programs_side_by_side(report):
    plain = report_of((GOLDEN / "gpu-0.12.0.1-packs.hlo").read_text(), terms=H100)
    rows = against(report, plain, "ours", "plain").splitlines()
    assert rows[0].split() == ["ours", "plain", "ratio"]
    assert rows[-1].split()[:2] == ["share", "exposed"]
    assert "reduced behind products" in rows[6]
    assert rows[6].split()[-2:] == ["0", "%"]


def test_a_timeline_is_drawn_and_needs_terms(report, tmp_path):
    report.timeline(tmp_path / "a.png", name="once", beside={"again": report})
    assert (tmp_path / "a.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"of this report are not known: compile for an acc"):
        report_of((GOLDEN / "gpu-0.12.0.1-packs.hlo").read_text()).timeline()


def test_a_chrome_trace_has_the_spans_of_the_timeline(report, tmp_path):
    report.chrome_trace(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    spans = [(lanes[e["tid"]], e) for e in found if e["ph"] == "X"]
    played = timeline(report)
    assert max(e["ts"] + e["dur"] for _, e in spans) == pytest.approx(played.seconds * 1e6)
    waited = sum(e["dur"] for lane, e in spans if lane == "waits")
    assert waited == pytest.approx(played.waited * 1e6)
    carried = [e for lane, e in spans if lane == "carries"]
    assert [e["args"]["instruction"] for e in carried] == [
        report.collectives[sent.k].name for sent in played.sent
    ]
    assert len([1 for lane, _ in spans if lane == "multiplies"]) == len(played.products)
    packs = report_of((GOLDEN / "gpu-0.12.0.1-packs.hlo").read_text(), terms=H100)
    names = [e["name"] for e in trace(packs)["traceEvents"] if e["ph"] == "X"]
    assert any(re.search(r"all_reduce_[0-9a-f]{6}/pack\d", name) for name in names), names
