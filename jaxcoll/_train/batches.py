"""Batches of rows that every process can read, placed on the devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._compat.coordination import store
from jaxcoll._mesh.mesh import axis_names, checked_mesh, no_mesh
from jaxcoll._mesh.placement import place
from jaxcoll._plan.checks import is_integer, positive
from jaxcoll._show.units import counted, some
from jaxcoll.errors import ProgramMismatchError

_counter = itertools.count()  # of the `Batches` that are split over processes


def batches(
    source: Any,
    batch_size: int,
    *,
    seed: int | None = None,
    uneven: Literal["drop", "pad"] = "drop",
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
) -> Batches:
    """Return the batches of rows that every process can read, each reading its own share.

    The order of an epoch depends on `seed` and its number alone, and not on how many processes or
    devices share a batch. Each row is read once in an epoch, by one process, and every replica has
    equally many rows of every batch.

    Args:
      source: all rows, the same on every process: a pytree of arrays with equally many rows
        (numpy, memory-mapped, or anything with `shape` and `[numbers]`); or an object with `len`
        and `[i]`, whose items are pytrees of arrays and numbers.
      batch_size: rows of a batch, over all processes.
      seed: of the order, another one in every epoch; None: the order of the source.
      uneven: what becomes of rows that do not fill a batch, or do not divide over the replicas.
        "drop": the last rows of an epoch are left out, and `batch_size` must divide. "pad": each
        item is a pair `(batch, weights)`, with float32 weights of 1 for rows and of 0 for padding
        (copies of the batch's last row), as `jc.WeightedLoss` and `jc.WeightedMean` take them.
      mesh: devices and axes; None: as in `jc.data_parallel`.
      axis_name: the mesh axis, or axes from outer to inner, that batches are split over.

    Returns:
      `Batches`: each `for` over it is an epoch of global arrays, split over the replicas. Cost: one
      batch in the devices' memory, and 8 bytes of the host's for each row.

    Raises:
      ValueError: an argument is invalid, the source has no rows that can be read by number or
        fewer than one batch; or, in a `for`, the batch does not divide over the replicas.
      ProgramMismatchError: in a `for`, this process has another seed or source than the first.

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
    if seed is not None and not (is_integer(seed) and 0 <= seed < 1 << 63):
        raise ValueError(
            f"`batches` expects `seed` to be an integer from 0, or None; got {seed!r}."
        )
    if uneven not in ("drop", "pad"):
        raise ValueError(f"`batches` expects `uneven` to be 'drop' or 'pad'; got {uneven!r}.")
    if mesh is not None:
        checked_mesh(mesh, axis_name, "batches")
    rows, read = _rows(source)
    if rows < (batch_size if uneven == "drop" else 1):
        advice = "Make batches smaller, or pad: `uneven='pad'`." if rows else "Give it rows."
        raise ValueError(
            f"`batches`: the source has {rows} rows, fewer than one batch of {batch_size}. {advice}"
        )
    return Batches(rows, read, batch_size, seed, uneven == "pad", mesh, axis_name)


@dataclasses.dataclass(eq=False, repr=False)
class Batches:
    """Epochs of batches; made by `batches`.

    Each `for` is one epoch: the next one if the last `for` came to its end, the same one from its
    first row if not. It begins in the middle of an epoch where `state` was set.
    """

    _rows: int
    _read: Callable[[np.ndarray], Any]
    _size: int
    _seed: int | None
    _pads: bool
    _mesh: Mesh | None
    _axis_name: str | tuple[str, ...]

    def __post_init__(self) -> None:
        self._next = self._given = (0, 0)
        self._is_compared = False
        self._about = {"rows": self._rows, "seed": -1 if self._seed is None else int(self._seed)}
        # Behind the last row with which a batch can begin
        self._stop = self._rows if self._pads else self._rows - self._size + 1
        of_epoch = functools.partial(order, self._rows, self._seed)
        self._order = functools.lru_cache(maxsize=1)(of_epoch)

    def __repr__(self) -> str:
        seed = "in the source's order" if self._seed is None else f"seed {self._seed}"
        epoch, row = self._given
        rows = f"{counted(self._rows, 'row')}, {counted(len(self), 'batch', 'batches')}"
        return f"Batches({rows} of {self._size:,} an epoch, {seed}; at epoch {epoch}, row {row:,})"

    def __len__(self) -> int:
        """Return the number of batches of a complete epoch."""
        return -(-self._rows // self._size) if self._pads else self._rows // self._size

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the present epoch, as global arrays."""
        epoch, row = self._next
        self._next = (epoch, 0)
        mesh = checked_mesh(self._mesh, self._axis_name, "batches")
        self._compare(mesh)
        sharding = NamedSharding(mesh, PartitionSpec(self._axis_name))
        size = self._padded(math.prod(mesh.shape[a] for a in axis_names(self._axis_name)))
        # The places in a batch of the rows that this process's devices have.
        spans = sharding.addressable_devices_indices_map((size,)).values()
        own = sorted({span[0].indices(size) for span in spans if span is not None})
        places = np.concatenate([np.arange(*span) for span in own])
        for first in range(row, self._stop, self._size):
            with no_mesh():
                batch = place(self._part(epoch, first, places), sharding)
            row = first + self._size
            self._given = (epoch, row) if row < self._stop else (epoch + 1, 0)
            yield batch
        self._next = self._given = (epoch + 1, 0)

    @property
    def state(self) -> dict[str, int]:
        """The position at which the next batch begins.

        Four ints, to be kept in a checkpoint: "epoch", "row" (of the epoch's order), and "rows" and
        "seed", by which another source is refused. Set it before a `for`, with the same source and
        seed, on any number of processes and with any batch size: the epoch goes on with the rows
        that it has not given.

        Raises:
          ValueError: it is not a state, or one of another source or seed.
        """
        epoch, row = self._given
        return {"epoch": epoch, "row": row, **self._about}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        try:
            epoch, row, *about = (int(state[name]) for name in ("epoch", "row", *self._about))
        except (KeyError, TypeError, ValueError):
            epoch, row, about = -1, 0, []
        if epoch < 0 or not 0 <= row < self._rows or about != [*self._about.values()]:
            raise ValueError(
                "`state` must be what `batches(...).state` was for these rows in this order (seed "
                f"-1: that of the source), {self._about}; got {state!r}."
            )
        self._next = self._given = (epoch, row)

    @property
    def source(self) -> str:
        """What has to be the same on every process, in words."""
        return json.dumps({**self._about, "batch_size": self._size})

    def share(self, step: int, worker: int, workers: int) -> Any:
        """Return one worker's rows of the batch of a step, as `jc.Elastic.run` takes them.

        Args:
          step: counts batches from the first epoch on.
          worker: this worker's place among them.
          workers: how many there are, each with as many devices as this one.

        Returns:
          Host arrays, and with `uneven="pad"` their weights; the same rows for any number of
          workers together.

        Raises:
          ValueError: the batch does not divide over the workers' devices.
        """
        epoch, batch = divmod(step, len(self))
        rows = self._padded(workers * jax.local_device_count()) // workers
        return self._part(epoch, batch * self._size, np.arange(worker * rows, (worker + 1) * rows))

    def _part(self, epoch: int, row: int, places: np.ndarray) -> Any:
        """Return the rows at these places of the batch that begins with a row."""
        numbers = self._order(epoch)[row : row + self._size]
        # The last row stands in for padding: a loss that is finite on all rows is finite on it, and
        # NaN times the weight 0 would be NaN.
        batch = self._read(numbers[np.minimum(places, len(numbers) - 1)])
        return (batch, (places < len(numbers)).astype(np.float32)) if self._pads else batch

    def _padded(self, replicas: int) -> int:
        size = self._size
        if size % replicas and not self._pads:
            raise ValueError(
                f"`batches`: a batch of {size} rows does not divide over {replicas} replicas "
                f"({size} = {replicas} × {size // replicas} + {size % replicas}). Choose a "
                "`batch_size` that does, or pad: `uneven='pad'`."
            )
        return -(-size // replicas) * replicas

    def _compare(self, mesh: Mesh) -> None:
        """Refuse other rows than those of the process that came first. Nobody is waited for."""
        keys = store()
        if self._is_compared or keys is None:
            return
        self._is_compared = True
        if len({device.process_index for device in mesh.devices.flat}) == 1:
            return
        own = self.source
        first = keys.agree(f"jaxcoll/batches/{next(_counter)}", own)
        if first != own:
            raise ProgramMismatchError(
                f"`batches`: process {keys.process} splits {own}, and another one {first}: some "
                "rows would be read several times and others never. Give all processes one source "
                "and one seed, which is neither the time nor the number of the process."
            )


def order(rows: int, seed: int | None, epoch: int) -> np.ndarray:
    """Return the numbers of all rows in the order of an epoch."""
    if seed is None:
        return np.arange(rows)
    # Every NumPy has the same raw bits, but `Generator.permutation` may change with its version,
    # and processes would then read different rows.
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(rows), kind="stable")


def _rows(source: Any) -> tuple[int, Callable[[np.ndarray], Any]]:
    """Return how many rows a source has, and a function that reads some of them as host arrays."""
    # An iterator would be a leaf, with a warning of JAX's.
    leaves = [source] if hasattr(source, "__next__") else jax.tree.leaves(source)
    counts = {x.shape[0] for x in leaves if getattr(x, "shape", ()) and hasattr(x, "__getitem__")}
    if len(counts) == 1 and all(getattr(x, "shape", ()) for x in leaves):
        columns = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, source)
        return *counts, lambda numbers: jax.tree.map(lambda x: _array(x[numbers]), columns)
    is_one = len(leaves) == 1 and leaves[0] is source
    if not is_one or not all(hasattr(source, name) for name in ("__len__", "__getitem__")):
        shapes = [str(getattr(x, "shape", type(x).__name__)) for x in leaves]
        raise ValueError(
            "`batches` expects rows that it can read in any order: a pytree of arrays with equally "
            "many rows (of a list: `np.asarray(rows)`), or one object with `len` and `[i]` that "
            f"gives a row; got {type(source).__name__} of "
            f"{', '.join(some(shapes, 4)) or 'nothing'}."
        )

    def read(numbers: np.ndarray) -> Any:
        items = [source[i] for i in numbers.tolist()]
        return jax.tree.map(lambda *xs: np.stack([_array(x) for x in xs]), *items)

    return len(source), read


def _array(x: Any) -> np.ndarray:
    if isinstance(x, np.ma.MaskedArray):
        jax.typeof(x)  # refuses it, where `np.asarray` drops the mask
    return np.asarray(x)
