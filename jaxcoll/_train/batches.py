"""Batches of a data set that every process can read, placed on the devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._compat.coordination import store
from jaxcoll._job.exchange import agree
from jaxcoll._plan.checks import is_integer, positive
from jaxcoll._show.units import pluralize, some
from jaxcoll._step.mesh.mesh import axis_names, check_mesh, no_mesh
from jaxcoll._step.mesh.placement import place
from jaxcoll.errors import ProgramMismatchError

_counter = itertools.count()  # numbers the `Batches` that are split over processes


def batches(
    source: Any,
    batch_size: int,
    *,
    seed: int | None = None,
    uneven: Literal["drop", "pad"] = "drop",
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
) -> Batches:
    """Split a data set that every process can read into batches; each process reads its share.

    The order of rows in an epoch depends only on `seed` and the epoch's number, not on the number
    of processes or devices. Each row is read once per epoch, by one process, and every replica gets
    equally many rows of every batch.

    Args:
      source: all rows, the same on every process: a pytree of arrays with equally many rows
        (numpy, memory-mapped, or anything with `shape` and `[numbers]`); or an object with `len`
        and `[i]` that returns pytrees of arrays and numbers.
      batch_size: number of rows in a batch, over all processes.
      seed: seed of the order, which is new in every epoch; None: the order of the source.
      uneven: how to treat rows that do not fill a batch or do not divide over the replicas.
        "drop": leave out the last rows of an epoch; in a `for`, `batch_size` must divide, and
        `jc.Elastic`, where any number of workers may remain, leaves out the last rows of a batch.
        "pad": each item is a pair `(batch, weights)`, with float32 weights of 1 for rows and 0 for
        padding (copies of the batch's last row), for `jc.WeightedLoss` and `jc.WeightedMean`.
      mesh: devices and axes; None: as in `jc.data_parallel`.
      axis_name: the mesh axis, or axes from outer to inner, that batches are split over.

    Returns:
      `Batches`: each `for` over it is one epoch of global arrays, split over the replicas. Cost:
      device memory of one batch, and 8 bytes of host memory per row.

    Raises:
      ValueError: an argument is invalid, or the source cannot be indexed or has fewer rows than one
        batch; or, in a `for`, the batch does not divide over the replicas.
      ProgramMismatchError: in a `for`, this process's seed or source differs from the first's.

    Examples:
      >>> import numpy as np
      >>> rows = {"x": np.arange(10.0), "y": np.arange(10)}
      >>> [batch["y"].tolist() for batch in batches(rows, 8)]
      [[0, 1, 2, 3, 4, 5, 6, 7]]
      >>> padded = batches(rows, 8, uneven="pad")
      >>> [weights.tolist() for batch, weights in padded][1]
      [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    batch_size = positive("batches", "batch_size", batch_size)
    expects = "`batches` expects"
    if seed is not None and not (is_integer(seed) and 0 <= seed < 1 << 63):
        raise ValueError(f"{expects} `seed` to be an integer from 0, or None; got {seed!r}.")
    if uneven not in ("drop", "pad"):
        raise ValueError(f"{expects} `uneven` to be 'drop' or 'pad'; got {uneven!r}.")
    if mesh is not None:
        check_mesh(mesh, axis_name, "batches")
    rows, read = _rows(source)
    if rows < (batch_size if uneven == "drop" else 1):
        advice = "Make batches smaller, or pad: `uneven='pad'`." if rows else "Give it rows."
        few = f"the source has {rows} rows, fewer than one batch of {batch_size}"
        raise ValueError(f"`batches`: {few}. {advice}")
    return Batches(rows, read, batch_size, seed, uneven == "pad", mesh, axis_name)


@dataclasses.dataclass(eq=False, repr=False)
class Batches:
    """Epochs of batches; made by `batches`.

    Each `for` is one epoch: the next one if the last `for` was completed, else the same one again.
    After `state` was set, the first `for` begins there, possibly in the middle of an epoch.
    """

    _rows: int
    _read: Callable[[np.ndarray], Any]
    _size: int
    _seed: int | None
    _pads: bool
    _mesh: Mesh | None
    _axis_name: str | tuple[str, ...]

    def __post_init__(self) -> None:
        self._next = self._position = (0, 0)
        self._is_compared = False
        self._identity = {"rows": self._rows, "seed": -1 if self._seed is None else int(self._seed)}
        # One more than the last row at which a batch can begin
        self._stop = self._rows if self._pads else self._rows - self._size + 1
        of_epoch = functools.partial(order, self._rows, self._seed)
        self._order = functools.lru_cache(maxsize=1)(of_epoch)

    def __repr__(self) -> str:
        seed = "in the source's order" if self._seed is None else f"seed {self._seed}"
        epoch, row = self._position
        rows = f"{pluralize(self._rows, 'row')}, {pluralize(len(self), 'batch', 'batches')}"
        return f"Batches({rows} of {self._size:,} an epoch, {seed}; at epoch {epoch}, row {row:,})"

    def __len__(self) -> int:
        """Return the number of batches in a complete epoch."""
        return -(-self._rows // self._size) if self._pads else self._rows // self._size

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch, as global arrays."""
        epoch, row = self._next
        self._next = (epoch, 0)
        mesh = check_mesh(self._mesh, self._axis_name, "batches")
        self._compare(mesh)
        sharding = NamedSharding(mesh, PartitionSpec(self._axis_name))
        size = self._pad_size(math.prod(mesh.shape[a] for a in axis_names(self._axis_name)))
        # Of the rows on this process's devices. Those along other axes hold the same: each once.
        slices = sharding.addressable_devices_indices_map((size,)).values()
        spans = sorted({x[0].indices(size) for x in slices if x is not None})
        positions = np.concatenate([np.arange(*span) for span in spans])
        for first in range(row, self._stop, self._size):
            with no_mesh():
                batch = place(self._part(epoch, first, positions), sharding)
            row = first + self._size
            self._position = (epoch, row) if row < self._stop else (epoch + 1, 0)
            yield batch
        self._next = self._position = (epoch + 1, 0)

    @property
    def state(self) -> dict[str, int]:
        """The position of the next batch, to be saved in a checkpoint.

        It has four ints: "epoch"; "row", the position in the epoch's order; and "rows" and "seed",
        which detect another source. Set it before a `for`, with the same source and seed; the
        number of processes and the batch size may change. The epoch continues with the rows that
        it has not yielded yet.

        Raises:
          ValueError: the value is not a state, or belongs to another source or seed.
        """
        epoch, row = self._position
        return {"epoch": epoch, "row": row, **self._identity}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        try:
            epoch, row, *identity = (int(state[name]) for name in ("epoch", "row", *self._identity))
        except (KeyError, TypeError, ValueError):
            epoch, row, identity = -1, 0, []
        if epoch < 0 or not 0 <= row < self._rows or identity != [*self._identity.values()]:
            must = "a `batches(...).state` for these rows in this order (seed -1: the source's)"
            raise ValueError(f"`state` must be {must}, {self._identity}; got {state!r}.")
        self._next = self._position = (epoch, row)

    @property
    def source(self) -> str:
        """Description of the settings that must be the same on every process, as JSON."""
        return json.dumps({**self._identity, "batch_size": self._size})

    def share(self, step: int, worker: int, workers: int) -> Any:
        """Return one worker's rows of a step's batch, for `jc.Elastic.run`.

        Args:
          step: number of the batch, counted from the first epoch on.
          worker: index of this worker.
          workers: number of workers, each with as many devices as this one.

        Returns:
          Host arrays, and with `uneven="pad"` their weights. All workers together get the same
          rows for any number of workers, except that without padding the last rows of a batch,
          fewer than there are replicas, are left out if they do not divide.

        Raises:
          ValueError: without padding, the batch has fewer rows than there are replicas.
        """
        epoch, batch = divmod(step, len(self))
        replicas = workers * jax.local_device_count()
        size = self._pad_size(replicas) if self._pads else count_divisible(self._size, replicas)
        rows = size // workers
        return self._part(epoch, batch * self._size, np.arange(worker * rows, (worker + 1) * rows))

    def _part(self, epoch: int, row: int, positions: np.ndarray) -> Any:
        """Read the rows at these positions of the batch that begins at `row` of the epoch."""
        numbers = self._order(epoch)[row : row + self._size]
        # Padding repeats the last row: a loss that is finite on all rows is finite on it. Zeros
        # might give NaN, and NaN times the weight 0 is NaN.
        batch = self._read(numbers[np.minimum(positions, len(numbers) - 1)])
        return (batch, (positions < len(numbers)).astype(np.float32)) if self._pads else batch

    def _pad_size(self, replicas: int) -> int:
        size = self._size
        if size % replicas and not self._pads:
            sum_ = f"{size} = {replicas} × {size // replicas} + {size % replicas}"
            raise ValueError(
                f"`batches`: a batch of {size} rows does not divide over {replicas} replicas "
                f"({sum_}). Choose a `batch_size` that does, or pad: `uneven='pad'`."
            )
        return -(-size // replicas) * replicas

    def _compare(self, mesh: Mesh) -> None:
        """Refuse settings that differ from those of the first process, without waiting for any."""
        keys = store()
        if self._is_compared or keys is None:
            return
        self._is_compared = True
        if len({device.process_index for device in mesh.devices.flat}) == 1:
            return
        here = self.source
        first = agree(keys, f"jaxcoll/batches/{next(_counter)}", here)
        if first != here:
            raise ProgramMismatchError(
                f"`batches`: process {keys.process} splits {here}, but another one splits {first}. "
                "Give all processes the same source and seed, not one of the time or the process."
            )


_PAD = "`jc.batches(..., uneven='pad')` uses all."


def count_divisible(rows: int, replicas: int, advice: str = _PAD) -> int:
    # The others are left out: a mean over replicas is that over rows only if each has equally many.
    if 0 < rows < replicas:
        few = f"fewer than one for each of {replicas} replicas"
        raise ValueError(f"`Elastic`: a batch has {pluralize(rows, 'row')}, {few}.")
    if rest := rows % replicas:
        _log_once(
            f"A batch of {pluralize(rows, 'row')} does not divide over {replicas} replicas: each "
            f"step leaves out its last {pluralize(rest, 'row')}. {advice}"
        )
    return rows - rest


_log_once = functools.cache(logging.getLogger("jaxcoll").warning)


def order(rows: int, seed: int | None, epoch: int) -> np.ndarray:
    """List the indices of all rows in the order of an epoch."""
    if seed is None:
        return np.arange(rows)
    # The raw bits are the same in every NumPy, but `Generator.permutation` may change with its
    # version, and processes would then read different rows.
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(rows), kind="stable")


def _rows(source: Any) -> tuple[int, Callable[[np.ndarray], Any]]:
    """Count the rows of a source, and make a function that reads rows as host arrays."""
    # `tree.leaves` would take an iterator for a leaf, with a warning.
    leaves = [source] if hasattr(source, "__next__") else jax.tree.leaves(source)
    counts = {x.shape[0] for x in leaves if getattr(x, "shape", ()) and hasattr(x, "__getitem__")}
    if len(counts) == 1 and all(getattr(x, "shape", ()) for x in leaves):
        columns = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, source)
        return *counts, lambda numbers: jax.tree.map(lambda x: _array(x[numbers]), columns)
    is_one = len(leaves) == 1 and leaves[0] is source
    if not is_one or not all(hasattr(source, name) for name in ("__len__", "__getitem__")):
        shapes = [str(getattr(x, "shape", type(x).__name__)) for x in leaves]
        got = f"{type(source).__name__} of {', '.join(some(shapes, 4)) or 'nothing'}"
        raise ValueError(
            "`batches` expects a pytree of arrays with equally many rows (for a list: "
            f"`np.asarray(rows)`), or an object with `len` and `[i]` that returns a row; got {got}."
        )

    def read(numbers: np.ndarray) -> Any:
        items = [source[i] for i in numbers.tolist()]
        return jax.tree.map(lambda *xs: np.stack([_array(x) for x in xs]), *items)

    return len(source), read


def _array(x: Any) -> np.ndarray:
    if isinstance(x, np.ma.MaskedArray):
        jax.typeof(x)  # raises an error; `np.asarray` would drop the mask
    return np.asarray(x)
