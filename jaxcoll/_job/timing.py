"""Every interval and timeout of a job: its start, its calls and elastic runs, and its end.

A closed connection is noticed at once, without these (see `liveness`). Most bound what connections
do not show: a process that is stopped, cut off, or in code that holds the interpreter lock.
"""

from __future__ import annotations

POLL_SECONDS = 0.02
"""Time between two looks at what other processes wrote."""

FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 0.001, 0.05
"""The same in an agreement on a program, doubled from the first to the last: usually all processes
arrive within milliseconds, and otherwise the coordinator should not be kept busy."""

PATIENCE_SECONDS = 0.25
"""Time that processes have to arrive at an agreement before they are asked what they do instead."""

NEWS_SECONDS = 0.05
"""Time after a transport error in which the coordinator has reported who died."""

HEARTBEAT_SECONDS = 0.5
"""Time between two heartbeats. At each, a process publishes its progress in calls and elastic runs,
reads the others' and who has ended. Survivors of a failure wait for up to four heartbeats."""

REPLY_SECONDS = 0.75
"""Timeout of a status query to another process's watchdog; a reply takes a few milliseconds."""

REPLY_SECONDS_EACH = 0.02
"""Extra time for each process that is queried."""

LINES_SECONDS = 10.0
"""Timeout for the lines of another process's program."""

RETRY_SECONDS = 3.0
"""A second, longer timeout before several silent processes are declared lost."""

COORDINATOR_SECONDS, LATE_COORDINATOR_SECONDS = 10.0, 0.2
"""Extra time for the coordinator to pass on a query and its reply; and after a deadline."""

SILENT_CALLER_SECONDS = 5.0
"""A process that must agree on the next program is lost after so long a silence, if no connection
shows its end. Longer than `SILENT_WORKER_SECONDS`, because this ends the job."""

SILENT_WORKER_SECONDS = 2.0
"""An elastic worker without a heartbeat for so long is not let in. If no connection shows its
end, it counts as dead once something has gone wrong."""

COORDINATOR_REPLY_SECONDS = 30.0
"""Longest timeout of an elastic run's request to the coordinator. The run must survive a short
stall. JAX itself ends the process after its heartbeat timeout, which is longer."""

SIGN_OFF_SECONDS = 2.0
"""Timeout for the coordinator, and for the watchdog's thread, when a process ends."""

LOCK_SECONDS, LAST_LOCK_SECONDS = 1.0, 30.0
"""Timeouts of an elastic run for the lock on its checkpoint: between steps, and at the end."""

IDLE_POLL_SECONDS, GLOO_CONNECT_SECONDS = 0.25, 60.0
"""Time between two looks for addresses of a generation's connections, once so much time has passed
since the last new one: by then Gloo has connected, whose timeout in XLA is 30 seconds."""

REACH_RETRY_SECONDS, COORDINATOR_GONE_SECONDS = 0.05, 2.0
"""Time between two attempts to reach a coordinator that is not there yet, and the time after which
one that hung up and does not listen has died."""

CANDIDATE_SECONDS = 2.0
"""Timeout for a connection to one of several hosts where the coordinator may be."""

ARRIVAL_REPLY_SECONDS = 5.0
"""Time by which a busy coordinator may be late with its reply, at a process's deadline."""

LEAST_CONNECT_SECONDS, LEAST_DEVICES_SECONDS = 5.0, 5.0
"""Times that JAX's clients may always take to connect, once all processes have arrived, and the
exchange of devices, once all have begun."""

LEAST_SILENCE_SECONDS = 2.0
"""Time for which a working connection to the coordinator may be silent."""

JAX_STARTUP_SECONDS = 24 * 3600
"""Timeout given to JAX for its startup. JAX aborts the process at its end; our timeout is shorter
and raises an error."""

HOSTS_SECONDS = 10.0
"""Timeout of the first use of the processes' hosts, for processes that have not published theirs.
Only after `jax.distributed.initialize`; `jc.initialize` publishes them."""

SILENT_EXIT_SECONDS = 3.0
"""Time for which process 0 waits for the others at its end before it says so."""

ABANDONED_SECONDS = 0.5
"""Time for which a process's exit waits for abandoned calls to return."""

GRACE_SECONDS, OUTPUT_SECONDS = 5.0, 1.0
"""Times between a launcher's SIGTERM and its SIGKILL, and for the last output of what it ended."""

SETTLE_SECONDS = 4.0
"""Time in which survivors of a failure find out whether they can go on, before the launcher
restarts the process that failed."""

LAUNCHER_POLL_SECONDS = 0.05
"""Time between a launcher's two looks at its processes."""
