"""This process's place in its job, from the environment variables of its launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxcoll._job.launch.subprocesses import COORDINATOR, PROCESSES, RANK
from jaxcoll._job.resolvers import TF_CONFIG, TFConfigClusterResolver, member_in_cluster
from jaxcoll._job.specs import HIGHEST_PORT, Member, parse_counts, parse_hosts, slurm_step

JAX_COORDINATOR, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own variables."""

_SLURM = "Slurm"

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


def read_member(environment: Mapping[str, str]) -> Member | None:
    """Read this process's place from the variables of the first launcher that set any.

    Slurm comes after torchrun, Open MPI and MPICH because it may start their agents, whose
    processes inherit its variables. `JAX_COORDINATOR_ADDRESS` overrides the meeting place of every
    launcher, and `JAXCOLL_COORDINATOR` overrides both.

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


def _check_numbers(environment: Mapping[str, str], member: Member | None) -> None:
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


def _jaxcoll_launch(environment: Mapping[str, str]) -> Member | None:
    if RANK not in environment:
        return None
    source = "jaxcoll launch"
    count, rank = _numbers(environment, (PROCESSES, RANK), source)
    return Member(_require(environment, COORDINATOR, source), count, rank, None, source)


def _slurm(environment: Mapping[str, str]) -> Member | None:
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= set(environment):
        return None  # no task of `srun`, but perhaps a shell in an allocation
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    # Steps of one job may run at the same time, so each has another port.
    with_step = {"SLURM_STEP_ID": "0", **environment}
    job, step = _numbers(with_step, ("SLURM_JOB_ID", "SLURM_STEP_ID"), _SLURM)
    hosts, own = parse_hosts(environment["SLURM_STEP_NODELIST"]), environment.get("SLURMD_NODENAME")
    counts = parse_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "0"))
    here = counts[0] if len(set(counts)) == 1 else 0
    if own in hosts and len(counts) == len(hosts):
        here = counts[hosts.index(own)]
    # Slurm sorts the list of hosts, and does not say where task 0 is if hosts were given task by
    # task, or in several parts: only task 0 itself knows.
    if environment["SLURM_PROCID"] == "0" and own in hosts:
        hosts = [own]
    elif not (
        "SLURM_HET_SIZE" in environment or environment.get("SLURM_DISTRIBUTION") == "arbitrary"
    ):
        hosts = hosts[:1]
    address, *others = (f"{host}:{_port(job + _STEPS * step)}" for host in hosts)
    names = count, "SLURM_PROCID", "SLURM_LOCALID"
    member = _process(environment, _SLURM, names, address, here, slurm_step(environment))
    return dataclasses.replace(member, elsewhere=tuple(others))


def _open_mpi(environment: Mapping[str, str]) -> Member | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    count, rank, local, here = (
        f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    address, job = _open_mpi_address(environment), environment.get("PMIX_NAMESPACE", "")
    on_host = int(environment.get(here, "0"))
    return _process(environment, "Open MPI", (count, rank, local), address, on_host, job)


def _pmi(environment: Mapping[str, str]) -> Member | None:
    if not {"PMI_RANK", "PMI_SIZE"} <= set(environment):
        return None
    names, on_host = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"), environment.get("MPI_LOCALNRANKS")
    return _process(environment, "MPICH's PMI", names, None, int(on_host or 0), _hydra_job())


def _hydra_job() -> str:
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


def _jax_variables(environment: Mapping[str, str]) -> Member | None:
    """Read the variables of Kubeflow: its Trainer's, or those of its JAXJob."""
    if {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"} <= set(environment):
        names = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", ""
        return _process(environment, "JAX_PROCESS_ID and JAX_NUM_PROCESSES", names, None, 0)
    needed = "NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS", "COORDINATOR_PORT"
    if not set(needed) <= set(environment):
        return None
    host, (port,) = environment[needed[2]], _numbers(environment, needed[3:], "JAXJob")
    return _process(environment, "JAXJob", (*needed[:2], ""), f"{host}:{port}", 0)


def _open_mpi_address(environment: Mapping[str, str]) -> str | None:
    # Such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, the address of the process that started
    # the others. Open MPI 5 and later have nothing like it.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    parts = re.match(r"(\d+)\.\d+;tcp6?://(?:\[([^,\]]+)|([^,:\]]+))", uri)
    if not parts:
        return None
    host = f"[{parts[2]}]" if parts[2] else parts[3]
    return f"{host}:{_port(int(parts[1]) // 4096)}"


def _master(environment: Mapping[str, str]) -> Member | None:
    source = "MASTER_ADDR, RANK and WORLD_SIZE"
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return None
    address = environment.get(JAX_COORDINATOR)
    if address is None:
        host = _require(environment, "MASTER_ADDR", source)
        host = f"[{host}]" if ":" in host else host
        (port,) = _numbers(environment, ("MASTER_PORT",), source)
        # If torchrun's agent itself listens on MASTER_PORT, take the next port.
        port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = f"{host}:{port}"
    here = int(environment.get("LOCAL_WORLD_SIZE", "0"))
    names, run = ("WORLD_SIZE", "RANK", "LOCAL_RANK"), environment.get("TORCHELASTIC_RUN_ID")
    return _process(environment, source, names, address, here, f"torchrun {run}" if run else "")


_READERS: Sequence[Callable[[Mapping[str, str]], Member | None]] = (
    _jaxcoll_launch,
    lambda environment: member_in_cluster(
        TFConfigClusterResolver(environment=environment), TF_CONFIG
    ),
    # torchrun, and later any other launcher with the same variables
    lambda environment: _master(environment) if "TORCHELASTIC_RUN_ID" in environment else None,
    *(_jax_variables, _open_mpi),
    lambda environment: _pmi(environment) if "MPI_LOCALRANKID" in environment else None,
    *(_slurm, _master, _pmi),
)


def _port(job: int) -> int:
    """Choose a port that differs from job to job on one host, as JAX does."""
    return job % _PORTS + HIGHEST_PORT - _PORTS + 1


def _process(
    environment: Mapping[str, str],
    source: str,
    names: tuple[str, str, str],
    address: str | None,
    here: int,
    job: str = "",
) -> Member:
    """Read a process from variables; `names` are those of the count, its rank and its local rank.

    `here` is the number of processes on its host, 0 if that is not known.
    """
    count, rank, local = names
    processes, number = _numbers(environment, (count, rank), source)
    ids = None
    if here != 1 and local in environment:
        ids = _share(environment, _numbers(environment, (local,), source)[0], here)
    return Member(address, processes, number, ids, source, job)


def _share(environment: Mapping[str, str], local: int, here: int) -> tuple[int, ...] | None:
    """Share a host's GPUs among its processes; None: this one sees only its own."""
    visible = next((environment[name] for name in _VISIBLE if environment.get(name)), None)
    if visible is None:
        return (local,)  # one for each, as JAX does it
    count = len(visible.split(","))
    if count < max(here, local + 1, int(environment.get("SLURM_GPUS_ON_NODE", "0"))):
        return None
    each = count // here if here else 1
    return tuple(range(local * each, (local + 1) * each))


def _require(environment: Mapping[str, str], name: str, source: str) -> str:
    if not environment.get(name):
        raise ValueError(f"{source}: the environment variable {name} is missing.")
    return environment[name]


def _numbers(environment: Mapping[str, str], names: Sequence[str], source: str) -> tuple[int, ...]:
    values = {name: _require(environment, name, source) for name in names}
    for name, value in values.items():
        if not value.isdecimal():
            raise ValueError(f"{source}: {name} must be a whole number; got {value!r}.")
    return tuple(map(int, values.values()))
