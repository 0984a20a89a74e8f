"""Parts of unequal shapes, one a replica, which no one global array can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._distribute.values.per_replica import DistributedValues, PerReplica
from jaxcoll._distribute.values.small_facts import known_to_all
from jaxcoll._mesh.placement import is_array
from jaxcoll._plan.packs.leaves import where
from jaxcoll._spmd.sparse import is_sparse


class Uneven(tuple):
    """One array for each replica of this process, of a shape of its own, on its replica's device.

    JAX takes it for a leaf. `gather` and `reduce` along an axis take any list or tuple of
    arrays for one; this class tells it from a tuple of values.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Uneven({', '.join(f'{x.dtype.name}{[*x.shape]}' for x in self)})"


def has_parts(value: Any) -> bool:
    """Whether `value` is one value with a part for each replica, as far as one can see."""
    return isinstance(value, DistributedValues) or is_sparse(value) or _is_list(value)


def check_no_list(caller: str, path: str, value: Any) -> None:
    """Refuse a list or tuple of plain values where they could be parts, or a tree of values.

    Raises:
      ValueError: it is one.
    """
    if _is_list(value):
        raise ValueError(
            f"`{caller}` with axis None got {where(path)} as a {type(value).__name__} of "
            f"{len(value)} plain values, which could be one for each replica, or values that "
            "every replica shares. Parts of the replicas are a `PerReplica`; shared values are "
            "reduced one at a time, or in a dictionary."
        )


def _is_list(value: Any) -> bool:
    """Whether `value` is a list or tuple of plain values; one with names is a tree."""
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return plain and bool(value) and all(map(is_array, value))


def parts_of(caller: str, value: Sequence[Any], replicas: int | None = None) -> list[Any]:
    """The arrays of a list or tuple that has one for each replica.

    Args:
      caller: what is named in a message.
      value: the list or tuple.
      replicas: how many there must be; None: as many as there are.

    Raises:
      ValueError: there are more or fewer, or one is no array.
    """
    if not value or (replicas is not None and len(value) != replicas):
        raise ValueError(
            f"`{caller}` takes a list or tuple for one array a replica, and expects "
            f"{replicas or 'one or more'} of them; got {len(value)}."
        )
    for i, part in enumerate(value):
        if not is_array(part):
            raise ValueError(
                f"`{caller}` takes a list or tuple for one array a replica; the part of replica "
                f"{i} is {part!r} ({type(part).__name__}). Trees go inside a `PerReplica`."
            )
    return [part if isinstance(part, jax.Array) else np.asarray(part) for part in value]


def check_parts(caller: str, parts: Sequence[Any], axes: Sequence[int]) -> None:
    """Refuse parts that differ in dtype, rank, or along any dimension but `axes`.

    Raises:
      ValueError: they do; both shapes are named.
    """
    first = parts[0]
    kept = [k for k in range(first.ndim) if k not in axes]
    along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(map(str, axes))}"
    for i, part in enumerate(parts):
        if part.ndim != first.ndim or any(part.shape[k] != first.shape[k] for k in kept):
            raise ValueError(
                f"`{caller}` expects parts that differ in size along {along} only; replica {i} "
                f"has shape {part.shape}, replica 0 {first.shape}."
            )
        if part.dtype != first.dtype:
            raise ValueError(
                f"`{caller}` expects one dtype; replica {i} has {part.dtype}, replica 0 "
                f"{first.dtype}."
            )


def known_shapes(
    caller: str,
    parts: Mapping[int, Any],
    devices: tuple[jax.Device, ...],
    axes: Sequence[int],
    timeout_seconds: float | None,
) -> list[jax.ShapeDtypeStruct]:
    """The shape and dtype of every replica's part, which differ along `axes` only.

    Args:
      caller: what is named in a message.
      parts: arrays, by replica: of this process's replicas.
      devices: one for each replica.
      axes: dimensions; negative ones count from the last.
      timeout_seconds: bounds the exchange with other processes, if there are any.

    Raises:
      ValueError: they differ otherwise, on every process; or a part is a typed PRNG key.
    """
    most = 32  # dimensions, and letters of a dtype's name

    def fact(part: Any) -> list[int]:
        if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"`{caller}` expects arrays; a part is a typed PRNG key. Pass its "
                "`jax.random.key_data`."
            )
        name = part.dtype.name.encode().ljust(most)
        return [part.ndim, *part.shape, *[0] * (most - part.ndim), *name]

    facts = {i: fact(part) for i, part in parts.items()}
    found = []
    for row in known_to_all(facts, devices, caller, timeout_seconds).tolist():
        rank, dtype = row[0], bytes(row[most + 1 :]).decode().strip()
        found.append(jax.ShapeDtypeStruct(tuple(row[1 : rank + 1]), jnp.dtype(dtype)))
    check_parts(caller, found, [k % max(1, len(found[0].shape)) for k in axes])
    return found


def distributed(values: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> Any:
    """A tree of distributed values, from the tree of each replica.

    Args:
      values: pytrees of numbers and arrays, for each replica of this process by its number.
      devices: one a replica.

    Returns:
      Their structure with a `PerReplica` in the place of each leaf, or an `Uneven` where the
      shapes differ.

    Raises:
      ValueError: they disagree in structure or dtype, or hold what is no array.
    """
    first, *_ = values
    structures = {i: jax.tree.structure(v, is_leaf=is_sparse) for i, v in values.items()}
    for i, structure in structures.items():
        if structure != structures[first]:
            raise ValueError(
                "`experimental_distribute_values_from_function` expects one structure for all "
                f"replicas; replica {i} has {structure}, replica {first} {structures[first]}."
            )
    leaves = (jax.tree.leaves(value, is_leaf=is_sparse) for value in values.values())
    columns = (dict(zip(values, column, strict=True)) for column in zip(*leaves, strict=True))
    return structures[first].unflatten([_column(column, devices) for column in columns])


def _column(parts: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> PerReplica | Uneven:
    alike = len({np.shape(part) for part in parts.values() if is_array(part)}) < 2
    if alike:
        return PerReplica.from_function(parts.__getitem__, devices=devices)
    arrays = parts_of("experimental_distribute_values_from_function", [*parts.values()])
    return Uneven(jax.device_put(x, devices[i]) for i, x in zip(parts, arrays, strict=True))
