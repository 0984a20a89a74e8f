"""The parts of a profile by backend: one description of TPUs, one of GPUs, one of CPUs.

A description says which events are executions of instructions, and which runs they belong to.
Launches, copies in the background and lines that other tools derive are no executions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxcoll._report.profile.xspace import ABSENT, Events, Plane

_MODULE = re.compile(r"(.*?)(?:\((\d+)\))?$")  # jit_step(9646411105960254074)
_NAME = re.compile(r"%?([\w.\-]+)")
_RUN = re.compile(r"run_id=RunId: (-?\d+)")
_STATS: tuple[str, ...] = ("hlo_module", "program_id", "hlo_op")

Program = tuple[str, int]
"""A program's name, and the number that distinguishes programs of one name in one profile."""


class Executions(NamedTuple):
    """Executions of instructions of one program, as columns. Times are nanoseconds since 1970."""

    names: list[str]
    name: np.ndarray  # positions in `names`
    device: np.ndarray
    run: np.ndarray
    start: np.ndarray
    end: np.ndarray


class Backend(NamedTuple):
    """The description of a backend."""

    planes: re.Pattern[str]  # the planes with executions; a group is the device's number
    read: Callable[[Plane, int, Found], None]  # adds the executions of a plane
    # True: a run has one number on all devices and ranks. False: its devices, and then ranks, are
    # joined by the times at which its collectives end
    has_numbers: bool
    # True: an instruction may run several kernels, and nothing says which run they belong to
    runs_kernels: bool
    has_ends: bool  # True: a run has an event of its own
    advice: str  # what to do if collectives have no events


class Found:
    """The executions that were found so far, by program."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._columns: dict[Program, list[list[np.ndarray]]] = {}

    def add(
        self, program: Program, chosen: np.ndarray, names: tuple[np.ndarray, dict[int, str]],
        device: np.ndarray | int, run: np.ndarray, events: Events,
    ) -> None:  # fmt: skip
        """Add those of `events` that are `chosen`."""
        keys, inverse = np.unique(names[0][chosen], return_inverse=True)
        texts = [names[1].get(key, "") for key in keys.tolist()]
        found = [match[1] if (match := _NAME.match(text)) else "" for text in texts]
        numbers = [self._numbers.setdefault(text, len(self._numbers)) for text in found]
        devices = np.broadcast_to(np.asarray(device, np.int32), chosen.shape)
        columns = self._columns.setdefault(program, [[] for _ in range(5)])
        columns[0].append(np.array(numbers, np.int32)[inverse])
        for column, values in zip(
            columns[1:], (devices, run, events.start, events.end), strict=True
        ):
            column.append(values[chosen])

    def executions(self, began: int) -> dict[Program, Executions]:
        """Join all, with times from when the session began. This can be done once."""
        joined, names = {}, list(self._numbers)
        for program, columns in self._columns.items():
            # Column by column, so that no more than one is in memory twice.
            arrays = [np.concatenate(columns.pop(0)) for _ in range(5)]
            arrays[3] += began
            arrays[4] += began
            joined[program] = Executions(names, *arrays)
        return joined


def _read_tpu(plane: Plane, device: int, found: Found) -> None:
    """Read a line of whole programs, and another one of the instructions within their times.

    A run's number counts the runs of all programs on this device. The line of asynchronous
    operations is left out: it has the times of copies in the background, on some devices only.
    """
    lines = defaultdict(list)
    for name, line in plane.lines():
        lines[name].append(line)
    modules = _concatenate(
        [events for line in lines["XLA Modules"] for events in plane.events(line)]
    )
    order = np.argsort(modules.start, kind="stable")
    starts, ends, keys = modules.start[order], modules.end[order], modules.name[order]
    for events in (events for line in lines["XLA Ops"] for events in plane.events(line)):
        run = np.searchsorted(starts, events.start, "right").astype(np.int32) - 1
        # An instruction before the first program has the run -1, which reads the appended element.
        inside = (run >= 0) & (events.start <= np.append(ends, 0)[run])
        of_module = np.append(keys, 0)[run]
        for key in np.unique(of_module[inside]).tolist():
            match = _MODULE.match(plane.names.get(key, ""))
            program = (match[1], int(match[2] or 0)) if match else ("", 0)
            names = events.name, plane.names
            found.add(program, inside & (of_module == key), names, device, run, events)


def _read_gpu(plane: Plane, device: int, found: Found) -> None:
    """Read the kernels of a device's streams, which have their instructions, but not their runs.

    Some kernels lack the instruction: it is that of the other kernels of the same name, if these
    have only one. The launch of a kernel, on a line of the host, has the same instruction.
    """
    streams = [
        _concatenate([*plane.events(line, _STATS)], _STATS)
        for name, line in plane.lines()
        if name.startswith("Stream #")
    ]
    events = _concatenate(streams, _STATS)
    stream = np.repeat(np.arange(len(streams)), [len(part.name) for part in streams])
    stats = np.stack([events.stats[stat] for stat in _STATS])
    known = stats[2] != ABSENT
    for kernel in np.unique(events.name[~known]).tolist():
        of_kernel = events.name == kernel
        instructions = np.unique(stats[:, of_kernel & known], axis=1)
        if instructions.shape[1] == 1:
            stats[:, of_kernel & ~known] = instructions
    # Kernels of one execution follow one another; another begins with the kernel of the first.
    order = np.lexsort((events.start, stream))
    changes = np.any(np.diff([*stats[:, order], stream[order]], prepend=ABSENT + 1), axis=0)
    name = events.name[order]
    begins = changes | (name == name[np.flatnonzero(changes)][np.cumsum(changes) - 1])
    chosen, at = order[begins], np.flatnonzero(begins)
    end = np.maximum.reduceat(events.end[order], at) if len(at) else events.end
    joined = {stat: values[chosen] for stat, values in zip(_STATS, stats, strict=True)}
    events = Events(events.name[chosen], events.start[chosen], end, joined)
    _add_named(plane, events, found, device, np.zeros(len(chosen), np.int32))


def _read_cpu(plane: Plane, _device: int, found: Found) -> None:
    """Read the instructions of all threads; each has its device and its run.

    JAX before 0.8 recorded neither, but the rendezvous inside a collective has the run's number. A
    thread executes a program for one device from one mark of its pool to the next. Older files do
    not number runs: each thread is taken for a device.
    """
    recorded = {*plane.names.values(), *plane.strings.values()}
    ends = [key for key, name in plane.names.items() if name.startswith("end: ")]
    places = [key for key, name in plane.names.items() if name.endswith("StartRegion")]
    devices: dict[int, int] = defaultdict(int)  # by run, those that were found so far
    for thread, (_, line) in enumerate(plane.lines()):
        for events in plane.events(line, (*_STATS, "device_ordinal", "run_id", "name")):
            device, run = events.stats["device_ordinal"], events.stats["run_id"]
            if not recorded & {"run_id", "Rendezvous"}:
                device[:], run[:] = thread, 0
            elif "run_id" not in recorded:
                _find_runs(plane, events, places, devices)
            device[device == ABSENT] = 0
            events.stats["hlo_op"][np.isin(events.name, ends) | (run == ABSENT)] = ABSENT
            _add_named(plane, events, found, device, run & 0xFFFFFFFF)  # it was a signed number


def _find_runs(
    plane: Plane, events: Events, places: Sequence[int], devices: dict[int, int]
) -> None:
    """Give events the run that a rendezvous between two marks names, and a device of their own."""
    order, part = np.argsort(events.start, kind="stable"), np.zeros(len(events.start), int)
    part[order] = np.cumsum(np.isin(events.name[order], places))
    says = events.stats["name"]
    for k in np.unique(part[says != ABSENT]).tolist():
        texts = [plane.strings.get(key, "") for key in says[part == k].tolist()]
        numbers = {int(match[1]) for text in texts if (match := _RUN.search(text))}
        # None: it did not communicate. Two: a mark is missing, and either would be a guess.
        if len(numbers) == 1:
            events.stats["run_id"][part == k] = number = numbers.pop()
            events.stats["device_ordinal"][part == k] = devices[number]
            devices[number] += 1


TPU = Backend(
    re.compile(r"/device:TPU:(\d+)"), _read_tpu,
    has_numbers=False, runs_kernels=False, has_ends=True,
    advice="record the profile while the program runs, with the default options of JAX's profiler",
)  # fmt: skip
GPU = Backend(
    re.compile(r"/device:GPU:(\d+)"), _read_gpu,
    has_numbers=False, runs_kernels=True, has_ends=False,
    advice="CUDA graphs hide collectives: set XLA_FLAGS=--xla_gpu_enable_command_buffer=",
)  # fmt: skip
CPU = Backend(
    re.compile("/host:CPU()"), _read_cpu, has_numbers=True, runs_kernels=False, has_ends=False,
    advice="on CPUs, JAX before 0.7 records instructions only with host_tracer_level=2",
)  # fmt: skip
OLD_CPU = CPU._replace(has_numbers=False, runs_kernels=True)


def find_backend(planes: Sequence[Plane]) -> Backend:
    """Find the backend that wrote a profile. The host's plane of a GPU has launches only."""
    for backend in (TPU, GPU):
        if any(backend.planes.fullmatch(plane.name) for plane in planes):
            return backend
    # Older versions of JAX record neither: what ran in which run is then counted, as on GPUs.
    known = [{*p.names.values(), *p.strings.values()} for p in planes if p.name == "/host:CPU"]
    return CPU if any({"run_id", "Rendezvous"} & names for names in known) else OLD_CPU


def _add_named(
    plane: Plane, events: Events, found: Found, device: np.ndarray | int, run: np.ndarray
) -> None:
    module, number, instruction = (events.stats[stat] for stat in _STATS)
    known = (module != ABSENT) & (instruction != ABSENT)
    number = np.where(number == ABSENT, 0, number)
    for key, n in np.unique(np.stack([module[known], number[known]]), axis=1).T.tolist():
        program = plane.strings.get(key, ""), n
        chosen = known & (module == key) & (number == n)
        found.add(program, chosen, (instruction, plane.strings), device, run, events)


def _concatenate(parts: Sequence[Events], stats: Sequence[str] = ()) -> Events:
    none = np.zeros(0, np.int64)
    name, start, end = (
        np.concatenate([none, *(getattr(part, column) for part in parts)])
        for column in ("name", "start", "end")
    )
    named = {k: np.concatenate([none, *(part.stats[k] for part in parts)]) for k in stats}
    return Events(name, start, end, named)
