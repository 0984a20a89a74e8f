"""Batches of training, placed on the devices before they are asked for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._mesh.mesh import axis_names, checked_mesh, no_mesh
from jaxcoll._mesh.placement import place
from jaxcoll._plan.checks import is_integer, positive
from jaxcoll._threads import ahead
from jaxcoll._train.rows import Rows, on_host, order, repeated, rows_of

Uneven = Literal["drop", "pad"]


def batches(
    source: Any,
    batch_size: int,
    *,
    seed: int | None = None,
    uneven: Uneven = "drop",
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    prefetch: int = 2,
) -> Batches:
    """The batches of rows that every process can read, each process reading its own share.

    Law: the order of an epoch depends on `seed` and its number alone, and not on how many
    processes or devices share a batch. Each row is read once in an epoch, by one process, and
    every replica has equally many rows of every batch.

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
      mesh: devices and axes; None: all devices on one axis, as for `jc.data_parallel`.
      axis_name: the mesh axis, or axes from outer to inner, that batches are split over.
      prefetch: batches that are read before they are asked for, in a thread of their own, and
        placed at the next occasion, so that both take place while steps run. 0: no thread.

    Returns:
      `Batches`: each `for` over it is an epoch of global arrays, split over the replicas. Cost:
      `prefetch` + 1 batches in the devices' memory, and 8 bytes of the host's for each row.

    Raises:
      ValueError: an argument is invalid, the source has no rows that can be read by number or
        fewer than one batch; or, in a `for`, the batch does not divide over the replicas.

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
    if seed is not None and not (_is_count(seed) and seed < 1 << 63):
        raise ValueError(
            f"`batches` expects `seed` to be an integer from 0, or None; got {seed!r}."
        )
    _check_ahead("batches", uneven, prefetch)
    rows = Rows(source)
    if len(rows) < (batch_size if uneven == "drop" else 1):
        raise ValueError(
            f"`batches`: the source has {len(rows)} rows, fewer than one batch of {batch_size}. "
            "Make batches smaller, or pad: `uneven='pad'`."
        )
    replicas = _Replicas(mesh, axis_name, "batches")
    return Batches(rows, batch_size, seed, uneven == "pad", replicas, prefetch)


@dataclasses.dataclass(eq=False, repr=False)
class Batches:
    """Epochs of batches; made by `batches`.

    Law: each `for` is one epoch: the next one if the last `for` came to its end, the same one from
    its first row if not. It begins in the middle of an epoch where `state` was set.
    """

    _rows: Rows
    _size: int
    _seed: int | None
    _pads: bool
    _replicas: _Replicas
    _prefetch: int

    def __post_init__(self) -> None:
        self._next = self._seen = (0, 0)
        of_epoch = functools.partial(order, len(self._rows), self._seed)
        self._order = functools.lru_cache(maxsize=1)(of_epoch)

    def __len__(self) -> int:
        """Batches of a complete epoch."""
        return -(-len(self._rows) // self._size) if self._pads else len(self._rows) // self._size

    def __iter__(self) -> Iterator[Any]:
        """What is left of the present epoch, as global arrays."""
        epoch, row = self._next
        self._next = (epoch, 0)
        host = self._host(epoch, row)
        for batch, seen in ahead(host, self._prefetch, self._placed):
            self._seen = seen
            yield batch
        self._next = self._seen = (epoch + 1, 0)

    @property
    def state(self) -> dict[str, int]:
        """Where the next batch begins; what was only read ahead does not count.

        Four ints, to be kept in a checkpoint: "epoch", "row" (of the epoch's order), and "rows" and
        "seed", by which another source is refused. Set it before a `for`, with the same source and
        seed, on any number of processes and with any batch size: the epoch goes on with the rows
        that it has not given.

        Raises:
          ValueError: it is not a state, or one of another source or seed.
        """
        epoch, row = self._seen
        return {"epoch": epoch, "row": row, **self._about()}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        about = self._about()
        try:
            found = {name: int(state[name]) for name in ("epoch", "row", *about)}
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"`state` must be what `batches(...).state` was; got {state!r}."
            ) from None
        if any(found[name] != value for name, value in about.items()):
            raise ValueError(
                f"`state` belongs to other batches: it is of {found['rows']} rows in the order of "
                f"seed {found['seed']}, and these are of {about['rows']} rows and seed "
                f"{about['seed']} (−1: none)."
            )
        epoch, row = found["epoch"], found["row"]
        if epoch < 0 or not 0 <= row < len(self._rows):
            raise ValueError(
                f"`state` must be what `batches(...).state` was, an epoch from 0 and a row from 0 "
                f"to {len(self._rows) - 1}; got {epoch} and {row}."
            )
        self._next = self._seen = (epoch, row)

    def share(self, step: int, worker: int, workers: int) -> Any:
        """One worker's rows of the batch of a step: what `jc.Elastic.run` takes.

        Args:
          step: counts batches from the first epoch on.
          worker: this worker's place among them.
          workers: how many there are, each with as many devices as this one.

        Returns:
          Host arrays, and with `uneven="pad"` their weights; the same rows for any number of
          workers together. Nothing is read ahead.

        Raises:
          ValueError: the batch does not divide over the workers' devices.
        """
        epoch, batch = divmod(step, len(self))
        here = jax.local_device_count()
        rows = self._padded_size(workers * here) // workers
        places = np.arange(worker * rows, (worker + 1) * rows)
        return self._read(epoch, batch * self._size, places)

    def _host(self, epoch: int, row: int) -> Iterator[tuple[Any, tuple[int, int]]]:
        """This process's part of every batch from a row on, and where the next one begins."""
        places = self._replicas.places(self._padded_size(self._replicas.count))
        last = len(self._rows) - (1 if self._pads else self._size)
        while row <= last:
            batch = self._read(epoch, row, places)
            row += self._size
            yield batch, (epoch, row) if row <= last else (epoch + 1, 0)

    def _placed(self, read: tuple[Any, tuple[int, int]]) -> tuple[Any, tuple[int, int]]:
        return self._replicas.placed(read[0]), read[1]

    def _read(self, epoch: int, row: int, places: np.ndarray) -> Any:
        """The rows at these places of the batch that begins with a row."""
        numbers = self._order(epoch)[row : row + self._size]
        at, weights = repeated(places, len(numbers))
        batch = self._rows.read(numbers[at])
        return (batch, weights) if self._pads else batch

    def _padded_size(self, replicas: int) -> int:
        size = self._size
        if size % replicas and not self._pads:
            raise ValueError(
                f"`batches`: a batch of {size} rows does not divide over {replicas} replicas "
                f"({size} = {replicas} × {size // replicas} + {size % replicas}). Choose a "
                "`batch_size` that does, or pad: `uneven='pad'`."
            )
        return -(-size // replicas) * replicas

    def _about(self) -> dict[str, int]:
        return {"rows": len(self._rows), "seed": -1 if self._seed is None else int(self._seed)}


def prefetch(
    loader: Iterable[Any],
    size: int = 2,
    *,
    uneven: Uneven = "drop",
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
) -> Iterator[Any]:
    """The batches of a loader on the devices, some of them before they are asked for.

    Law: what is yielded is what the loader yields, in its order, as global arrays that are split
    over the replicas. With several processes each loader yields its own process's share, as many
    batches as the others', equally long ones.

    Args:
      loader: anything that yields pytrees of host arrays with equally many rows: a PyTorch
        `DataLoader`, a grain data loader, a `tf.data.Dataset`, a generator.
      size: batches that are read before they are asked for, in a thread of their own, and placed
        at the next occasion, so that both take place while steps run. 0: no thread.
      uneven: what becomes of a batch with fewer rows than the first one. "drop": it is left out.
        "pad": each item is a pair `(batch, weights)`, as for `batches`.
      mesh: devices and axes; None: all devices on one axis, as for `jc.data_parallel`.
      axis_name: the mesh axis, or axes from outer to inner, that batches are split over.

    Returns:
      An iterator of global arrays. Cost: `size` + 1 batches in the devices' memory.

    Raises:
      ValueError: an argument is invalid; a batch has no rows, more than the first one, or, without
        padding, rows that do not divide over the replicas.

    Examples:
      >>> import numpy as np
      >>> loader = (np.arange(8.0) + k for k in range(3))
      >>> [float(batch.sum()) for batch in prefetch(loader)]
      [28.0, 36.0, 44.0]
    """
    if not isinstance(loader, Iterable):
        raise ValueError(
            f"`prefetch` expects an iterable of batches; got {type(loader).__name__}. Rows that "
            "can be read by number are for `jc.batches`."
        )
    _check_ahead("prefetch", uneven, size)
    replicas = _Replicas(mesh, axis_name, "prefetch")
    return ahead(_loaded(loader, uneven == "pad", replicas), size, replicas.placed)


def _loaded(loader: Iterable[Any], pads: bool, replicas: _Replicas) -> Iterator[Any]:
    """The batches of a loader that have the size of the first one, on the host."""
    full = 0
    for number, batch in enumerate(on_host(loader)):
        rows, here = rows_of(batch, number), len(replicas.places(replicas.count))
        if rows % here and not pads and rows >= full:
            raise ValueError(
                f"`prefetch`: batch {number} of the loader has {rows} rows, which do not divide "
                f"over this process's {here} replicas. Change the loader's batch size, or pad: "
                "`uneven='pad'`."
            )
        full = full or -(-rows // here) * here
        if rows > full:
            raise ValueError(
                f"`prefetch`: batch {number} of the loader has {rows} rows, more than the first "
                f"one. Batches have one size, but for shorter ones; the first had at most {full}."
            )
        if pads:
            at, weights = repeated(np.arange(full), rows)
            yield jax.tree.map(lambda x, at=at: x[at], batch), weights
        elif rows == full:
            yield batch


class _Replicas:
    """The replicas that share a batch."""

    def __init__(self, mesh: Mesh | None, axis_name: str | tuple[str, ...], caller: str) -> None:
        self._asked, self._axis_name, self._caller = mesh, axis_name, caller
        if mesh is not None:
            checked_mesh(mesh, axis_name, caller)

    @functools.cached_property
    def _sharding(self) -> NamedSharding:
        mesh = checked_mesh(self._asked, self._axis_name, self._caller)
        return NamedSharding(mesh, PartitionSpec(self._axis_name))

    @property
    def count(self) -> int:
        return math.prod(self._sharding.mesh.shape[a] for a in axis_names(self._axis_name))

    def places(self, rows: int) -> np.ndarray:
        """The places in a batch of the rows that this process's replicas have, in order."""
        spans = self._sharding.addressable_devices_indices_map((rows,)).values()
        found = sorted({span[0].indices(rows) for span in spans if span is not None})
        return np.concatenate([np.arange(*span) for span in found])

    def placed(self, batch: Any) -> Any:
        """This process's rows as part of global arrays."""
        with no_mesh():
            return place(batch, self._sharding)


def _check_ahead(caller: str, uneven: Any, ahead: Any) -> None:
    if uneven not in ("drop", "pad"):
        raise ValueError(f"`{caller}` expects `uneven` to be 'drop' or 'pad'; got {uneven!r}.")
    if not _is_count(ahead):
        raise ValueError(
            f"`{caller}` reads a whole number of batches ahead, from 0; got {ahead!r}."
        )


def _is_count(value: Any) -> bool:
    return is_integer(value) and value >= 0
