"""Hosts that exist only here: network namespaces on one switch, each with an address of its own."""

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess

import pytest


class Hosts:
    """Some hosts.

    Attributes:
      addresses: of each.
    """

    def __init__(self, count):
        self._switch = f"jcs{os.getpid()}"
        self._names = [f"jch{os.getpid()}n{i}" for i in range(count)]
        self.addresses = [f"10.79.0.{i + 1}" for i in range(count)]

    def make(self):
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "switch0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch0", "up")
        for i, name in enumerate(self._names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", f"port{i}", "netns", self._switch)
            ip("link", "add", "eth0", "netns", name, "type", "veth", *peer)
            ip("-n", self._switch, "link", "set", f"port{i}", "master", "switch0", "up")
            ip("-n", name, "address", "add", f"{self.addresses[i]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def on(self, host, *command):
        """The command that runs another one there."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def pull_cable(self, host):
        ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def part(self, *some):
        """Between these hosts nothing passes any more; all others see each of them."""
        for host in some:
            slave = ("type", "bridge_slave", "isolated", "on")
            ip("-n", self._switch, "link", "set", f"port{host}", *slave)

    def pids(self, host):
        return [int(pid) for pid in ip("netns", "pids", self._names[host]).split()]

    def listening(self, host):
        """The addresses at which anything listens there."""
        tables = self.on(host, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        text = subprocess.run(tables, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in text.splitlines()]
        return {_address(row[1].split(":")[0]) for row in rows if row[3] == "0A"}

    def end(self):
        for i, name in enumerate(self._names):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in self.pids(i):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self._switch)


@contextlib.contextmanager
def hosts(count):
    """So many hosts, which are gone afterwards; where they may not be made the test is skipped."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("only root can make network namespaces, with `ip`")
    found = Hosts(count)
    try:
        try:
            found.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield found
    finally:
        found.end()


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout


def _address(written):
    """As /proc/net writes it: words of four bytes, each in the order of this machine."""
    raw = bytes.fromhex(written)
    there = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    address = ipaddress.ip_address(there)
    return str(getattr(address, "ipv4_mapped", None) or address)
