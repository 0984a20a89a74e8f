"""This process's place in its job, by the environment variables of its launcher."""

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

# Set by launchers of MPI that are not read here (MPICH, Intel MPI, Cray, MVAPICH, Flux, jsrun,
# horovodrun): this process's number, and how many there are.
_OTHER_RANKS = (
    *("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MV2_COMM_WORLD_RANK"),
    *("FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "HOROVOD_RANK"),
)
_OTHER_SIZES = (
    *("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "HOROVOD_SIZE"),
)

_PORTS = 4096
_STEPS = 61  # ports between those of a job's steps, which other jobs near it may have


def member_of(environment: Mapping[str, str]) -> Member | None:
    """Return which process this is, by the variables of the first launcher that left any.

    In this order: `jaxcoll launch`, `TF_CONFIG`, torchrun, Open MPI, Slurm, and whoever writes
    torchrun's variables. What Slurm starts may be torchrun's agents or daemons of MPI, whose
    processes inherit its variables, so it comes after these. Where `JAX_COORDINATOR_ADDRESS` is
    set, it is where they meet, whoever started them (but for `jaxcoll launch`).

    Returns:
      The process; None: there is no launcher's mark, it has started one process alone, or the task
      takes no part (an evaluator).

    Raises:
      ValueError: variables are missing or impossible, or another launcher of MPI numbered this
        process, whose numbers are to be given by hand.
    """
    found = next((member for read in _READERS if (member := read(environment))), None)
    if found is None or found.source == _SLURM:
        _check_numbers(environment, found)
    if found is None or found.is_launched:
        return found
    if JAX_COORDINATOR in environment:
        return dataclasses.replace(found, coordinator_address=environment[JAX_COORDINATOR])
    return found if found.coordinator_address or found.num_processes > 1 else None


def _check_numbers(environment: Mapping[str, str], found: Member | None) -> None:
    """Refuse to be alone, or another process, where a launcher that is not read has a number."""
    rank, size = (found.process_id, found.num_processes) if found else (0, 1)
    expected = dict.fromkeys(_OTHER_RANKS, rank) | dict.fromkeys(_OTHER_SIZES, size)
    for name, number in expected.items():
        if environment.get(name, "").isdecimal() and int(environment[name]) != number:
            raise ValueError(
                f"`initialize`: {name}={environment[name]} comes from a launcher that is not read "
                "here, and says that this process is one of several. Give `coordinator_address`, "
                "`num_processes` and `process_id`."
            )


def _launched(environment: Mapping[str, str]) -> Member | None:
    if RANK not in environment:
        return None
    count, rank = _numbers(environment, (PROCESSES, RANK), LAUNCH)
    return Member(_needed(environment, COORDINATOR, LAUNCH), count, rank, None, LAUNCH)


def _slurm(environment: Mapping[str, str]) -> Member | None:
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= set(environment):
        return None  # a shell of an allocation, or no task of `srun`
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    # Steps of one job may run side by side, so each has a port of its own.
    with_step = {"SLURM_STEP_ID": "0", **environment}
    job, step = _numbers(with_step, ("SLURM_JOB_ID", "SLURM_STEP_ID"), _SLURM)
    host = hosts_of(environment["SLURM_STEP_NODELIST"])[0]
    # As in "1(x4)": one task on each node, which then has all of its accelerators.
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
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, of the process that started the others; from
    # Open MPI 5 on there is nothing like it.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    parts = re.match(r"(\d+)\.\d+;tcp6?://(?:\[([^,\]]+)|([^,:\]]+))", uri)
    if not parts:
        return None
    host = f"[{parts[2]}]" if parts[2] else parts[3]
    return f"{host}:{_port(int(parts[1]) // 4096)}"


def _torchrun(environment: Mapping[str, str]) -> Member | None:
    return _master(environment) if "TORCHELASTIC_RUN_ID" in environment else None


def _master(environment: Mapping[str, str]) -> Member | None:
    source = "MASTER_ADDR, RANK and WORLD_SIZE"
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return None
    host = _needed(environment, "MASTER_ADDR", source)
    host = f"[{host}]" if ":" in host else host
    (port,) = _numbers(environment, ("MASTER_PORT",), source)
    # Where torchrun's agent listens at MASTER_PORT itself, the next one is taken.
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    alone = environment.get("LOCAL_WORLD_SIZE") == "1"
    names = "WORLD_SIZE", "RANK", "LOCAL_RANK"
    return _process(environment, source, names, f"{host}:{port}", alone)


_READERS: Sequence[Callable[[Mapping[str, str]], Member | None]] = (
    _launched,
    lambda environment: member_of_tasks(
        TFConfigClusterResolver(environment=environment), TF_CONFIG
    ),
    *(_torchrun, _open_mpi, _slurm, _master),
)


def _port(job: int) -> int:
    """A port that differs from job to job on one host, as JAX chooses it."""
    return job % _PORTS + HIGHEST_PORT - _PORTS + 1


def _process(
    environment: Mapping[str, str],
    source: str,
    names: tuple[str, str, str],
    address: str | None,
    alone: bool,
) -> Member:
    """The process that variables name: of the number of processes, of its own, and on its host.

    A process that shares its host with others has one accelerator of its own, as JAX gives it.
    """
    count, rank, local = names
    processes, number = _numbers(environment, (count, rank), source)
    own = None if alone or local not in environment else _numbers(environment, (local,), source)
    return Member(address, processes, number, own, source)


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
