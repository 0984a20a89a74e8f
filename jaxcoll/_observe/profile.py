"""Read profiles that JAX recorded: the programs, and the executions of their instructions."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxcoll._compat.running import (
    assigned_devices,
    fields_of,
    program_id,
    text_of,
    wrapped_names,
)
from jaxcoll._observe.backends import CPU, Backend, Executions, Names, Program, find_backend
from jaxcoll._observe.parse.replica_groups import read_groups
from jaxcoll._observe.xspace import Plane, read_planes
from jaxcoll._show.units import shortened

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
    wrapped: Mapping[str, str] = {}  # from `wrapped_names`


class Profile(NamedTuple):
    """What a profile has of the devices of one process."""

    backend: Backend = CPU
    executions: Mapping[Program, Executions] = {}  # sorted by start
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
    """Return the executions in a serialized XSpace (b"": none).

    Cost: 0.5 µs for each event of a TPU, 2 µs for others; memory for two copies of the file.

    Raises:
      ValueError: the bytes are not a profile, or it is damaged.
    """
    planes, names = read_planes(memoryview(profile)), Names()
    backend = find_backend(planes)
    found: dict[Program, list[Executions]] = defaultdict(list)
    with _explained():
        epochs = (p.stat("profile_start_time") for p in planes if p.name == "Task Environment")
        began = next((int(epoch) for epoch in epochs if epoch), 0)
        for plane in planes:
            if match := backend.planes.fullmatch(plane.name):
                device = int(match[1]) if match.groups() else 0
                for program, columns in backend.read(plane, device, names):
                    found[program].append(columns)
    executions = {}
    for program in [*found]:
        columns = in_order(found.pop(program))
        columns.start[:] += began
        columns.end[:] += began
        executions[program] = columns
    return Profile(backend, executions, is_there=bool(planes))


def read_programs(profile: bytes | memoryview) -> list[Compiled]:
    """Return the communicating programs in a serialized XSpace.

    Raises:
      ValueError: the bytes are not a profile, or it is damaged.
    """
    programs = []
    with _explained():
        for plane in read_planes(memoryview(profile)):
            if plane.name == "/host:metadata":
                programs += [_compiled(*found) for found in _modules(plane)]
    return sorted(filter(None, programs), key=lambda program: program.number or 0)


def _modules(plane: Plane) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the HloModuleProto of each program in a plane of metadata."""
    for _, fields in plane.metadata():
        for stat in (dict(fields_of(value)) for number, value in fields if number == 5):
            name = plane.strings.get(stat.get(1, 0), "").replace("_", " ")
            for number, module in (
                fields_of(stat.get(6, b"")) if name.lower() == "hlo proto" else ()
            ):
                if number == 1:
                    yield str(bytes(dict(fields).get(2, b"")), "utf8"), bytes(module)


def _compiled(name: str, module: bytes) -> Compiled | None:
    """Return a program, unless it does not communicate."""
    text = text_of(module)
    if not sends(text):
        return None
    if assigned := assigned_devices(module):
        text = _for_devices(text, *assigned)
    # A TPU's executions have the number in the name, a fingerprint; others have the same in both.
    number = int(found[1]) if (found := _NUMBER.search(name)) else program_id(module)
    return Compiled(text, number, wrapped=wrapped_names(module))


def assume_devices(program: Compiled, devices: int) -> Compiled:
    """Return the program, for at least so many devices if its profile does not say for how many."""
    return program._replace(text=_for_devices(program.text, 1, devices, at_least=True))


def _for_devices(text: str, replicas: int, partitions: int, *, at_least: bool = False) -> str:
    header, newline, rest = text.partition("\n")
    if _DEVICES.search(header):
        return text
    if at_least:
        with contextlib.suppress(ValueError):  # a new notation: the report of the program says so
            lines = (
                rest[found.end() : rest.find("\n", found.end())] for found in _GROUPS.finditer(rest)
            )
            named = [device for line in lines for group in read_groups(line) for device in group]
            partitions = max([partitions, *(1 + device for device in named)])
    return f"{header}, replica_count={replicas}, num_partitions={partitions}{newline}{rest}"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn the errors of damaged messages into one ValueError."""
    try:
        yield
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        message = shortened(" ".join(str(error).split()), 200)
        raise ValueError(f"this is not a JAX profile, or it is damaged: {message}.") from None


def in_order(chunks: Sequence[Executions]) -> Executions:
    """Join executions of one profile, in the order of their starts."""
    names = chunks[0].names
    name, device, run, start, end = (
        np.concatenate(columns) for columns in zip(*(chunk[1:] for chunk in chunks), strict=True)
    )
    order = np.argsort(start, kind="stable")
    return Executions(names, *(column[order] for column in (name, device, run, start, end)))
