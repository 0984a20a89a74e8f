"""Every interval by which failures are noticed, for calls between programs and for elastic runs.

A closed connection is noticed at once and needs none of these (see `liveness`). They bound what no
connection tells: a process that is stopped, cut off, or busy in code that holds the interpreter.
"""

from __future__ import annotations

HEARTBEAT_SECONDS = 0.5
"""Seconds after which a process publishes its part in calls and elastic runs, and looks what others
published and which have ended. Survivors of a failure wait for up to four."""

REPLY_SECONDS = 0.75
"""Timeout of a status query to another process's watchdog, which takes a few milliseconds."""

RETRY_SECONDS = 3.0
"""A second, longer timeout before several silent processes are declared lost."""

COORDINATOR_SECONDS = 10.0
"""Seconds beyond that which the coordinator may take to pass a query and its reply on."""

SILENT_CALLER_SECONDS = 5.0
"""After such a silence a process that must agree on the next program is lost, where its connection
cannot tell. Longer than `SILENT_WORKER_SECONDS`: the job ends for it, an elastic run goes on."""

SILENT_WORKER_SECONDS = 2.0
"""Without a heartbeat for so long, an elastic worker is not taken in; and one whose connection
cannot tell of its death counts as dead once something has gone wrong."""

COORDINATOR_REPLY_SECONDS = 30.0
"""Longest timeout of an elastic run's request to the coordinator: the run must outlast a short
stall. JAX itself ends the process after its heartbeat timeout, which is longer."""

JAX_STARTUP_SECONDS = 24 * 3600
"""The timeout that JAX is given for its start-up, because at its end it aborts the process. Ours is
shorter, and raises."""

HOSTS_SECONDS = 10.0
"""Seconds for which the first use of a world waits for processes without a published host,
where `jax.distributed.initialize` was called in place of `jc.initialize`."""
