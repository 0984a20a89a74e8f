"""Differentiate a loss on each replica by itself, whatever the replicas' types.

Under a checked `shard_map` autodiff sums the gradient of a replicated parameter over the
replicas by itself, one `psum` a leaf, before anybody can pack or choose anything. Marking the
parameters as varying first keeps each replica's gradient its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll import _compat
from jaxcoll._errors import AlreadyReducedError
from jaxcoll._jaxpr.replication import mentions
from jaxcoll._jaxpr.retrace import traced
from jaxcoll._spmd.scope import Differentiation, differentiated

Differentiated = tuple[tuple[Any, Any], Any]


def value_and_local_grad(
    loss: Callable[..., tuple[Any, Any]],
    argnums: int | Sequence[int],
    differentiation: Differentiation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Differentiated:
    """`jax.value_and_grad(loss, argnums, has_aux=True)` of this replica's loss alone.

    A loop whose carry starts from a constant (`lax.scan(f, 0.0, batch)`) type-checks on one
    device but not under a checked `shard_map`, where the constant is invariant and the batch
    varies. Such a loss is traced a second time with every argument typed invariant, which is
    sound because it is local; only then is the result marked as varying again. A loss that
    communicates, or captures values that vary, is not local, and keeps JAX's refusal.

    Returns:
      `((value, aux), grads)`, *varying* over `axes` where types tell replicas apart.

    Raises:
      TypeError: the loss's own; or JAX's, where neither way to trace the loss type-checks.
    """
    axes = differentiation.axes
    differentiate = jax.value_and_grad(loss, argnums, has_aux=True)
    try:
        chosen = {argnums} if isinstance(argnums, int) else set(argnums)
        chosen = {i % len(args) for i in chosen if -len(args) <= i < len(args)}
        marked = [
            _vary(jax.tree.map(jnp.asarray, a), axes) if i in chosen else a
            for i, a in enumerate(args)
        ]
        with differentiated(differentiation):
            return differentiate(*marked, **kwargs)
    except TypeError as error:
        if not _compat.is_variance_mismatch(error):
            raise
        with differentiated(dataclasses.replace(differentiation, untyped=True)):
            result = _differentiate_untyped(loss, differentiate, axes, args, kwargs)
        if result is None:
            raise
        return result


def check_differentiable(leaves: Mapping[str, Any], caller: str) -> None:
    """Refuse what has no gradient, before JAX does without its name."""
    for name, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", None)
        is_number = isinstance(leaf, float | complex)
        if not is_number and (dtype is None or not jnp.issubdtype(dtype, jnp.inexact)):
            got = type(leaf).__name__ if dtype is None else dtype
            raise TypeError(
                f"`{caller}` differentiates arrays of floating point or complex numbers; {name} is "
                f"{got}. Pass apart what is trained, as `eqx.partition(module, "
                "eqx.is_inexact_array)` or `nnx.split(module, nnx.Param, ...)` gives it, and put "
                "the module together in the loss."
            )


def _differentiate_untyped(
    loss: Callable[..., tuple[Any, Any]],
    differentiate: Callable[..., Differentiated],
    axes: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Differentiated | None:
    """The second try; None if the loss is not local after all.

    That is read from its program: whatever is reduced, gathered or asked of an axis names the
    axis, and so does the step that JAX puts in where an invariant value meets a varying one.
    """
    args, kwargs = jax.tree.map(
        lambda x: _compat.as_invariant(x, axes, vouched=False) if isinstance(x, jax.Array) else x,
        (args, kwargs),
    )
    try:
        program = traced(loss, *args, **kwargs).program
    except (TypeError, AlreadyReducedError):
        return None
    if mentions(program.jaxpr, axes):
        return None
    return _vary(differentiate(*args, **kwargs), axes)


def _vary(tree: Any, axes: Sequence[str]) -> Any:
    return jax.tree.map(
        lambda x: _compat.as_varying(x, axes) if isinstance(x, jax.Array) else x, tree
    )
