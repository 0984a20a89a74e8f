"""Which world is measured: devices of this process, processes started here, or a launched job."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launch.local import join, world
from jaxcoll.bench.lab import Lab, Network, lab
from jaxcoll.bench.rank_pool import Entry, Here, Team, launched

SIMULATED = 8
"""Simulated CPU devices by default."""
SOURCES = Path(__file__).parents[2] / "docs" / "peers"
"""What of the benchmark is in the source tree, and not in the wheel."""


def from_checkout(what: str, name: str) -> Any:
    """A module of `SOURCES`; where that is not there, an error that begins with `what`."""
    file = SOURCES / f"{name}.py"
    if not file.exists():
        raise ValueError(
            f"{what} in jaxcoll's source tree (docs/peers), not in the wheel: run `jaxcoll bench` "
            "from a checkout."
        )
    return _loaded(file)


@functools.cache  # not by `sys.modules`, where a module stays whose code has failed
def _loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"jaxcoll_peers_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    # Dataclasses look their module up by its name.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def teams_of(
    entries: Sequence[Entry],
    *,
    processes: int | None = None,
    devices: int | None = None,
    platform: str | None = None,
    network: Network | None = None,
    against: Mapping[str, str | None] | None = None,  # of `PEERS`, with their interpreters
    timeout: float = 600,
) -> Iterator[list[Team]]:
    """The teams that the command's flags ask for, JAX's first; none is left at the end."""
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
    devices = devices or 1
    if against and devices > 1:
        raise ValueError("--against compares processes of one device each: leave --devices out.")
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(others.peer(name, python, processes, timeout))
            for name, python in (against or {}).items()
            for others in [from_checkout(f"--against {name}: its ranks are", "peer")]
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
    with lab(network.hosts, network.rate) as made:
        variables = made.variables(network.per_host)
        of_rank = [made.on(rank // network.per_host) for rank in range(len(variables))]
        with launched("jax", entries, _command(devices), variables, timeout, of_rank) as team:
            team.network, team.sent_bytes = str(network), made.sent_bytes
            yield team, made


def _here(entries: Sequence[Entry], devices: int | None, platform: str | None) -> Here:
    """This process: alone with its devices, or as one of a launched job."""
    from jaxcoll.bench.ranks.jax_rank import JaxRank

    # Flags that describe this process leave no doubt that it is alone.
    alone = devices is not None or platform is not None
    if not (together := join()) and not alone:
        initialize()  # enters the job of a launcher that it knows (Slurm, Open MPI, ...), if in one
        together = jax.distributed.is_initialized()
    if together and jax.process_count() > 1:
        return Here(entries, JaxRank(jax.devices()), together=True)
    found = jax.devices() if together else devices_of(platform or "cpu", devices)
    return Here(entries, JaxRank(found), together=False)


def devices_of(platform: str, count: int | None) -> list[jax.Device]:
    """The devices that `--platform` and `--devices` ask for; those of "cpu" are simulated."""
    if platform == "cpu":
        # Both must be set before the first backend exists; JAX refuses it later.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count or SIMULATED)
        return jax.devices("cpu")
    try:
        devices = jax.devices(None if platform == "auto" else platform)
    except RuntimeError as error:
        there = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ValueError(
            f"--platform {platform}: JAX finds no such device here, only {there}. Install JAX for "
            f"{platform} (`pip install -U 'jax[{'cuda13' if platform == 'gpu' else platform}]'`), "
            "or leave --platform out for simulated CPU devices."
        ) from error
    if count is not None and count > len(devices):
        raise ValueError(
            f"--devices {count}: this machine has {len(devices)} {devices[0].platform} "
            f"device{'s' if len(devices) > 1 else ''}. Ask for fewer, or leave --platform out for "
            "simulated CPU devices."
        )
    return devices[:count]


def is_first(teams: Sequence[Team]) -> bool:
    """Whether this process is the one that prints and writes."""
    return not isinstance(teams[0], Here) or jax.process_index() == 0
