"""The axes that are mapped at this point of a trace, and over which of them types vary."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

# The names bound by vmap, pmap and shard_map, for error messages only.
from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as _axis_names

_checks_types: Any = sys.modules[type(jax.config).__module__]._check_vma
"""JAX's own setting of whether a `shard_map` around this point checks types."""


def axes_in_scope() -> tuple[str, ...]:
    """Names of the mapped axes at this point of the trace, outermost first."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(dict.fromkeys([*manual, *(a for a in _axis_names() if isinstance(a, str))]))


def obstacle(axis: str) -> Literal["unreachable", "shadowed"] | None:
    """Return why no collective can run over a mapped axis.

    "unreachable": it belongs to a `vmap` inside a checked `shard_map`, where JAX 0.10 and 0.12 fail
    on every collective, with an assertion that has no words. "shadowed": a `vmap` has taken the
    name of an axis that the mesh maps as well, which its size shows; or, if that is the same, an
    index that is being batched.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.manual_axes:
        return "unreachable" if any(map(tracks_variance, mesh.manual_axes)) else None
    is_batched = type(lax.axis_index(axis)).__name__ == "BatchTracer"  # JAX's own, not public
    return "shadowed" if is_batched or lax.axis_size(axis) != mesh.shape[axis] else None


def is_vmapped(axis: str) -> bool:
    """True if `axis` belongs to a `vmap`: an array's own dimension, behind which is no device.

    `pmap` is a `shard_map` since JAX 0.8.
    """
    return axis not in jax.sharding.get_abstract_mesh().manual_axes


def in_mesh_order(axes: Sequence[str]) -> tuple[str, ...]:
    """`axes` in the order in which `lax.ppermute` counts replicas: that of the mesh.

    `lax.axis_index` and the gathers count in the order of the names they are given.
    """
    names = list(jax.sharding.get_abstract_mesh().axis_names)
    return tuple(sorted(axes, key=lambda a: names.index(a) if a in names else len(names)))


def varying_axes(x: Any) -> frozenset[str]:
    """Axes over which `x` is typed as varying; empty wherever types are not tracked."""
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    """The same of a type, as a traced program has them."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def zeros_like_aval(aval: Any, dtype: Any) -> jax.Array:
    """Zeros of the shape of a traced program's result, varying as it does, to begin a loop with."""
    return as_varying(jnp.zeros(aval.shape, dtype), sorted(varying_axes_of_type(aval)))


def types_tell() -> bool:
    """True if types tell replicas apart here: a checked `shard_map` is around."""
    return bool(_checks_types.value)


def tracks_variance(axis: str) -> bool:
    """True if types tell replicas apart along `axis` (a checked `shard_map` binds it).

    `pmap`, `vmap` and `shard_map(check_vma=False)` leave every type without marks, so an
    empty set of varying axes means "the same everywhere" only where this is true.
    """
    # An index costs an equation, so it is made only where types tell at all.
    return types_tell() and axis in varying_axes(lax.axis_index(axis))


def unreduced_axes(x: Any) -> frozenset[str]:
    """Axes over which `x` is, by its type, a sum that is still to be made."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(manual, "unreduced", ()))


def same_axes(x: Any, axes: Iterable[str]) -> tuple[str, ...]:
    """Return those of `axes` over which `x` is the same on all replicas by its type."""
    if not types_tell():
        return ()
    differs = varying_axes(x) | unreduced_axes(x)
    return tuple(a for a in axes if a not in differs and tracks_variance(a))


def as_varying(x: Any, axes: Sequence[str]) -> Any:
    """`x` typed as varying over `axes`: no data moves. Axes without tracked types are left out."""
    missing = same_axes(x, axes)
    return lax.pcast(x, missing, to="varying") if missing else x


def retyped(aval: Any, varying: frozenset[str]) -> Any:
    """The same type, but for the axes it varies over."""
    return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=varying))


def is_partially_sharded(x: Any) -> bool:
    """True if `x` is sharded, by its type, over a mesh axis that is not mapped here."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return [*spec].count(None) < len(spec)


def must_keep_shape(x: Any) -> bool:
    """True if `x` is split, or may be, over a mesh axis that is not mapped here."""
    return bool(automatic_axes()) or is_partially_sharded(x)


def automatic_axes() -> tuple[str, ...]:
    """Axes of the mesh around this point, longer than 1, that are left to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    if len(mesh.manual_axes) in (0, len(mesh.axis_names)):
        return ()
    return tuple(a for a, n in mesh.shape.items() if n > 1 and a not in mesh.manual_axes)
