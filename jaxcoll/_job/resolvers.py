"""Cluster resolvers, with TensorFlow's names: the tasks of a cluster, and this process's task."""

from __future__ import annotations

import abc
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from jaxcoll._job.specs import Member, parse_counts, parse_hosts, slurm_step
from jaxcoll._plan.checks import is_integer

TF_CONFIG = "TF_CONFIG"
_JOBS = ("chief", "worker", "ps", "evaluator")


class ClusterResolver(abc.ABC):
    """The tasks of a cluster, which `jc.initialize(cluster_resolver=...)` joins as processes.

    Subclasses define `cluster_spec`, and set `task_type` and `task_id` to this process's task.
    """

    task_type: str | None = None
    """The job of this process: "chief", "worker" or "evaluator"."""

    task_id: int | None = None
    """The number of this process in that job, from 0."""

    rpc_layer: str | None = None
    """Prefix that `master` puts before an address, as in "grpc://host:port"."""

    @abc.abstractmethod
    def cluster_spec(self) -> Mapping[str, tuple[str, ...]]:
        """Return the addresses of each job's tasks, "host:port", in the order of their numbers."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task.

        Args:
          task_type: its job. None: this process's.
          task_id: its number. None: this process's.
          rpc_layer: prefix of the address. None: the resolver's.

        Returns:
          An address such as "grpc://host:port"; "" if there is no cluster, or only one task.

        Raises:
          ValueError: there is no such task.
        """
        spec = self.cluster_spec()
        kind = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if sum(map(len, spec.values())) < 2:
            return ""
        tasks = spec.get(kind or "", ())
        if index is None or not 0 <= index < len(tasks):
            raise ValueError(
                f"`master`: there is no task {index} of job {kind!r}; the cluster has "
                f"{ {job: len(addresses) for job, addresses in spec.items()} } tasks."
            )
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{tasks[index]}" if layer else tasks[index]

    def num_accelerators(self) -> dict[str, int]:
        """Count this process's accelerators by kind, as in {"GPU": 8}; {} if it has only CPUs.

        This makes JAX look for devices, so call it after `jc.initialize`.
        """
        names = {"cuda": "GPU", "rocm": "GPU"}
        platforms = [str(d.platform) for d in jax.local_devices() if d.platform != "cpu"]
        kinds = [names.get(platform, platform.upper()) for platform in platforms]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def member(self) -> Member | None:
        """Return this task's place among the processes: the chief first, then the workers.

        Raises:
          ValueError: the cluster has no such task, or two chiefs, or other jobs.
        """
        return member_in_cluster(self, type(self).__name__)


class TFConfigClusterResolver(ClusterResolver):
    """A cluster described by the environment variable `TF_CONFIG`.

    Args:
      task_type: overrides the variable's.
      task_id: overrides the variable's.
      rpc_layer: overrides the variable's.
      environment: replaces `os.environ`.

    Raises:
      ValueError: the variable is not JSON, or lacks a required field.

    Examples:
      >>> import json
      >>> resolver = TFConfigClusterResolver(environment={"TF_CONFIG": json.dumps({
      ...     "cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
      ...     "task": {"type": "worker", "index": 1}})})
      >>> resolver.task_type, resolver.task_id, resolver.master()
      ('worker', 1, 'c:2222')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        text = (os.environ if environment is None else environment).get(TF_CONFIG, "")
        try:
            data = _mapping(json.loads(text) if text.strip() else {}, "its value")
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{TF_CONFIG} is not JSON ({error}); it begins with {text[:40]!r}."
            ) from None
        task = _mapping(data.get("task", {}), "'task'")
        if "cluster" not in data and task:
            raise ValueError(
                f"{TF_CONFIG} has a 'task' but no 'cluster', which maps jobs to addresses, as in "
                '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", '
                '"index": 0}}.'
            )
        cluster = _mapping(data.get("cluster", {}), "'cluster'")
        self._cluster = {str(job): _addresses(job, tasks) for job, tasks in cluster.items()}
        kind = task.get("type") if task_type is None else task_type
        index = task.get("index") if task_id is None else task_id
        source = TF_CONFIG if task_id is None else "`task_id`"
        self.task_type = None if kind is None else str(kind)
        self.task_id = None if index is None else _index(index, source)
        self.rpc_layer = rpc_layer or data.get("rpc_layer")

    def cluster_spec(self) -> Mapping[str, tuple[str, ...]]:
        """Return the addresses of each job's tasks; {} if the variable is not set."""
        return dict(self._cluster)


class SlurmClusterResolver(ClusterResolver):
    """A cluster of the tasks of this Slurm step, ordered by host.

    Args:
      jobs: number of tasks of each job, in the order of the tasks. None: all are workers.
      port_base: port of a host's first task; each further task has the next port.
      tasks_per_node: number of tasks on each host. None: as Slurm says.
      rpc_layer: prefix that `master` puts before an address.
      environment: replaces `os.environ`.

    Raises:
      ValueError: this is not a task of a step (`srun`), or `jobs` has another number of tasks.

    Examples:
      >>> resolver = SlurmClusterResolver({"chief": 1, "worker": 3}, environment={
      ...     "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
      ...     "SLURM_PROCID": "3"})
      >>> resolver.cluster_spec()
      {'chief': ('n1:8888',), 'worker': ('n1:8889', 'n2:8888', 'n2:8889')}
      >>> resolver.task_type, resolver.task_id
      ('worker', 2)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        tasks_per_node: int | None = None,
        rpc_layer: str | None = "grpc",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        env = os.environ if environment is None else environment
        names = ["SLURM_STEP_NODELIST", "SLURM_PROCID"]
        names += ["SLURM_STEP_TASKS_PER_NODE"] if tasks_per_node is None else []
        if missing := [name for name in names if not env.get(name)]:
            raise ValueError(
                f"`SlurmClusterResolver`: {', '.join(missing)} is missing from the environment: "
                "this process is not a task of a Slurm step. Start it with `srun`."
            )
        hosts = parse_hosts(env[names[0]])
        counts = [tasks_per_node or 0] * len(hosts)
        if tasks_per_node is None:
            counts = parse_counts(env[names[2]])
        if len(counts) != len(hosts):
            raise ValueError(
                f"`SlurmClusterResolver`: Slurm lists {len(hosts)} hosts ({env[names[0]]}), but "
                f"the tasks of {len(counts)} ({env[names[2]]})."
            )
        # Slurm numbers tasks host by host, and `jobs` take them in that order, as in TensorFlow.
        pairs = zip(hosts, counts, strict=True)
        tasks = [f"{host}:{port_base + k}" for host, count in pairs for k in range(count)]
        jobs = {"worker": len(tasks)} if jobs is None else dict(jobs)
        if sum(jobs.values()) != len(tasks):
            raise ValueError(
                f"`SlurmClusterResolver`: `jobs` has {sum(jobs.values())} tasks, but the Slurm "
                f"step has {len(tasks)}."
            )
        self._spec: dict[str, tuple[str, ...]] = {}
        self._step = slurm_step(env)
        self.rpc_layer = rpc_layer
        rank, first = int(env["SLURM_PROCID"]), 0
        for job, count in jobs.items():
            self._spec[job] = tuple(tasks[first : first + count])
            if first <= rank < first + count:
                self.task_type, self.task_id = job, rank - first
            first += count

    def cluster_spec(self) -> Mapping[str, tuple[str, ...]]:
        """Return the addresses of each job's tasks."""
        return dict(self._spec)

    def member(self) -> Member | None:
        """Return this task's place, as in `ClusterResolver.member`; its job is the Slurm step."""
        member = super().member()
        return member and dataclasses.replace(member, job=self._step)


def member_in_cluster(resolver: ClusterResolver, source: str) -> Member | None:
    """Number a cluster's task as a process, if it is one. Messages name `source`."""
    cluster = {job: tuple(tasks) for job, tasks in resolver.cluster_spec().items()}
    kind, index = resolver.task_type, resolver.task_id
    if not cluster or kind == "evaluator":
        return None
    unknown = ", ".join(sorted(set(cluster) - set(_JOBS)))
    several = next((job for job in ("chief", "evaluator") if len(cluster.get(job, ())) > 1), "")
    count = Counter(address for tasks in cluster.values() for address in tasks)
    twice = ", ".join(sorted(address for address, times in count.items() if times > 1))
    tasks = len(cluster.get(kind or "", ()))
    for is_wrong, text in (
        (unknown, f": jobs are {', '.join(_JOBS)}; got {unknown}."),
        (several, f": there can be only one {several}; got {', '.join(cluster.get(several, ()))}. "
         "Make the others workers."),
        (cluster.get("ps") or kind == "ps", " has parameter servers (job 'ps'), which no jaxcoll "
         "strategy uses. Start only a chief and workers."),
        (kind is None or index is None, " has a cluster, but does not say which task this process "
         f"is: '{'type' if kind is None else 'index'}' is missing from 'task'."),
        (kind not in cluster, f": this is a task of job {kind!r}, but the cluster has only the "
         f"jobs {', '.join(cluster)}."),
        (index not in range(tasks), f": this is task {index} of job {kind!r}, which has only "
         f"{tasks}, from task 0."),
        (twice, f": two tasks have the address {twice}."),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(f"{source}{text}")
    assert index is not None
    # Process 0 is the chief, or else the first worker; the coordinator listens at its address.
    ordered = [*cluster.get("chief", ()), *cluster.get("worker", ())]
    rank = index + (0 if kind == "chief" else len(cluster.get("chief", ())))
    return Member(ordered[0], len(ordered), rank, None, source)


def _addresses(job: str, tasks: Any) -> tuple[str, ...]:
    """Read the addresses of a job, given as a list or as a mapping from numbers."""
    if isinstance(tasks, Mapping):
        numbered = {_index(index): address for index, address in tasks.items()}
        if sorted(numbered) != list(range(len(numbered))):
            raise ValueError(
                f"{TF_CONFIG}: the tasks of job {job!r} must be numbered 0, 1, …, without gaps; "
                f"got {sorted(numbered)}."
            )
        tasks = [numbered[index] for index in sorted(numbered)]
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise ValueError(f"{TF_CONFIG}: job {job!r} must be a list of addresses; got {tasks!r}.")
    return tuple(tasks)


def _index(value: Any, source: str = TF_CONFIG) -> int:
    """Read a task's number, which TensorFlow's users may quote and JSON keys must be quoted."""
    if is_integer(value) or (isinstance(value, str) and value.strip().isdecimal()):
        return int(value)
    raise ValueError(f"{source}: a task's number must be a whole number from 0; got {value!r}.")


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{TF_CONFIG}: {what} must be a JSON object; got {value!r}.")
    return value
