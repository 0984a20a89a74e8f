"""Which world is measured: devices of this process, processes started here, or a launched job."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

import jax

from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launch.local import join, world
from jaxcoll.bench.devices import devices_of
from jaxcoll.bench.rank_pool import Entry, Here, Team, launched
from jaxcoll.bench.torch_tf import peer


@contextlib.contextmanager
def teams_of(args: argparse.Namespace, entries: Sequence[Entry]) -> Iterator[list[Team]]:
    """The teams that the command's flags ask for, JAX's first; none is left at the end.

    Args:
      args: of `jaxcoll bench`.
      entries: what JAX is to be measured with.

    Yields:
      The teams.

    Raises:
      ValueError: the flags ask for what is not there.
      LaunchError: the ranks of a team did not meet.
    """
    if args.processes is None:
        if args.against:
            raise ValueError("--against needs --processes N: the others have no simulated devices.")
        yield [_here(args, entries)]
        return
    n = args.processes
    if n < 2:
        raise ValueError(f"--processes must be at least 2; got {n}.")
    if args.platform not in (None, "cpu"):
        raise ValueError(
            f"--processes starts processes of CPU devices, and --platform is {args.platform}: "
            "start one process for each host with a launcher that JAX knows, and leave --processes "
            "out."
        )
    devices = 1 if args.devices is None else args.devices
    if devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}.")
    if args.against and devices > 1:
        raise ValueError("--against compares processes of one device each: leave --devices out.")
    command = [sys.executable, "-m", "jaxcoll.bench.ranks.jax_rank", str(devices)]
    with contextlib.ExitStack() as stack:
        teams: list[Team] = []
        for name in args.against:
            python = getattr(args, f"{name}_python")
            teams.append(stack.enter_context(peer(name, python, n, args.timeout)))
        variables = stack.enter_context(world(n))
        jax_team = launched("jax", entries, command, variables, args.timeout)
        yield [stack.enter_context(jax_team), *teams]


def _here(args: argparse.Namespace, entries: Sequence[Entry]) -> Here:
    """This process: alone with its devices, or as one of a job that somebody has launched."""
    from jaxcoll.bench.ranks.jax_rank import JaxRank

    # Flags that describe this process leave no doubt that it is alone.
    alone = args.devices is not None or args.platform is not None
    together = join() or (not alone and _clustered())
    if together and jax.process_count() > 1:
        return Here(entries, JaxRank(jax.devices()), together=True)
    devices = jax.devices() if together else devices_of(args.platform or "cpu", args.devices)
    return Here(entries, JaxRank(devices), together=False)


def _clustered() -> bool:
    """Enter the job of a launcher that `initialize` knows (Slurm, Open MPI, ...), if in one."""
    initialize()
    return jax.distributed.is_initialized()


def is_first(teams: Sequence[Team]) -> bool:
    """Whether this process is the one that prints and writes."""
    return not isinstance(teams[0], Here) or jax.process_index() == 0
