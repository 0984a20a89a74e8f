"""What the world at hand costs: a calibration of this machine, or else the preset."""

from __future__ import annotations

import functools
import json
import os
import platform
from pathlib import Path

from jaxcoll._plan.presets import preset
from jaxcoll._plan.terms import Key, Terms, read_terms
from jaxcoll._plan.world import World

FILE = "JAXCOLL_TERMS"
"""The environment variable that names a calibration file."""


def terms_here(world: World) -> Terms:
    """What `world` costs, read once: nothing is measured, and nothing changes during a run.

    The file that the environment variable `JAXCOLL_TERMS` names is used for the world it was
    measured on. Without the variable, a calibration that this user saved for this machine and
    world is used; but only where all processes are on this host, because processes that read
    different files would compile programs that do not meet. Else the preset stands.

    Raises:
      ValueError: the file cannot be read, or is of another machine or version.
    """
    named = os.environ.get(FILE)
    path = Path(named) if named else saved(Key.of(world))
    if world.platform == "cpu" and world.processes > 1:
        kept = os.environ.get("MALLOC_MMAP_MAX_") == "0"
    else:
        kept = False
    return _terms(world, path if named or world.hosts == 1 else None, bool(named), kept)


def saved(key: Key) -> Path:
    """Where the calibration of a world on this machine is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    words = (key.backend, key.device_kind, *(f"{k}{v}" for k, v in _counts(key)))
    name = "-".join(word.replace(" ", "_").replace("/", "_") for word in words if word)
    return cache / "jaxcoll" / f"{name}.json"


def machine() -> str:
    """This machine, as far as its speed depends on it."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.node()}"


def write(terms: Terms, path: Path) -> None:
    """Save a calibration; what is there is replaced whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({"machine": machine(), **terms.to_dict()}, indent=2) + "\n")
    partial.replace(path)


@functools.cache
def _terms(world: World, path: Path | None, must_be: bool, keeps_memory: bool) -> Terms:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usual = preset(world, cores=cores or 1, keeps_memory=keeps_memory)
    if path is None or (not must_be and not path.exists()):
        return usual
    try:
        text = path.read_text()
        measured_on = json.loads(text).pop("machine", None)
        ours = read_terms(_without_machine(text))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"the calibration {path}: {error}") from None
    if measured_on != machine():
        raise ValueError(
            f"the calibration {path} was measured on another machine ({measured_on}); this is "
            f"{machine()}: calibrate here with `jaxcoll bench --calibrate`, or delete the file."
        )
    return ours if ours.key == Key.of(world) else usual


def _without_machine(text: str) -> str:
    return json.dumps({k: v for k, v in json.loads(text).items() if k != "machine"})


def _counts(key: Key) -> tuple[tuple[str, int], ...]:
    return (("n", key.replicas), ("processes", key.processes), ("hosts", key.hosts))
