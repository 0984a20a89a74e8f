"""Compiled and running programs: parts of JAX without public names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.backend

from jaxcoll._compat import private
from jaxcoll._compat.settings import has_backend

COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event of `jax.monitoring` at the end of each compilation, in the thread that compiled."""
_OLD_GROUPS = re.compile(rb"\xba\x05(.)\x12(.)(?=\x08)", re.S)
"""Field 2 in field 87 of an instruction; since XLA of JAX 0.9, field 92 has this content."""
FROM_CACHE = "/jax/compilation_cache/cache_hits"
"""The event of a program that came from the persistent cache instead."""


def live_executables() -> Iterator[Any]:
    """Yield the live executables, for each client the newest first.

    Cost: about 0.05 ms, and 0.1 ms for each thousand.
    """
    if has_backend():  # as `backends()` would create them
        for client in jax.extend.backend.backends().values():
            yield from client.live_executables()


def read_fields(message: bytes | memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a protobuf message.

    A value is an integer, or the bytes of a string, a message or a number of fixed size.

    Raises:
      IndexError, KeyError, ValueError: the message is damaged.
    """
    at = 0
    while at < len(message):
        number, value, at = read_field(message, at)
        yield number, value


def read_field(message: bytes | memoryview, at: int) -> tuple[int, Any, int]:
    """Read the number and the value of the field that begins at `at`, and where it ends."""
    tag, at = _varint(message, at)
    number, wire_type = tag >> 3, tag & 7
    value, after = _varint(message, at) if wire_type in (0, 2) else (0, at)
    if wire_type == 0:
        return number, value, after
    end = after + (value if wire_type == 2 else {1: 8, 5: 4}[wire_type])
    if end > len(message):
        raise ValueError("it ends inside a field")
    return number, message[after:end], end


def _varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := message[at]) > 127:
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
    return value | byte << shift, at + 1


def program_id(module: bytes) -> int:
    """Read the id in a serialized HloModuleProto, by which profiles refer to the program.

    For a program from the persistent cache, profiles have the id from the process that compiled it.
    """
    return dict(read_fields(module)).get(5, 0)


def count_assigned_devices(module: bytes) -> tuple[int, int] | None:
    """Read the replicas and partitions in a serialized HloModuleProto; None if it lacks them."""
    assignment = dict(read_fields(dict(read_fields(module)).get(15, b"")))
    return (assignment.get(1, 1), assignment.get(2, 1)) if assignment else None


def decode_text(module: bytes) -> str:
    """Print a serialized HloModuleProto.

    Until JAX 0.9, the notation `[2,4]<=[8]` of replica groups was in a field that jaxlib drops now.
    """
    patched = bytearray(module)
    for groups in _OLD_GROUPS.finditer(module):
        (size,), (inner,), at = groups[1], groups[2], groups.end()
        if size == inner + 2:  # an unknown field at its end keeps the length as it was
            counted = module[at : at + inner] + b"\x78\x00"
            patched[groups.start() : at + inner] = b"\xe2\x05" + groups[1] + counted
    return private.hlo.HloModule.from_serialized_hlo_module_proto(bytes(patched)).to_string()


def find_wrapped_names(module: bytes) -> dict[str, str]:
    """Find the name of the instruction that each asynchronous start wraps.

    A GPU's profile has the wrapped name. The text has the start's: `all-to-all-start(...)` is short
    for `async-start(...), calls=` a computation, which it does not print.
    """
    if b"async-start" not in module:
        return {}
    # The fields of xla/service/hlo.proto: a module's computations are 3; a computation's
    # instructions 2, its id 5, its root's id 6; an instruction's name 1, opcode 2, id 35, and the
    # ids of the computations that it calls 38.
    computations = [value for number, value in read_fields(module) if number == 3]
    called: dict[int, str] = {}
    for computation in computations:
        if b"async-start" in computation:
            for number, value in read_fields(computation):
                if number == 2 and (start := dict(read_fields(value))).get(2) == b"async-start":
                    ids = start.get(38, b"")
                    # Repeated numbers may be packed into one string, or not.
                    first = ids if isinstance(ids, int) else _varint(ids, 0)[0]
                    called[first] = str(start[1], "utf8")
    wrapped = {}
    for computation in computations:
        fields = dict(read_fields(computation))
        if start := called.get(fields.get(5, -1)):
            for number, value in read_fields(computation):
                if number == 2 and (root := dict(read_fields(value))).get(35) == fields.get(6):
                    wrapped[start] = str(root[1], "utf8")
    return wrapped


def is_tracing() -> bool:
    return not private.is_idle()


_Session: Any = private.profiler.ProfilerSession


def call_before_profiles(then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` before anything but this file starts a profile; return what undoes this.

    While two profiles are open, JAX raises an error in the program that has opened the second.
    """

    def session(*args: Any, **kwargs: Any) -> Any:
        then()
        return _Session(*args, **kwargs)

    def undo() -> None:
        if private.profiler.ProfilerSession is session:
            private.profiler.ProfilerSession = _Session

    private.profiler.ProfilerSession = session
    return undo


class ProfilerSession:
    """A profile of this process's devices, kept in memory.

    JAX's own functions write to a folder. If another profile is running, this one is empty.

    Args:
      with_programs: include the live programs, so that the profile can be read by itself.
    """

    def __init__(self, *, with_programs: bool = False) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 1
        options.enable_hlo_proto = with_programs
        self._session: Any = _Session(options)

    def stop(self) -> bytes:
        """Return the profile, a serialized XSpace; b"" if another was running already.

        Cost: 1 to 3 µs per event, without holding Python's lock (GIL).
        """
        session, self._session = self._session, None
        try:
            return session.stop() if session else b""
        except jax.errors.JaxRuntimeError:
            return b""
