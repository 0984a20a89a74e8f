"""One replica's value for all of them: a sum to which the others add nothing."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd.arithmetic import received, sent
from jaxcoll._spmd.axes import as_array, bound_axes, count, listed
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Scope


def broadcast(value: Any, axis_name: str | tuple[str, ...], *, source: int, scope: Scope) -> Any:
    """The tree of replica `source`, *invariant* over the axes; see `jc.broadcast`."""
    axes = bound_axes(axis_name, "broadcast")
    try:
        index = operator.index(source)
    except TypeError:
        index = -1
    if not 0 <= index < count(axes) or isinstance(source, bool):
        raise ValueError(
            f"`broadcast` expects `source` to be an integer from 0 to {count(axes) - 1}, the "
            f"number of a replica along {listed(axes)}; got {source!r}."
        )
    # A sum, of up to twice the bytes: JAX broadcasts on GPUs only, and would not honour options.
    here = lax.axis_index(tuple(axes)) == index

    flat, treedef = flattened(value)
    expected = "an array of numbers"
    leaves = [as_array(x, f"`broadcast` cannot send {where(path)}", expected) for path, x in flat]
    summed = all_reduce(
        ReduceOp.SUM, [_shown(here, leaf) for leaf in leaves], axis_name, scope=scope.exactly
    )
    results = [_as_it_was(total, leaf) for total, leaf in zip(summed, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, results)


def _shown(here: jax.Array, x: jax.Array) -> jax.Array:
    """`x` on the source, and on all others what adds nothing to it."""
    if _without_zero(x.dtype):
        x = lax.bitcast_convert_type(x, jnp.uint8)
    x = x.astype(np.uint8) if x.dtype == np.bool_ else sent(x)
    return jnp.where(here, x, jnp.zeros_like(x))


def _as_it_was(total: jax.Array, x: jax.Array) -> jax.Array:
    return (
        lax.bitcast_convert_type(total, x.dtype) if _without_zero(x.dtype) else received(total, x)
    )


def _without_zero(dtype: np.dtype) -> bool:
    """True if no number of this type adds nothing: a float8_e8m0fnu is a power of two."""
    return jnp.issubdtype(dtype, np.number) and bool(np.zeros((), dtype) != 0)
