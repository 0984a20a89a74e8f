"""The files of docs/examples/cluster: their syntax, and whom the processes take themselves for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.teams import free_port
from jaxcoll._job.launchers import read_member

FILES = Path(__file__).parents[2] / "docs/examples/cluster"
SCRIPTS = [path for path in sorted(FILES.iterdir()) if path.suffix in (".sh", ".sbatch")]
# A program in place of a cluster's own: it shows how it was called, and the variables that matter.
STUB = """#!/bin/sh
echo "$(basename "$0") $*"
env | grep -E '^(JAX|MASTER|RANK|WORLD)' || true
"""


@pytest.fixture
def stubs(tmp_path):
    """Run a script of the folder where these commands only show how they were called."""

    def run(script, *names, **variables):
        for name in names:
            (tmp_path / name).write_text(STUB)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", FILES / script, "my-tpu", "us-east5-a"],
            env={"PATH": path, **variables}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def read_place(environment):
    member = read_member(environment)
    member.check()
    own = member.local_device_ids
    return member.coordinator_address, member.num_processes, member.process_id, own


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0
    assert script.read_text().startswith("#!/bin/bash\n")


def test_batch_script_has_gpu_tasks(stubs):
    text = (FILES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    out = stubs("slurm.sbatch", "srun")
    assert "srun --label python train.py" in out
    assert "JAX_ENABLE_PREEMPTION_SERVICE=false" in out
    for rank in (0, tasks, nodes * tasks - 1):
        environment = {  # what srun gives such a task
            "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[01-02]",
            "SLURM_NTASKS": str(nodes * tasks), "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % tasks), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        }  # fmt: skip
        own = (rank % tasks,)
        assert read_place(environment) == ("gpu01:61517", nodes * tasks, rank, own)


def test_mpirun_script_sets_address(stubs):
    out = stubs("mpirun.sh", "mpirun", FIRST_HOST="node1")
    mpirun = "mpirun --bind-to none --hostfile hosts -n 16 -x JAX_COORDINATOR_ADDRESS"
    assert f"{mpirun} python train.py" in out
    environment = {
        "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "JAX_COORDINATOR_ADDRESS": re.search(r"^JAX_COORDINATOR_ADDRESS=(.*)$", out, re.M)[1],
    }  # fmt: skip
    assert read_place(environment) == ("node1:29500", 16, 9, (1,))


@pytest.mark.parametrize("file", ["indexed_job.yaml", "jobset.yaml"])
def test_pods_find_each_other(file):
    yaml = pytest.importorskip("yaml")
    documents = {d["kind"]: d for d in yaml.safe_load_all((FILES / file).read_text())}
    if "JobSet" in documents:
        jobset = documents["JobSet"]
        (group,) = jobset["spec"]["replicatedJobs"]
        assert (group["replicas"], jobset["spec"]["network"]["enableDNSHostnames"]) == (1, True)
        job = group["template"]["spec"]
        # JobSet's names of pods, and of the service that it makes.
        name = jobset["metadata"]["name"]
        first = f"{name}-{group['name']}-0-0.{name}"
    else:
        service, job = documents["Service"], documents["Job"]["spec"]
        name = documents["Job"]["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": name}
        assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        first = f"{name}-0.{service['metadata']['name']}"
    assert (job["completionMode"], job["completions"]) == ("Indexed", job["parallelism"])
    assert job["backoffLimit"] == 0
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][-1].endswith("exec python train.py")
    for rank in range(job["completions"]):
        environment = {e["name"]: e.get("value", str(rank)) for e in container["env"]}
        assert read_place(environment) == (f"{first}:29500", job["completions"], rank, None)
    (index,) = [e for e in container["env"] if "valueFrom" in e]
    at = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index == {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": at}}}


def test_every_tpu_worker_starts(stubs):
    out = stubs("cloud_tpu.sh", "gcloud").splitlines()
    assert [line.split()[4] for line in out] == ["scp", "ssh"]
    assert all("--worker=all --zone=us-east5-a" in line for line in out)
    assert out[1].endswith("--command=python3 train.py")


def test_image_copies_existing_files():
    text = (FILES / "Dockerfile").read_text()
    assert re.findall(r"^COPY (\S+) ", text, re.M) == [".", "docs/examples/cluster/train.py"]
    assert (FILES / "train.py").exists()


@pytest.mark.processes
def test_ssh_script_trains(tmp_path):
    for name, text in (("ssh", 'shift\nexec "$@"'), ("python", f'exec "{sys.executable}" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")  # it stays on this host
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", FILES / "by_hand.sh"], cwd=FILES, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PORT": str(free_port()),
             "HOSTS": "127.0.0.1 127.0.0.1", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^2 processes, 4 devices, loss \d\.\de-\d+$", done.stdout, re.M), done.stdout
