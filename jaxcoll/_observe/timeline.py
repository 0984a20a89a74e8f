"""Plays a compiled schedule by the cost model: one lane multiplies, one carries."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxcoll._observe.parse.calls import Loop, Matmul
from jaxcoll._observe.report_data import ReportData

MOST_TURNS = 200
"""Of one loop that are played; the rest would make no picture."""


class Sent(NamedTuple):
    """One collective, carried out once."""

    k: int  # its position in `report.collectives`
    start: float  # seconds at which the program starts it
    begins: float  # when it has the links for itself
    ends: float  # when it is through
    asked: float  # when the program came to its end
    done: float  # when the program goes on behind its end; from when it asked to, it waited


class Timeline(NamedTuple):
    """A run of the program by the cost model, in seconds from its beginning."""

    # When matrix products begin and end, one after another
    products: tuple[tuple[float, float], ...]
    sent: tuple[Sent, ...]  # every collective that is carried out
    seconds: float  # when everything is through

    @property
    def waited(self) -> float:
        """Seconds in which nothing is multiplied because a collective is not through."""
        return sum(s.done - s.asked for s in self.sent)


def timeline(report: ReportData) -> Timeline:
    """Plays the compiled schedule.

    Law: instructions are carried out in the compiler's order; a matrix product takes its operations
    at the rate of its type, everything else no time; collectives have the links one after another,
    in the order of their starts; behind the end of one the program goes on when it is through. Each
    loop is played as often as it turns, at most 200 times; one that does not say so once.

    Raises:
      ValueError: the terms are not known.
    """
    terms = report.terms
    if terms is None or (report.matmuls and not terms.products):
        raise ValueError(
            "a timeline needs to know what collectives and matrix products take, and the terms of "
            f"this report are {'not known' if terms is None else 'without rates'}: compile for an "
            "accelerator, as in `jc.inspect(..., topology='h100:8')`."
        )
    here = free = 0.0
    products: list[tuple[float, float]] = []
    sent: list[Sent] = []
    open_now: dict[int, tuple[float, float, float]] = {}
    for event, k in _played(report):
        if isinstance(event, Matmul):
            spent = event.flops / (terms.product_rate(event.dtype) or float("inf"))
            products.append((here, here + spent))
            here += spent
        elif event == "start":
            begins = max(here, free)
            free = begins + (report.seconds_of(k) or 0.0)
            open_now[k] = (here, begins, free)
        else:
            start, begins, ends = open_now.pop(k)
            done = max(here, ends)
            sent.append(Sent(k, start, begins, ends, here, done))
            here = done
    return Timeline(tuple(products), tuple(sent), here)


def _played(report: ReportData) -> Iterator[tuple[Matmul | str, int]]:
    """Products, and starts and ends of collectives with their position, in order, loops turned."""
    marks: list[tuple[float, int, Matmul | str, int]] = [
        (m.at, 1, m, k) for k, m in enumerate(report.matmuls)
    ]
    for k, c in enumerate(report.collectives):
        if c.group_size > 1:
            marks.append((c.at, 0, "start", k))
            until = max(c.until, c.at) if c.is_async else c.at
            marks.append((until, 2, "end", k))
    # In one place a start comes before a product, and an end after it.
    marks.sort(key=lambda mark: mark[:2])
    places = [mark[0] for mark in marks]

    def within(first: int, last: int, loops: Sequence[Loop]) -> Iterator[tuple[Matmul | str, int]]:
        here = first
        while loops:
            loop, *rest = loops
            inside = [x for x in rest if x.at >= loop.at and x.until <= loop.until]
            low = bisect.bisect_left(places, loop.at, here, last)
            high = bisect.bisect_right(places, loop.until, low, last)
            yield from ((event, k) for _, _, event, k in marks[here:low])
            for _ in range(min(loop.trips or 1, MOST_TURNS)):
                yield from within(low, high, inside)
            here, loops = high, [x for x in rest if x not in inside]
        yield from ((event, k) for _, _, event, k in marks[here:last])

    yield from within(0, len(marks), sorted(report.loops, key=lambda x: (x.at, -x.until)))


_LANES = ("multiplies", "waits", "carries")


def trace(report: ReportData) -> dict[str, Any]:
    """One lane of matrix products, one of waiting, one of collectives, named by their packs."""
    played = timeline(report)
    events = [_event("matrix product", 0, start, end) for start, end in played.products]
    for sent in played.sent:
        collective = report.collectives[sent.k]
        name = ", ".join(report.packs_of(sent.k)) or collective.kind
        about = {"instruction": collective.name, "wire bytes": collective.wire_bytes}
        events.append(_event(name, 2, sent.begins, sent.ends, **about))
        if sent.done > sent.asked:
            events.append(_event(f"waits for {name}", 1, sent.asked, sent.done))
    lanes = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": words}}
        for lane, words in enumerate(_LANES)
    ]
    return {"traceEvents": lanes + events, "displayTimeUnit": "ms"}


def _event(name: str, lane: int, start: float, end: float, **about: Any) -> dict[str, Any]:
    """A span, in microseconds."""
    span = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "pid": 0, "tid": lane, **span, "args": about}
