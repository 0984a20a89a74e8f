"""Run one program under a profile, and lay together what all processes saw."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._compat.coordination import StoreUnreachableError, store
from jaxcoll._compat.running import ProfilerSession
from jaxcoll._observe.profile import BUSY, Compiled, read_events
from jaxcoll._observe.programs import programs_from, read_rank
from jaxcoll._observe.report import Report

_numbers = itertools.count()
_PATIENCE_SECONDS = 10.0


def measured(report: Report, text: str, call: Callable[[], Any], runs: int) -> Report:
    """Carry out a call so many times without a profile, and again with one: the report of both."""
    jax.block_until_ready(call())  # compiles
    began = time.perf_counter()
    for _ in range(runs):
        jax.block_until_ready(call())
    outside = (time.perf_counter() - began) / runs
    session = ProfilerSession()
    for _ in range(runs):
        jax.block_until_ready(call())
    profile = session.stop()
    reports, rows = read_rank([Compiled(text)], read_events(profile), (), runs)
    for row in rows["programs"].values():
        if row["times"]:
            row["times"]["outside"] = 1e9 * outside
    if not profile:
        rows["notes"].append(BUSY)
    ranks, note = gathered(rows, f"jaxcoll/measure/{next(_numbers)}/rows", everywhere=True)
    programs = programs_from(reports, ranks, 0)
    notes = (*report.notes, *programs.notes, *filter(None, [note]))
    took = programs.reports[0].measured
    return dataclasses.replace(report, measured=took, notes=notes)


def gathered(own: dict[str, Any], name: str, *, everywhere: bool) -> tuple[dict[int, Any], str]:
    """Return what each rank gave, by rank, and a note on those that did not answer.

    They are plain values, and `name` is of no other call. Unless `everywhere` is asked for, all
    ranks but the first have their own alone.
    """
    keys = store()
    if keys is None or keys.processes == 1:
        return {0: own}, ""
    ranks: dict[int, Any] = {keys.process: own}
    try:
        packed = zlib.compress(json.dumps(own).encode(), 6)
        keys.set(f"{name}/{keys.process}", base64.b85encode(packed).decode())
        if keys.process and not everywhere:
            return ranks, ""
        until = time.monotonic() + _PATIENCE_SECONDS
        for rank in sorted({*range(keys.processes)} - {keys.process}):
            try:
                packed = keys.get(f"{name}/{rank}", max(0.1, until - time.monotonic()))
            except TimeoutError:
                continue
            ranks[rank] = json.loads(zlib.decompress(base64.b85decode(packed)))
    except StoreUnreachableError:
        pass  # those that answered before are in
    missing = sorted({*range(keys.processes)} - {*ranks})
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    note = f"{names} did not answer within {_PATIENCE_SECONDS:g} s." if missing else ""
    return dict(sorted(ranks.items())), note
