"""Which world is measured: devices of this process, processes started here, or a launched job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launch.local import free_port, join, world
from jaxcoll.bench.devices import devices_of
from jaxcoll.bench.lab.namespaces import Lab, Network, lab
from jaxcoll.bench.rank_pool import Entry, Here, Launched, Places, Team, launched

_SOURCES = Path(__file__).parents[2] / "docs" / "peers"
# A folder of the user's that is called torch must not be taken for the library.
_SAFE = {"PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def teams_of(
    entries: Sequence[Entry],
    *,
    processes: int | None = None,
    devices: int | None = None,
    platform: str | None = None,
    network: Network | None = None,
    against: Mapping[str, str | None] | None = None,
    timeout: float = 600,
) -> Iterator[list[Team]]:
    """The teams that the command's flags ask for, JAX's first; none is left at the end.

    Args:
      entries: what JAX is measured with.
      processes: how many to start here; None: this process, or the job that it is one of.
      devices: of each process.
      platform: of this process's devices.
      network: hosts to start processes on, in place of `processes`.
      against: names of `naming.PEERS`, each with its interpreter; None: this one.
      timeout: seconds that one request may take.

    Yields:
      The teams.

    Raises:
      ValueError: the flags ask for what is not there.
      LaunchError: the ranks of a team did not meet.
      LabUnavailableError: there can be no such network here.
    """
    if network is not None:
        if processes is not None or against or platform not in (None, "cpu"):
            raise ValueError(
                "--rate measures CPU processes of JAX on the hosts of --hosts and --per-host: "
                "leave --processes, --platform and --against out."
            )
        with on_hosts(network, entries, devices or 1, timeout) as (team, _):
            yield [team]
        return
    if processes is None:
        if against:
            raise ValueError("--against needs --processes N: the others have no simulated devices.")
        yield [_here(entries, devices, platform)]
        return
    if processes < 2:
        raise ValueError(f"--processes must be at least 2; got {processes}.")
    if platform not in (None, "cpu"):
        raise ValueError(
            f"--processes starts processes of CPU devices, and --platform is {platform}: "
            "start one process for each host with a launcher that JAX knows, and leave --processes "
            "out."
        )
    devices = 1 if devices is None else devices
    if devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}.")
    if against and devices > 1:
        raise ValueError("--against compares processes of one device each: leave --devices out.")
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(peer(name, python, processes, timeout))
            for name, python in (against or {}).items()
        ]
        variables = stack.enter_context(world(processes))
        ours = launched("jax", entries, _command(devices), variables, timeout)
        yield [stack.enter_context(ours), *peers]


def _command(devices: int) -> list[str]:
    """What a rank of JAX runs."""
    return [sys.executable, "-m", "jaxcoll.bench.ranks.jax_rank", str(devices)]


@contextlib.contextmanager
def on_hosts(
    network: Network, entries: Sequence[Entry], devices: int, timeout: float
) -> Iterator[tuple[Team, Lab]]:
    """A team of JAX whose ranks are on hosts of their own, and these hosts."""
    if network.per_host < 1:
        raise ValueError(f"--per-host must be at least 1; got {network.per_host}.")
    with lab(network.hosts, network.rate) as made:
        variables = made.variables(network.per_host)
        places = Places(
            str(network), lambda rank: made.on(rank // network.per_host), made.sent_bytes
        )
        with launched("jax", entries, _command(devices), variables, timeout, places) as team:
            yield team, made


def _here(entries: Sequence[Entry], devices: int | None, platform: str | None) -> Here:
    """This process: alone with its devices, or as one of a launched job."""
    from jaxcoll.bench.ranks.jax_rank import JaxRank

    # Flags that describe this process leave no doubt that it is alone.
    alone = devices is not None or platform is not None
    together = join() or (not alone and _clustered())
    if together and jax.process_count() > 1:
        return Here(entries, JaxRank(jax.devices()), together=True)
    found = jax.devices() if together else devices_of(platform or "cpu", devices)
    return Here(entries, JaxRank(found), together=False)


def _clustered() -> bool:
    """Enter the job of a launcher that `initialize` knows (Slurm, Open MPI, ...), if in one."""
    initialize()
    return jax.distributed.is_initialized()


def is_first(teams: Sequence[Team]) -> bool:
    """Whether this process is the one that prints and writes."""
    return not isinstance(teams[0], Here) or jax.process_index() == 0


@contextlib.contextmanager
def peer(name: str, python: str | None, processes: int, timeout: float) -> Iterator[Launched]:
    """Start a team of another library, whose ranks idle while others are measured.

    Yields:
      The team.

    Raises:
      ValueError: the library, or the source tree that its ranks are in, is not there.
      LaunchError: its ranks did not meet.
    """
    if not (_SOURCES / f"{name}_rank.py").exists():
        raise ValueError(
            f"--against {name}: its ranks are in jaxcoll's source tree (docs/peers), not in the "
            "wheel: run `jaxcoll bench` from a checkout."
        )
    interpreter = _interpreter(name, python)
    # `ranks` is found without jaxcoll, which would need JAX; both folders come last, so that
    # nothing in them hides a module of the library's own.
    code = (
        f"import sys; sys.path += {[str(Path(__file__).parent), str(_SOURCES)]!r}; "
        f"import {name}_rank; {name}_rank.main()"
    )
    with launched(name, (), [interpreter, "-c", code], _worlds(processes), timeout) as team:
        yield team


def _interpreter(name: str, python: str | None) -> str:
    """The interpreter, once it is known to have the library."""
    interpreter = sys.executable if python is None else shutil.which(python)
    flag = f"--{name}-python"
    if interpreter is None:
        raise ValueError(f"{flag}: there is no interpreter {python!r}.")
    code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({name!r}))"
    safe = {**os.environ, **_SAFE}
    if subprocess.run([interpreter, "-c", code], env=safe, capture_output=True).returncode:
        raise ValueError(
            f"--against {name}: {interpreter} has no {name}; name an interpreter that has it with "
            f"{flag}."
        )
    return interpreter


def _worlds(processes: int) -> list[dict[str, str]]:
    """Each rank's environment variables, as PyTorch and as TensorFlow read them."""
    port, *ports = (free_port() for _ in range(processes + 1))
    cluster = {"worker": [f"127.0.0.1:{each}" for each in ports]}
    common = {**_SAFE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["WORLD_SIZE"] = str(processes)
    return [
        {
            **common,
            "RANK": str(rank),
            "TF_CONFIG": json.dumps(
                {"cluster": cluster, "task": {"type": "worker", "index": rank}}
            ),
        }
        for rank in range(processes)
    ]
