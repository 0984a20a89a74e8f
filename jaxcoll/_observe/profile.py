"""Read profiles that JAX recorded: the programs that ran, and the times of their instructions."""

from __future__ import annotations

import bisect
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxcoll._compat.running import fields_of, program_id, text_of

BUSY = "not measured: the program itself had JAX's profiler running."
_SENDS = re.compile(
    r" (?:all-(?:reduce|gather|to-all)|reduce-scatter|ragged-all|collective-|send)[\w\-]*\("
)
_DEVICES = re.compile(r"\b(?:replica_count|num_partitions)=")
_DEVICE = re.compile(r"/device:\w+:(\d+)")
_NAME = re.compile(r"%?([\w.\-]+)")


class Event(NamedTuple):
    """One execution of an instruction on one device."""

    module: str  # the program's name
    program: int  # distinguishes programs of one name, within one process
    instruction: str
    # JAX's number of the program's launch; None if the profile does not have it (GPUs)
    run: int | None
    device: int
    start: int  # nanoseconds since 1970, by this host's clock
    end: int


class Compiled(NamedTuple):
    """A compiled program that communicates."""

    text: str
    number: int | None = None  # `Event.program` of its events; None if not certain
    calls: int | None = None  # calls by Python code; None if they were not counted


def sends(text: str) -> bool:
    """True if a compiled program communicates."""
    return bool(_SENDS.search(text))


def read_programs(profile: bytes, devices: int) -> list[Compiled]:
    """Return the communicating programs in a serialized XSpace, for `devices` if it has no number.

    Raises:
      ValueError: the bytes are not a profile.
    """
    programs = []
    try:
        # The field numbers are those of OpenXLA's xplane.proto and hlo.proto.
        for plane in _all(profile, 1):
            for metadata in _all(plane, 4) if [*_all(plane, 2)] == [b"/host:metadata"] else ():
                for stat in itertools.chain(*(_all(event, 5) for event in _all(metadata, 2))):
                    for module in itertools.chain(*(_all(proto, 1) for proto in _all(stat, 6))):
                        text = text_of(module)
                        if sends(text):
                            header, newline, rest = text.partition("\n")
                            if not _DEVICES.search(header):
                                header += f", num_partitions={devices}"
                            text = header + newline + rest
                            programs.append(Compiled(text, program_id(module)))
    except (IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"this is not a JAX profile: {error}") from None
    return sorted(programs, key=lambda program: program.number or 0)


def _all(message: bytes, field: int) -> list[Any]:
    return [value for number, value in fields_of(message) if number == field]


def read_events(profile: bytes) -> list[Event]:
    """Return the instructions in a serialized XSpace (b"": none), sorted by start.

    The run number is an attribute of the instruction (CPUs) or of the event of the whole program
    around it (TPUs); GPUs do not record it. Cost: 3 µs for each event.

    Raises:
      ValueError: the bytes are not a profile.
    """
    with warnings.catch_warnings():
        # Python 3.13 warns about the types of jaxlib's iterators when they are first used.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            planes = list(ProfileData.from_serialized_xspace(profile).planes)
            epochs = [dict(plane.stats).get("profile_start_time") for plane in planes]
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"this is not a JAX profile: {error}") from None
        began = next((int(epoch) for epoch in epochs if epoch), 0)
        events = [event for plane in planes for event in _of_plane(plane, began)]
    return sorted(events, key=lambda event: event.start)


def _of_plane(plane: Any, began: int) -> Iterator[Event]:
    number = _DEVICE.match(plane.name)
    lines = [(line.name, list(line.events)) for line in plane.lines]
    # On a TPU, one line holds the runs of whole programs, and others their instructions.
    wholes = []
    for name, events in lines:
        if name == "XLA Modules":
            for event in events:
                stats = dict(event.stats)
                module = event.name.partition("(")[0]
                program, run = stats.get("program_id", 0), stats.get("run_id")
                wholes.append(
                    (event.start_ns, event.start_ns + event.duration_ns, module, program, run)
                )
    wholes.sort()
    starts = [whole[0] for whole in wholes]
    for name, events in lines:
        if name == "XLA Modules" or (wholes and name not in ("XLA Ops", "Async XLA Ops")):
            continue
        for event in events:
            if event.name.startswith("end: "):
                continue
            stats = dict(event.stats)
            module, program = stats.get("hlo_module"), stats.get("program_id", 0)
            run, instruction = stats.get("run_id"), stats.get("hlo_op")
            if wholes:
                at = bisect.bisect_right(starts, event.start_ns) - 1
                if at < 0 or event.start_ns >= wholes[at][1]:
                    continue
                _, _, module, program, run = wholes[at]
                text = _NAME.match(event.name)
                instruction = instruction or (text[1] if text else None)
            if module is None or instruction is None:
                continue
            device = stats.get("device_ordinal", int(number[1]) if number else 0)
            start = began + round(event.start_ns)
            yield Event(
                str(module), int(program), str(instruction),
                None if run is None else int(run) & 0xFFFFFFFF,  # recorded as a signed number
                int(device), start, start + round(event.duration_ns),
            )  # fmt: skip
