"""Teams of other libraries for `jaxcoll bench --against`, in interpreters of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxcoll.bench
from jaxcoll.bench.rank_pool import Launched, launched

SOURCES = Path(__file__).parent
_BENCH = Path(jaxcoll.bench.__file__).parent
# A folder of the user's that is called torch must not be taken for the library.
_SAFE = {"PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def peer(name: str, python: str | None, processes: int, timeout: float) -> Iterator[Launched]:
    """Start a team of another library, whose ranks idle while others are measured.

    Yields:
      The team.

    Raises:
      ValueError: the library is not there.
      LaunchError: its ranks did not meet.
    """
    interpreter = _interpreter(name, python)
    # `ranks` is found without jaxcoll, which would need JAX; both folders come last, so that
    # nothing in them hides a module of the library's own.
    code = (
        f"import sys; sys.path += {[str(_BENCH), str(SOURCES)]!r}; "
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
    port, *ports = (_free_port() for _ in range(processes + 1))
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
