"""Compiled and running programs: parts of JAX without public names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.backend
from jax import core

from jaxcoll._compat.settings import has_backend

_hlo: Any = importlib.import_module("jaxlib._hlo")
_profiler: Any = importlib.import_module("jaxlib._profiler")

COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event of `jax.monitoring` at the end of each compilation, in the thread that compiled."""
FROM_CACHE = "/jax/compilation_cache/cache_hits"
"""The event of a program that came from the persistent cache instead."""


def live_executables() -> Iterator[Any]:
    """Yield the live executables, for each client the newest first.

    Cost: about 0.05 ms, and 0.1 ms for each thousand.
    """
    if has_backend():  # as `backends()` would create them
        for client in jax.extend.backend.backends().values():
            yield from client.live_executables()


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a protobuf message.

    A value is an integer, or the bytes of a string, a message or a number of fixed size.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            yield number, varint()
            continue
        length = varint() if wire_type == 2 else {1: 8, 5: 4}[wire_type]
        yield number, message[at : at + length]
        at += length


def program_id(module: bytes) -> int:
    """Return the id in a serialized HloModuleProto, by which profiles refer to the program.

    For a program from the persistent cache, profiles have the id from the process that compiled it.
    """
    return dict(fields_of(module)).get(5, 0)


def text_of(module: bytes) -> str:
    """Return the text of a serialized HloModuleProto."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()


def is_tracing() -> bool:
    """Return True if this thread is tracing a program."""
    module: Any = sys.modules[core.Tracer.__module__]
    return not module.trace_state_clean()


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
        self._session: Any = _profiler.ProfilerSession(options)

    def stop(self) -> bytes:
        """Return the profile, a serialized XSpace; b"" if another was running already.

        Cost: 1 to 3 µs per event, without holding Python's lock (GIL).
        """
        session, self._session = self._session, None
        try:
            return session.stop() if session else b""
        except jax.errors.JaxRuntimeError:
            return b""
