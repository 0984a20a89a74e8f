"""Over which mesh axes a type varies, and types that vary over more of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def varying_axes(x: Any) -> frozenset[str]:
    """Axes over which `x` is typed as varying; empty wherever types are not tracked."""
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    """The same of a type, as a traced program has them."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def zeros_like_aval(aval: Any, dtype: Any) -> jax.Array:
    """Zeros of the shape of a traced program's result, varying as it does, to begin a loop with."""
    manual = getattr(aval, "manual_axis_type", None)
    varying = () if manual is None else tuple(sorted(manual.varying))
    return as_varying(jnp.zeros(aval.shape, dtype), varying)


def tracks_variance(axis: str) -> bool:
    """Whether types tell replicas apart along `axis` (a checked `shard_map` binds it).

    `pmap`, `vmap` and `shard_map(check_vma=False)` leave every type without marks, so an
    empty set of varying axes means "the same everywhere" only where this is true.
    """
    return axis in varying_axes(lax.axis_index(axis))


def same_axes(x: Any, axes: Iterable[str]) -> tuple[str, ...]:
    """Those of `axes` over which `x` is the same on all replicas by its type."""
    return tuple(a for a in axes if a not in varying_axes(x) and tracks_variance(a))


def as_varying(x: Any, axes: Sequence[str]) -> Any:
    """`x` typed as varying over `axes`: no data moves. Axes without tracked types are left out."""
    missing = same_axes(x, axes)
    return lax.pcast(x, missing, to="varying") if missing else x


def retyped(aval: Any, varying: frozenset[str]) -> Any:
    """The same type, but for the axes it varies over."""
    manual = aval.manual_axis_type
    kept = {k: getattr(manual, k) for k in ("unreduced", "reduced")}
    return aval.update(manual_axis_type=type(manual)(varying=varying, **kept))


def is_variance_mismatch(error: BaseException) -> bool:
    """Whether `error` may be JAX's refusal of types that vary differently.

    JAX has no class for it, and as many wordings as primitives: of loops and branches, of custom
    derivatives, solvers, samplers. All of them show a type that varies, or name such types.
    """
    return _VARIANCE.search(str(error)) is not None


_VARIANCE = re.compile(r"\{V:|manual axis types|varying manual axes|check_vma=False")


def is_partially_sharded(x: Any) -> bool:
    """Whether `x` is sharded, by its type, over a mesh axis that is not mapped here."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = getattr(sharding, "spec", ()) if sharding is not None else ()
    return any(part is not None for part in spec)
