"""What each backend writes into a profile: one description of TPUs, one of GPUs, one of CPUs.

A description says which events are executions of instructions, and which runs they belong to.
Launches, copies in the background and lines that other tools derive are no executions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxcoll._observe.xspace import ABSENT, Events, Plane

_MODULE = re.compile(r"(.*?)(?:\((\d+)\))?$")  # jit_step(9646411105960254074)
_NAME = re.compile(r"%?([\w.\-]+)")
_RUN = re.compile(r"run_id=RunId: (-?\d+)")
_OF_PROGRAM = ("hlo_module", "program_id", "hlo_op")

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

    platform: str
    planes: re.Pattern[str]  # the planes with executions; a group is the device's number
    # Yields the executions of one plane, each with its program
    read: Callable[[Plane, int, Names], Iterator[tuple[Program, Executions]]]
    # True: a run has one number on all devices and ranks. False: its devices, and then ranks, are
    # joined by the times at which its collectives end
    has_numbers: bool
    # True: an instruction may run several kernels, and nothing says which run they belong to
    runs_kernels: bool
    advice: str  # what to do if collectives have no events


class Names:
    """Numbers the names of instructions."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._number: dict[str, int] = {}

    def number(
        self, keys: np.ndarray, texts: dict[int, str], pattern: re.Pattern | None
    ) -> np.ndarray:
        """Return the numbers of the names that `keys` refer to."""
        unique, inverse = np.unique(keys, return_inverse=True)
        numbers = []
        for key in unique.tolist():
            text = texts.get(key, "")
            if pattern and (match := pattern.match(text)):
                text = match[1]
            if text not in self._number:
                self._number[text] = len(self.names)
                self.names.append(text)
            numbers.append(self._number[text])
        return np.array(numbers, np.int32)[inverse]


def _of_tpu(plane: Plane, device: int, names: Names) -> Iterator[tuple[Program, Executions]]:
    """Yield what one line has, by the runs of whole programs in another line.

    A run's number counts the runs of all programs on this device. The line of asynchronous
    operations is left out: it has the times of copies in the background, on some devices only.
    """
    lines = defaultdict(list)
    for name, line in plane.lines():
        if name in ("XLA Modules", "XLA Ops"):
            lines[name] += plane.events(line)
    if not lines["XLA Modules"]:
        return
    modules = _joined(lines["XLA Modules"])
    order = np.argsort(modules.start, kind="stable")
    starts, ends, keys = modules.start[order], modules.end[order], modules.name[order]
    for events in lines["XLA Ops"]:
        run = np.searchsorted(starts, events.start, "right") - 1
        inside = (run >= 0) & (events.start <= ends[run])
        name = names.number(events.name, plane.names, _NAME)
        for key in np.unique(keys[run[inside]]).tolist():
            of_program = inside & (keys[run] == key)
            match = _MODULE.match(plane.names.get(key, ""))
            program = (match[1], int(match[2] or 0)) if match else ("", 0)
            yield program, _columns(names, events, of_program, name, device, run)


def _of_gpu(plane: Plane, device: int, names: Names) -> Iterator[tuple[Program, Executions]]:
    """Yield the kernels of a device's streams, which have their instructions, but not their runs.

    Some kernels lack the instruction: it is that of the other kernels of the same name, if these
    have only one. The launch of a kernel, on a line of the host, has the same instruction.
    """
    streams = [line for name, line in plane.lines() if name.startswith("Stream #")]
    chunks = [events for line in streams for events in plane.events(line, _OF_PROGRAM)]
    if not chunks:
        return
    events = _joined(chunks)
    stats = np.stack([events.stats[stat] for stat in _OF_PROGRAM])
    known = stats[2] != ABSENT
    for kernel in np.unique(events.name[~known]).tolist():
        of_kernel = events.name == kernel
        instructions = np.unique(stats[:, of_kernel & known], axis=1)
        if instructions.shape[1] == 1:
            stats[:, of_kernel & ~known] = instructions
    events = events._replace(stats=dict(zip(_OF_PROGRAM, stats, strict=True)))
    yield from _of_stats(plane, events, names, np.full(len(stats[0]), device), stats[1] * 0)


def _of_cpu(plane: Plane, device: int, names: Names) -> Iterator[tuple[Program, Executions]]:
    """Yield the instructions of all threads; each has its device and its run."""
    stats = (*_OF_PROGRAM, "device_ordinal", "run_id")
    if "run_id" not in plane.strings.values():
        yield from _of_old_cpu(plane, names)
        return
    ends = {key for key, name in plane.names.items() if name.startswith("end: ")}
    for _, line in plane.lines():
        for events in plane.events(line, stats):
            events.stats["hlo_op"][np.isin(events.name, list(ends))] = ABSENT
            place, run = events.stats["device_ordinal"], events.stats["run_id"]
            place[place == ABSENT] = device
            # It is recorded as a signed number.
            yield from _of_stats(plane, events, names, place, run & 0xFFFFFFFF)


def _of_old_cpu(plane: Plane, names: Names) -> Iterator[tuple[Program, Executions]]:
    """Yield what JAX before 0.8 wrote: the rendezvous inside a collective has the run's number.

    A thread executes a program for one device from one mark of the thread pool to the next.
    """
    devices: dict[int, int] = defaultdict(int)  # executions of a run so far
    for _, line in plane.lines():
        for events in plane.events(line, (*_OF_PROGRAM, "name")):
            order = np.argsort(events.start, kind="stable")
            texts = [plane.names.get(key, "") for key in events.name[order].tolist()]
            place = np.full(len(order), -1)
            run = np.full(len(order), ABSENT)
            begin = 0
            for at in [
                *(k for k, text in enumerate(texts) if text.endswith("StartRegion")),
                len(order),
            ]:
                own = order[begin:at]
                rendezvous = own[[texts[k] == "Rendezvous" for k in range(begin, at)]]
                of_own = {
                    plane.strings.get(k, "") for k in events.stats["name"][rendezvous].tolist()
                }
                numbers = {match[1] for text in of_own if (match := _RUN.search(text))}
                if len(numbers) == 1:
                    run[own] = int(numbers.pop()) & 0xFFFFFFFF
                    place[own] = devices[int(run[own[0]])]
                    devices[int(run[own[0]])] += 1
                begin = at
            ends = [k for k, name in plane.names.items() if name.startswith("end: ")]
            events.stats["hlo_op"][np.isin(events.name, ends) | (place < 0)] = ABSENT
            yield from _of_stats(plane, events, names, place, run)


TPU = Backend(
    "TPU", re.compile(r"/device:TPU:(\d+)"), _of_tpu, has_numbers=False, runs_kernels=False,
    advice="record the profile while the program runs, with the default options of JAX's profiler",
)  # fmt: skip
GPU = Backend(
    "GPU", re.compile(r"/device:GPU:(\d+)"), _of_gpu, has_numbers=False, runs_kernels=True,
    advice="CUDA graphs hide collectives: set XLA_FLAGS=--xla_gpu_enable_command_buffer=",
)  # fmt: skip
CPU = Backend(
    "CPU", re.compile("/host:CPU"), _of_cpu, has_numbers=True, runs_kernels=False,
    advice="JAX before 0.7 records instructions on CPUs only with host_tracer_level=2",
)  # fmt: skip


def find_backend(planes: Sequence[Plane]) -> Backend:
    """Return the backend that wrote a profile. A host's plane of it has launches only."""
    names = [plane.name for plane in planes]
    return next((b for b in (TPU, GPU) if any(map(b.planes.fullmatch, names))), CPU)


def _of_stats(
    plane: Plane, events: Events, names: Names, device: np.ndarray, run: np.ndarray
) -> Iterator[tuple[Program, Executions]]:
    """Yield the executions of events that say their program and instruction."""
    module, number, instruction = (events.stats[stat] for stat in _OF_PROGRAM)
    known = (module != ABSENT) & (instruction != ABSENT)
    if not known.any():
        return
    name = names.number(instruction, plane.strings, None)
    number = np.where(number == ABSENT, 0, number)
    for key, program in np.unique(np.stack([module[known], number[known]]), axis=1).T.tolist():
        of_program = known & (module == key) & (number == program)
        columns = _columns(names, events, of_program, name, device, run)
        yield (plane.strings.get(key, ""), program), columns


def _columns(
    names: Names, events: Events, chosen: np.ndarray, name: np.ndarray, device: np.ndarray | int,
    run: np.ndarray,
) -> Executions:  # fmt: skip
    of_each = np.broadcast_to(device, chosen.shape)
    columns = name, of_each, run, events.start, events.end
    return Executions(names.names, *(column[chosen] for column in columns))


def _joined(chunks: Sequence[Events]) -> Events:
    name, start, end = (np.concatenate(c) for c in zip(*(x[:3] for x in chunks), strict=True))
    stats = {k: np.concatenate([chunk.stats[k] for chunk in chunks]) for k in chunks[0].stats}
    return Events(name, start, end, stats)
