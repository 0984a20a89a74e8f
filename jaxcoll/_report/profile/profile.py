"""Read profiles that JAX recorded: the programs, and the executions of their instructions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxcoll._compat.running import (
    count_assigned_devices,
    decode_text,
    find_wrapped_names,
    program_id,
    read_fields,
)
from jaxcoll._hlo.replica_groups import read_groups
from jaxcoll._report.profile.backends import CPU, Backend, Executions, Found, Program, find_backend
from jaxcoll._report.profile.xspace import Plane, read_planes, text
from jaxcoll._show.units import shorten

BUSY = "not measured: the program itself had JAX's profiler running."
_SENDS = re.compile(
    r" (?:all-(?:reduce|gather|to-all)|reduce-scatter|ragged-all|collective-|send)[\w\-]*\("
    r"| custom-call-start\("  # of a SparseCore
)
_DEVICES = re.compile(r"\b(?:replica_count|num_partitions)=")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=")
_NUMBER = re.compile(r"\((\d+)\)$")


class Compiled(NamedTuple):
    """A compiled program that communicates."""

    text: str
    number: int | None = None  # the number of its executions' `Program`; None if not certain
    calls: int | None = None  # calls by Python code; None if they were not counted
    wrapped: Mapping[str, str] = {}  # from `find_wrapped_names`
    runs_here: bool = True  # this process has some of its devices


class Profile(NamedTuple):
    """The part of a profile that is about the devices of one process."""

    backend: Backend = CPU
    executions: Mapping[Program, Executions] = {}
    is_there: bool = False

    @property
    def devices(self) -> int:
        """The number of devices that executed something."""
        places = [np.unique(columns.device) for columns in self.executions.values()]
        return len(np.unique(np.concatenate(places))) if places else 0

    @property
    def events(self) -> int:
        """The number of executions of instructions."""
        return sum(len(columns.name) for columns in self.executions.values())


def sends(text: str) -> bool:
    """True if a compiled program communicates."""
    return bool(_SENDS.search(text))


def read_profile(profile: bytes | memoryview) -> Profile:
    """Read the executions in a serialized XSpace (b"": none).

    Cost: 0.5 µs for each event of a TPU, 2 µs for others; memory for two copies of the file.

    Raises:
      ValueError: the bytes are not a profile, or it is damaged.
    """
    with _explain_damage():
        planes, found = read_planes(memoryview(profile)), Found()
        backend = find_backend(planes)
        for plane in planes:
            if match := backend.planes.fullmatch(plane.name):
                backend.read(plane, int(match[1] or 0), found)
        epochs = [p.stat("profile_start_time") for p in planes if p.name == "Task Environment"]
        began = next((int(epoch) for epoch in epochs if epoch), 0)
    return Profile(backend, found.executions(began), is_there=bool(planes))


def read_programs(profile: bytes | memoryview) -> list[Compiled]:
    """Read the communicating programs in a serialized XSpace.

    Raises:
      ValueError: the bytes are not a profile, or it is damaged.
    """
    with _explain_damage():
        planes = [p for p in read_planes(memoryview(profile)) if p.name == "/host:metadata"]
        programs = [_read_program(*module) for plane in planes for module in modules_in(plane)]
    return sorted(filter(None, programs), key=lambda program: program.number or 0)


def modules_in(plane: Plane) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the HloModuleProto of each program in a plane of metadata."""
    for _, fields in plane.metadata():
        for stat in (dict(read_fields(value)) for number, value in fields if number == 5):
            kind = plane.strings.get(stat.get(1, 0), "").lower().replace("_", " ")
            if kind == "hlo proto" and (module := dict(read_fields(stat.get(6, b""))).get(1)):
                yield text(dict(fields).get(2, b"")), bytes(memoryview(module))


def _read_program(name: str, module: bytes) -> Compiled | None:
    hlo = decode_text(module)
    if not sends(hlo):
        return None
    if assigned := count_assigned_devices(module):
        hlo = _set_devices(hlo, *assigned)
    # A TPU's executions have the number in the name, a fingerprint; others have the same in both.
    number = int(found[1]) if (found := _NUMBER.search(name)) else program_id(module)
    return Compiled(hlo, number, wrapped=find_wrapped_names(module))


def assume_devices(program: Compiled, devices: int) -> Compiled:
    """Suppose at least so many devices for a program whose profile does not say for how many."""
    return program._replace(text=_set_devices(program.text, 1, devices, at_least=True))


def _set_devices(hlo: str, replicas: int, partitions: int, *, at_least: bool = False) -> str:
    header, newline, rest = hlo.partition("\n")
    if _DEVICES.search(header):
        return hlo
    if at_least:
        with contextlib.suppress(ValueError):  # a new notation: the report of the program says so
            lines = (
                rest[found.end() : rest.find("\n", found.end())] for found in _GROUPS.finditer(rest)
            )
            named = [device for line in lines for group in read_groups(line) for device in group]
            partitions = max([partitions, *(1 + device for device in named)])
    return f"{header}, replica_count={replicas}, num_partitions={partitions}{newline}{rest}"


@contextlib.contextmanager
def _explain_damage() -> Iterator[None]:
    """Turn the errors of damaged messages into one ValueError."""
    try:
        yield
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        message = shorten(" ".join(str(error).split()), 200)
        raise ValueError(f"this is not a JAX profile, or it is damaged: {message}.") from None
