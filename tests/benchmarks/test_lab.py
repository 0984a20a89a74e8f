"""The hosts with a slow network that benchmarks make, where this machine allows them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from processes.hosts import hosts
from processes.ranks import launch

from benchmarks.lab import LabUnavailableError, bits_per_second, lab
from jaxcoll._job.launch.subprocesses import killed_on_exit

pytestmark = pytest.mark.product
ROOT = str(Path(__file__).parents[2])
JOB = Path(__file__).parents[1] / "processes" / "two_levels.py"
ARRAY = 4 << 20  # bytes that the job sums
ONE_DEVICE = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
TWO_DEVICES = {"JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}

SENDS = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    start = time.perf_counter()
    connection.sendall(bytes(1 << 20))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - start)
"""
RECEIVES = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
"""
HOLDS = """
import os, signal, sys
sys.path.insert(0, {root!r})
from benchmarks.lab import lab
signal.signal(signal.SIGINT, signal.default_int_handler)
with lab(2, "1gbit") as made:
    print(*made.on(0), flush=True)
    {then}
"""


def test_rate_limits_what_is_counted():
    with hosts(2, "16mbit") as made:
        there = made.address(1)
        receives = [*made.on(1), sys.executable, "-c", RECEIVES, there]
        with subprocess.Popen(receives, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            before = made.sent_bytes()
            sends = [*made.on(0), sys.executable, "-c", SENDS, there]
            done = subprocess.run(sends, capture_output=True, text=True, timeout=60, check=True)
        # 64 KiB may pass at once; the rest of 1 MiB takes half a second at least.
        assert float(done.stdout) > 0.9 * ((1 << 20) - (64 << 10)) * 8 / 16e6
        assert 1 << 20 <= made.sent_bytes() - before < 1.2 * (1 << 20)
        made.limit("none")
        limits = [*made.on(0), "tc", "qdisc", "show", "dev", "eth0"]
        shown = subprocess.run(limits, capture_output=True, text=True, check=True).stdout
        assert "tbf" not in shown


def test_host_reaches_hosts_only():
    with socket.create_server(("127.0.0.1", 0)) as server, hosts(2, "none") as made:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        done = subprocess.run([*made.on(0), sys.executable, "-c", code], capture_output=True)
        assert b"ConnectionRefusedError" in done.stderr


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("pass", 0),
        ("raise RuntimeError", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["success", "failure", "interrupt", "kill"],
)
def test_nothing_outlives_lab(then, status, tmp_path):
    with hosts(2, "none"):
        pass
    done = forks.with_commands().run(HOLDS.format(then=then, root=ROOT), cwd=tmp_path)
    assert done.returncode == status, done.stderr
    command = done.stdout.split()
    holder = Path("/proc") / command[command.index("--target") + 1]
    until = time.monotonic() + 20
    while holder.exists() and "cat" in (holder / "comm").read_text():
        assert time.monotonic() < until, "the process that holds the namespace goes on"
        time.sleep(0.05)


def facts_in(text):
    return json.loads(text.partition("FACTS ")[2].splitlines()[0])


def check_two_levels(exact, coded, within, by):
    for facts in (exact, coded):
        assert (facts["hosts"], facts["inner"]) == (2, 1)
    assert exact["algorithm"] == f"{within}/native"
    assert exact["compiled"] == ["all-reduce", by]
    assert exact["error"] < 1e-6
    assert coded["algorithm"] == f"{within}/shuffle"
    assert coded["coded"] == [False, True], "between hosts only"
    assert coded["compiled"] == sorted({"all-gather", "all-to-all", by})
    assert 1e-5 < coded["error"] < 1e-2


@pytest.mark.processes
def test_two_hosts_use_two_levels(tmp_path):
    logs = [tmp_path / f"{rank}.log" for rank in range(4)]
    with hosts(2, "none") as made, killed_on_exit() as running:
        for rank, variables in enumerate(made.variables(2)):
            command = [*made.on(rank // 2), sys.executable, str(JOB), "found"]
            with logs[rank].open("wb") as log:
                streams = {"stdout": log, "stderr": subprocess.STDOUT}
                running.start(command, {**variables, **ONE_DEVICE}, **streams)
        for process in running.processes:
            assert process.wait(120) == 0, "".join(log.read_text() for log in logs)
        # Between two hosts each sends the array once, and once as codes of a quarter of its bytes;
        # round a ring it would be 1.5 times each.
        assert 1.25 < made.sent_bytes() / (2 * ARRAY) < 1.25 * 1.15
    for log in logs:
        facts = facts_in(log.read_text())
        check_two_levels(*facts, "halving_doubling", "collective-permute")


@pytest.mark.processes
def test_hosts_named_by_hand():
    for log in launch([sys.executable, str(JOB), "named"], 2, timeout=120, env=TWO_DEVICES):
        check_two_levels(*facts_in(log), "shuffle", "all-to-all")


def test_wrong_arguments_are_refused():
    assert [bits_per_second(rate) for rate in ("200mbit", "1.5gbit", "none")] == [2e8, 1.5e9, None]
    for rate in ("", "fast", "0mbit", "100 mbit", "-1gbit", "1tbit"):
        with pytest.raises(ValueError, match="expected a rate such as 200mbit or 1gbit, or 'none'"):
            bits_per_second(rate)
    for count in (0, 1, 65):
        refused = pytest.raises(ValueError, match=f"expected 2 to 64 hosts; got {count}")
        with refused, lab(count):
            pass


def test_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr("benchmarks.lab.shutil.which", lambda tool: None if tool == "tc" else tool)
    refused = pytest.raises(
        LabUnavailableError, match="needs `tc` .iproute2, util-linux., which is"
    )
    with refused, lab(2):
        pass


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("unshare", "namespaces may not be made here: they need root .*the kernel refuses"),
        ("tc", "the network could not be made: `tc qdisc replace .*`: the kernel refuses"),
    ],
)
def test_kernels_refusal_is_said(monkeypatch, tmp_path, tool, message):
    with hosts(2, "none"):
        pass
    refusing = tmp_path / tool
    refusing.write_text("#!/bin/sh\necho the kernel refuses >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LabUnavailableError, match=message), lab(2):
        pass
