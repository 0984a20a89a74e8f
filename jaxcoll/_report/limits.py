"""`jc.assert_collectives`: limits on what a program sends, which are checked without JAX."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxcoll._hlo.collective import KINDS, Collective, count_bytes
from jaxcoll._show.units import pluralize, some

if TYPE_CHECKING:
    from jaxcoll._report.programs import Programs
    from jaxcoll._report.report import Report

_NUMBERS = ("max_count", "max_wire_bytes", "max_operands")
_NAMES = {"dtypes": "element types of HLO such as f32, bf16", "kinds": ", ".join(KINDS)}


def assert_collectives(
    report: Report | Programs,
    *,
    max_count: int | None = None,
    max_wire_bytes: int | None = None,
    max_operands: int | None = None,
    none_in_loops: bool = False,
    dtypes: Iterable[str] | None = None,
    kinds: Iterable[str] | None = None,
) -> Report | Programs:
    """Assert limits on what a program sends, in a test suite.

    It passes only if every limit is known to be kept. If the program may send something that could
    not be read, every limit fails; in a loop of unknown length, those on counts and bytes fail.

    Args:
      report: the result of `inspect`, for local devices or a topology; or the result of
        `inspecting`, in which every program must keep the limits.
      max_count: most collectives that one run of the compiled program executes, counting each
        iteration of a loop; 0 allows none.
      max_wire_bytes: most bytes that leave one device in one run.
      max_operands: most arrays in a single collective.
      none_in_loops: True forbids collectives in loops.
      dtypes: element types that may travel, as HLO spells them: f32, bf16, s8, ...
      kinds: kinds of collective that may occur: all-reduce, all-gather, reduce-scatter, ...

    Returns:
      The report, for further checks.

    Raises:
      AssertionError: a limit is exceeded. The message lists every exceeded limit with the value
        found and its rows, and then the whole report.
      TypeError: there is no limit of that name, or `report` is not a report.
      ValueError: no limit is given, or one is invalid.

    Examples:
      >>> import numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("mean", w * x.sum(), "data"))
      >>> report = inspect(step, np.ones(10, "f"), np.ones(8, "f"))
      >>> assert_collectives(report, max_count=1, none_in_loops=True, dtypes=["f32"]).count
      1
    """
    __tracebackhide__ = True  # pytest then shows the test's own line
    from jaxcoll._report.programs import Programs
    from jaxcoll._report.report import Report

    if not isinstance(report, Report | Programs):
        raise TypeError(
            "`assert_collectives` expects a report, as in `jc.assert_collectives(jc.inspect(step, "
            f"*args), max_count=1)`; got {type(report).__name__}."
        )
    given = check_limits({
        "max_count": max_count, "max_wire_bytes": max_wire_bytes, "max_operands": max_operands,
        "none_in_loops": none_in_loops or None, "dtypes": dtypes, "kinds": kinds,
    })  # fmt: skip
    if isinstance(report, Programs) and report.unread:
        raise AssertionError(f"a program could not be checked. {' '.join(report.unread)}")
    if isinstance(report, Programs) and not report.reports and not report.quiet:
        raise AssertionError(
            "no program was compiled, so there was nothing to check. A report of `inspecting` is "
            "filled when its block ends, with the programs that were first compiled inside it."
        )
    for one in report.reports if isinstance(report, Programs) else [report]:
        if complaints := list(_complaints(one, given)):
            lines = [f"{one.title} exceeds its limits.", *complaints, "", str(one)]
            raise AssertionError("\n".join(lines))
    return report


def check_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the limits that are given, allowed names as sets; refuse invalid ones."""
    given: dict[str, Any] = {}
    for name, limit in limits.items():
        if limit is None:
            continue
        if name in _NAMES:
            limit = {limit} if isinstance(limit, str) else set(limit)
            for invalid in (x for x in limit if not _is_name(name, x)):
                raise ValueError(f"`{name}` may name {_NAMES[name]}; got {invalid!r}.")
        elif name in _NUMBERS and (type(limit) is not int or limit < 0):
            raise ValueError(f"`{name}` must be None or an integer of at least 0; got {limit!r}.")
        given[name] = limit
    if not given:
        names = ", ".join([*_NUMBERS, "none_in_loops", *_NAMES])
        raise ValueError(f"`assert_collectives` needs a limit, one or more of {names}; got none.")
    return given


def _is_name(limit: str, name: Any) -> bool:
    if limit == "kinds" or not isinstance(name, str):
        return name in KINDS
    with contextlib.suppress(ValueError):
        return count_bytes(name, 1) > 0
    return False


def _complaints(report: Report, given: Mapping[str, Any]) -> Iterator[str]:
    for name, total in (("max_count", report.runs), ("max_wire_bytes", report.wire_bytes)):
        if name in given and (total > given[name] or report.unbounded):
            least = "at least " if report.uncounted else ""
            yield f"{name}={given[name]:,}, found {least}{total:,} in one run."
    for name in ("max_operands", "none_in_loops", "dtypes", "kinds"):
        if name in given:
            limit = given[name]
            excess = {k: _excess(name, limit, c) for k, c in enumerate(report.collectives)}
            if rows := [f"#{k}" for k in excess if excess[k]]:
                values = ", ".join(dict.fromkeys(itertools.chain(*excess.values())))
                shown = sorted(limit) if name in _NAMES else limit
                yield f"{name}={shown}, found {values} in {', '.join(some(rows, 8))}."
    # What could not be read may exceed any limit.
    yield from (f"not counted: {note}" for note in report.unread)


def _excess(name: str, limit: Any, c: Collective) -> list[str]:
    match name:
        case "max_operands":
            return [pluralize(len(c.operands), "operand")] * (len(c.operands) > limit)
        case "none_in_loops":
            return [f"loop {loop}" for loop in c.loops[-1:]]
        case _:
            return sorted({*c.dtypes} - limit if name == "dtypes" else {c.kind} - limit)
