"""This process's place in its job, from the environment variables of its launcher."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from jaxcoll._cluster.launch.subprocesses import COORDINATOR, PROCESSES, RANK
from jaxcoll._cluster.resolvers import TF_CONFIG, TFConfigClusterResolver, member_of_tasks
from jaxcoll._cluster.specs import HIGHEST_PORT, LAUNCH, Member, hosts_of

JAX_COORDINATOR, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own variables."""

_SLURM = "Slurm"

# Process numbers and counts of MPI launchers that this file does not support (MPICH, Intel MPI,
# Cray, MVAPICH, Flux, jsrun, horovodrun).
_OTHER_RANKS = (
    *("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MV2_COMM_WORLD_RANK"),
    *("FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "HOROVOD_RANK"),
)
_OTHER_SIZES = (
    *("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "HOROVOD_SIZE"),
)

_PORTS = 4096
_STEPS = 61  # distance between the ports of two steps, so that jobs with close numbers differ


def member_of(environment: Mapping[str, str]) -> Member | None:
    """Return this process's place, from the variables of the first launcher that set any.

    The order is `jaxcoll launch`, `TF_CONFIG`, torchrun, Open MPI, Slurm, then any launcher that
    sets torchrun's variables. Slurm comes after torchrun and Open MPI because it may start their
    agents, whose processes inherit its variables. `JAX_COORDINATOR_ADDRESS` overrides the meeting
    place of every launcher but `jaxcoll launch`.

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
    if member is None or member.is_launched:
        return member
    if JAX_COORDINATOR in environment:
        return dataclasses.replace(member, coordinator_address=environment[JAX_COORDINATOR])
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


def _launched(environment: Mapping[str, str]) -> Member | None:
    if RANK not in environment:
        return None
    count, rank = _numbers(environment, (PROCESSES, RANK), LAUNCH)
    return Member(_needed(environment, COORDINATOR, LAUNCH), count, rank, None, LAUNCH)


def _slurm(environment: Mapping[str, str]) -> Member | None:
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= set(environment):
        return None  # no task of `srun`, but perhaps a shell in an allocation
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    # Steps of one job may run at the same time, so each has another port.
    with_step = {"SLURM_STEP_ID": "0", **environment}
    job, step = _numbers(with_step, ("SLURM_JOB_ID", "SLURM_STEP_ID"), _SLURM)
    host = hosts_of(environment["SLURM_STEP_NODELIST"])[0]
    # As in "1(x4)": with one task on each node, the task gets all of the node's accelerators.
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    alone = re.fullmatch(r"1(\(x\d+\))?(,1(\(x\d+\))?)*", per_node) is not None
    address = f"{host}:{_port(job + _STEPS * step)}"
    names = count, "SLURM_PROCID", "SLURM_LOCALID"
    return _process(environment, _SLURM, names, address, alone)


def _open_mpi(environment: Mapping[str, str]) -> Member | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    count, rank, local, here = (
        f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    alone = environment.get(here) == "1"
    address = _open_mpi_address(environment)
    return _process(environment, "Open MPI", (count, rank, local), address, alone)


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
        host = _needed(environment, "MASTER_ADDR", source)
        host = f"[{host}]" if ":" in host else host
        (port,) = _numbers(environment, ("MASTER_PORT",), source)
        # If torchrun's agent itself listens on MASTER_PORT, take the next port.
        port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = f"{host}:{port}"
    alone = environment.get("LOCAL_WORLD_SIZE") == "1"
    names = "WORLD_SIZE", "RANK", "LOCAL_RANK"
    return _process(environment, source, names, address, alone)


_READERS: Sequence[Callable[[Mapping[str, str]], Member | None]] = (
    _launched,
    lambda environment: member_of_tasks(
        TFConfigClusterResolver(environment=environment), TF_CONFIG
    ),
    # torchrun, and later any other launcher with the same variables
    lambda environment: _master(environment) if "TORCHELASTIC_RUN_ID" in environment else None,
    *(_open_mpi, _slurm, _master),
)


def _port(job: int) -> int:
    """Return a port that differs from job to job on one host, chosen as JAX does."""
    return job % _PORTS + HIGHEST_PORT - _PORTS + 1


def _process(
    environment: Mapping[str, str],
    source: str,
    names: tuple[str, str, str],
    address: str | None,
    alone: bool,
) -> Member:
    """Read a process from variables; `names` are those of the count, its rank and its local rank.

    A process that shares its host with others gets one accelerator, as JAX does it.
    """
    count, rank, local = names
    processes, number = _numbers(environment, (count, rank), source)
    ids = None if alone or local not in environment else _numbers(environment, (local,), source)
    return Member(address, processes, number, ids, source)


def _needed(environment: Mapping[str, str], name: str, source: str) -> str:
    if not environment.get(name):
        raise ValueError(f"{source}: the environment variable {name} is missing.")
    return environment[name]


def _numbers(environment: Mapping[str, str], names: Sequence[str], source: str) -> tuple[int, ...]:
    values = {name: _needed(environment, name, source) for name in names}
    for name, value in values.items():
        if not value.isdecimal():
            raise ValueError(f"{source}: {name} must be a whole number; got {value!r}.")
    return tuple(map(int, values.values()))
