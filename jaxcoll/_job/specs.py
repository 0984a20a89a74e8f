"""A process's place in its job, addresses, and Slurm's lists of hosts and tasks."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxcoll._job.launch.subprocesses import check_system

HIGHEST_PORT = 65535


@dataclasses.dataclass(frozen=True)
class Member:
    """A process's place in its job."""

    coordinator_address: str | None  # "host:port" where all processes meet; None: not known
    num_processes: int  # number of processes in the job
    process_id: int  # number of this process, from 0
    # The accelerators of this process; None: all that it sees
    local_device_ids: tuple[int, ...] | None = None
    source: str = "the arguments"  # what named these values, for messages
    job: str = ""  # the job's own name, from its launcher; a process of another job is refused
    elsewhere: tuple[str, ...] = ()  # addresses at which process 0 may be instead

    def check(self) -> None:
        """Raise ValueError for an impossible process number or address."""
        whole = all(type(x) is int for x in (self.num_processes, self.process_id))
        if not whole or not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                "`initialize` expects `process_id` to be an int in 0 … num_processes − 1; "
                f"{self.source} gave process {self.process_id!r} of {self.num_processes!r}."
            )
        if self.num_processes > 1:
            check_system()
        if self.coordinator_address is None:
            return
        try:
            _, port = host_and_port(self.coordinator_address)
        except ValueError as error:
            raise ValueError(f"`initialize`: {error} It came from {self.source}.") from None
        if not port:
            raise ValueError(
                "`initialize` needs a port that all processes know; 0, as in "
                f"{self.coordinator_address!r} from {self.source}, means any free port."
            )


def host_and_port(address: Any) -> tuple[str, int]:
    """Split "host:port".

    Raises:
      ValueError: the address has another form.

    Examples:
      >>> host_and_port("node1:1234"), host_and_port("[::1]:1234")
      (('node1', 1234), ('::1', 1234))
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    name = host.removeprefix("[").removesuffix("]")
    closed = host == name if ":" not in name else host == f"[{name}]"
    if not (colon and name and closed and port.isdecimal() and int(port) <= HIGHEST_PORT):
        raise ValueError(
            "an address must be 'host:port', or '[host]:port' for an IPv6 host, with a port of at "
            f"most {HIGHEST_PORT}; got {address!r}."
        )
    return name, int(port)


def is_loopback(address: str) -> bool:
    """Tell whether an address is a loopback address; names are not resolved."""
    host, _ = host_and_port(address)
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def parse_hosts(listed: str) -> list[str]:
    """List the hosts in a list that Slurm wrote, with ranges in brackets.

    Raises:
      ValueError: it is not such a list.

    Examples:
      >>> parse_hosts("gpu[01-03,7],login")
      ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
      >>> parse_hosts("r[1-2]n[1-2]")
      ['r1n1', 'r1n2', 'r2n1', 'r2n2']
    """
    names = re.findall(r"(?:[^,\[\]]|\[[\d,-]+\])+", listed)
    if ",".join(names) != listed or not names:
        raise ValueError(f"Slurm: this is not a list of hosts: {listed!r}.")
    return [host for name in names for host in _expand(name)]


def slurm_step(environment: Mapping[str, str]) -> str:
    """Name this process's job by the step of Slurm that it is in; "" without one."""
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "0")
    return f"Slurm step {job}.{step}" if job else ""


def parse_counts(listed: str) -> list[int]:
    """List the number of tasks on each host, from a list that Slurm wrote.

    Raises:
      ValueError: it is not such a list.

    Examples:
      >>> parse_counts("2(x3),1")
      [2, 2, 2, 1]
    """
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in listed.split(",")]
    if not all(parts):
        raise ValueError(f"Slurm: this is not a list of task counts: {listed!r}.")
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def _expand(name: str) -> Iterator[str]:
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
