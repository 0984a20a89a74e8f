"""The axes that are mapped at this point of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxcoll._compat.types import tracks_variance

try:
    # Since 0.4.36: the names bound by vmap, pmap and shard_map, for error messages only.
    from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as _axis_names
except ImportError:  # pragma: no cover - a JAX that has removed the debugging aid

    def _axis_names() -> list[Any]:
        return []


def axes_in_scope() -> tuple[str, ...]:
    """Names of the mapped axes at this point of the trace, outermost first."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(dict.fromkeys([*manual, *(a for a in _axis_names() if isinstance(a, str))]))


def is_unreachable(axis: str) -> bool:
    """Whether `axis` belongs to a `vmap` inside a checked `shard_map`.

    JAX 0.10 and 0.12 fail there on every collective, with an assertion that has no words.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return axis not in manual and any(tracks_variance(a) for a in manual)


def is_vmapped(axis: str) -> bool:
    """Whether `axis` belongs to a `vmap`: an array's own dimension, behind which is no device.

    `pmap` is a `shard_map` since JAX 0.8.
    """
    return axis not in jax.sharding.get_abstract_mesh().manual_axes


def is_shadowed(axis: str) -> bool:
    """Whether a `vmap` has taken the name of an axis that the mesh maps as well.

    Recognised by its size, and, for one of the same size, by an index that is being batched.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.manual_axes:
        return False
    batched = type(lax.axis_index(axis)).__name__ == "BatchTracer"  # a class JAX keeps to itself
    return batched or lax.axis_size(axis) != mesh.shape[axis]


def in_mesh_order(axes: Sequence[str]) -> tuple[str, ...]:
    """`axes` in the order in which `lax.ppermute` counts replicas: that of the mesh.

    `lax.axis_index` and the gathers count in the order of the names they are given.
    """
    names = list(jax.sharding.get_abstract_mesh().axis_names)
    return tuple(sorted(axes, key=lambda a: names.index(a) if a in names else len(names)))
