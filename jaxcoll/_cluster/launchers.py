"""Which process of which job this is, read off environment variables."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcoll._cluster.slurm import first_host
from jaxcoll._cluster.tf_config import TFConfig

COORDINATOR, PROCESSES, RANK = "JAXCOLL_COORDINATOR", "JAXCOLL_PROCESSES", "JAXCOLL_RANK"
"""What `jaxcoll launch` tells the processes it starts, and a coordinator already runs."""

REJOIN = "JAXCOLL_REJOIN"
"""Set to "1" by `jaxcoll launch` for a process that is started again while the others go on."""

OF_A_LAUNCH = (COORDINATOR, PROCESSES, RANK, REJOIN)
"""What a job that is started inside a job must not inherit."""

JAX_COORDINATOR, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own variables."""

LAUNCH = "jaxcoll launch"
_HIGHEST_PORT, _PORTS = 65535, 4096
_STEPS = 61  # ports between those of a job's steps, which other jobs near it may have


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of a job.

    Attributes:
      coordinator_address: "host:port" where all meet; None: nobody said.
      num_processes: how many there are.
      process_id: this one's number, from 0.
      local_device_ids: the accelerators that are its own; None: all that it sees.
      source: where this came from, for messages.
    """

    coordinator_address: str | None
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    source: str = "the arguments"

    @property
    def is_launched(self) -> bool:
        """Whether a launcher of ours runs the coordinator."""
        return self.source == LAUNCH

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
          ValueError: there is no such process, or the address is none.
        """
        whole = all(type(x) is int for x in (self.num_processes, self.process_id))
        if not whole or not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                "`initialize` expects `process_id` to be one of 0 … num_processes − 1, as ints; "
                f"{self.source} gave process {self.process_id!r} of {self.num_processes!r}."
            )
        if self.coordinator_address is None:
            return
        try:
            _, port = host_and_port(self.coordinator_address)
        except ValueError as error:
            raise ValueError(f"`initialize`: {error} It came from {self.source}.") from None
        if not port:
            raise ValueError(
                "`initialize` needs a port that all processes know: 0, as in "
                f"{self.coordinator_address!r} from {self.source}, stands for any that is free."
            )


def host_and_port(address: Any) -> tuple[str, int]:
    """The two halves of "host:port".

    Raises:
      ValueError: it is something else.

    Examples:
      >>> host_and_port("node1:1234"), host_and_port("[::1]:1234")
      (('node1', 1234), ('::1', 1234))
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bare = host.removeprefix("[").removesuffix("]")
    closed = host == bare if ":" not in bare else host == f"[{bare}]"
    if not (colon and bare and closed and port.isdecimal() and int(port) <= _HIGHEST_PORT):
        raise ValueError(
            "an address is expected as 'host:port', or '[host]:port' of an IPv6 host, with a port "
            f"of at most {_HIGHEST_PORT}; got {address!r}."
        )
    return bare, int(port)


def is_loopback(address: str) -> bool:
    """Whether an address is one of this host's own, by its spelling alone."""
    host, _ = host_and_port(address)
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def member_of(environment: Mapping[str, str]) -> Member | None:
    """Which process this is, as the first launcher tells that left its variables.

    In this order: `jaxcoll launch`, `TF_CONFIG`, torchrun, Open MPI and other launchers of MPI,
    Slurm, and those that write torchrun's variables. What Slurm starts may be torchrun's agents or
    daemons of MPI, whose processes inherit its variables, so it comes after these. Where
    `JAX_COORDINATOR_ADDRESS` is set, it is where they meet, whoever started them (but for `jaxcoll
    launch`). A launcher of MPI does not say where; what comes after it may, for the same process.

    Returns:
      The process; None: there is no launcher's mark, it has started one process alone, or the task
      takes no part (an evaluator).

    Raises:
      ValueError: a launcher's variables contradict themselves or one is missing.
    """
    found = next((found for read in _READERS if (found := read(environment))), None)
    if found is None:
        return _check_not_one_of_many(environment)
    if found.is_launched:
        return found
    if JAX_COORDINATOR in environment:
        return dataclasses.replace(found, coordinator_address=environment[JAX_COORDINATOR])
    if found.coordinator_address is not None:
        return found
    others = [other for read in (_slurm, _master) if (other := read(environment))]
    numbers = (found.num_processes, found.process_id)
    same = [other for other in others if (other.num_processes, other.process_id) == numbers]
    return same[0] if same else found if found.num_processes > 1 else None


def _launched(environment: Mapping[str, str]) -> Member | None:
    if RANK not in environment:
        return None
    count, rank = _numbers(environment, (PROCESSES, RANK), LAUNCH)
    return Member(_needed(environment, COORDINATOR, LAUNCH), count, rank, None, LAUNCH)


def _tf_config(environment: Mapping[str, str]) -> Member | None:
    return member_of_tasks(TFConfig.of(environment))


def member_of_tasks(config: TFConfig) -> Member | None:
    """The process that a task of a cluster is: the chief first, then the workers in their order.

    Args:
      config: whose `cluster` maps jobs to addresses.

    Returns:
      The process; None: there is no cluster, or an evaluator's task, which takes no part.

    Raises:
      ValueError: the cluster is for others, the task is none of it, or not said.
    """
    addresses = [a for job in ("chief", "worker") for a in config.cluster.get(job, ())]
    if not config.cluster or config.task_type == "evaluator":
        return None
    config.check()
    chiefs = len(config.cluster.get("chief", ()))
    assert config.task_id is not None
    rank = config.task_id + (0 if config.task_type == "chief" else chiefs)
    return Member(addresses[0], len(addresses), rank, None, config.source)


def _slurm(environment: Mapping[str, str]) -> Member | None:
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= set(environment):
        return None  # a shell of an allocation, or no task of `srun`
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    names = (count, "SLURM_PROCID", "SLURM_JOB_ID")
    processes, rank, job = _numbers(environment, names, "Slurm")
    # Steps of one job may run side by side.
    (step,) = _numbers({"SLURM_STEP_ID": "0", **environment}, ("SLURM_STEP_ID",), "Slurm")
    host = first_host(environment["SLURM_STEP_NODELIST"])
    several = re.fullmatch(
        r"1(\(x\d+\))?(,1(\(x\d+\))?)*", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    )
    own = None if several else _local(environment, "SLURM_LOCALID", "Slurm")
    return Member(f"{host}:{_port(job + _STEPS * step)}", processes, rank, own, "Slurm")


def _open_mpi(environment: Mapping[str, str]) -> Member | None:
    source = "Open MPI"
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    processes, rank = _numbers(
        environment, ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), source
    )
    alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    own = None if alone else _local(environment, "OMPI_COMM_WORLD_LOCAL_RANK", source)
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, of the process that started the others; from
    # Open MPI 5 on there is nothing like it.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    parts = re.match(r"(\d+)\.\d+;tcp6?://(?:\[([^,\]]+)|([^,:\]]+))", uri)
    if not parts:
        return Member(None, processes, rank, own, source)
    host = f"[{parts[2]}]" if parts[2] else parts[3]
    return Member(f"{host}:{_port(int(parts[1]) // 4096)}", processes, rank, own, source)


# The variable by which a launcher is known, and those of the number of processes, of this one's
# number, and of both on its host. None of them says where the processes could meet.
_OF_MPI = {
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    "Cray PALS": ("PALS_RANKID", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_SIZE", "PMI_LOCAL_RANK"),
    "Flux": (
        "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_RANK",
        "FLUX_TASK_LOCAL_SIZE", "FLUX_TASK_LOCAL_ID",
    ),
    "jsrun": (
        "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
    ),
    "MPICH or Intel MPI": (
        "PMI_RANK", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
    ),
    "horovodrun": (
        "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_LOCAL_RANK",
    ),
}  # fmt: skip


def _mpi(environment: Mapping[str, str]) -> Member | None:
    for source, (mark, size, rank, local_size, local_rank) in _OF_MPI.items():
        if mark not in environment:
            continue
        if source == "Cray PALS" and "PMI_SIZE" not in environment:
            continue
        processes, number = _numbers(environment, (size, rank), source)
        alone = environment.get(local_size) == "1" or (
            source == "Flux" and environment.get("FLUX_JOB_NNODES") == environment[size]
        )
        own = None if alone else _local(environment, local_rank, source)
        return Member(None, processes, number, own, source)
    return None


def _check_not_one_of_many(environment: Mapping[str, str]) -> None:
    """Refuse to be alone where a launcher counts its processes, and does not say how many.

    Raises:
      ValueError: this is not the first of them.
    """
    for source, rank in (("PMIx", "PMIX_RANK"), ("ALPS", "ALPS_APP_PE"), ("PALS", "PALS_RANKID")):
        if environment.get(rank, "0").isdecimal() and int(environment.get(rank, "0")) > 0:
            raise ValueError(
                f"`initialize`: {source} started this as process {environment[rank]} ({rank}) of a "
                "job, and does not say of how many. Give `coordinator_address`, `num_processes` "
                "and `process_id`."
            )


def _torchrun(environment: Mapping[str, str]) -> Member | None:
    return _master(environment) if "TORCHELASTIC_RUN_ID" in environment else None


def _master(environment: Mapping[str, str]) -> Member | None:
    source = "MASTER_ADDR, RANK and WORLD_SIZE"
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return None
    processes, rank = _numbers(environment, ("WORLD_SIZE", "RANK"), source)
    host = _needed(environment, "MASTER_ADDR", source)
    (port,) = _numbers(environment, ("MASTER_PORT",), source)
    # Where torchrun's agent listens at MASTER_PORT itself, the next one is taken.
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    alone = environment.get("LOCAL_WORLD_SIZE") == "1"
    own = None if alone else _local(environment, "LOCAL_RANK", source)
    host = f"[{host}]" if ":" in host else host
    return Member(f"{host}:{port}", processes, rank, own, source)


_READERS: Sequence[Callable[[Mapping[str, str]], Member | None]] = (
    *(_launched, _tf_config),
    *(_torchrun, _open_mpi, _mpi, _slurm),
    _master,
)


def _port(job: int) -> int:
    """A port that differs from job to job on one host, as JAX chooses it."""
    return job % _PORTS + _HIGHEST_PORT - _PORTS + 1


def _local(environment: Mapping[str, str], name: str, source: str) -> tuple[int, ...] | None:
    """The one accelerator of a process that shares its host with others, as JAX gives it."""
    return _numbers(environment, (name,), source) if name in environment else None


def _needed(environment: Mapping[str, str], name: str, source: str) -> str:
    if not environment.get(name):
        raise ValueError(f"{source}: the environment variable {name} is missing.")
    return environment[name]


def _numbers(environment: Mapping[str, str], names: Sequence[str], source: str) -> tuple[int, ...]:
    said = {name: _needed(environment, name, source) for name in names}
    for name, value in said.items():
        if not value.isdecimal():
            raise ValueError(f"{source}: {name} must be a whole number; got {value!r}.")
    return tuple(int(value) for value in said.values())


def checked_seconds(name: str, value: Any) -> float:
    """A time limit that can be waited for.

    Raises:
      ValueError: it is no positive, finite number of seconds.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(
            f"`initialize` expects `{name}` to be a finite number of seconds above 0: processes "
            f"that do not come are not waited for without end; got {value!r}."
        )
    return float(value)
