"""Watch this process from one point to another, and lay together what all processes saw."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxcoll._compat.coordination import store
from jaxcoll._observe.profile import read_events, read_programs
from jaxcoll._watch.compilations import Compilations
from jaxcoll._watch.window import ABSENT, Window

if TYPE_CHECKING:
    from jaxcoll._observe.programs import Programs

_numbers = itertools.count()
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
        # The readers of programs are imported once there is something to read: what is watched
        # begins without them.
        from jaxcoll._observe.programs import programs_from, read_rank
        from jaxcoll._watch.measure import gathered

        compiled, window = self.compilations.programs(), self.window
        if folder is not None and window.profile:
            (folder / _PROFILE.format(this_rank())).write_bytes(window.profile)
        events, probe = read_events(window.profile), read_events(window.probe)
        reports, rows = read_rank(compiled, events, probe, self._most)
        if self._most and reports and not any(row["times"] for row in rows["programs"].values()):
            rows["notes"].append(window.note or ABSENT)
        ranks, note = gathered(rows, f"{self._name}/rows", everywhere=everywhere)
        programs = programs_from(reports, ranks, self.compilations.quiet)
        return dataclasses.replace(programs, notes=(*programs.notes, *filter(None, [note])))


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
