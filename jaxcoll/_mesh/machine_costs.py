"""What the world at hand costs: a calibration of this machine, or else the preset."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from jaxcoll._cluster.hosts import Hosts, hosts_of_job
from jaxcoll._malloc import keeps_freed_memory
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Key, Terms, parsed, terms_of
from jaxcoll._plan.world import World

FILE = "JAXCOLL_TERMS"
"""The environment variable that names a calibration file."""

_PROCESSOR = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class MachineCosts:
    """What a world costs on this machine: a value, so that a traced program reads no file."""

    # Of calibrations, beside their paths: the one that `JAXCOLL_TERMS` names, or all that this user
    # has saved for this machine
    texts: tuple[tuple[Path, str], ...] = ()
    is_named: bool = False  # it is the former
    memory_is_kept: bool = False  # malloc keeps the pages of large arrays that are freed
    hosts: Hosts = dataclasses.field(default_factory=Hosts)  # of the job

    @functools.cache  # noqa: B019  a process has few of these
    def __call__(self, world: World) -> Terms:
        """What `world` costs."""
        kept = world.platform == "cpu" and self.memory_is_kept
        usual, name = self.preset(world), _saved_name(world, kept)
        found = [each for each in self.texts if self.is_named or each[0].name == name]
        if not found:
            return usual
        ((path, text),) = found
        try:
            data = parsed(text)
            terms = terms_of(data)
        except ValueError as error:
            raise ValueError(f"the calibration {path}: {error}") from None
        measured_on = data.get("measured_on")
        there = measured_on.get("machine") if isinstance(measured_on, dict) else None
        if there != machine():
            raise ValueError(
                f"the calibration {path} was measured on another machine ({there}); this is "
                f"{machine()}: calibrate here with `jaxcoll bench --calibrate`, or delete the file."
            )
        if terms.key != Key.of(world):
            other = f"is of another world ({terms.key})"
        elif measured_on != {"machine": there, "keeps_memory": kept}:
            other = f"was measured with memory that malloc {'gives back' if kept else 'keeps'}"
        else:
            return terms
        return dataclasses.replace(usual, source=f"{usual.source}, since {path} {other}")

    def preset(self, world: World) -> Terms:
        """The preset for `world` on this machine, whatever has been calibrated.

        Nothing in it may differ between the processes of a job: plans that differ never meet. What
        malloc does is therefore used only where all processes are known to be on this host; and the
        hosts' cores, for single processes may be pinned.
        """
        kept = self.memory_is_kept and world.platform == "cpu"
        kept = kept and (world.processes == 1 or self.hosts.are_one)
        return preset(world, cores=self.hosts.cores, keeps_memory=kept)


def costs_here() -> MachineCosts:
    """What worlds cost on this machine, read before a program is traced.

    The file that the environment variable `JAXCOLL_TERMS` names is used for the world it was
    measured on; for another the preset stands, and its source says so. Without the variable, what
    this user has saved for this machine and world is used, if all processes are known to be on this
    host: processes that read different files would compile programs that do not meet. Else the
    preset stands. A file is read once: nothing changes during a run.
    """
    hosts, kept = hosts_of_job(), keeps_freed_memory()
    if name := os.environ.get(FILE):
        return MachineCosts(((Path(name), _text(Path(name))),), True, kept, hosts)
    return MachineCosts(_texts(_folder()) if hosts.are_one else (), False, kept, hosts)


def terms_here(world: World) -> Terms:
    """What `world` costs on this machine; see `costs_here`."""
    return costs_here()(world)


def preset_here(world: World) -> Terms:
    """The preset for `world` on this machine, whatever has been calibrated."""
    return MachineCosts(memory_is_kept=keeps_freed_memory(), hosts=hosts_of_job()).preset(world)


def saved(world: World) -> Path:
    """Where the calibration of a world on this machine is kept."""
    return _folder() / _saved_name(world, keeps_memory(world))


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jaxcoll" / "terms" / _file_name(machine())


def _saved_name(world: World, kept: bool) -> str:
    key = Key.of(world)
    counts = f"n{key.replicas}", f"processes{key.processes}", f"hosts{key.hosts}"
    words = [key.backend, key.device_kind, *counts, *["kept"] * kept]
    return f"{_file_name('-'.join(filter(None, words)))}.json"


def circumstances(world: World) -> dict[str, Any]:
    """What a calibration holds for, beside the world: the machine, and what malloc does."""
    return {"machine": machine(), "keeps_memory": keeps_memory(world)}


def calibration(terms: Terms, measured_on: dict[str, Any]) -> str:
    """The text of a calibration file; `measured_on` are the `circumstances` of all processes."""
    return json.dumps({"measured_on": measured_on, **terms.to_dict()}, indent=2) + "\n"


@functools.cache
def machine() -> str:
    """This machine's processor, and its cores as far as this process may use them."""
    names = [
        line.partition(":")[2].strip()
        for line in (_PROCESSOR.read_text().splitlines() if _PROCESSOR.exists() else ())
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {cores()} cores"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keeps_memory(world: World) -> bool:
    """Whether malloc keeps the pages of large arrays that are freed (docs/performance.md)."""
    return world.platform == "cpu" and keeps_freed_memory()


@functools.cache
def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")  # damage counts only where the file is used
    except OSError as error:
        raise ValueError(
            f"the calibration {path} cannot be read ({error.strerror}): name another in {FILE}, or "
            "unset it to use the preset."
        ) from None


@functools.cache
def _texts(folder: Path) -> tuple[tuple[Path, str], ...]:
    return tuple((path, _text(path)) for path in sorted(folder.glob("*.json")))


def _file_name(words: str) -> str:
    return re.sub(r"[^\w.-]+", "_", words)
