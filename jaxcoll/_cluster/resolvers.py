"""Cluster resolvers, with TensorFlow's names: which tasks there are, and which this process is."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Mapping

import jax

from jaxcoll._cluster.launchers import Member, member_of_tasks
from jaxcoll._cluster.specs import TFConfig, counts_of, host_of_each_task, hosts_of, turn_of


class ClusterResolver(abc.ABC):
    """Knows the tasks of a cluster. `jc.initialize(cluster_resolver=...)` makes processes of them.

    A resolver of your own has a `cluster_spec`, and says which task this process is.
    """

    task_type: str | None = None
    """The job of this process: "chief", "worker" or "evaluator"."""

    task_id: int | None = None
    """Its number in that job, from 0."""

    rpc_layer: str | None = None
    """Put before an address by `master`, as in "grpc://host:port"."""

    @abc.abstractmethod
    def cluster_spec(self) -> Mapping[str, tuple[str, ...]]:
        """The addresses of each job's tasks, "host:port", in the order of their numbers."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task.

        Args:
          task_type: its job; None: this process's.
          task_id: its number; None: this process's.
          rpc_layer: what to put before it; None: the resolver's.

        Returns:
          Such as "grpc://host:port"; "" where there is no cluster, or nobody else in it.

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
                f"{ {job: len(found) for job, found in spec.items()} } tasks."
            )
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{tasks[index]}" if layer else tasks[index]

    def num_accelerators(self) -> dict[str, int]:
        """Count this process's accelerators by kind, as in {"GPU": 8}; {} of CPUs alone.

        It looks for devices, so it comes after `jc.initialize`.
        """
        names = {"cuda": "GPU", "rocm": "GPU"}
        found = [str(d.platform) for d in jax.local_devices() if d.platform != "cpu"]
        kinds = [names.get(platform, platform.upper()) for platform in found]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def member(self) -> Member | None:
        """The process that this task is: the chief first, then the workers.

        Raises:
          ValueError: the cluster has no such task, or two chiefs, or other jobs.
        """
        spec = {job: tuple(tasks) for job, tasks in self.cluster_spec().items()}
        return member_of_tasks(
            TFConfig(spec, self.task_type, self.task_id, None, type(self).__name__)
        )


class TFConfigClusterResolver(ClusterResolver):
    """A cluster described by the environment variable `TF_CONFIG`.

    Args:
      task_type: over what it says.
      task_id: over what it says.
      rpc_layer: over what it says.
      environment: in place of `os.environ`.

    Raises:
      ValueError: it is not JSON, or lacks what it must have.

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
        read = TFConfig.of(os.environ if environment is None else environment)
        self._config = dataclasses.replace(
            read,
            task_type=read.task_type if task_type is None else str(task_type),
            task_id=read.task_id if task_id is None else int(task_id),
        )
        self.task_type, self.task_id = self._config.task_type, self._config.task_id
        self.rpc_layer = rpc_layer or read.rpc_layer

    def cluster_spec(self) -> Mapping[str, tuple[str, ...]]:
        """The addresses of each job's tasks; empty without the variable."""
        return dict(self._config.cluster)


class SlurmClusterResolver(ClusterResolver):
    """A cluster described by Slurm, of the tasks of this step.

    Args:
      jobs: how many tasks each job has, in the order of the tasks; None: all are workers.
      port_base: the port of a host's first task; the next has the next port.
      tasks_per_node: of each host; None: what Slurm says.
      rpc_layer: put before an address by `master`.
      environment: in place of `os.environ`.

    Raises:
      ValueError: this is not a task of a step (`srun`), the jobs have other tasks than the step, or
        Slurm put the tasks on hosts in an order of its own.

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
                "this is not a task of a step. Start it with `srun`."
            )
        hosts = hosts_of(env[names[0]])
        if tasks_per_node is None:
            counts = counts_of(env[names[2]])
        else:
            counts = [tasks_per_node] * len(hosts)
        if len(counts) != len(hosts):
            raise ValueError(
                f"`SlurmClusterResolver`: {len(hosts)} hosts ({env[names[0]]}), and tasks of "
                f"{len(counts)} ({env[names[2]]})."
            )
        placed = host_of_each_task(counts, turn_of(env))
        tasks = [
            f"{hosts[host]}:{port_base + placed[:rank].count(host)}"
            for rank, host in enumerate(placed)
        ]
        jobs = {"worker": len(tasks)} if jobs is None else dict(jobs)
        if sum(jobs.values()) != len(tasks):
            raise ValueError(
                f"`SlurmClusterResolver`: `jobs` has {sum(jobs.values())} tasks, and Slurm "
                f"{len(tasks)}."
            )
        self._spec: dict[str, tuple[str, ...]] = {}
        self.rpc_layer = rpc_layer
        rank, first = int(env["SLURM_PROCID"]), 0
        here = env.get("SLURM_NODEID")
        if here is not None and rank < len(placed) and placed[rank] != int(here):
            raise ValueError(
                f"`SlurmClusterResolver`: task {rank} is on host {here} of {env[names[0]]} by "
                f"Slurm, and on host {placed[rank]} by the distribution "
                f"{env.get('SLURM_DISTRIBUTION', 'block')!r}. Ask for `--distribution=block`, or "
                "cyclic, or plane."
            )
        for job, count in jobs.items():
            self._spec[job] = tuple(tasks[first : first + count])
            if first <= rank < first + count:
                self.task_type, self.task_id = job, rank - first
            first += count

    def cluster_spec(self) -> Mapping[str, tuple[str, ...]]:
        """The addresses of each job's tasks."""
        return dict(self._spec)
