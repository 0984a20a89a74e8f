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

import jax

from jaxcoll._cluster.launchers import COORDINATOR, JAX_COORDINATOR
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Key, Terms, parsed, terms_of
from jaxcoll._plan.world import World

FILE = "JAXCOLL_TERMS"
"""The environment variable that names a calibration file."""

_PROCESSOR = Path("/proc/cpuinfo")
_COORDINATORS = (COORDINATOR, JAX_COORDINATOR)


def terms_here(world: World) -> Terms:
    """What `world` costs, read once: nothing is measured, and nothing changes during a run.

    The file that the environment variable `JAXCOLL_TERMS` names is used for the world it was
    measured on; for another the preset stands, and its source says so. Without the variable, what
    this user has saved for this machine and world is used, if all processes are known to be on this
    host: processes that read different files would compile programs that do not meet. Else the
    preset stands.

    Raises:
      ValueError: the file cannot be read, or is of another machine or version.
    """
    named = os.environ.get(FILE)
    path = Path(named) if named else saved(world)
    return _terms(world, path, bool(named), keeps_memory(world))


def preset_here(world: World) -> Terms:
    """The preset for `world` on this machine, whatever has been calibrated.

    Nothing in it may differ between the processes of a job: plans that differ never meet. How many
    cores there are and what malloc does is therefore asked only where all processes are known to
    be on this host, and of the host, to whose cores single processes may be pinned.
    """
    if world.processes > 1 and not _on_this_host():
        return preset(world)
    return preset(world, cores=os.cpu_count() or 1, keeps_memory=keeps_memory(world))


def saved(world: World) -> Path:
    """Where the calibration of a world on this machine is kept."""
    key = Key.of(world)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    counts = (("n", key.replicas), ("processes", key.processes), ("hosts", key.hosts))
    words = [key.backend, key.device_kind, *(f"{name}{count}" for name, count in counts)]
    words += ["kept"] * keeps_memory(world)
    name = "-".join(filter(None, words))
    return cache / "jaxcoll" / "terms" / _file_name(machine()) / f"{_file_name(name)}.json"


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
    return world.platform == "cpu" and os.environ.get("MALLOC_MMAP_MAX_") == "0"


@functools.cache
def _terms(world: World, path: Path, named: bool, keeps: bool) -> Terms:
    usual = preset_here(world)
    if not named and not (path.exists() and _on_this_host()):
        return usual
    try:
        data = parsed(path.read_text())
        measured_on = data.pop("measured_on", None)
        terms = terms_of(data)
    except OSError as error:
        raise ValueError(
            f"the calibration {path} cannot be read ({error.strerror}): name another in {FILE}, or "
            "unset it to use the preset."
        ) from None
    except ValueError as error:
        raise ValueError(f"the calibration {path}: {error}") from None
    there = measured_on.get("machine") if isinstance(measured_on, dict) else None
    if there != machine():
        raise ValueError(
            f"the calibration {path} was measured on another machine ({there}); this is "
            f"{machine()}: calibrate here with `jaxcoll bench --calibrate`, or delete the file."
        )
    if terms.key != Key.of(world):
        other = f"is of another world ({terms.key})"
    elif measured_on != circumstances(world):
        other = f"was measured with memory that malloc {'gives back' if keeps else 'keeps'}"
    else:
        return terms
    return dataclasses.replace(usual, source=f"{usual.source}, since {path} {other}")


def _on_this_host() -> bool:
    """Whether all processes of the job are known to be on this host, which JAX does not tell."""
    if jax.process_count() == 1:
        return True
    told = [os.environ[name] for name in _COORDINATORS if name in os.environ]
    return bool(told) and told[0].rpartition(":")[0] in ("127.0.0.1", "localhost")


def _file_name(words: str) -> str:
    return re.sub(r"[^\w.-]+", "_", words)
