"""What `Elastic.run` is given for batches, as one function of a worker's rows."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcoll._train.batches import Batches

Rows = Callable[[int, int, int], Any]
"""One worker's rows of a step's batch: of (step, this worker's place, how many there are)."""

_EXPECTED = """\
`Elastic.run` expects batches that it can ask for again, as after a loss: `jc.batches(rows, \
batch_size)`; a list of batches; `lambda step: batch`; or `lambda step, worker, workers: rows`, \
which returns this worker's rows; got {got}."""


def rows_of(batches: Any) -> Rows:
    """Return the function of a worker's rows that `batches` stands for.

    Raises:
      ValueError: it is none of what `Elastic.run` takes.
    """
    if isinstance(batches, Batches):
        return batches.share
    if isinstance(batches, list) and batches:
        return _split(lambda step: batches[step % len(batches)])
    if not callable(batches):
        raise ValueError(_EXPECTED.format(got=type(batches).__name__))
    if (count := _count_of_positions(batches)) not in (1, 3):
        raise ValueError(_EXPECTED.format(got=f"a function of {count} arguments"))
    return _split(batches) if count == 1 else batches


def source_of(batches: Any) -> str:
    """Return what shows that workers share these batches; "": a function shows nothing."""
    if isinstance(batches, Batches):
        return batches.source
    return f"a list, digest {_digest(batches[0])}" if isinstance(batches, list) else ""


def _digest(batch: Any) -> str:
    found = hashlib.blake2b(digest_size=8)
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        found.update(f"{jax.tree_util.keystr(path)} {np.shape(x)}".encode())
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()


def _count_of_positions(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function must be given; 3 where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one of C's
        return 3
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    positions = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positions)


def _split(batch_of: Callable[[int], Any]) -> Rows:
    """Return the rows of equal shares of whole batches."""

    def rows(step: int, worker: int, workers: int) -> Any:
        def share(path: Any, x: Any) -> Any:
            shape = np.shape(x)
            if not shape:
                raise ValueError(
                    f"`Elastic`: batch{jax.tree_util.keystr(path)} of step {step} is a number "
                    f"({x!r}), which has no rows for the workers to share. A batch is an array, "
                    "whose leading dimension is its rows, or a tree of such arrays: make one of "
                    "numbers by `np.asarray`."
                )
            if shape[0] % workers:
                raise ValueError(
                    f"`Elastic`: batch{jax.tree_util.keystr(path)} of step {step} has the shape "
                    f"{list(shape)}, whose rows do not divide over {workers} workers. Give every "
                    "batch a number of rows that divides by each number of workers that may be "
                    "left, or let `jc.batches(rows, batch_size, uneven='pad')` pad them."
                )
            count = shape[0] // workers
            return x[worker * count : (worker + 1) * count]

        return jax.tree_util.tree_map_with_path(share, batch_of(step))

    return rows
