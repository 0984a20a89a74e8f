"""The sum of coded numbers: codes to the owner of each shard, whose sum goes to all as codes.

Each element is rounded twice, whatever the number of replicas is. The owner decodes what it sent,
as all others do, so that every replica has the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._plan import wire_formats
from jaxcoll._spmd.algorithms.exchange import exchanged, tree_sum
from jaxcoll._spmd.wire_formats import bf16, int4, int8


class Codec(Protocol):
    """What every format's file defines."""

    def encode(self, blocks: jax.Array, /, feedback: bool) -> jax.Array:
        """Blocks of float32, of shape (..., m, block), as uint8 or uint16 of shape (..., m, w).

        With `feedback`, what a block loses is added to it the next time.
        """
        ...

    def decode(self, codes: jax.Array, /, feedback: bool) -> jax.Array:
        """Blocks of float32; one with anything that was not finite is not finite anywhere there.

        `feedback` is what it was when they were coded.
        """
        ...


CODECS: dict[str, Codec] = {"bf16": bf16, "int8": int8, "int4": int4}


class How(NamedTuple):
    """How numbers are coded."""

    feedback: bool  # whether what is lost is sent the next time
    platform: str  # "cpu", "gpu" or "tpu"


class Coded(NamedTuple):
    """What this replica coded, from which follows what it lost: blocks, and their codes."""

    flat: jax.Array  # what it sent
    sent: jax.Array  # the codes of that, of shape (n, m, w)
    own: jax.Array  # the sum of the shard that it owns, of shape (m, block)
    again: jax.Array  # the codes of that


def all_reduce(
    flat: jax.Array, format: str, axes: tuple[str, ...], how: How
) -> tuple[jax.Array, Coded]:
    """The sum of `flat`, float32 of as many whole blocks for each replica; and what `lost` takes.

    Typed *varying*, with the same bits everywhere. Cost: an all-to-all and an all-gather of codes;
    2(n-1) coded shards leave a device.
    """
    codec, apart = _known(format, how)
    shape = lax.axis_size(axes), -1, wire_formats.of(format).block
    # Or compilers would encode once more for what is lost, and could round otherwise there.
    sent = apart(_encoded, codec=codec, feedback=how.feedback, shape=shape)(flat)
    sent = lax.optimization_barrier(sent)
    own = apart(_summed, codec=codec, feedback=how.feedback)(exchanged(sent, axes))
    again = lax.optimization_barrier(apart(codec.encode, feedback=how.feedback)(own))
    total = apart(codec.decode, feedback=how.feedback)(lax.all_gather(again, axes, tiled=True))
    return total.reshape(-1), Coded(flat, sent, own, again)


def lost(
    coded: Coded,
    format: str,
    axes: tuple[str, ...],
    how: How,
    instead: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """What this replica's share of a sum lost; *varying*.

    Law: over the replicas, sum(flat - lost) = sum, to rounding in float32. What the second
    rounding takes is counted among what the shard's owner lost. `instead` has whether to keep that,
    and a flat array that is the result otherwise.
    """
    codec, apart = _known(format, how)
    rank = _compat.as_varying(lax.axis_index(axes), axes)
    found = apart(_lost, codec=codec, feedback=how.feedback)(coded, rank, instead)
    return found.reshape(-1)


def _known(format: str, how: How) -> tuple[Codec, Callable[..., Callable[..., Any]]]:
    known = wire_formats.of(format)
    # Joined with code of other shapes, XLA's CPU compiler fetches the bytes of blocks one by one.
    apart = how.platform == "cpu" and known.block > 1
    return CODECS[known.name], _compat.apart if apart else functools.partial


# Flat arrays come in, blocks go out: the other way XLA would join a copy with what is around.
def _encoded(flat: jax.Array, *, codec: Codec, feedback: bool, shape: tuple[int, ...]) -> jax.Array:
    return codec.encode(flat.reshape(shape), feedback=feedback)


def _summed(codes: jax.Array, *, codec: Codec, feedback: bool) -> jax.Array:
    return tree_sum(codec.decode(codes, feedback=feedback))


def _lost(
    coded: Coded,
    rank: jax.Array,
    instead: tuple[jax.Array, jax.Array] | None,
    *,
    codec: Codec,
    feedback: bool,
) -> jax.Array:
    decode = functools.partial(codec.decode, feedback=feedback)
    shape = len(coded.sent), *coded.own.shape
    rows = coded.flat.reshape(shape)
    of_rank = functools.partial(lax.dynamic_index_in_dim, index=rank, keepdims=False)
    mine = of_rank(rows) - decode(of_rank(coded.sent)) + (coded.own - decode(coded.again))
    found = lax.dynamic_update_index_in_dim(rows - decode(coded.sent), mine, rank, axis=0)
    return found if instead is None else jnp.where(instead[0], found, instead[1].reshape(shape))
