"""This process's place in its job, from the environment variables of its launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxcoll._job.launch.subprocesses import COORDINATOR, PROCESSES, RANK
from jaxcoll._job.resolvers import TF_CONFIG, TFConfigClusterResolver, member_in_cluster
from jaxcoll._job.specs import HIGHEST_PORT, Member, parse_counts, parse_hosts, slurm_step

JAX_COORDINATOR, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own variables."""

_SLURM, _MASTER = "Slurm", "MASTER_ADDR, RANK and WORLD_SIZE"

# Process numbers and counts of MPI launchers that this file does not support (Cray, MVAPICH, Flux,
# jsrun, horovodrun), or of a part of those that it does.
_OTHER_RANKS = (
    *("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MV2_COMM_WORLD_RANK"),
    *("FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "HOROVOD_RANK"),
)
_OTHER_SIZES = (
    *("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "HOROVOD_SIZE"),
)

_VISIBLE = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"

_PORTS = 4096
_STEPS = 61  # distance between the ports of two steps, so that jobs with close numbers differ

Environment = Mapping[str, str]


def read_member(environment: Environment) -> Member | None:
    """Read this process's place from the variables of the first launcher that set any.

    `JAX_COORDINATOR_ADDRESS` overrides the meeting place of every launcher, and
    `JAXCOLL_COORDINATOR` overrides both.

    Returns:
      The process. None: no launcher set its variables, it started only one process, or the task
      takes no part (an evaluator).

    Raises:
      ValueError: variables are missing or invalid, or another MPI launcher numbered this process,
        so the caller must pass the numbers.
    """
    member = next((place for read in _READERS if (place := read(environment))), None)
    if member is None or member.source == _SLURM:
        _check_numbers(environment, member)
    if member is None:
        return None
    if address := environment.get(COORDINATOR) or environment.get(JAX_COORDINATOR):
        return dataclasses.replace(member, coordinator_address=address, elsewhere=())
    return member if member.coordinator_address or member.num_processes > 1 else None


def _check_numbers(environment: Environment, member: Member | None) -> None:
    """Refuse a place that contradicts the variables of an MPI launcher that is not supported."""
    rank, size = (member.process_id, member.num_processes) if member else (0, 1)
    expected = dict.fromkeys(_OTHER_RANKS, rank) | dict.fromkeys(_OTHER_SIZES, size)
    for name, number in expected.items():
        if environment.get(name, "").isdecimal() and int(environment[name]) != number:
            raise ValueError(
                f"`initialize`: {name}={environment[name]} says that this process is one of "
                "several, but comes from a launcher that jaxcoll does not support. Pass "
                "`coordinator_address`, `num_processes` and `process_id`."
            )


class _Launcher(NamedTuple):
    """The variables that a launcher sets for each process."""

    name: str
    size: str  # the number of processes
    rank: str
    needs: tuple[str, ...]  # without one of these, another launcher started the process
    local: str = ""  # the process's number on its host
    # How many processes are on its host, 0 if that is not known; where process 0 may be; and the
    # name of the job, if the launcher gives it one
    count_here: Callable[[Environment], int] = lambda environment: 0
    addresses: Callable[[Environment], Sequence[str]] = lambda environment: ()
    job: Callable[[Environment], str] = lambda environment: ""

    def read(self, environment: Environment) -> Member | None:
        if not set(self.needs) <= set(environment):
            return None
        count, rank = _numbers(environment, (self.size, self.rank), self.name)
        address, *elsewhere = self.addresses(environment) or (None,)
        here, ids = self.count_here(environment), None
        if here != 1 and self.local in environment:
            (local,) = _numbers(environment, (self.local,), self.name)
            ids = _share_gpus(environment, local, here)
        job = self.job(environment)
        return Member(address, count, rank, ids, self.name, job, tuple(filter(None, elsewhere)))


def _read_tf_config(environment: Environment) -> Member | None:
    return member_in_cluster(TFConfigClusterResolver(environment=environment), TF_CONFIG)


def _slurm_addresses(environment: Environment) -> Sequence[str]:
    hosts, own = parse_hosts(environment["SLURM_STEP_NODELIST"]), environment.get("SLURMD_NODENAME")
    # Slurm sorts the list of hosts, and does not say where task 0 is if hosts were given task by
    # task, or in several parts: only task 0 itself knows.
    if environment["SLURM_PROCID"] == "0" and own in hosts:
        hosts = [own]
    elif not (
        "SLURM_HET_SIZE" in environment or environment.get("SLURM_DISTRIBUTION") == "arbitrary"
    ):
        hosts = hosts[:1]
    # Steps of one job may run at the same time, so each has another port.
    with_step = {"SLURM_STEP_ID": "0", **environment}
    job, step = _numbers(with_step, ("SLURM_JOB_ID", "SLURM_STEP_ID"), _SLURM)
    return [f"{host}:{_port(job + _STEPS * step)}" for host in hosts]


def _count_slurm_tasks(environment: Environment) -> int:
    hosts, own = parse_hosts(environment["SLURM_STEP_NODELIST"]), environment.get("SLURMD_NODENAME")
    counts = parse_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "0"))
    if own in hosts and len(counts) == len(hosts):
        return counts[hosts.index(own)]
    return counts[0] if len(set(counts)) == 1 else 0


def _open_mpi_address(environment: Environment) -> Sequence[str]:
    # Such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, the address of the process that started
    # the others. Open MPI 5 and later have nothing like it.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    parts = re.match(r"(\d+)\.\d+;tcp6?://(?:\[([^,\]]+)|([^,:\]]+))", uri)
    if not parts:
        return ()
    host = f"[{parts[2]}]" if parts[2] else parts[3]
    return (f"{host}:{_port(int(parts[1]) // 4096)}",)


def _name_hydra_job(environment: Environment) -> str:
    # MPICH tells its processes no name of the job; their ancestor, which it starts on each host,
    # has been given the address of `mpiexec`.
    process = os.getpid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            if "--control-port" in words:
                return f"mpiexec at {words[words.index('--control-port') + 1]}"
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return ""


def _jax_job_address(environment: Environment) -> Sequence[str]:
    (port,) = _numbers(environment, ("COORDINATOR_PORT",), "JAXJob")
    return (f"{environment['COORDINATOR_ADDRESS']}:{port}",)


def _master_address(environment: Environment) -> Sequence[str]:
    if JAX_COORDINATOR in environment:
        return ()  # it overrides this one, which need not be there
    host = _require(environment, "MASTER_ADDR", _MASTER)
    host = f"[{host}]" if ":" in host else host
    (port,) = _numbers(environment, ("MASTER_PORT",), _MASTER)
    # If torchrun's agent itself listens on MASTER_PORT, take the next port.
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return (f"{host}:{port}",)


def _name_torch_run(environment: Environment) -> str:
    run = environment.get("TORCHELASTIC_RUN_ID")
    return f"torchrun {run}" if run else ""


def _integer(name: str) -> Callable[[Environment], int]:
    return lambda environment: int(environment.get(name) or 0)


_TORCH = _Launcher(
    _MASTER, "WORLD_SIZE", "RANK", ("WORLD_SIZE", "RANK"), "LOCAL_RANK",
    _integer("LOCAL_WORLD_SIZE"), _master_address, _name_torch_run,
)  # fmt: skip
_PMI = _Launcher(
    "MPICH's PMI", "PMI_SIZE", "PMI_RANK", ("PMI_SIZE", "PMI_RANK"), "MPI_LOCALRANKID",
    _integer("MPI_LOCALNRANKS"), job=_name_hydra_job,
)  # fmt: skip
_SLURM_STEP = _Launcher(
    _SLURM, "SLURM_NTASKS", "SLURM_PROCID",
    ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"),  # not: a shell in an allocation
    "SLURM_LOCALID", _count_slurm_tasks, _slurm_addresses, slurm_step,
)  # fmt: skip

_READERS: Sequence[Callable[[Environment], Member | None]] = (
    _Launcher("jaxcoll launch", PROCESSES, RANK, (RANK,)).read,
    _read_tf_config,
    _TORCH._replace(needs=(*_TORCH.needs, "TORCHELASTIC_RUN_ID")).read,
    # Kubeflow's Trainer, and its JAXJob
    _Launcher(
        "JAX_PROCESS_ID and JAX_NUM_PROCESSES", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID",
        ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    ).read,
    _Launcher(
        "JAXJob", "NUM_PROCESSES", "PROCESS_ID",
        ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS", "COORDINATOR_PORT"),
        addresses=_jax_job_address,
    ).read,
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_RANK",),
        "OMPI_COMM_WORLD_LOCAL_RANK", _integer("OMPI_COMM_WORLD_LOCAL_SIZE"), _open_mpi_address,
        lambda environment: environment.get("PMIX_NAMESPACE", ""),
    ).read,
    _PMI._replace(needs=(*_PMI.needs, "MPI_LOCALRANKID")).read,
    # A step may have fewer tasks than its job
    _SLURM_STEP._replace(
        size="SLURM_STEP_NUM_TASKS", needs=(*_SLURM_STEP.needs, "SLURM_STEP_NUM_TASKS")
    ).read,
    *(_SLURM_STEP.read, _TORCH.read, _PMI.read),
)  # fmt: skip
"""Later ones may stand in the environment of earlier ones: Slurm starts the agents of others."""


def _port(job: int) -> int:
    """Choose a port that differs from job to job on one host, as JAX does."""
    return job % _PORTS + HIGHEST_PORT - _PORTS + 1


def _share_gpus(environment: Environment, local: int, here: int) -> tuple[int, ...] | None:
    """Share a host's GPUs among its processes; None: this one sees only its own."""
    visible = next((environment[name] for name in _VISIBLE if environment.get(name)), None)
    if visible is None:
        return (local,)  # one for each, as JAX does it
    count = len(visible.split(","))
    if count < max(here, local + 1, int(environment.get("SLURM_GPUS_ON_NODE", "0"))):
        return None
    each = count // here if here else 1
    return tuple(range(local * each, (local + 1) * each))


def _require(environment: Environment, name: str, source: str) -> str:
    if not environment.get(name):
        raise ValueError(f"{source}: the environment variable {name} is missing.")
    return environment[name]


def _numbers(environment: Environment, names: Sequence[str], source: str) -> tuple[int, ...]:
    values = {name: _require(environment, name, source) for name in names}
    for name, value in values.items():
        if not value.isdecimal():
            raise ValueError(f"{source}: {name} must be a whole number; got {value!r}.")
    return tuple(map(int, values.values()))
