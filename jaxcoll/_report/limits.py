"""`jc.assert_collectives`: limits on what a program sends, which are checked without JAX."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxcoll._hlo.collective import KINDS, Collective, count_bytes
from jaxcoll._show.units import pluralize, some

if TYPE_CHECKING:
    from jaxcoll._report.programs import Programs
    from jaxcoll._report.report import Report


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
    upper, allowed = check_limits({
        "max_count": max_count, "max_wire_bytes": max_wire_bytes, "max_operands": max_operands,
        "none_in_loops": none_in_loops, "dtypes": dtypes, "kinds": kinds,
    })  # fmt: skip
    if isinstance(report, Programs) and report.unread:
        raise AssertionError(f"a program could not be checked. {' '.join(report.unread)}")
    if isinstance(report, Programs) and not report.reports and not report.quiet:
        raise AssertionError(
            "no program was compiled, so there was nothing to check. A report of `inspecting` is "
            "filled when its block ends, with the programs that were first compiled inside it."
        )
    for one in report.reports if isinstance(report, Programs) else [report]:
        if complaints := list(_complaints(one, upper, none_in_loops, allowed)):
            lines = [f"{one.title} exceeds its limits.", *complaints, "", str(one)]
            raise AssertionError("\n".join(lines))
    return report


def check_limits(
    limits: Mapping[str, Any],
) -> tuple[dict[str, int | None], dict[str, set[str] | None]]:
    """Split limits into those on numbers and the allowed names; refuse invalid ones."""
    upper = {name: limits.get(name) for name in ("max_count", "max_wire_bytes", "max_operands")}
    for name, limit in upper.items():
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ValueError(f"`{name}` must be None or an integer of at least 0; got {limit!r}.")
    allowed = {
        "dtypes": _check_names(
            limits, "dtypes", _is_dtype, "element types of HLO such as f32, bf16"
        ),
        "kinds": _check_names(limits, "kinds", KINDS.__contains__, ", ".join(KINDS)),
    }
    values = *upper.values(), *allowed.values()
    if not limits.get("none_in_loops") and all(limit is None for limit in values):
        names = ", ".join([*upper, "none_in_loops", *allowed])
        raise ValueError(f"`assert_collectives` needs a limit, one or more of {names}; got none.")
    return upper, allowed


def _check_names(
    limits: Mapping[str, Any], name: str, is_valid: Callable[[str], bool], valid: str
) -> set[str] | None:
    if (value := limits.get(name)) is None:
        return None
    names = {value} if isinstance(value, str) else set(value)
    for invalid in (x for x in names if not isinstance(x, str) or not is_valid(x)):
        raise ValueError(f"`{name}` may name {valid}; got {invalid!r}.")
    return names


def _is_dtype(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return count_bytes(name, 1) > 0
    return False


def _complaints(
    report: Report,
    upper: Mapping[str, int | None],
    none_in_loops: bool,
    allowed: Mapping[str, set[str] | None],
) -> Iterator[str]:
    """Yield each limit that is not known to be kept, with the value found."""
    for name, total in (("max_count", report.runs), ("max_wire_bytes", report.wire_bytes)):
        limit = upper[name]
        if limit is not None and (total > limit or report.unbounded):
            least = "at least " if report.uncounted else ""
            yield f"{name}={limit:,}, found {least}{total:,} in one run."
    # Limits on single collectives, each with a function that lists how a collective exceeds it
    limits: list[tuple[str, Callable[[Collective], Iterable[str]]]] = []
    if (most := upper["max_operands"]) is not None:
        limits.append((
            f"max_operands={most}",
            lambda c: [pluralize(len(c.operands), "operand")] * (len(c.operands) > most),
        ))  # fmt: skip
    if none_in_loops:
        limits.append(("none_in_loops=True", lambda c: [f"loop {name}" for name in c.loops[-1:]]))
    if (dtypes := allowed["dtypes"]) is not None:
        limits.append((f"dtypes={sorted(dtypes)}", lambda c: {*c.dtypes} - dtypes))
    if (kinds := allowed["kinds"]) is not None:
        limits.append((f"kinds={sorted(kinds)}", lambda c: {c.kind} - kinds))
    for limit, excess_of in limits:
        excess = {k: sorted(excess_of(c)) for k, c in enumerate(report.collectives)}
        if rows := [f"#{k}" for k in excess if excess[k]]:
            values = ", ".join(dict.fromkeys(itertools.chain(*excess.values())))
            yield f"{limit}, found {values} in {', '.join(some(rows, 8))}."
    # What could not be read may exceed any limit.
    yield from (f"not counted: {note}" for note in report.unread)
