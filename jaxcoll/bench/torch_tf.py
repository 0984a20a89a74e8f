"""Other libraries on the same trees, in the same run: PyTorch over Gloo, and TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxcoll._cluster.launch.local import free_port
from jaxcoll.bench.rank_pool import Entry, Launched, launched

ENTRIES: dict[str, tuple[Entry, ...]] = {
    "torch": (
        ("torch flat",),
        tuple(f"torch buckets@{size}MiB" for size in (1, 4, 16, 25)),
    ),
    "tensorflow": (("tensorflow ring@32MB",),),
}
"""What each is measured with; of several in one entry, the fastest of a short trial."""


@contextlib.contextmanager
def peer(name: str, python: str | None, processes: int, timeout: float) -> Iterator[Launched]:
    """Start a team of another library.

    Its ranks idle while others are measured; they share the machine, never the clock.

    Args:
      name: "torch" or "tensorflow".
      python: an interpreter that has it; None: this one.
      processes: how many ranks, of one CPU device each.
      timeout: seconds that one answer may take.

    Yields:
      The team.

    Raises:
      ValueError: the library is not there.
      LaunchError: its ranks did not meet.
    """
    interpreter = _interpreter(name, python)
    # The folder of `ranks` and not jaxcoll, which would need JAX; behind everything else, so
    # that nothing in it hides a module of the library's own.
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r}); "
        f"from ranks import {name}_rank; {name}_rank.main()"
    )
    with launched(
        name, ENTRIES[name], [interpreter, "-c", code], _worlds(name, processes), timeout
    ) as team:
        yield team


def _interpreter(name: str, python: str | None) -> str:
    """The interpreter, once it is known to have the library."""
    interpreter = sys.executable if python is None else shutil.which(python)
    flag = f"--{name}-python"
    if interpreter is None:
        raise ValueError(f"{flag}: there is no interpreter {python!r}.")
    code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({name!r}))"
    found = subprocess.run([interpreter, "-c", code], env=_safe(), capture_output=True, check=False)
    if found.returncode:
        raise ValueError(
            f"--against {name}: {interpreter} has no {name}; name an interpreter that has it with "
            f"{flag}."
        )
    return interpreter


def _worlds(name: str, processes: int) -> list[dict[str, str]]:
    """Each rank's environment variables, in the library's own words."""
    if name == "torch":
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1", **_SAFE}
        return [{**common, "RANK": str(rank)} for rank in range(processes)]
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(processes)]}
    return [
        {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}),
            "CUDA_VISIBLE_DEVICES": "-1",
            **_SAFE,
        }
        for i in range(processes)
    ]


# A folder of the user's that is called torch is not to be taken for the library.
_SAFE = {"PYTHONSAFEPATH": "1"}


def _safe() -> dict[str, str]:
    return {**os.environ, **_SAFE}
