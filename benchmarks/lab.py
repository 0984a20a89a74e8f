"""Network namespaces that stand for hosts, each with one link of a limited rate to one switch."""

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
_HOLD = "echo && exec cat"  # lives, and with it its namespace, for as long as its standard input


class LabUnavailableError(RuntimeError):
    """This machine or this user cannot make network namespaces; the message says why."""


def bits_per_second(rate: str) -> float | None:
    """The bits per second of a rate as `tc` spells it ("1.5gbit"); None for "none"."""
    if rate == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not bits:
        raise ValueError(f"expected a rate such as 200mbit or 1gbit, or 'none'; got {rate!r}.")
    return bits


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts, processes on each of them, and the rate of each host's link, as `tc` spells it."""

    hosts: int
    per_host: int
    rate: str

    def __str__(self) -> str:
        between = "no limit" if self.rate == "none" else self.rate
        return f"{self.hosts} hosts, {between} between them"


class Lab:
    """Hosts that see each other over their links alone; processes of one host use its loopback.

    Nothing is made in the machine's own network namespace, and no file is written. A namespace
    lives as long as the process that holds it, and those end with this one, whatever ends it.
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
        """The address of a host on its link."""
        return f"{_SUBNET}.{host + 1}"

    def on(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return self._entering(self._hosts[host])

    def variables(self, per_host: int) -> list[dict[str, str]]:
        """Each process's environment variables, by which `initialize` brings them together."""
        size = len(self._hosts) * per_host
        common = {"MASTER_ADDR": self.address(0), "MASTER_PORT": _PORT}
        return [{**common, "WORLD_SIZE": str(size), "RANK": str(rank)} for rank in range(size)]

    def limit(self, rate: str) -> None:
        """Let each host send, and receive, no more than `rate` from now on."""
        bits = bits_per_second(rate)
        for i, pid in enumerate(self._hosts):
            for namespace, device in ((pid, "eth0"), (self._switch, f"p{i}")):
                # Without a limit first: then there is one to be replaced, whatever was before.
                self._tc(namespace, f"qdisc replace dev {device} root pfifo_fast")
                if bits is not None:
                    # 2 ms may pass at once; what waits longer than 50 ms is dropped, and TCP slows.
                    burst = max(64 << 10, int(bits / 8 * 0.002))
                    bucket = f"rate {int(bits)}bit burst {burst}b limit {burst + int(bits / 160)}b"
                    self._tc(namespace, f"qdisc replace dev {device} root tbf {bucket}")

    def sent_bytes(self) -> int:
        """Bytes that have left all hosts over their links, headers included."""
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
    """Hosts, for as long as the block lasts; `LabUnavailableError` where none can be made."""
    bits_per_second(rate)
    if not 2 <= hosts <= MOST_HOSTS:
        raise ValueError(f"expected 2 to {MOST_HOSTS} hosts; got {hosts}.")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not sys.platform.startswith("linux") or missing:
        lacking = f"`{'`, `'.join(missing)}` (iproute2, util-linux)" if missing else "Linux"
        raise LabUnavailableError(f"a network with a rate needs {lacking}, which is not here.")
    with contextlib.ExitStack() as holders:
        made = Lab(hosts, holders)
        made.limit(rate)
        yield made


def _held(command: Sequence[str], holders: contextlib.ExitStack) -> int:
    """The process that holds the namespace which `command` makes, once that is there."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", _HOLD], start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    holders.callback(holder.wait)
    holders.enter_context(holder.stdin)  # which ends it, and is closed first
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
