"""Hosts that exist only here, and cables between them that can be pulled."""

import contextlib
import ipaddress
import subprocess
from pathlib import Path

import pytest

from benchmarks.lab import Lab, LabUnavailableError, lab


@contextlib.contextmanager
def hosts(count, rate="none"):
    """So many hosts, which are gone afterwards; where they may not be made the test is skipped."""
    try:
        with lab(count, rate) as made:
            yield made
    except LabUnavailableError as error:
        pytest.skip(str(error))


def pull_cable(made: Lab, host):
    made._ip(made._switch, f"link set p{host} down")


def pids(made: Lab, host):
    """The processes there, but for the one that holds the host."""
    holder = Path(f"/proc/{made._hosts[host]}/ns/net")
    found = []
    for other in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # it has ended
            if other.samefile(holder):
                found.append(int(other.parts[2]))
    return [pid for pid in found if pid != made._hosts[host]]


def listening(made: Lab, host):
    """The addresses at which anything listens there."""
    tables = [*made.on(host), "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    text = subprocess.run(tables, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in text.splitlines()]
    return {_address(row[1].split(":")[0]) for row in rows if row[3] == "0A"}


def _address(written):
    """As /proc/net writes it: words of four bytes, each in the order of this machine."""
    raw = bytes.fromhex(written)
    there = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    address = ipaddress.ip_address(there)
    return str(getattr(address, "ipv4_mapped", None) or address)
