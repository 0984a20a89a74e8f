"""The `batches` argument of `Elastic.run`, as one function that returns a worker's rows."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcoll._plan.packs.leaves import flatten_with_paths
from jaxcoll._show.units import pluralize
from jaxcoll._train.batches import Batches, count_divisible

Rows = Callable[[int, int, int], Any]
"""A function of (step, this worker's index, number of workers) that returns the worker's rows."""

_EXPECTED = """\
`Elastic.run` expects batches that it can request again after a loss: `jc.batches(rows, \
batch_size)`; a list of batches; `lambda step: batch`; or `lambda step, worker, workers: rows`, \
which returns this worker's rows; got {got}."""

_CHOOSE = "Choose numbers of rows that every possible number of workers divides."


def convert_batches(batches: Any) -> Rows:
    """Convert `batches` to a function that returns a worker's rows.

    Raises:
      ValueError: `Elastic.run` does not accept `batches`.
    """
    if isinstance(batches, Batches):
        return batches.share
    if isinstance(batches, list) and batches:
        return _split(lambda step: batches[step % len(batches)])
    if not callable(batches):
        raise ValueError(_EXPECTED.format(got=type(batches).__name__))
    if (count := _count_positions(batches)) not in (1, 3):
        raise ValueError(_EXPECTED.format(got=f"a function of {count} arguments"))
    return _split(batches) if count == 1 else batches


def describe_source(batches: Any) -> str:
    """Describe batches by a text that must be equal on all workers; "" for a function."""
    if isinstance(batches, Batches):
        return batches.source
    return f"a list, digest {_digest(batches[0])}" if isinstance(batches, list) else ""


def _digest(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path, x in flatten_with_paths(batch)[0]:
        digest.update(f"{path} {np.shape(x)}".encode())
        digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()


def _count_positions(function: Callable[..., Any]) -> int:
    """Count required positional arguments; 3 if a function takes any number."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is written in C
        return 3
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    positions = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positions)


def _split(batch_of: Callable[[int], Any]) -> Rows:
    """Make a function that takes a worker's equal share of whole batches."""

    def rows(step: int, worker: int, workers: int) -> Any:
        batch = batch_of(step)
        for path, x in flatten_with_paths(batch)[0]:
            if not np.ndim(x):
                raise ValueError(
                    f"`Elastic`: batch{path} of step {step} is a number "
                    f"({x!r}), which has no rows for the workers to share. A batch is an array "
                    "with rows as its leading dimension, or a tree of such arrays; "
                    "`np.asarray` makes one from numbers."
                )
        counts = {np.shape(x)[0] for x in jax.tree.leaves(batch)}
        here = jax.local_device_count()
        used = {n: n if n % (workers * here) == 0 else 0 for n in counts}
        if len(counts) == 1:
            used = {n: count_divisible(n, workers * here, _CHOOSE) for n in counts}
        elif not all(used.values()):  # to leave out rows would part what belongs together
            raise ValueError(
                f"`Elastic`: the arrays of the batch of step {step} have {sorted(counts)} rows, "
                f"which do not all divide among {workers} workers with {pluralize(here, 'device')} "
                f"each. {_CHOOSE}"
            )

        def share(x: Any) -> Any:
            count = used[np.shape(x)[0]] // workers
            return x[worker * count : (worker + 1) * count]

        return jax.tree.map(share, batch)

    return rows
