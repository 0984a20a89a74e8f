"""Launchers' descriptions of a cluster's processes: TF_CONFIG, and lists of Slurm."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

VARIABLE = "TF_CONFIG"
_JOBS = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class TFConfig:
    """A cluster of tasks, and which of them this process is."""

    # The addresses of each job's tasks, "host:port"; empty: this process is alone
    cluster: Mapping[str, tuple[str, ...]]
    task_type: str | None = None  # this process's job; None: not given
    task_id: int | None = None  # its number in the job; None: not given
    rpc_layer: str | None = None  # TensorFlow's protocol; None: not given
    source: str = VARIABLE  # where this came from, for messages

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TFConfig:
        """Read it; without the variable, or with an empty one, the cluster is empty."""
        text = environment.get(VARIABLE, "")
        if not text.strip():
            return cls({})
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"{VARIABLE} is not JSON ({error}); it begins with {text[:40]!r}."
            ) from None
        data = _mapping(data, "the whole")
        task = _mapping(data.get("task", {}), "'task'")
        if "cluster" not in data and task:
            raise ValueError(
                f"{VARIABLE} has a 'task' and no 'cluster': that maps jobs to addresses, as in "
                '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", '
                '"index": 0}}.'
            )
        cluster = _mapping(data.get("cluster", {}), "'cluster'")
        kind, index = task.get("type"), task.get("index")
        return cls(
            {str(job): _addresses(str(job), tasks) for job, tasks in cluster.items()},
            None if kind is None else str(kind),
            None if index is None else _index(index),
            data.get("rpc_layer"),
        )

    def check(self) -> None:
        """Refuse an unknown job, two chiefs, a parameter server, or a task that is not there."""
        unknown = sorted(set(self.cluster) - set(_JOBS))
        if unknown:
            raise ValueError(
                f"{self.source}: jobs are {', '.join(_JOBS)}; got {', '.join(unknown)}."
            )
        for job in ("chief", "evaluator"):
            if len(self.cluster.get(job, ())) > 1:
                raise ValueError(
                    f"{self.source}: there can be one {job}; got "
                    f"{', '.join(self.cluster[job])}. Make the others workers."
                )
        if self.cluster.get("ps") or self.task_type == "ps":
            raise ValueError(
                f"{self.source}: there are parameter servers (job 'ps'), and no strategy here "
                "uses any. Start chief and workers only."
            )
        if self.task_type is None or self.task_id is None:
            missing = "type" if self.task_type is None else "index"
            raise ValueError(
                f"{self.source} has a cluster, and does not say which task this process is: "
                f"'{missing}' is missing from 'task'."
            )
        if self.task_type not in self.cluster:
            raise ValueError(
                f"{self.source}: this is a task of job {self.task_type!r}, and the cluster has "
                f"the jobs {', '.join(self.cluster)}."
            )
        tasks = len(self.cluster[self.task_type])
        if not 0 <= self.task_id < tasks:
            raise ValueError(
                f"{self.source}: this is task {self.task_id} of job {self.task_type!r}, which has "
                f"{tasks} (numbered from 0)."
            )
        addresses = [address for job in self.cluster.values() for address in job]
        if twice := sorted({a for a in addresses if addresses.count(a) > 1}):
            raise ValueError(f"{self.source}: two tasks have the address {', '.join(twice)}.")


def _addresses(job: str, tasks: Any) -> tuple[str, ...]:
    """The tasks of a job: a list, or a mapping from numbers."""
    if isinstance(tasks, Mapping):
        numbered = {_index(index): address for index, address in tasks.items()}
        if sorted(numbered) != list(range(len(numbered))):
            raise ValueError(
                f"{VARIABLE}: the tasks of job {job!r} are numbered {sorted(numbered)}; here all "
                "tasks from 0 on take part."
            )
        tasks = [numbered[index] for index in sorted(numbered)]
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise ValueError(f"{VARIABLE}: job {job!r} must be a list of addresses; got {tasks!r}.")
    return tuple(tasks)


def _index(value: Any) -> int:
    """A number, also as TensorFlow's own users write it: in quotes, as keys must be."""
    if type(value) is int or (isinstance(value, str) and value.strip().isdecimal()):
        return int(value)
    raise ValueError(f"{VARIABLE}: a task's number must be whole, from 0; got {value!r}.")


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{VARIABLE}: {what} must be a JSON object; got {value!r}.")
    return value


def hosts_of(listed: str) -> list[str]:
    """All hosts of a list as Slurm writes it, with ranges in brackets.

    Raises:
      ValueError: it is not such a list.

    Examples:
      >>> hosts_of("gpu[01-03,7],login")
      ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
      >>> hosts_of("r[1-2]n[1-2]")
      ['r1n1', 'r1n2', 'r2n1', 'r2n2']
    """
    names = re.findall(r"(?:[^,\[\]]|\[[\d,-]+\])+", listed)
    if ",".join(names) != listed or not names:
        raise ValueError(f"Slurm: this is not a list of hosts: {listed!r}.")
    return [host for name in names for host in _expanded(name)]


def counts_of(listed: str) -> list[int]:
    """Return the number of tasks on each host.

    Raises:
      ValueError: it is not such a list.

    Examples:
      >>> counts_of("2(x3),1")
      [2, 2, 2, 1]
    """
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in listed.split(",")]
    if not all(parts):
        raise ValueError(f"Slurm: this does not say how many tasks a host has: {listed!r}.")
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def host_of_each_task(counts: Sequence[int], turn: int) -> list[int]:
    """The number of each task's host, in the order of the tasks.

    `turn` tasks follow on one another before the next host has its turn: 1 where Slurm's
    distribution is "cyclic", all where it is "block".

    Examples:
      >>> host_of_each_task([3, 1], 1), host_of_each_task([3, 1], 3)
      ([0, 1, 0, 0], [0, 0, 0, 1])
    """
    order: list[int] = []
    left = list(counts)
    while any(left):
        for host, count in enumerate(left):
            order += [host] * min(turn, count)
            left[host] -= min(turn, count)
    return order


def turn_of(environment: Mapping[str, str]) -> int:
    """Return the number of tasks a host is given at a turn, by the requested distribution."""
    match environment.get("SLURM_DISTRIBUTION", "block").partition(":")[0]:
        case "cyclic":
            return 1
        case "plane":
            return max(1, int(environment.get("SLURM_DIST_PLANESIZE", "1")))
        case _:
            return sys.maxsize


def _expanded(name: str) -> Iterator[str]:
    pieces = [
        list(_range(piece[1:-1])) if piece.startswith("[") else [piece]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", name)
    ]
    return map("".join, itertools.product(*pieces))


def _range(listed: str) -> Iterator[str]:
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if not first or (last and int(last) < int(first)):
            raise ValueError(f"Slurm: this is not a range of hosts: [{listed}].")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"
