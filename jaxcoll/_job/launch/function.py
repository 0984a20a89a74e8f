"""Run a Python function in several processes of this host, and return their results."""

from __future__ import annotations

import contextlib
import os
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

from jaxcoll._compat.settings import numerics
from jaxcoll._job.initialize import initialize
from jaxcoll._job.launch.subprocesses import RANK, check_system, signal_name
from jaxcoll._job.launch.supervisor import Job, world
from jaxcoll._plan import checks
from jaxcoll.errors import LaunchError

_CHILD = "from jaxcoll._job.launch.function import work; work()"
_CALL = "call"
_COPIED = (
    *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_random_seed_offset"),
    *("jax_debug_nans", "jax_debug_infs"),
)
"""JAX settings that processes take over from the caller, beside those that change numbers."""


def launch(
    fn: Callable[[], Any],
    processes: int = 2,
    *,
    devices_per_process: int = 1,
    platform: str = "cpu",
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Run a function in several new processes of this host, which form one job.

    This is for notebooks, tests and scripts; `jaxcoll launch` does the same for programs. Each
    process has called `jc.initialize()` before, so its `jax.devices()` are those of all processes.
    Printed lines appear after "[rank] ". Everything listens on 127.0.0.1 only. No process outlives
    the call, however it ends. JAX settings that change numbers (64 bits, precision, promotion,
    random numbers) are copied from the caller.

    Args:
      fn: called without arguments in each process; use `functools.partial` to pass some. Lambdas
        and functions of a notebook need cloudpickle (`pip install 'jaxcoll[notebook]'`). They see
        copies of the caller's variables.
      processes: number of processes.
      devices_per_process: number of simulated CPU devices, or of GPUs, for each process.
      platform: "cpu", or "gpu" for this host's GPUs.
      timeout_seconds: time after which all processes are killed. None: no limit.

    Returns:
      The return value of each process, by rank. JAX arrays come back as numpy arrays; they must be
      complete in one process, or replicated.

    Raises:
      ValueError: an argument is invalid.
      OSError: this is Windows.
      ImportError: the function needs cloudpickle, which is not installed.
      LaunchError: a process raised an exception, ended early, or was not done in time. The message
        has the rank, and the traceback of the earliest exception.

    Examples:
      >>> import os
      >>> len({*launch(os.getpid, 2)})
      2
    """
    processes = checks.positive("launch", "processes", processes)
    count = checks.positive("launch", "devices_per_process", devices_per_process)
    if platform not in ("cpu", "gpu"):
        raise ValueError(f"`launch` expects `platform` to be 'cpu' or 'gpu'; got {platform!r}.")
    if timeout_seconds is not None:
        timeout_seconds = checks.seconds("launch", "timeout_seconds", timeout_seconds)
    check_system()
    settings = numerics() | {name: getattr(jax.config, name) for name in _COPIED}
    call = pickle.dumps((list(sys.path), settings)) + _pickle(fn)
    with tempfile.TemporaryDirectory(prefix="jaxcoll-") as folder:
        Path(folder, _CALL).write_bytes(call)
        with world(processes, platform, count) as (variables, _):
            job = Job([sys.executable, "-c", _CHILD, folder], variables, _show)
            job.run(timeout_seconds)
        files = [Path(folder, str(rank)) for rank in range(processes)]
        outcomes = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    return _results(outcomes, job, timeout_seconds)


def work() -> None:
    """Run the function in one process of `launch`; the command line names the shared folder."""
    folder, rank = Path(sys.argv[1]), os.environ[RANK]
    failure, result = None, b""
    try:
        with (folder / _CALL).open("rb") as file:
            sys.path[:], settings = pickle.load(file)
            for name, value in settings.items():
                jax.config.update(name, value)
            initialize()
            result = jax.tree.map(_to_numpy, pickle.load(file)())
            # If cloudpickle brought the function, the result may be of the notebook's classes too.
            result = sys.modules.get("cloudpickle", pickle).dumps(result)
    except BaseException as error:
        lines = [
            (f.filename, f.lineno, f.name, None) for f in traceback.extract_tb(error.__traceback__)
        ]
        message = "".join(traceback.format_exception_only(error)).strip()
        failure = time.monotonic(), message, lines[1:]  # all processes of a host share this clock
    # Rename, so that a process that is killed leaves either a complete file or none.
    (folder / f"{rank}.part").write_bytes(pickle.dumps((failure, result)))
    (folder / f"{rank}.part").rename(folder / rank)
    sys.exit(failure is not None)


def _results(
    outcomes: list[tuple[Any, bytes] | None], job: Job, timeout: float | None
) -> list[Any]:
    n = len(outcomes)
    failures = [(*of[0], rank) for rank, of in enumerate(outcomes) if of and of[0]]
    if failures:
        # The earliest: the other ranks may have failed because it was gone.
        _, message, lines, rank = min(failures, key=lambda failure: failure[0])
        # Format it here: only the caller's Python has the source lines of a notebook's cells.
        frames = "".join(traceback.StackSummary.from_list(lines).format())
        text = f"rank {rank} of {n} raised {message}\n\nTraceback of rank {rank} (most recent "
        raise LaunchError(f"{text}call last):\n{frames}{message}", ranks=[rank])
    late = [rank for rank, status in enumerate(job.statuses) if status is None]
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if wrong := job.failed[:1] or late or silent[:1]:
        status = job.statuses[wrong[0]]
        if status is None:
            how = f"did not end within {timeout:g} s"
        elif status < 0:
            how = f"was killed by {signal_name(-status)}"
        else:
            how = f"ended with status {status}" + " before the function returned" * (status == 0)
        who, its = ("ranks", "their") if len(wrong) > 1 else ("rank", "its")
        text = f"{who} {', '.join(map(str, wrong))} of {n} {how}; see {its} output above."
        raise LaunchError(text, ranks=wrong)
    results = []
    for rank, (_, result) in enumerate(filter(None, outcomes)):
        try:
            results.append(pickle.loads(result))
        except Exception as error:
            text = f"the return value of rank {rank} of {n} cannot be unpickled here"
            raise LaunchError(f"{text}: {type(error).__name__}: {error}", ranks=[rank]) from error
    return results


def _pickle(fn: Any) -> bytes:
    if not callable(fn):
        program = " (programs are started by `jaxcoll launch`)" if isinstance(fn, str) else ""
        raise ValueError(f"`launch` expects a function{program}; got {checks.describe_type(fn)}.")
    try:
        import cloudpickle
    except ImportError:
        try:
            data = pickle.dumps(fn)
        except (pickle.PicklingError, AttributeError, TypeError):
            data = b"__main__"
        if b"__main__" not in data:  # `__main__` is a different module in the new processes
            return data
        raise ImportError(
            "`launch` needs cloudpickle to send this function to other processes, because it was "
            "defined in a notebook, in the main program, or inside another function. `pip install "
            "'jaxcoll[notebook]'`, or move it to a module that can be imported."
        ) from None
    return cloudpickle.dumps(fn)


def _to_numpy(x: Any) -> Any:
    if not hasattr(x, "addressable_shards"):
        return x
    if not (x.is_fully_addressable or x.is_fully_replicated):
        raise ValueError(
            f"`launch`: the function returned a sharded array, {x.dtype}{list(x.shape)}. "
            "Return `[s.data for s in x.addressable_shards]`, or a replicated array."
        )
    return np.asarray(x)


def _show(rank: int, stream: str, line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        (sys.stdout if stream == "out" else sys.stderr).write(f"[{rank}] {line}")
