"""The order in which this process called its jitted functions, from Python 3.12 on."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter, deque
from typing import Any

import jax

from jaxcoll._cluster.stacks import clean, name_of_program, variable
from jaxcoll._compat.running import is_tracing
from jaxcoll._compat.settings import has_backend

_MOST = 1 << 14  # calls that are remembered


class CallLog:
    """Counts and the order of the calls of jitted functions; `is_known` is False before 3.12.

    It misses calls by C code, such as `map(step, batches)`. Cost: 0.3 µs for each call.
    """

    def __init__(self) -> None:
        self.jitted = type(jax.jit(lambda: None))
        self.counts: Counter[str] = Counter()
        self.order: deque[str] = deque(maxlen=_MOST)
        self.is_known, self._tool = False, None
        self._monitoring: Any = getattr(sys, "monitoring", None)

    def start(self) -> None:
        """Start counting, unless other tools use all of `sys.monitoring`'s tool ids."""
        if has_backend():  # some calls would be missing
            return
        monitoring = self._monitoring
        free = [k for k in (4, 3, 5, 2) if monitoring and monitoring.get_tool(k) is None]
        if free:
            monitoring.use_tool_id(free[0], "jaxcoll-hang")
            monitoring.register_callback(free[0], monitoring.events.CALL, self._called)
            monitoring.set_events(free[0], monitoring.events.CALL)
            self.is_known, self._tool = True, free[0]

    def stop(self) -> None:
        """Stop counting."""
        if self._tool is not None:
            self._monitoring.set_events(self._tool, 0)
            self._monitoring.free_tool_id(self._tool)
            self._tool = None

    def _called(self, code: types.CodeType, at: int, function: Any, first: Any) -> Any:
        # An error here would be raised in the user's program.
        try:
            while type(function) in (functools.partial, types.MethodType):
                is_partial = type(function) is functools.partial
                function = function.func if is_partial else function.__func__
            if type(function) is not self.jitted:
                return self._monitoring.DISABLE
            if not is_tracing():
                name = getattr(function, "__name__", None)
                name = clean(name) if name else self._name_of_compiled()
                self.counts[name] += 1
                self.order.append(name)
        except Exception:
            self.is_known = False
        return None

    def _name_of_compiled(self) -> str:
        """Return the name of a program that was compiled ahead of time, which its caller knows."""
        compiled = variable(sys._getframe(2), "self")
        if not isinstance(compiled, jax.stages.Compiled):
            return "?"
        executable: Any = compiled.runtime_executable()
        return name_of_program(executable.hlo_modules()[0].name)
