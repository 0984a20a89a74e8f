"""Simulated hosts: network namespaces, each linked to one switch at a limited rate."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.counters import transmitted_bytes

TOOLS = ("ip", "tc", "nsenter", "unshare")
MOST_HOSTS = 64
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SUBNET, _PORT = "10.77.0", "29400"
_HOLD = "echo && exec cat"  # keeps its namespace alive until its standard input is closed


class LabUnavailableError(RuntimeError):
    """Network namespaces cannot be made by this user on this machine; the message says why."""


def bits_per_second(rate: str) -> float | None:
    """Return the bits per second of a rate in `tc`'s syntax ("1.5gbit"), or None for "none"."""
    if rate == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not bits:
        raise ValueError(f"expected a rate such as 200mbit or 1gbit, or 'none'; got {rate!r}.")
    return bits


@dataclasses.dataclass(frozen=True)
class Network:
    """Number of hosts, processes per host, and rate of each host's link in the syntax of `tc`."""

    hosts: int
    per_host: int
    rate: str

    def __str__(self) -> str:
        between = "no limit" if self.rate == "none" else self.rate
        return f"{self.hosts} hosts, {between} between them"


class Lab:
    """Hosts connected only by their links; processes on one host use its loopback interface.

    The machine's own network namespace is not changed, and no file is written. A namespace lives
    as long as the process that holds it, and these processes end with this one, however it ends.
    """

    def __init__(self, hosts: int, holders: contextlib.ExitStack) -> None:
        as_user = os.geteuid() != 0
        self._enter_user = ["--user", "--preserve-credentials"] if as_user else []
        mapped = ["--user", "--map-root-user"] if as_user else []
        self._switch = _held(["unshare", *mapped, "--net"], holders)
        inside = self._entering(self._switch)
        held = [*inside, "unshare", "--net"]
        self._hosts = [_held(held, holders) for _ in range(hosts)]
        self._ip(self._switch, "link add br0 type bridge", "link set br0 up")
        for i, pid in enumerate(self._hosts):
            pair = f"link add p{i} type veth peer name eth0 netns {pid}"
            self._ip(self._switch, pair, f"link set p{i} master br0 up")
            address = f"address add {self.address(i)}/24 dev eth0"
            self._ip(pid, address, "link set eth0 up", "link set lo up")

    def address(self, host: int) -> str:
        """Return the address of a host on its link."""
        return f"{_SUBNET}.{host + 1}"

    def on(self, host: int) -> list[str]:
        """Return the prefix that runs a command on a host."""
        return self._entering(self._hosts[host])

    def variables(self, per_host: int) -> list[dict[str, str]]:
        """Return each process's environment variables, from which `initialize` connects them."""
        size = len(self._hosts) * per_host
        common = {"MASTER_ADDR": self.address(0), "MASTER_PORT": _PORT}
        return [{**common, "WORLD_SIZE": str(size), "RANK": str(rank)} for rank in range(size)]

    def limit(self, rate: str) -> None:
        """Limit what each host sends, and what it receives, to `rate`."""
        bits = bits_per_second(rate)
        for i, pid in enumerate(self._hosts):
            for namespace, device in ((pid, "eth0"), (self._switch, f"p{i}")):
                # Remove the limit first, so that there is always a qdisc to replace.
                self._tc(namespace, f"qdisc replace dev {device} root pfifo_fast")
                if bits is not None:
                    # Bursts of 2 ms pass; packets that wait over 50 ms are dropped, so TCP slows.
                    burst = max(64 << 10, int(bits / 8 * 0.002))
                    bucket = f"rate {int(bits)}bit burst {burst}b limit {burst + int(bits / 160)}b"
                    self._tc(namespace, f"qdisc replace dev {device} root tbf {bucket}")

    def sent_bytes(self) -> int:
        """Return the bytes that all hosts have sent over their links, headers included."""
        texts = (Path(f"/proc/{pid}/net/dev").read_text() for pid in self._hosts)
        return sum(transmitted_bytes(text, "eth0") for text in texts)

    def _entering(self, pid: int) -> list[str]:
        return ["nsenter", "--target", str(pid), "--net", *self._enter_user, "--"]

    def _ip(self, namespace: int, *lines: str) -> None:
        _done([*self._entering(namespace), "ip", "-batch", "-"], "\n".join(lines))

    def _tc(self, namespace: int, line: str) -> None:
        _done([*self._entering(namespace), "tc", *line.split()])


@contextlib.contextmanager
def lab(hosts: int, rate: str = "none") -> Iterator[Lab]:
    """Make hosts that exist until the block ends.

    Yields:
      The hosts, with their links limited to `rate`.

    Raises:
      ValueError: the rate or the number of hosts is invalid.
      LabUnavailableError: the hosts cannot be made here.
    """
    bits_per_second(rate)
    if not 2 <= hosts <= MOST_HOSTS:
        raise ValueError(f"expected 2 to {MOST_HOSTS} hosts; got {hosts}.")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not sys.platform.startswith("linux") or missing:
        lacking = f"`{'`, `'.join(missing)}` (iproute2, util-linux)" if missing else "Linux"
        raise LabUnavailableError(f"a network with a rate needs {lacking}, which is missing here.")
    with contextlib.ExitStack() as holders:
        made = Lab(hosts, holders)
        made.limit(rate)
        yield made


def _held(command: Sequence[str], holders: contextlib.ExitStack) -> int:
    """Start a process that holds the namespace made by `command`, and return its pid once ready."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", _HOLD], start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    holders.callback(holder.wait)
    holders.enter_context(holder.stdin)  # closed first, which ends the holder
    with holder.stdout, holder.stderr:
        ready = holder.stdout.readline()
        words = "" if ready else holder.stderr.read().decode(errors="replace").strip()
    if not ready:
        raise LabUnavailableError(
            "network namespaces may not be made here: they need root (in a container with "
            f"CAP_SYS_ADMIN) or a kernel that allows user namespaces ({words})."
        )
    return holder.pid


def _done(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        what = " ".join(command[command.index("--") + 1 :])
        raise LabUnavailableError(
            f"the network could not be made: `{what}`: {done.stderr.strip() or done.returncode}."
        )
