"""Measure calls under JAX's profiler, and bring the measurements of all ranks together."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxcoll._compat.coordination import StoreUnreachableError, store
from jaxcoll._compat.running import ProfilerSession
from jaxcoll._job.exchange import LateError, exchange
from jaxcoll._plan.checks import is_integer
from jaxcoll._report.profile.profile import BUSY, Compiled, read_profile

if TYPE_CHECKING:  # readers of programs are imported once there is something to read
    from jaxcoll._report.programs import Programs
    from jaxcoll._report.report import Report

_numbers = itertools.count()
_ANSWER_SECONDS = 10.0  # the time that other ranks have to send their measurements


def measure_calls(report: Report, text: str, call: Callable[[], Any], runs: int) -> Report:
    """Add times to the report, of `runs` calls under the profiler after as many without it."""
    from jaxcoll._report.profile.rank_times import find_step
    from jaxcoll._report.programs import read_rank

    jax.block_until_ready(call())  # compiles
    starts = []
    for _ in range(runs):
        starts.append(time.perf_counter_ns())
        jax.block_until_ready(call())
    session = ProfilerSession()
    for _ in range(runs):
        jax.block_until_ready(call())
    profile = session.stop()
    reports, rows = read_rank([Compiled(text)], read_profile(profile), runs)
    for row in rows["programs"].values():
        if row["times"]:  # as there: from the start of one run to the start of the next
            row["times"]["unprofiled"] = find_step(starts)
    if not profile:
        rows["notes"].append(BUSY)
    programs = merge_ranks(
        reports, rows, f"jaxcoll/measure/{next(_numbers)}/rows", 0, everywhere=True
    )
    times = programs.reports[0].measured
    return dataclasses.replace(report, measured=times, notes=(*report.notes, *programs.notes))


def merge_ranks(
    reports: dict[str, Report], rows: dict[str, Any], name: str, quiet: int, *, everywhere: bool
) -> Programs:
    """Add the measurements of all ranks to the programs of this process."""
    from jaxcoll._report.programs import programs_from

    ranks, note = gather(rows, name, everywhere=everywhere)
    programs = programs_from(reports, ranks, quiet)
    notes = (*programs.notes, *filter(None, [note]))
    return dataclasses.replace(programs, notes=notes, unread=tuple(rows["unread"]))


def gather(values: dict[str, Any], name: str, *, everywhere: bool) -> tuple[dict[int, Any], str]:
    """Exchange `values` with all ranks; add a note on ranks that did not answer.

    Values must be JSON, and each call needs a new `name`. Unless `everywhere`, ranks other than
    rank 0 get their own values only.
    """
    keys = store()
    if keys is None or keys.processes == 1:
        return {0: values}, ""
    packed, note = base64.b85encode(zlib.compress(json.dumps(values).encode(), 6)).decode(), ""
    waited_for = range(keys.processes) if everywhere or not keys.process else [keys.process]
    try:
        texts = exchange(keys, name, packed, waited_for, _ANSWER_SECONDS)
    except LateError as late:
        texts, note = late.values, str(late)
    except StoreUnreachableError:
        texts, note = {keys.process: packed}, "the coordinator does not answer."
    return {r: json.loads(zlib.decompress(base64.b85decode(x))) for r, x in texts.items()}, note


def this_rank() -> int:
    """Number this process as `jax.distributed` does; 0 if it is alone."""
    return getattr(store(), "process", 0)


def check_measure(caller: str, measure: Any) -> None:
    """Refuse anything but a number of runs to measure."""
    if not is_integer(measure) or measure < 0:
        raise ValueError(f"`{caller}`: `measure` must be an integer, at least 0; got {measure!r}.")
