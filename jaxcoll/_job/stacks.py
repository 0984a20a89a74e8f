"""The stacks of this process's threads, and what they wait for. Needs no JAX."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from jaxcoll._job.frames import look_up, read_barrier, read_call, read_function

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_JAXCOLL = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (*{sysconfig.get_path(name) + os.sep for name in _PATHS}, "<frozen", _JAXCOLL)
_JAX = (f"{os.sep}jax{os.sep}", f"{os.sep}jaxlib{os.sep}")
_COMPILING = {"compiler.py", "partial_eval.py", "mlir.py"}
_OF_COORDINATOR = {"wait_at_barrier", "blocking_key_value_get", "blocking_key_value_get_bytes"}
_WAITING = {"block_until_ready"}
_STEPS = ("worker", "step")  # jaxcoll's threads that run programs
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd")
_LONGEST = 120  # characters of a call's source
_MOST_PLACES = 8  # of a thread

CallsOfThreads = Mapping[int, tuple[int, CodeType | None]]

OURS = "jaxcoll-"
"""The names of jaxcoll's own threads begin so."""


@dataclasses.dataclass
class Thread:
    """One thread: its frames, innermost first, and the times since when they have not moved."""

    is_main: bool
    frames: list[FrameType]
    since: list[float]  # of the thread itself, which may wake up, and then of each frame
    cpu: float = 0.0  # seconds that it has used since the last look
    name: str = ""

    def show_places(self, now: float) -> list[list[Any]]:
        """Show its innermost frames in the user's files."""
        frames = zip(self.frames, self.since[1:], strict=True)
        of_user = ((f, since) for f, since in frames if is_user(f.f_code.co_filename))
        return [
            show_place(
                frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name,
                read_call(frame)[0], now - since,
            )
            for frame, since in itertools.islice(of_user, _MOST_PLACES)
        ]  # fmt: skip


def show_place(file: str, line: int, function: str, call: str, seconds: float) -> list[Any]:
    """Show where a frame is, as in a report's JSON."""
    return [os.path.basename(file), line, function, call.strip()[:_LONGEST], round(seconds, 1)]


def is_user(file: str) -> bool:
    """Tell a file of the user's from a library's."""
    return not file.startswith(_LIBRARIES) and f"{os.sep}site-packages{os.sep}" not in file


class Stacks:
    """Looks at the threads of this process, and remembers since when each stands where it is."""

    def __init__(self) -> None:
        self.cpu = 0.0  # seconds that all threads with Python frames have used
        self._before: dict[int, tuple[list[Any], list[float], tuple[int, int]]] = {}
        self._spent: dict[int, float] = {}  # those of each thread
        self._at = 0.0

    def look(self, now: float, calls: CallsOfThreads, *, wakes: int) -> list[Thread]:
        """List the threads that run the user's code or programs, the main thread first.

        Args:
          now: the time in seconds.
          calls: the number of calls of programs so far, and the code of the last, by thread.
          wakes: how often in a second a thread that waits may wake up.
        """
        frames, threads, main = sys._current_frames(), [], threading.main_thread().ident
        named = {thread.ident: thread for thread in list(threading.enumerate())}
        before, self._before = self._before, {}
        spent_before, self._spent = self._spent, {}
        at = time.monotonic()  # `now` stands still while the process is suspended
        most_wakes, self._at = wakes * (at - self._at + 0.05), at
        for ident in dict.fromkeys([main, *frames]):
            assert ident is not None
            thread, chain = named.get(ident), [*_walk(frames.get(ident))]
            native = getattr(thread, "native_id", None)
            spent = _read_cpu(native)
            cpu = max(0.0, spent - spent_before.get(ident, 0.0))  # another may have its number
            self._spent[ident], self.cpu = spent, self.cpu + cpu
            if thread is not None and _is_idle(thread.name, chain):
                continue
            keys: list[Any] = [(id(f), f.f_code, f.f_lasti) for f in reversed(chain)]
            old, times, (made, woke) = before.get(ident, ([], [now], (0, 0)))
            pairs = zip(old, keys, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            number, caller = calls.get(ident, (0, None))
            if number != made:  # a frame that is at the same place again looks alike
                codes = [code for _, code, _ in keys]
                moved = codes.index(caller) if caller in codes else len(keys) - 1
                same = min(same, max(moved, 0))
            marks = number, _count_wakes(native)
            stands = same == len(keys) == len(old) and marks[1] - woke <= most_wakes
            times = [*times[:same], *[now] * (len(keys) - same), times[-1] if stands else now]
            self._before[ident] = keys, times, marks
            name = thread.name if thread is not None else ""
            threads.append(Thread(ident == main, chain, times[::-1], cpu, name))
        return threads


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_idle(name: str, chain: Sequence[FrameType]) -> bool:
    """Tell jaxcoll's own threads, unless they run the user's step."""
    at_rest = not chain or chain[0].f_code.co_name == "_work"
    return name.startswith(OURS) and (at_rest or not name.endswith(_STEPS))


def _read_cpu(thread: int | None) -> float:
    """Read the processor seconds that a thread has used; 0 if that is not known."""
    try:
        # So Linux numbers a thread's clock. `pthread_getcpuclockid` must not ask for an ended one.
        return time.clock_gettime((~thread << 3) | 6) if thread else 0.0
    except (OSError, AttributeError):
        return 0.0


def _count_wakes(thread: int | None) -> int:
    """Count how often the system has put a thread to sleep; 0 if that is not known."""
    try:
        return int(Path(f"/proc/self/task/{thread}/status").read_text().split()[-3])
    except OSError:
        return 0


def classify(thread: Thread, jitted: type) -> tuple[str, str | None]:
    """Tell what a thread is in, and the name of the program if it runs one.

    It is in a `debugger`, `callback`, `barrier`, `shutdown`, `compile` or `program`, at its `exit`,
    or elsewhere in `python`. `jitted` is the type of jitted functions.
    """
    chain = thread.frames
    if not chain:
        return "exit", None  # C code calls its functions
    files = [frame.f_code.co_filename for frame in chain]
    if any(os.path.basename(file).startswith(_DEBUGGERS) for file in files):
        return "debugger", None
    user = next((k for k, file in enumerate(files) if is_user(file)), len(files))
    if any("callback" in os.path.basename(file) for file in files[user:] if _JAX[0] in file):
        return "callback", None
    in_jax = {
        (os.path.basename(file), frame.f_code.co_name)
        for file, frame in zip(files, chain, strict=True)
        if any(part in file for part in _JAX)
    }
    if (name := read_call(chain[0])[1]) in _OF_COORDINATOR:
        return "barrier", read_barrier(chain[0]) if name == "wait_at_barrier" else None
    if ("distributed.py", "shutdown") in in_jax:
        return "shutdown", None
    if any(file in _COMPILING or "lower" in name for file, name in in_jax):
        return "compile", None
    # Where an executor or a library makes the call, no frame of the user's has it.
    called = [read_function(frame) for frame in (chain[min(user, len(chain) - 1)], chain[0])]
    for name, function in called:
        if type(function) is jitted:
            name = getattr(function, "__name__", None)
            return "program", name and clean_name(name)
    for frame in chain[:user]:
        if frame.f_code.co_name == "__call__" and frame.f_code.co_filename.endswith("pxla.py"):
            name = getattr(look_up(frame, "self"), "name", None)
            return "program", name and name_program(name)
    is_waiting = any(name in _WAITING for name, _ in called)
    inside = any(part in file for file in files[:user] for part in (*_JAX, _JAXCOLL))
    return ("program" if is_waiting or inside else "python"), None


@functools.lru_cache(maxsize=4096)
def name_program(module: str) -> str:
    """Name the function whose module has this name, such as jit_step, or JAX's own, jit(step)."""
    return clean_name(re.sub(r"^(jit|pmap)[_(]", "", module))


@functools.lru_cache(maxsize=4096)
def clean_name(name: str) -> str:
    """Write a function's name as it stands in its module's name, without <> for example."""
    return re.sub(r"\W+", "_", name).strip("_") or "?"


def main_place() -> str:
    """Show the main thread's innermost frame in user files: file, line, function and call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = Thread(True, chain := [*_walk(frame)], [0.0] * (1 + len(chain))).show_places(0.0)
    return "{}:{} in {}: {}".format(*places[0]) if places else ""


def has_main_ended(threads: list[Thread]) -> bool:
    """True if the program's own code has ended, so that only its exit is left."""
    module = sys.modules.get("__main__")
    if hasattr(sys, "ps1") or module is None:
        return False
    frames: Iterator[FrameType] = (f for t in threads if t.is_main for f in t.frames)
    return not any(f.f_globals is vars(module) and f.f_code.co_name == "<module>" for f in frames)
