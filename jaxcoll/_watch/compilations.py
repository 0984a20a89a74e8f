"""Record the text of every communicating program that is compiled, and count its calls."""

from __future__ import annotations

import functools
import sys
import threading
import time
import types
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._compat.running import (
    COMPILED,
    FROM_CACHE,
    is_tracing,
    live_executables,
    program_id,
    wrapped_names,
)
from jaxcoll._observe.profile import Compiled, sends

_SEEN_IN_A_ROW = 16
"""The search for new executables ends after this many known ones in a row."""


class Compilations:
    """The programs that are compiled between `start` and `stop`, in any thread, by any library.

    Programs without collectives are only counted. Cost: 0.1 ms for each compilation, nothing for
    each run. Those that are compiled already count if not `only_new`.
    """

    def __init__(self, *, only_new: bool = True) -> None:
        self.quiet = 0  # programs without collectives
        self.at = time.monotonic()  # of the last compilation with collectives
        self.calls = Calls()
        self.modules: set[str] = set()  # names of programs with collectives
        self._texts: dict[Any, tuple[str, bytes, int, dict[str, str]]] = {}
        self._functions: Counter[str] = Counter()  # the number of programs of each name
        self._from_cache = False
        self._seen = {_key(executable) for executable in live_executables() if only_new}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._texts)

    def start(self) -> None:
        """Start recording."""
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        jax.monitoring.register_event_listener(self._event)
        self.calls.start()

    def stop(self) -> None:
        """Stop recording, after a last look for programs that were compiled without an event."""
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        jax.monitoring.unregister_event_listener(self._event)
        self.calls.stop()
        self.look()

    def programs(self) -> list[Compiled]:
        """Return the communicating programs, with their numbers and calls if known."""
        return [
            Compiled(
                zlib.decompress(packed).decode(),
                None if self._from_cache else number,
                self.calls.of(name) if self._functions[name] == 1 else None,
                wrapped,
            )
            for name, packed, number, wrapped in self._texts.values()
        ]

    def _compiled(self, event: str, duration_secs: float, **fields: Any) -> None:
        if event == COMPILED:
            self.look(str(fields.get("fun_name", "")))

    def _event(self, event: str, **fields: Any) -> None:
        self._from_cache |= event == FROM_CACHE

    def look(self, name: str = "") -> None:
        """Note new programs, of a function of this name if it is known."""
        with self._lock:
            in_a_row = 0
            for executable in live_executables():
                key = _key(executable)
                in_a_row = in_a_row + 1 if key in self._seen else 0
                if in_a_row == _SEEN_IN_A_ROW:
                    break
                if key in self._seen:
                    continue
                self._seen.add(key)
                self._functions[name] += 1
                module = executable.hlo_modules()[0]
                text = module.to_string()
                if sends(text):
                    proto = module.as_serialized_hlo_module_proto()
                    packed = zlib.compress(text.encode(), 1)
                    self._texts[key] = name, packed, program_id(proto), wrapped_names(proto)
                    self.modules.add(module.name)
                    self.at = time.monotonic()
                else:
                    self.quiet += 1


def _key(executable: Any) -> Any:
    module = executable.hlo_modules
    return executable.fingerprint or module()[0].as_serialized_hlo_module_proto()


class Calls:
    """Counts calls of jitted functions by Python code, from Python 3.12 on; before 3.12, none.

    It misses calls by C code, such as `map(step, batches)`, and calls from a line that first called
    another function. It counts functions, not their programs. Cost: 0.2 µs for each call.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._monitoring: Any = getattr(sys, "monitoring", None)
        self._tool: int | None = None
        self._local: list[types.CodeType] = []
        self._jitted: Any = type(jax.jit(lambda: None))

    def start(self) -> None:
        """Start counting, unless other tools use all of `sys.monitoring`'s tool ids."""
        if self._monitoring is None:
            return
        free = (k for k in (4, 3, 5, 2) if self._monitoring.get_tool(k) is None)
        self._tool = next(free, None)
        if self._tool is not None:
            events = self._monitoring.events
            self._monitoring.use_tool_id(self._tool, "jaxcoll")
            self._monitoring.register_callback(self._tool, events.CALL, self._called)
            self._monitoring.set_events(self._tool, events.CALL)

    def stop(self) -> None:
        """Stop counting."""
        if self._tool is not None:
            events = self._monitoring.events
            self._monitoring.set_events(self._tool, 0)
            for code in self._local:
                self._monitoring.set_local_events(self._tool, code, 0)
            for event in (events.CALL, events.PY_START):
                self._monitoring.register_callback(self._tool, event, None)
            self._monitoring.free_tool_id(self._tool)
            self._tool = None

    def of(self, name: str) -> int | None:
        """Return the calls of the function of that name; None if several or none have it."""
        counts = [n for (function, _), n in self._counts.items() if f"jit({function})" == name]
        return counts[0] if len(counts) == 1 else None

    def on_enter(self, function: Any, then: Callable[[], None]) -> None:
        """Call `then` whenever a Python function is entered, from Python 3.12 on."""
        if self._tool is not None:
            start = self._monitoring.events.PY_START
            self._monitoring.register_callback(self._tool, start, lambda *_: then())
            self._monitoring.set_local_events(self._tool, function.__code__, start)
            self._local.append(function.__code__)

    def _called(self, code: types.CodeType, at: int, function: Any, first: Any) -> Any:
        while isinstance(function, functools.partial | types.MethodType):
            if isinstance(function, functools.partial):
                function = function.func
            else:
                function = function.__func__
        if not isinstance(function, self._jitted):
            return self._monitoring.DISABLE
        if not is_tracing():
            self._counts[function.__name__, id(function)] += 1
        return None
