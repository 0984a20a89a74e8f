"""The table of algorithms, and the collectives that a plan's stages compose from them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import coded as codes
from jaxcoll._collectives.algorithms import halving_doubling, native, ring, shuffle
from jaxcoll._collectives.algorithms.coded import Coded, Coding
from jaxcoll._plan.algorithms import Stage, align, stage_format


class Algorithm(Protocol):
    """The two halves of an all-reduce, which every algorithm's file defines.

    `axes` are names of mapped axes, outer first; `rank` counts replicas along them in that order.
    """

    def reduce_scatter(self, shards: jax.Array, axes: tuple[str, ...], /) -> jax.Array:
        """Return row `rank` of the sum over replicas of `shards`, of shape (m, k); *varying*."""
        ...

    def all_gather(self, shard: jax.Array, count: int, axes: tuple[str, ...], /) -> jax.Array:
        """Stack the first `count` replicas' shards, of shape (k,), in order, as (count, k).

        The result has the same bits everywhere, and is typed *varying*.
        """
        ...


ALGORITHMS: dict[str, Algorithm] = {
    "native": native,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "shuffle": shuffle,
}


def all_reduce(
    array: jax.Array, stages: Sequence[Stage], axes: Sequence[str], coding: Coding
) -> tuple[jax.Array, Coded | None]:
    """Sum `array` over the axes of the stages; also return the input of `rounding_error` if coded.

    `array` is *varying* over those axes where types tell; the sum is *invariant*, with the same
    bits on every replica. Derivatives are those of the exact sum: differentiation ignores rounding
    to a wire format, and tangents and cotangents travel exactly.
    """
    if len(stages) == 1 and stages[0].algorithm == "native":
        return native.all_reduce(array, _names(stages[0], axes)), None
    flat = array.reshape(-1)
    if stage_format(stages) is None:
        total, coded = _sum_stages(flat, stages, axes, None)
    else:
        flat = jnp.pad(flat, (0, align(stages, flat.size) - flat.size))  # whole blocks a replica
        total, coded = _sum_stages(lax.stop_gradient(flat), stages, axes, coding)
        total = _differentiate_exactly(total, flat, tuple(stages), tuple(axes))[: array.size]
    return _compat.cast_invariant(total.reshape(array.shape), axes, summed=True), coded


def rounding_error(
    coded: Coded, stages: Sequence[Stage], axes: Sequence[str], coding: Coding, like: jax.Array
) -> jax.Array:
    """Return this replica's rounding error in a coded sum, in the shape `like`; *varying*.

    Over the replicas, sum(array - lost) = sum, up to rounding.
    """
    *inner, last = stages
    assert last.format is not None
    error = codes.rounding_error(coded, last.format, _names(last, axes), coding)
    for stage in reversed(inner):
        # This replica encoded its shard of the group's sum; it has no error in the other shards.
        within = _names(stage, axes)
        rank = _compat.cast_varying(lax.axis_index(within), within)
        zeros = _compat.cast_varying(jnp.zeros((stage.shards, error.size), error.dtype), within)
        error = lax.dynamic_update_index_in_dim(zeros, error, rank, axis=0).reshape(-1)
    return error[: like.size].reshape(like.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _differentiate_exactly(
    total: jax.Array, summand: jax.Array, stages: tuple[Stage, ...], axes: tuple[str, ...]
) -> jax.Array:
    """Return `total`, with the derivatives of the exact sum of `summand`."""
    return total


@_differentiate_exactly.defjvp
def _exact_jvp(stages: Any, axes: Any, primals: Any, tangents: Any) -> Any:
    (total, _), (_, summand) = primals, tangents
    tangent, _ = _sum_stages(summand, stages, axes, None)
    axes = sorted({*axes} - _compat.varying_axes(total))
    return total, _compat.cast_invariant(tangent, axes).astype(total.dtype)


def _sum_stages(
    flat: jax.Array, stages: Sequence[Stage], axes: Sequence[str], coding: Coding | None
) -> tuple[jax.Array, Coded | None]:
    """Reduce-scatter, sum the shard over the outer stages, and all-gather; see `all_reduce`.

    The last stage uses its wire format only with `coding`, and then shards are whole blocks.
    """
    if not stages:
        return flat, None
    stage, *outer = stages
    over = _names(stage, axes)
    if stage.format and coding:
        return codes.all_reduce(flat, stage.format, over, coding)
    if stage.algorithm == "native" and not outer:
        return native.all_reduce(flat, over), None
    algorithm = ALGORITHMS[stage.algorithm]
    length = -(-flat.size // stage.shards)
    padded = jnp.pad(flat, (0, stage.shards * length - flat.size))
    shards, coded = padded.reshape(stage.shards, length), None
    if stage.algorithm == "halving_doubling" and not outer:
        total = halving_doubling.all_reduce(shards, over)
    else:
        shard = algorithm.reduce_scatter(shards, over)
        shard, coded = _sum_stages(shard, outer, axes, coding)
        total = algorithm.all_gather(shard, stage.shards, over)
    return total.reshape(-1)[: flat.size], coded


def reduce_scatter(blocks: jax.Array, stages: Sequence[Stage], axes: Sequence[str]) -> jax.Array:
    """Return this replica's block of the sum of `blocks`, (n, rows, lanes); *varying*."""
    block = blocks.shape[1:]
    for stage in stages:
        m = stage.replicas
        # This replica gets the blocks of all replicas with its position along the inner axes.
        rest = len(blocks) // m
        sent = blocks.reshape(rest, m, *block).swapaxes(0, 1)
        shape = (m, rest * block[0], *block[1:]) if stage.algorithm == "native" else (m, -1)
        algorithm = ALGORITHMS[stage.algorithm]
        blocks = algorithm.reduce_scatter(sent.reshape(shape), _names(stage, axes))
        blocks = blocks.reshape(rest, *block)
    return blocks.reshape(block)


def all_gather(shard: jax.Array, stages: Sequence[Stage], axes: Sequence[str]) -> jax.Array:
    """Stack all replicas' blocks, of shape (rows, lanes); equal everywhere, but typed *varying*."""
    block = shard.shape
    blocks = shard[None]
    for stage in reversed(stages):
        m, rest = stage.replicas, len(blocks)
        sent = blocks.reshape(rest * block[0], *block[1:])
        sent = sent if stage.algorithm == "native" else sent.reshape(-1)
        gathered = ALGORITHMS[stage.algorithm].all_gather(sent, m, _names(stage, axes))
        blocks = gathered.reshape(m, rest, *block).swapaxes(0, 1).reshape(m * rest, *block)
    return blocks


def _names(stage: Stage, axes: Sequence[str]) -> tuple[str, ...]:
    names = tuple(map(axes.__getitem__, stage.axes))
    if len(names) == 1 or stage.algorithm == "native":
        return names
    if local := [name for name in names if _compat.is_vmapped(name)]:
        raise ValueError(
            f"the algorithm {stage.algorithm!r} over axes {names}: JAX cannot exchange between "
            f"replicas along several axes at once when a `vmap` maps one of them ({local[0]!r}). "
            f"Ask for '{stage.algorithm}/{stage.algorithm}', one axis at a time, or for 'native'."
        )
    return names
