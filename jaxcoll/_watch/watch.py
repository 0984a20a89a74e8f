"""Watch this process from one point to another, and lay together what all processes saw."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxcoll._compat.coordination import StoreUnreachableError, store
from jaxcoll._compat.running import ProfilerSession
from jaxcoll._observe.profile import BUSY, Compiled, read_events, read_programs
from jaxcoll._watch.compilations import Compilations
from jaxcoll._watch.window import ABSENT, Window

if TYPE_CHECKING:  # readers of programs are imported once there is something to read
    from jaxcoll._observe.programs import Programs
    from jaxcoll._observe.report import Report

_numbers = itertools.count()
_PATIENCE_SECONDS = 10.0  # for what other ranks give
_MOST_SAVED = 1000
"""Runs of a saved profile that are read, the last ones."""
_PROFILE = "rank{}.xplane.pb"


class Watch:
    """What is compiled and run between its start and its end.

    One profile should have `measure` runs (0: there is none), and its programs if it is saved.
    """

    def __init__(self, measure: int = 0, *, with_programs: bool = False) -> None:
        # Programs are the same on all ranks, and so is how often they watch.
        self._name = f"jaxcoll/watch/{next(_numbers)}"
        self._most = measure
        self.compilations = Compilations()
        self.window = Window(
            self.compilations, measure, f"{self._name}/begin", with_programs=with_programs
        )

    def start(self) -> None:
        """Begin."""
        self.compilations.start()
        if self._most:
            self.window.start()

    def stop(self) -> None:
        """Compile and run what you like: it is not looked at any more."""
        if self._most:
            self.window.close()
            self.window.join(10)
        self.compilations.stop()

    def programs(self, *, everywhere: bool, folder: Path | None = None) -> Programs:
        """Read what was seen, keep the profile in a folder, and exchange what was measured.

        All ranks have what every rank measured, or else the first alone.
        """
        from jaxcoll._observe.programs import read_rank

        compiled, window = self.compilations.programs(), self.window
        if folder is not None and window.profile:
            (folder / _PROFILE.format(this_rank())).write_bytes(window.profile)
        events, probe = read_events(window.profile), read_events(window.probe)
        reports, rows = read_rank(compiled, events, probe, self._most)
        if self._most and reports and not any(row["times"] for row in rows["programs"].values()):
            rows["notes"].append(window.note or ABSENT)
        quiet = self.compilations.quiet
        return _together(reports, rows, f"{self._name}/rows", quiet, everywhere=everywhere)


def measured(report: Report, text: str, call: Callable[[], Any], runs: int) -> Report:
    """Carry out a call so many times without a profile, and again with one: the report of both."""
    from jaxcoll._observe.programs import read_rank

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
    programs = _together(reports, rows, f"jaxcoll/watch/{next(_numbers)}/rows", 0, everywhere=True)
    took = programs.reports[0].measured
    return dataclasses.replace(report, measured=took, notes=(*report.notes, *programs.notes))


def _together(
    reports: dict[str, Report], rows: dict[str, Any], name: str, quiet: int, *, everywhere: bool
) -> Programs:
    """Return the programs of this process, with what was measured of them on all ranks."""
    from jaxcoll._observe.programs import programs_from

    ranks, note = gathered(rows, name, everywhere=everywhere)
    programs = programs_from(reports, ranks, quiet)
    return dataclasses.replace(programs, notes=(*programs.notes, *filter(None, [note])))


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


def this_rank() -> int:
    """Return the number of this process among those of `jax.distributed`; alone it is 0."""
    return getattr(store(), "process", 0)


@contextlib.contextmanager
def inspecting(*, measure: int = 0) -> Iterator[Programs]:
    """Report every program with collectives that is compiled inside a `with` block.

    It needs nothing of what runs there: `jax.jit` with shardings, `pmap`, `shard_map`, or a library
    that compiles by itself, in any thread. Of programs that were compiled before nothing is known.

    Over several processes all of them open the block; each then has the same report, with
    what was measured on every rank. One that does not come is named after ten seconds.

    Args:
      measure: about how many runs a profile should have, which is opened a second after the last
        compilation: it tells what each collective took, and which rank came late. 0 for none.

    Yields:
      A `Programs`, which is empty until the block ends: print it, or have a notebook show it.

    Cost: 0.1 ms for each compilation, nothing for a run (0.2 µs from Python 3.12 on, where calls
    are counted), a few per cent of a step while the profile is open.

    Raises:
      ValueError: `measure` is below 0.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> rows = jax.NamedSharding(mesh, jax.P("data"))
      >>> with inspecting() as programs:
      ...     total = jax.jit(lambda x: x.sum())(jax.device_put(jnp.ones(80), rows))
      >>> [(report.count, report.wire_bytes) for report in programs.reports]
      [(1, 8)]
    """
    from jaxcoll._observe.programs import Programs

    if measure < 0:
        raise ValueError(f"`inspecting`: measure must be at least 0; got {measure}.")
    watch, programs = Watch(measure), Programs()
    watch.start()
    try:
        yield programs
    finally:
        watch.stop()
        vars(programs).update(vars(watch.programs(everywhere=True)))


def read_folder(folder: Path) -> Programs:
    """Read saved profiles, the newest of each host, as one report.

    JAX saves programs with them, unless it was told otherwise (`enable_hlo_proto`).

    Raises:
      ValueError: there is no profile in it, or none with programs.
    """
    from jaxcoll._observe.programs import programs_from, read_rank

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: (len(file.name), file))
    # JAX makes a folder for each profile, named for its time.
    profiles = {file.name: file for file in files}
    if not profiles:
        raise ValueError(f"{folder} holds no profile: there is no file named *.xplane.pb in it.")
    contents = [file.read_bytes() for file in profiles.values()]
    events = [read_events(profile) for profile in contents]
    devices = sum(len({event.device for event in own}) for own in events)
    reports: dict[str, Any] = {}
    ranks = {}
    for rank, profile in enumerate(contents):
        compiled = read_programs(profile, devices)
        own, ranks[rank] = read_rank(compiled, events[rank], (), _MOST_SAVED)
        reports = own | reports
    if not reports:
        raise ValueError(
            f"{folder}: its profiles hold no program that communicates. Record them with JAX's "
            "`enable_hlo_proto`, which is the default."
        )
    return programs_from(reports, ranks, 0)
