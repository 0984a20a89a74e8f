"""The mean of the replicas' losses as a function, whose derivative is the mean's, once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._spmd.arithmetic import quotient
from jaxcoll._spmd.axes import bound_axes
from jaxcoll._spmd.gradients.gradient import Asked, reduced_gradient
from jaxcoll._spmd.gradients.loss import value_and_weight
from jaxcoll._spmd.reduce import all_reduce
from jaxcoll._spmd.scope import Scope

CALLER = "jc.mean_loss"


def mean_loss(
    fun: Callable[..., Any],
    axis_name: Any,
    argnums: int | Sequence[int],
    scope: Callable[[], Scope],
    options: CommunicationOptions,
) -> Callable[..., Any]:
    """The body of `jc.mean_loss`, which says what it does."""
    asked = Asked(fun, ReduceOp.MEAN, argnums, has_aux=False, scatter=False, feedback=False)
    gradient = reduced_gradient(asked, axis_name, scope, options)

    @functools.wraps(fun, updated=())
    def mean(*args: Any, **kwargs: Any) -> Any:
        places = asked.places(args)
        learned = tuple(args[i] for i in places)

        def with_learned(learned: Sequence[Any]) -> tuple[Any, ...]:
            replaced = dict(zip(places, learned, strict=True))
            return tuple(replaced.get(i, x) for i, x in enumerate(args))

        @jax.custom_jvp
        def of_learned(*learned: Any) -> Any:
            here = scope()
            axes = bound_axes(here.over(axis_name, CALLER), CALLER)
            value, weight = value_and_weight(fun(*with_learned(learned), **kwargs), CALLER)
            exactly = here.merged(options).exactly
            if weight is None:
                return all_reduce(ReduceOp.MEAN, value, tuple(axes), scope=exactly)
            pair = all_reduce(
                ReduceOp.SUM, (value, weight), tuple(axes), scope=exactly, repeats=True
            )
            return quotient(pair[0], by=pair[1])

        @of_learned.defjvp
        def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
            value, grads = gradient(*with_learned(primals), **kwargs)
            grads = (grads,) if isinstance(argnums, int) else grads
            products = jax.tree.map(lambda g, t: jnp.sum(g * t), grads, tuple(tangents))
            tangent = sum(jax.tree.leaves(products), jnp.zeros((), value.dtype))
            return value, tangent.astype(value.dtype)

        return of_learned(*learned)

    return mean
