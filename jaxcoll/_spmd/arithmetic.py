"""Arithmetic around the sum: the type it travels in, a mean's division, the type it ends in."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._plan.packs.leaves import carried_dtype


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arithmetic of a leaf's reduction; two leaves share a pack if it is equal."""

    # Axes the sum is over, those of size one left out; empty: nothing travels
    over: tuple[str, ...]
    axes: tuple[str, ...]  # all axes of the reduction, over which the result is invariant
    # Every axis that the leaf varies over, so that packing gives none a wider type
    varying: frozenset[str]
    dtype: np.dtype  # the leaf's type
    wire: np.dtype  # the type it travels and is summed in
    times: int  # what a sum is multiplied by: the replicas that hold the same value
    divisor: int | None  # what makes a mean of the sum; None for a sum

    @property
    def halvings(self) -> int:
        """Powers of two taken off a float16 before a mean, so that no partial sum overflows."""
        if self.divisor is None or self.wire != np.float16 or not self.over:
            return 0
        return halvings(self.divisor)


def halvings(summands: int) -> int:
    """Powers of two to take off so many numbers before a mean, so that no partial sum overflows."""
    return math.ceil(math.log2(summands))


def halved(total: jax.Array, times: int) -> jax.Array:
    """A float16 with so many powers of two taken off; anything else as it is."""
    return total * np.float16(2.0**-times) if total.dtype == np.float16 and times else total


def quotient(total: jax.Array, by: jax.Array | int, times: int = 0) -> jax.Array:
    """`total / by` in the type of `total`, computed in float32 or wider.

    Neither does a count have to fit into float16, nor is it rounded to eight bits for bfloat16.
    """
    exact = total.astype(wide(total.dtype))
    if total.dtype == np.float16:
        exact = exact * np.float32(2.0**times)
    return (exact / jnp.asarray(by).astype(exact.dtype)).astype(total.dtype)


def sent(array: jax.Array) -> jax.Array:
    """`array` as it travels unchanged: of PRNG keys their data, in whole bytes."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return array.astype(carried_dtype(array.dtype))


def received(array: jax.Array, like: jax.Array) -> jax.Array:
    """Undo `sent` of arrays of the type of `like`."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return array.astype(like.dtype)


def before(array: jax.Array, recipe: Recipe) -> jax.Array:
    """`array` as it travels."""
    array = array.astype(recipe.wire)
    return array * np.float16(2.0**-recipe.halvings) if recipe.halvings else array


def after(total: jax.Array, recipe: Recipe) -> jax.Array:
    """The sum made the result: divided or multiplied, in its own type, *invariant*."""
    # The sum of what varies over no axis varies over none.
    total = _compat.as_invariant(total, recipe.axes) if recipe.varying else total
    return divided(total, recipe)


def divided(total: jax.Array, recipe: Recipe) -> jax.Array:
    """The sum, or a part of it, made the result, varying as it does."""
    if recipe.divisor is None:
        return (total * recipe.times if recipe.times > 1 else total).astype(recipe.dtype)
    if recipe.halvings:
        share = np.float32(2.0**recipe.halvings / recipe.divisor)
        return (total.astype(np.float32) * share).astype(recipe.dtype)
    mean = jnp.true_divide(total, recipe.divisor)  # of integers: a float of JAX's choice
    return mean if jnp.issubdtype(recipe.dtype, jnp.integer) else mean.astype(recipe.dtype)


def wide(dtype: np.dtype) -> np.dtype:
    """The type in which numbers of `dtype` are added up locally: a float of at least 32 bits."""
    if jnp.issubdtype(dtype, np.complexfloating) or dtype == np.float64:
        return dtype
    return np.dtype(np.float32)
