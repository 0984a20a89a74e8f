"""Parts of unequal shapes, one for each replica, which no single global array can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll._distribute.values.assemble import check_structures
from jaxcoll._distribute.values.per_replica import DistributedValues, PerReplica
from jaxcoll._mesh.placement import host_array, is_array
from jaxcoll._plan.packs.leaves import where
from jaxcoll._spmd.sparse import is_sparse


class Uneven(tuple):
    """One array for each replica of this process, of a shape of its own, on its replica's device.

    JAX treats it as a leaf. `gather` and `reduce` along an axis interpret any list or tuple of
    arrays as one; this class tells it from a tuple of values.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Uneven({', '.join(f'{x.dtype.name}{[*x.shape]}' for x in self)})"


def has_parts(value: Any) -> bool:
    """Whether `value` is one value with a part for each replica, as far as one can see."""
    return isinstance(value, DistributedValues) or is_sparse(value) or _is_list(value)


def check_no_list(caller: str, path: str, value: Any) -> None:
    """Refuse a list or tuple of plain values where they could be parts, or a tree of values."""
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
    """The arrays of a list or tuple that has one for each replica; `replicas` None: any number."""
    who = f"`{caller}` interprets a list or tuple as one array per replica"
    if not value or (replicas is not None and len(value) != replicas):
        raise ValueError(f"{who}; expected {replicas or 'one or more'}, got {len(value)}.")
    for i, part in enumerate(value):
        if not is_array(part):
            raise ValueError(
                f"{who}; the part of replica {i} is {part!r} ({type(part).__name__}). Trees go "
                "inside a `PerReplica`."
            )
    return [*map(host_array, value)]


def check_parts(caller: str, parts: Sequence[Any], axes: Sequence[int]) -> None:
    """Refuse parts that differ in dtype, rank, or along any dimension but `axes`."""
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


def distributed(values: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> Any:
    """A tree with a `PerReplica` in the place of each leaf, or an `Uneven` where shapes differ."""
    first, *_ = values
    structures = {i: jax.tree.structure(v, is_leaf=is_sparse) for i, v in values.items()}
    check_structures("experimental_distribute_values_from_function", structures)
    leaves = (jax.tree.leaves(value, is_leaf=is_sparse) for value in values.values())
    columns = (dict(zip(values, column, strict=True)) for column in zip(*leaves, strict=True))
    return structures[first].unflatten([_column(column, devices) for column in columns])


def _column(parts: Mapping[int, Any], devices: tuple[jax.Device, ...]) -> PerReplica | Uneven:
    alike = len({np.shape(part) for part in parts.values() if is_array(part)}) < 2
    if alike:
        return PerReplica.from_function(parts.__getitem__, devices=devices)
    arrays = parts_of("experimental_distribute_values_from_function", [*parts.values()])
    return Uneven(jax.device_put(x, devices[i]) for i, x in zip(parts, arrays, strict=True))
