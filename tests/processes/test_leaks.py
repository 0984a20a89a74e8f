"""What a process has entered and left, or was killed in, leaves nothing behind."""

import json
import os
import sys
from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.processes

CYCLES = """
import json, os, socket, sys, threading, time
import jax
jax.config.update("jax_platforms", "cpu")
import jaxcoll as jc
from jaxcoll._compat.coordination import store
from jaxcoll._runtime.watchdog import watchdog

def children_of(thread):
    try:
        return open(f"/proc/self/task/{thread}/children").read()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return ""

def held():
    children = [children_of(thread) for thread in os.listdir("/proc/self/task")]
    names = sorted(thread.name for thread in threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))
    return names, files, os.listdir(os.environ["TMPDIR"]), "".join(children).split()

def settled():
    until = time.monotonic() + 20
    while held()[0] != before[0] and time.monotonic() < until:
        time.sleep(0.05)
    return held()

def cycle(seconds):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jc.initialize(f"127.0.0.1:{port}", 1, 0, initialization_timeout_seconds=seconds,
                  heartbeat_timeout_seconds=seconds, shutdown_timeout_seconds=seconds)
    assert watchdog() is not None
    kept.append(store())  # a client that is not destroyed keeps no connection
    if "killed" in sys.argv:
        os.kill(os.getpid(), 9)
    jax.distributed.shutdown()

kept, before = [], held()
for seconds in (60, 1e12, 60, 60):
    cycle(seconds)
    if seconds != 1e12:  # after which the next is entered at once
        after = settled()
kept.clear()
print(json.dumps([before, after]))
"""


def cycles(tmp_path, *how):
    # A folder whose name is too long for a socket's.
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    done = forks.with_jaxcoll().run(CYCLES, "", *how, cwd=tmp_path, timeout=120, TMPDIR=str(folder))
    return done, os.listdir(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux shows")
def test_left_jobs_leave_nothing(
    tmp_path,
):
    done, left = cycles(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (threads, files, folders, children), after = json.loads(done.stdout)
    assert after[0] == threads
    assert after[1] <= files + 4  # gRPC keeps so many of its own, however many jobs there were
    assert (after[2], after[3], left) == (folders, children, [])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a socket has a file")
def test_killed_process_leaves_no_folder(tmp_path):
    done, left = cycles(tmp_path, "killed")
    assert (done.returncode, left) == (-9, [])
