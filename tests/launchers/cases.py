"""Jobs under real launchers, each of which is started for its case.

    python -m tests.launchers.cases             # names the cases
    python -m tests.launchers.cases requeue     # runs one; the exit status is 1 if it is not as it says

Needs root, and Debian's slurm-wlm, munge, iproute2, openmpi-bin, mpich; MPIRUN may name another Open MPI. What runs on two hosts runs on two
network namespaces; nothing is left of them.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.processes.hosts import hosts, pull_cable

HERE = Path(__file__).parent
SBATCH = HERE.parents[1] / "docs/examples/cluster/slurm.sbatch"

# Every process but the first writes its share for four more seconds.
EARLY = """
import time
import jaxcoll as jc
jc.initialize(initialization_timeout_seconds=90)
import jax, numpy as np
total = jc.data_parallel(lambda x: jc.psum(x.sum()))
assert total(np.ones(jax.local_device_count())) == jax.device_count()
time.sleep(4 * (jax.process_index() > 0))
print("finished", jax.process_index(), flush=True)
"""

# Trains until SIGTERM, saves, and goes on at the saved step when it is started again.
SAVES = """
import os, signal, sys, time
import jaxcoll as jc
jc.initialize(initialization_timeout_seconds=90)
import jax, numpy as np
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(True))
any_process = jc.data_parallel(lambda flags: jc.psum(flags.sum()) > 0)
first = jc.restore_checkpoint("last.npz", np.float32(0))[1] if os.path.exists("last.npz") else 0
print("from", first, flush=True)
for step in range(first + 1, 1000):
    time.sleep(0.05)
    if any_process(np.full(jax.local_device_count(), bool(received))):
        if jax.process_index() == 0:
            jc.save_checkpoint("last.npz", np.float32(step), step=step)
        any_process(np.zeros(jax.local_device_count(), bool))
        print("saved", step, flush=True)
        sys.exit(75)
    if first and step > first + 20:
        break
    if step == 20 and jax.process_index() == 0:
        open("trains", "w").close()
print("done", flush=True)
"""

ELASTIC = """
import os, signal, time
import jaxcoll as jc
jc.initialize(initialization_timeout_seconds=90)
import jax, jax.numpy as jnp, numpy as np

@jc.data_parallel(batch_argnums=1)
def step(w, x):
    value, gradient = jc.value_and_grad(lambda w, x: jnp.mean((x - w) ** 2), "data")(w, x)
    return w - 0.1 * gradient, value

def batches(step, rank, world):
    time.sleep(0.02)
    if step == 20 and jax.process_index() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.random.default_rng((step, rank)).standard_normal(8).astype("f")

trainer = jc.Elastic(step, np.float32(0), min_workers=2, timeout_seconds=60, checkpoint="last.npz")
trainer.run(batches, 40)
print("finished", jax.process_index(), [(change.step, change.lost) for change in trainer.changes], flush=True)
"""

# The last process is late once, at step 20.
HANGS = """
import os, sys, time
import jaxcoll as jc
jc.initialize(initialization_timeout_seconds=90)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), np.ones((1, 4), "f"))
late = jax.process_count() - 1

def load(seconds):
    time.sleep(seconds)

@jax.jit
def train_step(x):
    return x - x.mean()

for number in range(30):
    if number == 20 and jax.process_index() == late:
        print("loads", flush=True)
        load(float(sys.argv[1]))
    train_step(rows).block_until_ready()
print("finished", jax.process_index(), flush=True)
"""

# Adds a number over both processes, the second of which comes late.
SUMS = """
import os, sys, time
value, late = map(float, sys.argv[1:])
import jaxcoll as jc
from jaxcoll._job.launchers import read_member
rank = read_member(os.environ).process_id
time.sleep(late * rank)
try:
    jc.initialize(initialization_timeout_seconds=30)
except (ValueError, OSError, jc.errors.DeadlineExceededError) as error:
    sys.exit(f"refused {type(error).__name__}")
import numpy as np
total = jc.data_parallel(lambda x: jc.psum(x.sum()))(np.full(1, value))
print(f"sum {total:.0f} of {value:.0f}", flush=True)
"""


def run(script, *around, timeout=300, files=(), **variables):
    """Run a bash script inside a command; returns the exit status and the output.

    In the script $PY is this Python, and the current folder has `files`, a mapping of names to texts.
    """
    with tempfile.TemporaryDirectory(prefix="jaxcoll-case-") as folder:
        os.chmod(folder, 0o755)
        for name, text in {**dict(files), "case.sh": script}.items():
            Path(folder, name).write_text(text)
        settings = {
            "PY": sys.executable, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "MPIRUN": os.environ.get("MPIRUN", "mpirun.openmpi"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", **variables,
        }  # fmt: skip
        process = subprocess.Popen(
            [*around, "bash", "case.sh"], cwd=folder, env={**os.environ, **settings},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # the cluster ends what it started
            output = f"{process.communicate()[0]}\nnot done within {timeout} s"
    print(*(line for line in output.splitlines() if "[Gloo]" not in line), sep="\n")
    return process.returncode, output


def on_slurm(script, **settings):
    return run(script, "sh", str(HERE / "slurm.sh"), **settings)


def first_ends():
    """Slurm ends all processes of a host with its last task: process 0 waits for process 1."""
    status, output = on_slurm(
        "srun -N2 -n2 $PY early.py", files={"early.py": EARLY}, PROCTRACK="cgroup"
    )
    return status == 0 and output.count("finished") == 2


def task_0_elsewhere():
    """Task 0 is on the second host of the step's list: where hosts are given one by one, and in parts."""
    script = """
    printf 'jcn2\\njcn1\\n' > hosts
    SLURM_HOSTFILE=hosts srun -n2 -m arbitrary $PY early.py || exit
    srun -w jcn2 -n1 $PY early.py : -w jcn1 -n1 $PY early.py
    """
    status, output = on_slurm(script, files={"early.py": EARLY})
    return status == 0 and output.count("finished") == 4


def requeue():
    """A preempted job saves, is queued again by the page's batch script, and goes on to its end."""
    batch = SBATCH.read_text().replace("#SBATCH --gpus-per-node=8\n", "").replace("python", "$PY")
    script = """
    job=$(sbatch --parsable -p low -N2 --ntasks-per-node=1 -c1 -o job.log slurm.sbatch)
    until [ -e trains ]; do sleep 0.2; done
    sbatch -p high -N2 --ntasks-per-node=1 -c4 -o other.log --wrap 'sleep 3'
    until squeue -h -j $job -o %t | grep -q PD; do sleep 0.3; done
    squeue -j $job -o '%t %r %S'
    scontrol update JobId=$job StartTime=now  # Slurm waits two minutes before it starts a job again
    for try in $(seq 200); do
      state=$(squeue -h -j $job -o %t)
      case $state in "" | CD | F | NF | PR | TO) break;; esac
      sleep 0.3
    done
    scontrol show job $job | grep -E 'JobState|Restarts'
    cat job.log
    """
    files = {"slurm.sbatch": batch, "train.py": SAVES}
    _, output = on_slurm(script, files=files, PY=sys.executable)
    saved = re.findall(r"saved (\d+)", output)
    again = re.findall(r"from (\d+)", output)
    return len(saved) == 2 and again == ["0", "0", *saved] and "JobState=COMPLETED" in output


def elastic():
    """A run of jc.Elastic outlives process 0, since the batch script has the coordinator."""
    script = """
    $PY -m jaxcoll coordinator "$(hostname):29500" -n 3 &
    export JAXCOLL_COORDINATOR="$(hostname):29500"
    srun --no-kill --kill-on-bad-exit=0 -N2 -n3 $PY train.py
    echo "srun ended with $?"
    wait $!
    echo "the coordinator ended with $?"
    """
    _, output = on_slurm(script, files={"train.py": ELASTIC}, PROCTRACK="cgroup")
    finished = re.findall(r"finished (\d) (.*)", output)
    return (
        sorted(finished) == [(str(rank), "[(20, (0,))]") for rank in (1, 2)]
        and "srun ended with 137" in output
        and "the coordinator ended with 0" in output
    )


def names_late(output, processes):
    late = processes - 1
    lines = re.findall(r"jaxcoll hang: (.*)", output)
    waiting = (
        f"processes 0, 1 and 2 of {processes} have waited"
        if late == 3
        else "process 0 of 2 has waited"
    )
    return (
        waiting in lines[0]
        and f"for process {late}." in lines[0]
        and any("in load: time.sleep(seconds)" in line for line in lines)
        and any("in <module>: train_step(rows)" in line for line in lines)
        and output.count("finished") == processes
    )


def hang_on_slurm():
    """A rank that is late is named, with its line, on two hosts under srun."""
    script = (
        "srun -N2 -n4 bash own_folder.sh $PY -m jaxcoll inspect --hang-seconds 4 --run hangs.py 12"
    )
    # Nothing on a disk is seen by both hosts.
    own = 'export TMPDIR=$PWD/$SLURMD_NODENAME; mkdir -p "$TMPDIR"; exec "$@"'
    status, output = on_slurm(script, files={"hangs.py": HANGS, "own_folder.sh": own})
    return status == 0 and names_late(output, 4)


def hang_ends_on_slurm():
    """--hang-exit ends a job that would hang for ever, where srun ends all with the first failure."""
    hang = "--hang-seconds 4 --hang-exit --run hangs.py 100000"
    script = f"srun --kill-on-bad-exit=1 -N2 -n2 $PY -m jaxcoll inspect {hang}; echo ended with $?"
    _, output = on_slurm(script, files={"hangs.py": HANGS})
    # Slurm kills the process that slept: srun's own status is the highest, 137.
    return "task 0: Exited with exit code 124" in output and "\nended with 137" in output


def hang_on_mpi():
    """A rank that is late is named, with its line, under Open MPI's mpirun."""
    script = """
    export JAX_COORDINATOR_ADDRESS=127.0.0.1:29517
    $MPIRUN --bind-to none --oversubscribe -n 4 $PY -m jaxcoll inspect --hang-seconds 4 --run hangs.py 12
    """
    status, output = run(script, files={"hangs.py": HANGS})
    return status == 0 and names_late(output, 4)


def hang_cut():
    """Process 0's host is cut off: each side says of whom it hears nothing, and whom it cannot know of."""
    with hosts(2) as two, tempfile.TemporaryDirectory() as folder:
        Path(folder, "hangs.py").write_text(HANGS)
        place = {"MASTER_ADDR": two.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
        inspect = [sys.executable, "-u", "-m", "jaxcoll", "inspect", "--hang-seconds", "4", "--run"]
        logs, started = [Path(folder, f"{rank}.log") for rank in range(4)], []
        for rank, log in enumerate(logs):
            own = Path(folder, f"host{rank // 2}")  # nothing on a disk is seen by both hosts
            own.mkdir(exist_ok=True)
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', own.name]
            environment = {**os.environ, **place, "RANK": str(rank), "JAX_PLATFORMS": "cpu"}
            started.append(subprocess.Popen(
                [*two.on(rank // 2), *named, *inspect, "hangs.py", "2"], cwd=folder,
                env=environment | {"TMPDIR": str(own)}, stdout=log.open("w"), stderr=subprocess.STDOUT,
            ))  # fmt: skip
        until = time.monotonic() + 90
        while "loads" not in logs[3].read_text() and time.monotonic() < until:
            time.sleep(0.05)
        pull_cable(two, 0)
        time.sleep(20)
        for process in started:
            process.kill()
            process.wait()
        texts = [log.read_text() for log in logs]
    print(*(line for line in "".join(texts).splitlines() if "jaxcoll hang:" in line), sep="\n")
    return (
        "processes 0 and 1 of 4 have waited" in texts[0]
        and "s for processes 2 and 3." in texts[0]
        and "process 3 does not answer: stopped, cut off, dead, or in native code" in texts[0]
        and "processes 2 and 3 of 4 have waited" in texts[2]
        and "process 0 does not answer: stopped, cut off, dead, or in native code" in texts[2]
        and "nothing can be known of process 1: the coordinator does not answer" in texts[2]
    )


def two_jobs():
    """Two jobs at one address: a process of the other job is refused, and sums never mix."""
    is_right = True
    for launcher in ("$MPIRUN --bind-to none -n 2", "mpiexec.hydra -n 2"):
        script = f"""
        export JAX_COORDINATOR_ADDRESS=127.0.0.1:29518
        {launcher} $PY sums.py 1 6 > first 2>&1 & sleep 2
        {launcher} $PY sums.py 100 0
        wait $! && cat first
        """
        _, output = run(script, files={"sums.py": SUMS})
        sums = re.findall(r"sum (\d+) of (\d+)", output)
        is_right &= sums == [("2", "1")] * 2 and "refused ValueError" in output
    return is_right


def doctor():
    """`jaxcoll doctor` compares the processes of each launcher, and sees that they are bound."""
    bound = "taskset -c 0 $PY -m jaxcoll doctor"
    _, slurm = on_slurm(f"srun -N2 -n2 {bound}")
    script = f"""
    export JAX_COORDINATOR_ADDRESS=127.0.0.1:29519
    $MPIRUN -n 2 --bind-to core $PY -m jaxcoll doctor; mpiexec.hydra -n 2 {bound}
    export MASTER_ADDR=127.0.0.1 MASTER_PORT=29520 WORLD_SIZE=2
    unset JAX_COORDINATOR_ADDRESS
    RANK=1 {bound} & RANK=0 {bound}; wait
    """
    _, others = run(script)
    found = re.findall(r"processes +(2 on \d host)", slurm + others)
    warned = re.findall(r"cores +may use 1 of", slurm + others)
    return found == ["2 on 2 host", *["2 on 1 host"] * 3] and len(warned) == 4


def mpi_collectives():
    """Calls over JAX's `mpi` collectives are right. Needs MPIwrapper's library in MPITRAMPOLINE_LIB.

    The job then ends with an error of MPI, as in plain JAX, which clears up after MPI has ended.
    """
    script = """
    export JAX_COORDINATOR_ADDRESS=127.0.0.1:29521 JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi
    $MPIRUN --bind-to none --oversubscribe -n 2 $PY sums.py 1 0
    """
    _, output = run(script, files={"sums.py": SUMS})
    return re.findall(r"sum (\d+) of (\d+)", output) == [("2", "1")] * 2


CASES = {case.__name__: case for case in (
    first_ends, task_0_elsewhere, requeue, elastic, hang_on_slurm, hang_ends_on_slurm, hang_on_mpi,
    hang_cut, two_jobs, doctor, mpi_collectives,
)}  # fmt: skip

if __name__ == "__main__":
    if not sys.argv[1:]:
        for name, case in CASES.items():
            print(f"{name}: {case.__doc__.splitlines()[0]}")
    for name in sys.argv[1:]:
        right = CASES[name]()
        print(f"{name}: {'right' if right else 'WRONG'}", flush=True)
        if not right:
            sys.exit(1)
