"""Count the calls of jitted functions."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._compat.running import is_tracing
from jaxcoll._watch.shield import Shield

_TOOLS = (4, 3)
"""Ids of `sys.monitoring` that Python reserves for no other kind of tool."""
_MOST_ENDED = 1000  # functions that are remembered one by one


class _Function:
    """A jitted function of the program, which is not kept alive."""

    def __init__(self, function: Any, ended: Callable[[Any], None]) -> None:
        self.name = f"jit({getattr(function, '__name__', '')})"
        self.calls = 0
        self.programs: frozenset[Any] = frozenset()
        self.ref: Any = weakref.ref(function, ended)


class Calls:
    """Counts calls of jitted functions by Python code, from Python 3.12 on; before 3.12, none.

    It misses calls by C code, such as `map(step, batches)`, and calls from a line that first called
    another function. Cost: 0.4 µs for each call.
    """

    def __init__(self, shield: Shield) -> None:
        self.number = 0  # of all calls
        self.unknown: set[Any] = set()  # programs of which nobody knows who calls them
        self._functions: dict[int, _Function] = {}
        self._ended: deque[_Function] = deque()
        self._totals: Counter[frozenset[Any]] = Counter()  # of functions that ended
        self._here = threading.local()
        self._monitoring: Any = getattr(sys, "monitoring", None)
        self._tool: int | None = None
        self._jitted: Any = type(jax.jit(lambda: None))
        self._shield = shield

    def start(self) -> None:
        """Start counting, unless other tools use the ids of `sys.monitoring`."""
        if self._monitoring is None:
            return
        self._tool = next((k for k in _TOOLS if self._monitoring.get_tool(k) is None), None)
        if self._tool is not None:
            event = self._monitoring.events.CALL
            self._monitoring.use_tool_id(self._tool, "jaxcoll")
            called = self._shield(self._called, self._monitoring.DISABLE)
            self._monitoring.register_callback(self._tool, event, called)
            self._monitoring.set_events(self._tool, event)
            # Otherwise callbacks are called, here and in forked children, while Python ends.
            self._at_exit = self._shield(self.stop, in_forks=True)
            atexit.register(self._at_exit)

    def stop(self) -> None:
        """Stop counting."""
        if self._tool is not None:
            atexit.unregister(self._at_exit)
            tool, self._tool = self._tool, None
            self._monitoring.set_events(tool, 0)
            self._monitoring.register_callback(tool, self._monitoring.events.CALL, None)
            self._monitoring.free_tool_id(tool)
        for number in [*self._functions]:
            function = self._functions.pop(number)
            function.ref = None  # nothing is called when it ends
            self._ended.append(function)

    def join(self, program: Any, name: str) -> None:
        """Note that the function of that name, called last in this thread, has this program."""
        function, self._here.function = getattr(self._here, "function", None), None
        if function is not None and function.name == name:
            function.programs |= {program}
        else:
            self.unknown.add(program)

    def totals(self) -> Counter[frozenset[Any]]:
        """Return the calls of all functions that have exactly these programs."""
        while self._ended:
            function = self._ended.popleft()
            self._totals[function.programs] += function.calls
        totals = self._totals.copy()
        for function in [*self._functions.values()]:
            totals[function.programs] += function.calls
        return totals

    def _called(self, code: types.CodeType, at: int, function: Any, first: Any) -> Any:
        # Not `isinstance`, which would run a property `__class__` of the program's object.
        while (kind := type(function)) is functools.partial or kind is types.MethodType:
            function = getattr(function, "func" if kind is functools.partial else "__func__")
        if kind is not self._jitted:
            return self._monitoring.DISABLE
        if not is_tracing():
            found = self._functions.get(id(function))
            if found is None:
                found = self._add(function)
            self.number += 1
            found.calls += 1
            self._here.function = found
        return None

    def _add(self, function: Any) -> _Function:
        number = id(function)
        if len(self._ended) > _MOST_ENDED:
            self.totals()

        def ended(_: Any) -> None:
            # Called wherever the program drops it, which may be while a lock of ours is taken.
            self._ended.append(self._functions.pop(number))

        found = self._functions[number] = _Function(function, self._shield(ended))
        return found
