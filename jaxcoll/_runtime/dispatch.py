"""The one place where the host runs programs: in step with other processes, within deadlines."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from jaxcoll._compat import settings
from jaxcoll._job.threads import Task, Worker, abandon_and_watch_exit
from jaxcoll._runtime.cached_order import compiled_in_order
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import Compile, Program, compile_once
from jaxcoll.errors import DeadlineExceededError, SameRowsWarning

_COUNTS = (
    *("JAXCOLL_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"),
    *("PMI_SIZE", "JAX_NUM_PROCESSES"),
)
"""Variables in which launchers say how many processes there are."""

_ALONE = """\
{name}={count} says that this process is one of several, but it has not joined the others: each \
trains alone. {advice}. If they should run separately, ignore this."""

_INITIALIZE = "Call `jc.initialize()` first in the program, before any other use of JAX"
_SRUN = f"Start the program with `srun`. {_INITIALIZE}"


class Group(Protocol):
    """The processes that run a program together: what calls need of a `ProcessGroup`."""

    worker: Worker  # two programs of one group at once would mix up their messages
    compiled: Compile

    def describe(self, call: Call) -> Program: ...
    def begin(self, task: Task) -> None: ...
    def run(self, call: Call, program: Program, wait: bool = True) -> Any: ...
    def deadline(self, call: Call, begun: float) -> float: ...
    def describe_late(self, call: Call, program: Program) -> tuple[tuple[int, ...], str]: ...


def find_group(devices: Sequence[jax.Device]) -> Group | None:
    """Find the group that watches calls over these devices; None if all are in this process."""
    if jax.process_count() > 1:
        from jaxcoll._runtime import watchdog  # here, so that a single process does not load it

        return watchdog.find_group(devices)
    _warn_where_alone()
    return None


_alone = threading.local()
"""A worker for each thread, for calls within this process: they overlap, as without a deadline, and
callbacks inside programs can make calls too."""


def run(call: Call, until: float | None = None) -> Any:
    """Make one call and return its result; of one without a program, the value of each process.

    With a deadline, or over Gloo, this waits for the result. With a deadline the program runs in
    another thread, because a backend may run a program while dispatching it, as XLA's CPU backend
    does with small ones. Over several processes it always does, so that another process's failure
    can end the wait.

    `until` is its deadline, by `time.monotonic`; None: `call.timeout_seconds` from now.

    Raises:
      PeerLostError: another process has died, or was cut off.
      ProgramMismatchError: processes call different programs.
      DeadlineExceededError: the deadline passed; the error names the processes that did not arrive.
        Only the wait ends: the program goes on until it can finish, the process stays usable, and
        the next call over the same processes begins after that.
    """
    group = call.group or find_group(call.devices)
    if group is None and not call.timeout_seconds and not has_queue():
        with compiled_in_order(call):
            return call.program(*call.args, **call.kwargs)
    # Compile in this thread, because tracing uses the JAX configuration of its thread. Read the
    # deadline afterwards, because the trace may request a shorter one.
    if call.program is None and group is not None:
        program = group.describe(call)
    else:
        program = compile_once(call, None if group is None else group.compiled)
    seconds, begun = call.timeout_seconds or math.inf, time.monotonic()
    ends = begun + seconds if until is None else until
    worker = _own_worker() if group is None else group.worker
    make = functools.partial(_run_and_wait, program, call)
    task = Task(worker)
    if group is not None:
        # A result that failed over Gloo may never be ready, so a later wait for it would hang.
        wait = seconds < math.inf or call.devices[0].platform == "cpu"
        make = functools.partial(group.run, call, program, wait)
        group.begin(task)  # before the call, so that it misses no failure
    if group is not None and settings.read_option("cpu_collectives_implementation") == "mpi":
        task.end(make())  # MPI serves only the thread that initialized it: no deadline
    else:
        worker.submit(make, task)
    while not task.wait(max(0.0, ends - time.monotonic())):
        if group is not None and call.meeting_seconds is not None:
            ends = group.deadline(call, begun)
        if time.monotonic() >= ends:
            ranks, why = ((), "") if group is None else group.describe_late(call, program)
            abandon_and_watch_exit(worker)
            text = f"{call.name} did not finish within {seconds:g} s.{why}"
            raise DeadlineExceededError(text, ranks=ranks)
    while call.same_rows:
        settings.warn(call.same_rows.pop(), SameRowsWarning)
    return task.result()


def has_queue() -> bool:
    """Return True if calls of this thread queue, so that none overtakes one that was given up."""
    worker = getattr(_alone, "worker", None)
    return worker is not None and worker.is_alive()


def run_all(calls: Sequence[Call]) -> list[Any]:
    """Make calls one after another within the deadline of the first, and return their results."""
    seconds = calls[0].timeout_seconds
    until = time.monotonic() + seconds if seconds else None
    return [run(call, until) for call in calls]


def _own_worker() -> Worker:
    if getattr(_alone, "worker", None) is None:
        _alone.worker = Worker("jaxcoll-worker")
    return _alone.worker


def _run_and_wait(program: Program, call: Call) -> Any:
    return jax.block_until_ready(program.compiled(*call.args, **call.kwargs))


@functools.cache
def _warn_where_alone() -> None:
    """Warn once if a launcher started several processes and this one has not joined the others."""
    if text := reason_to_warn(os.environ):
        settings.warn(text)


def reason_to_warn(environment: Mapping[str, str]) -> str:
    """Return a warning if this environment says that a lone process is one of several, else "".

    Examples:
      >>> reason_to_warn({"SLURM_NTASKS": "1"}), reason_to_warn({"SLURM_NTASKS": "4"})[:14]
      ('', 'SLURM_NTASKS=4')
    """
    for name in _COUNTS:
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 1:
            is_task = "SLURM_STEP_NODELIST" in environment or name != "SLURM_NTASKS"
            return _ALONE.format(name=name, count=count, advice=_INITIALIZE if is_task else _SRUN)
    return ""
