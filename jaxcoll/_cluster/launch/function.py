"""A Python function, run by several processes of this host, whose results come back."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launch.local import world
from jaxcoll._cluster.launch.subprocesses import signal_name
from jaxcoll._cluster.launch.supervisor import Job, Outcome, Owner
from jaxcoll._cluster.launchers import check_system
from jaxcoll._compat import numerics
from jaxcoll._errors import LaunchError
from jaxcoll._plan import checks

_CHILD = "from jaxcoll._cluster.launch.function import work; work()"
_CALL = "call"
_TAIL = 30  # lines shown of a process that died without a word
_CARRIED = (
    *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_random_seed_offset"),
    *("jax_debug_nans", "jax_debug_infs"),
)
"""Settings of JAX that processes have from their caller, beside those that change numbers."""


def launch(
    fn: Callable[[], Any],
    processes: int = 2,
    *,
    devices_per_process: int = 1,
    platform: str = "cpu",
    timeout: float | None = None,
) -> list[Any]:
    """Run a function in several new processes of this host, which form one job.

    For notebooks, tests and scripts; `jaxcoll launch` does it for programs. In each process
    `jc.initialize()` has been called, so that `jax.devices()` are those of all. What they print
    appears behind "[rank] ". Everything listens on 127.0.0.1 only.

    Law: no process outlives the call, however it ends. JAX's settings that change numbers (64 bits,
    precision, promotion, random numbers) are the caller's.

    Args:
      fn: called without arguments in each process; `functools.partial` gives it some. Functions of
        a notebook, and lambdas, need cloudpickle (`pip install 'jaxcoll[notebook]'`). They see
        copies of the caller's variables.
      processes: how many.
      devices_per_process: simulated CPU devices, or GPUs, of each.
      platform: "cpu", or "gpu" for this host's GPUs.
      timeout: seconds after which all are ended; None: never.

    Returns:
      What each process returned, in the order of their ranks, with numpy arrays for arrays of JAX
      that are complete in one process or replicated.

    Raises:
      ValueError: an argument is invalid.
      OSError: this is Windows.
      ImportError: the function needs cloudpickle, and it is not installed.
      LaunchError: a process raised an exception, which is shown with its rank and traceback (of
        several, the earliest), or died, or the time was up.

    Examples:
      >>> import os
      >>> len({*launch(os.getpid, 2)})
      2
    """
    processes = checks.positive("launch", "processes", processes)
    count = checks.positive("launch", "devices_per_process", devices_per_process)
    if platform not in ("cpu", "gpu"):
        raise ValueError(f"`launch` expects `platform` to be 'cpu' or 'gpu'; got {platform!r}.")
    if timeout is not None:
        timeout = checks.seconds("launch", "timeout", timeout)
    check_system()
    settings = numerics() | {name: getattr(jax.config, name) for name in _CARRIED}
    call = pickle.dumps((list(sys.path), settings)) + _pickled(fn)
    with tempfile.TemporaryDirectory(prefix="jaxcoll-") as folder:
        Path(folder, _CALL).write_bytes(call)
        shown = _Shown(processes)
        with world(processes, platform, count) as variables:
            outcome = Job([sys.executable, "-c", _CHILD, folder], variables, shown).run(timeout)
        found = [_read(Path(folder, str(rank))) for rank in range(processes)]
    _check(found, outcome, shown, timeout)
    return [ended.result for ended in found if ended]


@dataclasses.dataclass
class _Ended:
    """How the function ended in one process."""

    at: float  # by the clock that all processes of a host share
    result: Any = None  # what it returned
    error: str = ""  # the exception in words; "": none
    # File, line and function of each frame of its traceback
    frames: tuple[tuple[str, int, str], ...] = ()


def work() -> None:
    """What a process of `launch` runs; the folder is its argument."""
    folder = Path(sys.argv[1])
    with (folder / _CALL).open("rb") as file:
        sys.path[:], settings = pickle.load(file)
        for name, value in settings.items():
            jax.config.update(name, value)
        initialize()
        rank = jax.process_index()
        try:
            ended = _Ended(0.0, jax.tree.map(_on_host, pickle.load(file)()))
            data = pickle.dumps(ended)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]
            words = "".join(traceback.format_exception_only(error)).strip()
            lines = tuple((frame.filename, frame.lineno or 0, frame.name) for frame in frames)
            ended = _Ended(time.monotonic(), None, words, lines)
            data = pickle.dumps(ended)
    (folder / str(rank)).write_bytes(data)
    sys.exit(bool(ended.error))


def _pickled(fn: Any) -> bytes:
    if not callable(fn):
        raise ValueError(f"`launch` expects a function; got {type(fn).__name__}.")
    with contextlib.suppress(ImportError):
        import cloudpickle

        return cloudpickle.dumps(fn)
    try:
        data = pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        data = b"__main__"
    if b"__main__" in data:  # which is another module in the processes
        raise ImportError(
            "`launch` needs cloudpickle to send this function to other processes: it was made in a "
            "notebook, in the program's main file, or in another function. `pip install "
            "'jaxcoll[notebook]'`, or move it to a module that can be imported."
        )
    return data


def _on_host(x: Any) -> Any:
    """A numpy array for an array of JAX; anything else as it is."""
    if not hasattr(x, "addressable_shards"):
        return x
    if not (x.is_fully_addressable or x.is_fully_replicated):
        raise ValueError(
            f"`launch`: the function returned {x.dtype}{list(x.shape)}, of which each process has "
            "a part. Return `[s.data for s in x.addressable_shards]`, or a replicated array."
        )
    return np.asarray(x)


def _read(file: Path) -> _Ended | None:
    # A process that was killed may have written a part.
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):
        return pickle.loads(file.read_bytes())
    return None


def _check(found: list[_Ended | None], outcome: Outcome, shown: _Shown, timeout: Any) -> None:
    """Raise what went wrong first."""
    n = len(found)
    raised = {rank: ended for rank, ended in enumerate(found) if ended and ended.error}
    if raised:
        rank = min(raised, key=lambda rank: raised[rank].at)
        ended = raised[rank]
        # The caller's Python knows the lines of a notebook's cells.
        frames = traceback.StackSummary.from_list([(*f, None) for f in ended.frames]).format()
        text = f"rank {rank} of {n} raised {ended.error}\n\nTraceback of rank {rank} (most recent "
        raise LaunchError(f"{text}call last):\n{''.join(frames)}{ended.error}", ranks=[rank])
    if outcome.failed:
        rank = outcome.failed[0]
        status = outcome.statuses[rank] or 0
        how = f"ended with status {status}" if status > 0 else f"died of {signal_name(-status)}"
        raise LaunchError(f"rank {rank} of {n} {how}.{shown.tail(rank)}", ranks=[rank])
    if outcome.late:
        late = [rank for rank, status in enumerate(outcome.statuses) if status is None]
        words = ", ".join(map(str, late))
        text = f"not all of {n} processes ended within {timeout:g} s: ranks {words} did not"
        raise LaunchError(f"{text}.{shown.tail(late[0])}", ranks=late)


class _Shown(Owner):
    """Shows what processes print where `print` of the caller would show it."""

    def __init__(self, processes: int) -> None:
        self._tails = [collections.deque[str](maxlen=_TAIL) for _ in range(processes)]

    def show(self, rank: int, stream: str, piece: bytes) -> None:
        text = piece.decode(errors="replace")
        self._tails[rank].append(text)
        print(f"[{rank}] {text}", end="", file=sys.stdout if stream == "out" else sys.stderr)

    def tail(self, rank: int) -> str:
        lines = "".join(self._tails[rank]).rstrip()
        return f" Its last lines:\n{lines}" if lines else ""
