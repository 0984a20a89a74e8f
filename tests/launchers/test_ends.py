"""A job that plain JAX ends with 0 ends with 0, wherever it runs, and whoever ends first."""

import os
import signal
import subprocess
import sys
import time

import forks
import pytest

from benchmarks.teams import free_port
from jaxcoll._job.coordinator import start_coordinator

pytestmark = pytest.mark.processes
POD = ["unshare", "--pid", "--fork", "--mount-proc"]  # whose process 1 ends all others with it
PROGRAM = """
import sys, time
import jaxcoll as jc

jc.initialize(initialization_timeout_seconds=90, shutdown_timeout_seconds=60)

import jax
import numpy as np

total = jc.data_parallel(lambda x: jc.psum(x.sum()))
assert total(np.ones(1, "f")) == 2
rank = jax.process_index()
if rank == 0 and "fails" in sys.argv:
    raise ValueError("process 0 fails")
if rank == 1 and "fails" in sys.argv:
    try:  # not watched: only the end of process 0's connections ends this
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), np.ones(1))
        print(jax.jit(lambda x: x.sum())(rows))
    except Exception as error:
        print("noticed", type(error).__name__)
time.sleep(5 * rank)
print("finished", flush=True)
"""


def run(around, *arguments):
    """Run two processes, each inside another command; return their statuses and outputs."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [*around, sys.executable, "-c", PROGRAM, *arguments],
            env={**os.environ, **place, "RANK": str(rank), "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240) for process in started]
    return [process.returncode for process in started], outputs


def run_forks(folder, code, places):
    """Run `python -c code` once for each place; return the statuses, and what each printed."""
    logs = [folder / f"{rank}.log" for rank in range(len(places))]
    with forks.running() as running:
        for log, place in zip(logs, places, strict=True):
            own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **place}
            with log.open("wb") as out:
                running.start(["python", "-c", code], own, stdout=out)
        statuses = [process.wait(240) for process in running.processes]
    return statuses, [log.read_text() for log in logs]


def test_pods_process_0_ends_last():
    if os.geteuid() or subprocess.run([*POD, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    statuses, ((_, said), _) = run(POD)
    assert statuses == [0, 0]
    assert "process 0 is done, and waits up to 60 s (`shutdown_timeout_seconds`) for the" in said
    assert "others 1: the coordinator" in said


def test_failed_process_0_releases_others():
    statuses, ((_, failed), (out, _)) = run([], "fails")
    assert statuses == [1, 0]
    assert "ValueError: process 0 fails" in failed
    assert out.splitlines()[-2:] == ["noticed JaxRuntimeError", "finished"]


SERVED = """
import os, signal, sys
import jaxcoll as jc

jc.initialize(initialization_timeout_seconds=90)

import jax
import numpy as np

total = jc.data_parallel(lambda x: jc.psum(x.sum()))
assert total(np.ones(1, "f")) == 2
if jax.process_index() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    total(np.ones(1, "f"))
except jc.errors.PeerLostError as lost:
    print("lost", *lost.ranks, flush=True)
"""


def test_separate_coordinator_outlives_process_0(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "jaxcoll", "coordinator", address, "-n", "2"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert serving.stdout.readline() == f"JAXCOLL_COORDINATOR={address} serves 2 processes\n"
    place = {"JAXCOLL_COORDINATOR": address, "PMI_SIZE": "2"}
    places = [{**place, "PMI_RANK": str(rank)} for rank in range(2)]
    statuses, (_, printed) = run_forks(tmp_path, SERVED, places)
    assert statuses == [-signal.SIGKILL, 0]
    assert "lost 0\n" in printed
    assert serving.wait(60) == 0
    serving.stdout.close()


LOADED = """
import multiprocessing
import jaxcoll as jc

jc.initialize(initialization_timeout_seconds=90)


def load(k):
    return k * k


if __name__ == "__main__":
    import jax
    import numpy as np

    for start in ("spawn", "forkserver"):
        with multiprocessing.get_context(start).Pool(1) as pool:
            rows = np.array(pool.map(load, range(1, 4)), "f").sum(keepdims=True)
        print(jc.data_parallel(lambda x: jc.psum(x.sum()))(rows))
"""


def test_loader_processes_do_not_join(tmp_path):
    (tmp_path / "train.py").write_text(LOADED)
    done = subprocess.run(
        [sys.executable, "-m", "jaxcoll", "launch", "-n", "2", tmp_path / "train.py"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 28.0"] * 2 + ["[1] 28.0"] * 2


FOUND = """
import os
import jax
import jaxcoll as jc
from jax.experimental import multihost_utils

class Found(multihost_utils.distributed.clusters.ClusterEnv):
    is_env_present = classmethod(lambda cls: True)
    get_coordinator_address = classmethod(lambda cls, **_: os.environ["AT"])
    get_process_count = classmethod(lambda cls: 2)
    get_process_id = classmethod(lambda cls: int(os.environ["NUMBER"]))

try:
    jc.initialize(initialization_timeout_seconds=float(os.environ["TIMEOUT"]))
except jc.errors.DeadlineExceededError as late:
    print("late", *late.ranks)
else:
    print(jax.process_count(), jc._job.initialize.outlives_processes())
"""


@pytest.mark.parametrize("late", [True, False])
def test_detected_clusters_have_deadlines(late, tmp_path):
    place = {"AT": f"127.0.0.1:{free_port()}", "TIMEOUT": "2" if late else "90"}
    places = [{**place, "NUMBER": str(rank)} for rank in range(1 if late else 2)]
    statuses, printed = run_forks(tmp_path, FOUND, places)
    assert set(statuses) == {0}, printed
    assert all(("late 1\n" if late else "2 True\n") in text for text in printed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_coordinator_ignores_job_signals(number):
    started = start_coordinator("127.0.0.1:0", 2)
    started.process.send_signal(number)
    time.sleep(0.2)
    assert started.process.poll() is None
    started.release()  # nobody has come
    assert started.await_end(20)
    assert started.process.returncode == 0
