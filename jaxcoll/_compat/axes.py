"""The axes that are mapped at this point of a trace, and those over which types vary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

# The names bound by vmap, pmap and shard_map, for error messages only.
from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as _axis_names

from jaxcoll._compat.private import checks_types


def axes_in_scope() -> tuple[str, ...]:
    """Name the mapped axes at this point of the trace, outermost first."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(dict.fromkeys([*manual, *(a for a in _axis_names() if isinstance(a, str))]))


def obstacle(axis: str) -> Literal["unreachable", "shadowed"] | None:
    """Say why no collective can run over a mapped axis; None if it can.

    "unreachable": the axis belongs to a `vmap` inside a checked `shard_map`, where every collective
    fails in JAX 0.10 and 0.12, with an assertion without a message. "shadowed": a `vmap` has the
    same axis name as the mesh. Its size shows this; if the sizes are equal, a batched axis index.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.manual_axes:
        return "unreachable" if any(map(tracks_variance, mesh.manual_axes)) else None
    is_batched = type(lax.axis_index(axis)).__name__ == "BatchTracer"  # JAX's own, not public
    return "shadowed" if is_batched or lax.axis_size(axis) != mesh.shape[axis] else None


def is_vmapped(axis: str) -> bool:
    """Return True if `axis` belongs to a `vmap`: a dimension of an array, not of the devices.

    `pmap` is a `shard_map` since JAX 0.8.
    """
    return axis not in jax.sharding.get_abstract_mesh().manual_axes


def order_by_mesh(axes: Sequence[str]) -> tuple[str, ...]:
    """Sort `axes` in the order of the mesh, in which `lax.ppermute` counts replicas.

    `lax.axis_index` and the gathers count in the order of their argument.
    """
    names = list(jax.sharding.get_abstract_mesh().axis_names)
    return tuple(sorted(axes, key=lambda a: names.index(a) if a in names else len(names)))


def varying_axes(x: Any) -> frozenset[str]:
    """Read the axes over which `x` is typed as varying; none where types are not tracked."""
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def zeros_like_aval(aval: Any, dtype: Any) -> jax.Array:
    """Make zeros with the shape and varying axes of a type, as the initial carry of a loop."""
    return cast_varying(jnp.zeros(aval.shape, dtype), sorted(varying_axes_of_type(aval)))


def types_tracked() -> bool:
    """Types tell replicas apart inside a checked `shard_map`."""
    return bool(checks_types.value)


def tracks_variance(axis: str) -> bool:
    """Return True if types tell replicas apart along `axis`, which a checked `shard_map` binds.

    `pmap`, `vmap` and `shard_map(check_vma=False)` do not mark types. So an empty set of varying
    axes means "the same on every replica" only if this function returns True.
    """
    # The index costs an equation, so it is made only if types tell anything here.
    return types_tracked() and axis in varying_axes(lax.axis_index(axis))


def axes_left_to_sum(x: Any) -> frozenset[str]:
    """Read the axes over which the type of `x` is an unfinished sum (`unreduced`)."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(manual, "unreduced", ()))


def same_axes(x: Any, axes: Iterable[str]) -> tuple[str, ...]:
    """Keep the `axes` over which the type of `x` shows it to be the same on all replicas."""
    if not types_tracked():
        return ()
    differs = varying_axes(x) | axes_left_to_sum(x)
    return tuple(a for a in axes if a not in differs and tracks_variance(a))


def cast_varying(x: Any, axes: Sequence[str]) -> Any:
    """Type `x` as varying over `axes`, except axes without tracked types. Nothing moves."""
    missing = same_axes(x, axes)
    return lax.pcast(x, missing, to="varying") if missing else x


def retype(aval: Any, varying: frozenset[str]) -> Any:
    return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=varying))


def make_weak(x: jax.Array) -> jax.Array:
    """Make an array of the same parts, weakly typed as Python numbers are."""
    parts = [part.data for part in x.addressable_shards]
    make: Any = type(x)
    return make(jax.typeof(x).update(weak_type=True), x.sharding, parts, committed=True)


def is_partially_sharded(x: Any) -> bool:
    """The type of `x` may be sharded over a mesh axis that is not mapped here."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return [*spec].count(None) < len(spec)


def must_keep_shape(x: Any) -> bool:
    return bool(automatic_axes()) or is_partially_sharded(x)


def automatic_axes() -> tuple[str, ...]:
    """Name the axes of the current mesh, larger than 1, that are left to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    if len(mesh.manual_axes) in (0, len(mesh.axis_names)):
        return ()
    return tuple(a for a, n in mesh.shape.items() if n > 1 and a not in mesh.manual_axes)
