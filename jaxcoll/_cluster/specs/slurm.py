"""How Slurm writes lists of hosts, and of how many tasks each has."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence


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
    """How many tasks each host has.

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
    """How many tasks a host is given at a turn, by the distribution that was asked for."""
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
