"""The sum of coded numbers: codes to the owner of each shard, whose sum goes to all as codes.

Each element is rounded twice, whatever the number of replicas is. The owner decodes what it sent,
as all others do, so that every replica has the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxcoll import _compat
from jaxcoll._spmd.algorithms.exchange import exchanged, tree_sum
from jaxcoll._wire.format import WireFormat


class Coding(NamedTuple):
    """The circumstances under which numbers are coded."""

    feedback: bool  # what is lost is sent the next time
    platform: str  # "cpu", "gpu" or "tpu"

    def apart(self, function: Callable[..., Any], format: WireFormat, **parameters: Any) -> Any:
        """Return `function` of a format, with more arguments known, for arrays alone.

        Joined with code of other shapes, XLA's CPU compiler fetches the bytes of blocks one by one.
        """
        wrap = _compat.apart if self.platform == "cpu" and format.block > 1 else functools.partial
        return wrap(function, format=format, feedback=self.feedback, **parameters)


class Coded(NamedTuple):
    """Blocks that this replica coded, and their codes: what it lost follows from them."""

    flat: jax.Array  # what it sent
    sent: jax.Array  # the codes of that, of shape (n, m, w)
    own: jax.Array  # the sum of the shard that it owns, of shape (m, block)
    again: jax.Array  # the codes of that


def all_reduce(
    flat: jax.Array, format: WireFormat, axes: tuple[str, ...], coding: Coding
) -> tuple[jax.Array, Coded]:
    """Return the sum of float32 `flat`, whole blocks for each replica; and what `lost` takes.

    Typed *varying*, with the same bits everywhere. Cost: an all-to-all and an all-gather of codes;
    2(n-1) coded shards leave a device.
    """
    shape = lax.axis_size(axes), -1, format.block
    # Or compilers would encode once more for what is lost, and could round otherwise there.
    sent = lax.optimization_barrier(coding.apart(_encoded, format, shape=shape)(flat))
    own = coding.apart(_summed, format)(exchanged(sent, axes))
    again = lax.optimization_barrier(coding.apart(_encoded, format, shape=None)(own))
    total = coding.apart(_decoded, format)(lax.all_gather(again, axes, tiled=True))
    return total.reshape(-1), Coded(flat, sent, own, again)


def lost(coded: Coded, format: WireFormat, axes: tuple[str, ...], coding: Coding) -> jax.Array:
    """Return what this replica's share of a sum lost, flat; *varying*.

    Over the replicas, sum(flat - lost) = sum, to rounding in float32. What the second rounding
    takes is counted among what the shard's owner lost.
    """
    rank = _compat.as_varying(lax.axis_index(axes), axes)
    return coding.apart(_lost, format)(coded, rank).reshape(-1)


# Flat arrays come in, blocks go out: the other way XLA would join a copy with what is around.
def _encoded(
    numbers: jax.Array, *, format: WireFormat, feedback: bool, shape: tuple[int, ...] | None
) -> jax.Array:
    blocks = numbers if shape is None else numbers.reshape(shape)
    return format.encode(blocks, feedback)


def _decoded(codes: jax.Array, *, format: WireFormat, feedback: bool) -> jax.Array:
    return format.decode(codes, feedback)


def _summed(codes: jax.Array, *, format: WireFormat, feedback: bool) -> jax.Array:
    return tree_sum(format.decode(codes, feedback))


def _lost(coded: Coded, rank: jax.Array, *, format: WireFormat, feedback: bool) -> jax.Array:
    rows = coded.flat.reshape(len(coded.sent), *coded.own.shape)
    of_rank = functools.partial(lax.dynamic_index_in_dim, index=rank, keepdims=False)
    once = of_rank(rows) - format.decode(of_rank(coded.sent), feedback)
    mine = once + (coded.own - format.decode(coded.again, feedback))
    others = rows - format.decode(coded.sent, feedback)
    return lax.dynamic_update_index_in_dim(others, mine, rank, axis=0)
