"""Start teams of ranks: of JAX, on this host or simulated hosts, or of other libraries."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.lab import Lab, Network, lab
from benchmarks.rank_pool import Entry, Team, launched
from benchmarks.ranks.jax_rank import ALONE

HERE = Path(__file__).parent
PEERS = ("torch", "tensorflow")
"""Other libraries that can be measured in the same run."""

_JAX = [sys.executable, "-m", "benchmarks.ranks.jax_rank"]
# Keep Python from importing a user's folder named torch instead of the library.
_SAFE = {"PYTHONSAFEPATH": "1"}


def add_world(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that describe the ranks of JAX."""
    add = parser.add_argument
    add("--processes", type=int, default=2, metavar="N", help="processes on this host (default: 2)")
    add(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="simulated devices per process (default: 1)",
    )
    add(
        "--rate",
        metavar="RATE",
        help="start the processes on simulated hosts (network namespaces here), and limit their "
        "links to RATE each way: 200mbit, 1gbit, or none for no limit",
    )
    add(
        "--hosts",
        type=int,
        default=2,
        metavar="H",
        help="simulated hosts, with --rate (default: 2)",
    )
    add(
        "--per-host",
        type=int,
        default=1,
        metavar="P",
        help="processes per simulated host (default: 1)",
    )
    add("--timeout", type=float, default=600, help="seconds that a request may take (default: 600)")


@contextlib.contextmanager
def team_of(args: argparse.Namespace, entries: Sequence[Entry]) -> Iterator[Team]:
    """Start the ranks of JAX that the flags of `add_world` describe."""
    if args.rate is not None:
        network = Network(args.hosts, args.per_host, args.rate)
        with on_hosts(network, entries, args.devices, args.timeout) as (team, _):
            yield team
        return
    with on_this_host(args.processes, entries, args.devices, args.timeout) as team:
        yield team


def on_this_host(
    processes: int, entries: Sequence[Entry], devices: int, timeout: float
) -> contextlib.AbstractContextManager[Team]:
    """Start a team of JAX ranks that communicate over the loopback interface."""
    # A single process needs no rendezvous.
    rendezvous = worlds(processes) if processes > 1 else [{}]
    variables = [{**ours(devices), **world} for world in rendezvous]
    return launched("jax", entries, _JAX, variables, timeout)


def ours(devices: int) -> dict[str, str]:
    """Return the environment variables of a rank of JAX, with the path of this checkout."""
    path = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    # A rank reads requests in a thread older than `jc.initialize`. With an arena of its own,
    # it would leave malloc two, as no thread of a usual program does.
    arena = {"MALLOC_ARENA_MAX": "1"}
    return arena | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}


def jax_alone(processes: int, timeout: float) -> contextlib.AbstractContextManager[Team]:
    """Start a team of JAX ranks that join through `jax.distributed`, with the baseline alone."""
    own = {name: value for name, value in ours(1).items() if not name.startswith("MALLOC")}
    variables = [{**own, **world} for world in worlds(processes)]
    return launched(ALONE, [(ALONE,)], [*_JAX, ALONE], variables, timeout)


@contextlib.contextmanager
def on_hosts(
    network: Network, entries: Sequence[Entry], devices: int, timeout: float
) -> Iterator[tuple[Team, Lab]]:
    """Start a team of JAX ranks on simulated hosts; yields the team and the hosts."""
    with lab(network.hosts, network.rate) as made:
        variables = [{**ours(devices), **world} for world in made.variables(network.per_host)]
        of_rank = [made.on(rank // network.per_host) for rank in range(len(variables))]
        with launched("jax", entries, _JAX, variables, timeout, of_rank) as team:
            team.network, team.sent_bytes = str(network), made.sent_bytes
            yield team, made


def peer(
    name: str, python: str | None, processes: int, timeout: float
) -> contextlib.AbstractContextManager[Team]:
    """Start a team of another library; its ranks are idle while other teams are measured.

    Raises:
      ValueError: the interpreter or the library does not exist.
    """
    interpreter = sys.executable if python is None else shutil.which(python)
    if interpreter is None:
        raise ValueError(f"--{name}-python: there is no interpreter {python!r}.")
    code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({name!r}))"
    safe = {**os.environ, **_SAFE}
    if subprocess.run([interpreter, "-c", code], env=safe, capture_output=True).returncode:
        raise ValueError(
            f"--against {name}: {interpreter} has no {name}; name an interpreter that has it with "
            f"--{name}-python."
        )
    # `ranks` is imported without jaxcoll, which would need JAX. Its folder comes last in the path,
    # so that it hides none of the library's modules.
    code = f"import sys; sys.path.append({str(HERE)!r}); import ranks.{name}_rank as r; r.main()"
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(processes)]
    variables = []
    for rank, world in enumerate(worlds(processes)):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        variables.append({**_SAFE, **world, "TF_CONFIG": json.dumps(task)})
    return launched(name, (), [interpreter, "-c", code], variables, timeout)


def worlds(processes: int) -> list[dict[str, str]]:
    """Return each rank's environment variables, with torchrun's names."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common["WORLD_SIZE"] = str(processes)
    return [{**common, "RANK": str(rank)} for rank in range(processes)]


def free_port() -> int:
    """Return a port on which no process listens, and which no new connection will use.

    The system assigns ports to connections from 32768 on.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
