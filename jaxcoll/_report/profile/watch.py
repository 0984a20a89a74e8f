"""Watch this process between two points in time, and merge the results of all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxcoll._report.profile.calls import Calls
from jaxcoll._report.profile.compilations import Compilations
from jaxcoll._report.profile.measure import check_measure, merge_ranks, this_rank
from jaxcoll._report.profile.profile import (
    Compiled,
    Profile,
    assume_devices,
    read_profile,
    read_programs,
)
from jaxcoll._report.profile.shield import Shield
from jaxcoll._report.profile.window import ABSENT, Window

if TYPE_CHECKING:  # readers of programs are imported once there is something to read
    from jaxcoll._report.programs import Programs

_numbers = itertools.count()
_MOST_SAVED = 1000
"""The most runs that are read from a saved profile; the last ones."""
_PROFILE = "rank{}.xplane.pb"


class Watch:
    """Records the programs that are compiled and run between `start` and `finish`.

    It makes one profile of about `measure` runs (0: none); `with_programs` adds their HLO to it.
    Nothing here raises: what fails is noted by the `shield`. `watched` is what is watched, in a
    word.
    """

    def __init__(
        self, measure: int, watched: str, shield: Shield, *, with_programs: bool = False
    ) -> None:
        # All ranks run the same program, so they make the same watches in the same order.
        self._name = f"jaxcoll/watch/{next(_numbers)}"
        self._most, self._watched, self._with_programs = measure, watched, with_programs
        self._shield = shield
        self._compilations: Compilations | None = None
        self._window: Window | None = None

    def start(self) -> None:
        self._shield(self._start)()

    def finish(self, *, everywhere: bool, folder: Path | None = None) -> Programs:
        """Stop watching, read the programs and the profile, and exchange measurements.

        With `everywhere`, all ranks get the measurements of all; otherwise only rank 0 does. The
        profile is also saved in `folder`.
        """
        from jaxcoll._report.programs import Programs

        self._shield(self._stop)()
        programs = self._shield(self._programs)(folder, everywhere) or Programs()
        failed = [note for note in self._shield.notes if note not in programs.notes]
        return dataclasses.replace(programs, notes=(*programs.notes, *failed))

    def _start(self) -> None:
        self._compilations = Compilations(self._shield, Calls(self._shield))
        self._compilations.start()
        if self._most:
            self._window = Window(
                self._compilations, self._most, f"{self._name}/begin", self._watched, self._shield,
                with_programs=self._with_programs,
            )  # fmt: skip
            self._window.start()

    def _stop(self) -> None:
        if self._window is not None:
            self._shield(self._window.close)()
            self._shield(self._window.join)(10)
        if self._compilations is not None:
            self._compilations.stop()

    def _programs(self, folder: Path | None, everywhere: bool) -> Programs | None:
        from jaxcoll._report.programs import read_rank

        if self._compilations is None:
            return None
        saved, note = b"", ABSENT
        if self._window is not None:
            saved, note = self._window.profile, self._window.note or ABSENT
        if folder is not None and saved:
            (folder / _PROFILE.format(this_rank())).write_bytes(saved)
        profile = self._shield(read_profile, Profile())(saved)
        reports, rows = read_rank(self._compilations.programs(), profile, self._most)
        if self._most and reports and not any(row["times"] for row in rows["programs"].values()):
            # Why a profile was not to be had says more than what is not in it.
            rows["notes"] = [note, *rows["unread"]] if note != ABSENT else rows["notes"] or [note]
        rows["notes"] += self._shield.notes
        quiet = self._compilations.quiet
        return merge_ranks(reports, rows, f"{self._name}/rows", quiet, everywhere=everywhere)


@contextlib.contextmanager
def inspecting(*, measure: int = 0) -> Iterator[Programs]:
    """Report every program with collectives that is compiled inside a `with` block.

    The block may run any code: `jax.jit` with shardings, `pmap`, `shard_map`, or a library that
    compiles by itself, in any thread. Programs that were compiled earlier are not reported. Nothing
    of this can raise into the block; what fails is in the notes.

    In a job of several processes, all of them must enter the block. Each gets the same report, with
    the measurements of every rank; a rank that does not answer in ten seconds is named in it.

    Args:
      measure: the approximate number of runs to profile, beginning a second after the last
        compilation, for the time of each collective and the ranks that arrive late. 0: no profile.

    Yields:
      A `Programs`, which is empty until the block ends. Print it, or let a notebook show it.

    Cost: 0.1 ms for each compilation; nothing for a run (2 to 10 µs from Python 3.12 on, which
    counts calls); a few per cent of a step under the profiler.

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
    from jaxcoll._report.programs import Programs

    check_measure("inspecting", measure)
    watch, programs = Watch(measure, "block", Shield()), Programs()
    watch.start()
    try:
        yield programs
    finally:
        vars(programs).update(vars(watch.finish(everywhere=True)))


def read_folder(folder: Path) -> Programs:
    """Read the newest saved profile of each process, as one report.

    Files of one name in several log folders are of several processes: JAX names a file after its
    host. It saves programs in its profiles, unless its option `enable_hlo_proto` is off.

    Raises:
      ValueError: the folder has no profile that can be read, or none with a communicating program.
    """
    from jaxcoll._report.programs import programs_from, read_rank

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: (len(file.name), file))
    newest = {(_log_folder(file), file.name): file for file in files}
    if not newest:
        raise ValueError(f"{folder} contains no profile, which is a file named *.xplane.pb.")
    contents: list[tuple[Profile, list[Compiled]]] = []
    unread = []
    for file in newest.values():
        try:
            contents.append(_read_file(file))
        except (OSError, ValueError) as error:
            unread.append(f"{file}: {error}")
    devices = sum(profile.devices for profile, _ in contents)
    reports: dict[str, Any] = {}
    ranks = {}
    for rank, (profile, programs) in enumerate(contents):
        compiled = [assume_devices(program, devices) for program in programs]
        of_rank, ranks[rank] = read_rank(compiled, profile, _MOST_SAVED)
        # A program that several processes ran is reported as the first of them has it.
        reports = of_rank | reports
    if not reports and contents:
        unread.append(
            f"{folder}: its profiles contain no communicating program. Record them with JAX's "
            "`enable_hlo_proto`, which is the default."
        )
    if not reports:
        raise ValueError("\n".join(unread))
    programs = programs_from(reports, ranks, 0)
    return dataclasses.replace(programs, unread=tuple(unread))


def _log_folder(file: Path) -> Path:
    """Cut off the time that JAX adds to a profile's folder, LOG/plugins/profile/TIME."""
    *log, plugins, profile, _ = (
        file.parent.parts if len(file.parent.parts) > 2 else ("", "", "", "")
    )
    return Path(*log) if (plugins, profile) == ("plugins", "profile") else file.parent


def _read_file(file: Path) -> tuple[Profile, list[Compiled]]:
    with file.open("rb") as opened:
        if not (size := os.fstat(opened.fileno()).st_size):
            raise ValueError("this is not a JAX profile: it is empty.")
        # What is not wanted stays on the disk.
        contents = memoryview(mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ))
    return read_profile(contents), read_programs(contents)
