"""Count the calls of jitted functions, and note their order."""

from __future__ import annotations

import atexit
import sys
import threading
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._compat.running import is_tracing
from jaxcoll._compat.settings import has_backend
from jaxcoll._job.frames import look_up, unwrap
from jaxcoll._job.stacks import clean_name, name_program
from jaxcoll._report.profile.shield import Shield

_TOOLS = (4, 3)
"""Ids of `sys.monitoring` that Python reserves for no other kind of tool."""
_MOST_ENDED = 1000  # functions that are remembered one by one
_MOST = 1 << 14  # calls whose order is remembered

_NAMED = types.FunctionType, types.BuiltinFunctionType, type
_MOST_OTHERS = 1000  # calls by one place before a first call of a jitted function

JITTED: Any = type(jax.jit(lambda: None))
_monitoring: Any = getattr(sys, "monitoring", None)

_counting: tuple[Calls, ...] = ()
"""All that count now: they share one callback, and a tool id of the first one."""
_tool = 0
_others: dict[tuple[int, int], int] = {}
"""The calls of other functions by places that may call any; far below 0 once one was jitted."""


class _Thread:
    """A thread of the program, and the function that it called last."""

    def __init__(self) -> None:
        self.calls = 0
        self.code: types.CodeType | None = None  # that made the last call
        self.function: _Function | None = None


class _Function:
    """A jitted function of the program, which is not kept alive."""

    def __init__(self, function: Any, name: str, ended: Callable[[Any], None]) -> None:
        self.name, self.in_order = f"jit({getattr(function, '__name__', '')})", name
        self.calls = 0
        self.programs: frozenset[Any] = frozenset()
        self.ref: Any = weakref.ref(function, ended)


class Calls:
    """Counts calls of jitted functions by Python code, from Python 3.12 on; before 3.12, none.

    It misses calls by C code, such as `map(step, batches)`, and calls from a place that has called
    a thousand other functions. Cost: 2 µs for each call in a loop of nothing else, some 10 µs
    where a step's data has driven this code out of the caches.
    """

    def __init__(self, shield: Shield) -> None:
        self.order: deque[str] = deque(maxlen=_MOST)  # names of functions, as modules have them
        self.counts: defaultdict[str, int] = defaultdict(int)  # by those names
        self.unknown: set[Any] = set()  # programs of which nobody knows who calls them
        self._functions: dict[int, _Function] = {}
        self._ended: deque[_Function] = deque()
        self._totals: Counter[frozenset[Any]] = Counter()  # of functions that ended
        self._threads: defaultdict[int, _Thread] = defaultdict(_Thread)
        self._began, self._shield = False, shield

    @property
    def are_all(self) -> bool:
        """True if `order` and `counts` miss no call that Python code made."""
        return self._began and not self._shield.notes

    @property
    def number(self) -> int:
        """The number of all calls."""
        return sum(calls for calls, _ in self.by_thread.values())

    @property
    def by_thread(self) -> dict[int, tuple[int, types.CodeType | None]]:
        """The number of calls of each thread, by its `ident`, and the code of the last one."""
        threads = dict(self._threads).items()
        return {ident: (thread.calls, thread.code) for ident, thread in threads}

    def start(self) -> None:
        """Start counting, unless other tools use the ids of `sys.monitoring`."""
        global _counting, _tool
        if _monitoring is None:
            return
        # The first one's failure ends the callback, so that it is noted there, and comes last.
        self._count = self._shield(self._count_call) if _counting else self._count_call
        if not _counting:
            free = [tool for tool in _TOOLS if _monitoring.get_tool(tool) is None]
            if not free:
                return
            _tool = free[0]
            _monitoring.use_tool_id(_tool, "jaxcoll")
            called = self._shield(_count_everywhere, _monitoring.DISABLE)
            _monitoring.register_callback(_tool, _monitoring.events.CALL, called)
            _monitoring.set_events(_tool, _monitoring.events.CALL)
        self._began = not has_backend()
        _counting = (self, *_counting)
        # Otherwise callbacks are called, here and in forked children, while Python ends.
        self._at_exit = self._shield(self.stop, in_forks=True)
        atexit.register(self._at_exit)

    def stop(self) -> None:
        global _counting
        if self in _counting:
            atexit.unregister(self._at_exit)
            _counting = tuple(calls for calls in _counting if calls is not self)
            if not _counting:
                _monitoring.set_events(_tool, 0)
                _monitoring.register_callback(_tool, _monitoring.events.CALL, None)
                _monitoring.free_tool_id(_tool)
        for number in [*self._functions]:
            function = self._functions.pop(number)
            function.ref = None  # nothing is called when it ends
            self._ended.append(function)

    def join(self, program: Any, name: str) -> None:
        """Note that the function of that name, called last in this thread, has this program."""
        thread = self._threads[threading.get_ident()]
        function, thread.function = thread.function, None
        if function is not None and function.name == name:
            function.programs |= {program}
        else:
            self.unknown.add(program)

    def totals(self) -> Counter[frozenset[Any]]:
        """Sum the calls of all functions that have exactly these programs."""
        while self._ended:
            function = self._ended.popleft()
            self._totals[function.programs] += function.calls
        totals = self._totals.copy()
        for function in [*self._functions.values()]:
            totals[function.programs] += function.calls
        return totals

    def _count_call(self, function: Any, code: types.CodeType) -> None:
        found = self._functions.get(id(function)) or self._add(function, code)
        found.calls += 1
        self.counts[found.in_order] += 1
        self.order.append(found.in_order)
        thread = self._threads[threading.get_ident()]
        thread.calls, thread.code = thread.calls + 1, code
        thread.function = found

    def _add(self, function: Any, code: types.CodeType) -> _Function:
        number = id(function)
        if len(self._ended) > _MOST_ENDED:
            self.totals()

        def drop(_: Any) -> None:
            # Called wherever the program drops it, which may be while a lock of ours is taken.
            self._ended.append(self._functions.pop(number))

        name = getattr(function, "__name__", None)
        name = clean_name(name) if name else _name_compiled(code)
        found = self._functions[number] = _Function(function, name, self._shield(drop))
        return found


def _count_everywhere(code: types.CodeType, at: int, function: Any, first: Any) -> Any:
    # Not `isinstance`, which would run a property `__class__` of the program's object.
    if type(function := unwrap(function)) is not JITTED:
        # A place that names its function calls no other. One that has it in a variable, as an
        # executor has, may call a jitted one yet.
        if type(function) in _NAMED and function.__name__ in code.co_names:
            return _monitoring.DISABLE
        place = id(code), at
        _others[place] = others = _others.get(place, 0) + 1
        return _monitoring.DISABLE if others >= _MOST_OTHERS else None
    _others[id(code), at] = -sys.maxsize  # this place is never left out
    if not is_tracing():
        for calls in _counting:
            calls._count(function, code)
    return None


def _name_compiled(code: types.CodeType) -> str:
    frame = sys._getframe()
    while frame.f_code is not code and frame.f_back is not None:
        frame = frame.f_back
    compiled = look_up(frame, "self")
    if not isinstance(compiled, jax.stages.Compiled):
        return "?"
    executable: Any = compiled.runtime_executable()
    return name_program(executable.hlo_modules()[0].name)
