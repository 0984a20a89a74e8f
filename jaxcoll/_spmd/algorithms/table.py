"""The table of algorithms, and the one place where they are put together to an all-reduce."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan.algorithms import Stage, aligned, is_coded
from jaxcoll._spmd.algorithms import halving_doubling, native, ring, shuffle
from jaxcoll._spmd.wire_formats import two_phase
from jaxcoll._spmd.wire_formats.two_phase import Coded, How


class Algorithm(Protocol):
    """The two halves of an all-reduce, as every algorithm's file defines them.

    `axes` are names of mapped axes, outer first; `rank` counts replicas along them in that order.
    """

    def reduce_scatter(self, shards: jax.Array, axes: tuple[str, ...], /) -> jax.Array:
        """Row `rank` of the sum over the replicas of `shards`, of shape (m, k); *varying*."""
        ...

    def all_gather(self, shard: jax.Array, count: int, axes: tuple[str, ...], /) -> jax.Array:
        """The first `count` replicas' shards of shape (k,), in order, everywhere the same bits.

        The result has shape (count, k) and is typed *varying*.
        """
        ...


ALGORITHMS: dict[str, Algorithm] = {
    "native": native,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "shuffle": shuffle,
}


def all_reduce(array: jax.Array, stages: Sequence[Stage], axes: Sequence[str]) -> jax.Array:
    """The sum of `array` over all replicas along the axes of the stages, inner first; *invariant*.

    `array` is *varying* over those axes where types tell; every replica ends with the same bits.
    """
    if [stage.algorithm for stage in stages] == ["native"]:
        return lax.psum(array, _names(stages[0], axes))
    total, _ = _summed(array.reshape(-1), stages, axes)
    return _compat.as_invariant(total.reshape(array.shape), axes, summed=True)


def coded_all_reduce(
    array: jax.Array, stages: Sequence[Stage], axes: Sequence[str], how: How
) -> tuple[jax.Array, Coded | None]:
    """The sum of float32 `array` in a wire format; and what `lost` takes, None if nothing is coded.

    Law: rounding counts as the identity to derivatives, which are those of the exact sum: tangents
    and cotangents travel exactly.
    """
    if not is_coded(stages):
        return all_reduce(array, stages, axes), None
    flat = _flat(array, stages)
    total, coded = _summed(lax.stop_gradient(flat), stages, axes, how)
    total = as_exact(total, flat, tuple(stages), tuple(axes), 1)[: array.size].reshape(array.shape)
    return _compat.as_invariant(total, axes, summed=True), coded


def lost(
    coded: Coded,
    stages: Sequence[Stage],
    axes: Sequence[str],
    how: How,
    like: jax.Array,
    instead: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """What this replica's share of a sum lost in a wire format: an array like the sum, *varying*.

    Law: over the replicas, sum(array - lost) = sum, to rounding. `instead` has whether to keep
    that, and an array like the sum that is the result otherwise.
    """
    *inner, last = stages
    if instead is not None:
        instead = instead[0], _flat(instead[1], stages)
    soon = None if inner else instead
    found = two_phase.lost(coded, last.format, _names(last, axes), how, soon)
    for stage in reversed(inner):
        # The group's sum was coded by the replica that holds this shard of it.
        within = _names(stage, axes)
        rank = _compat.as_varying(lax.axis_index(within), within)
        none = _compat.as_varying(jnp.zeros((stage.shards, found.size), found.dtype), within)
        found = lax.dynamic_update_index_in_dim(none, found, rank, axis=0).reshape(-1)
    if inner and instead is not None:
        found = jnp.where(instead[0], found, instead[1])
    return found[: like.size].reshape(like.shape)


def _flat(array: jax.Array, stages: Sequence[Stage]) -> jax.Array:
    """`array` without a shape, and with zeros behind it, of whole blocks for each replica."""
    flat = array.reshape(-1)
    return jnp.pad(flat, (0, aligned(stages, flat.size) - flat.size))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def as_exact(
    total: jax.Array, own: jax.Array, stages: tuple[Stage, ...], axes: tuple[str, ...], by: int
) -> jax.Array:
    """`total`, whose derivatives are those of the exact sum of `own`, divided `by` so many."""
    return total


@as_exact.defjvp
def _as_exact_jvp(stages: Any, axes: Any, by: int, primals: Any, tangents: Any) -> Any:
    (total, _), (_, own) = primals, tangents
    moved, _ = _summed(own.reshape(-1), stages, axes)
    moved = _compat.as_invariant(
        moved.reshape(own.shape), sorted({*axes} - _compat.varying_axes(total))
    )
    return total, (moved / by if by > 1 else moved).astype(total.dtype)


def _summed(
    flat: jax.Array, stages: Sequence[Stage], axes: Sequence[str], how: How | None = None
) -> tuple[jax.Array, Coded | None]:
    """Reduce-scatter, the same for the shard along the outer axes, all-gather.

    Without `how` exactly; else in the last stage's wire format, of shards of whole blocks, and with
    what was coded.
    """
    if not stages:
        return flat, None
    stage, *outer = stages
    over = _names(stage, axes)
    if stage.format and how is not None:
        return two_phase.all_reduce(flat, stage.format, over, how)
    if stage.algorithm == "native" and not outer:
        return lax.psum(flat, over), None
    algorithm = ALGORITHMS[stage.algorithm]
    length = -(-flat.size // stage.shards)
    padded = jnp.pad(flat, (0, stage.shards * length - flat.size))
    shard = algorithm.reduce_scatter(padded.reshape(stage.shards, length), over)
    total, coded = _summed(shard, outer, axes, how)
    return algorithm.all_gather(total, stage.shards, over).reshape(-1)[: flat.size], coded


def reduce_scatter(blocks: jax.Array, stages: Sequence[Stage], axes: Sequence[str]) -> jax.Array:
    """This replica's block of the sum of `blocks`, of shape (n, rows, lanes); *varying*."""
    block = blocks.shape[1:]
    for stage in stages:
        m = stage.replicas
        # The blocks of all replicas that share this one's place along the inner axes come to it.
        rest = len(blocks) // m
        sent = blocks.reshape(rest, m, *block).swapaxes(0, 1)
        shape = (m, rest * block[0], *block[1:]) if stage.algorithm == "native" else (m, -1)
        algorithm = ALGORITHMS[stage.algorithm]
        blocks = algorithm.reduce_scatter(sent.reshape(shape), _names(stage, axes))
        blocks = blocks.reshape(rest, *block)
    return blocks.reshape(block)


def all_gather(shard: jax.Array, stages: Sequence[Stage], axes: Sequence[str]) -> jax.Array:
    """All replicas' blocks of shape (rows, lanes), stacked; the same everywhere, but *varying*."""
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
    names = tuple(axes[i] for i in stage.axes)
    local = [name for name in names if _compat.is_vmapped(name)]
    if local and len(names) > 1 and stage.algorithm != "native":
        raise ValueError(
            f"the algorithm {stage.algorithm!r} over axes {names}: JAX cannot exchange between "
            f"replicas along several axes at once when a `vmap` maps one of them ({local[0]!r}). "
            f"Ask for '{stage.algorithm}/{stage.algorithm}', one axis at a time, or for 'native'."
        )
    return names
