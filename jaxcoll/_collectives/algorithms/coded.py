"""All-reduce in a wire format: each shard's owner sums codes, and sends the sum to all as codes.

Each element is rounded twice, for any number of replicas. The owner, too, decodes the codes that it
sends, so that every replica has the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.algorithms.exchange import exchange, tree_sum
from jaxcoll._compression.format import WireFormat


class Coding(NamedTuple):
    """The settings for encoding and decoding."""

    feedback: bool  # replicas add rounding errors to the next sum
    platform: str  # "cpu", "gpu" or "tpu"

    def apart(self, function: Callable[..., Any], format: WireFormat, **parameters: Any) -> Any:
        """Bind all arguments of `function` but the arrays; on CPUs, keep it from being fused.

        Fused with code of other shapes, it would load the bytes of a block one by one there.
        """
        wrap = (
            _compat.forbid_fusion
            if self.platform == "cpu" and format.block > 1
            else functools.partial
        )
        return wrap(function, format=format, feedback=self.feedback, **parameters)


class Coded(NamedTuple):
    """The numbers that this replica encoded, and their codes: the input of `rounding_error`."""

    flat: jax.Array  # its summand
    codes: jax.Array  # the codes of `flat`, of shape (n, m, w)
    shard: jax.Array  # the sum of the shard that it owns, of shape (m, block)
    shard_codes: jax.Array  # the codes of `shard`


def all_reduce(
    flat: jax.Array, format: WireFormat, axes: tuple[str, ...], coding: Coding
) -> tuple[jax.Array, Coded]:
    """Sum float32 `flat`, whole blocks for each replica; also return the input of `rounding_error`.

    Typed *varying*, with the same bits everywhere. Cost: an all-to-all and an all-gather of codes;
    2(n-1) coded shards leave a device.
    """
    shape = lax.axis_size(axes), -1, format.block
    # Without barriers compilers would encode once more in `rounding_error`, and might round
    # differently.
    codes = lax.optimization_barrier(coding.apart(_encode, format, shape=shape)(flat))
    shard = coding.apart(_decode_and_sum, format)(exchange(codes, axes))
    shard_codes = lax.optimization_barrier(coding.apart(_encode, format, shape=None)(shard))
    total = coding.apart(_decode, format)(lax.all_gather(shard_codes, axes, tiled=True))
    return total.reshape(-1), Coded(flat, codes, shard, shard_codes)


def rounding_error(
    coded: Coded, format: WireFormat, axes: tuple[str, ...], coding: Coding
) -> jax.Array:
    """Return this replica's rounding error in a sum, flat; *varying*.

    Over the replicas, sum(flat - lost) = sum, up to rounding in float32. The error of a shard's
    second rounding counts as its owner's.
    """
    rank = _compat.cast_varying(lax.axis_index(axes), axes)
    return coding.apart(_rounding_error, format)(coded, rank).reshape(-1)


# Inputs are flat, results are blocks: otherwise XLA would fuse a copy with the surrounding code.
def _encode(
    numbers: jax.Array, *, format: WireFormat, feedback: bool, shape: tuple[int, ...] | None
) -> jax.Array:
    blocks = numbers if shape is None else numbers.reshape(shape)
    return format.encode(blocks, feedback)


def _decode(codes: jax.Array, *, format: WireFormat, feedback: bool) -> jax.Array:
    return format.decode(codes, feedback)


def _decode_and_sum(codes: jax.Array, *, format: WireFormat, feedback: bool) -> jax.Array:
    return tree_sum(format.decode(codes, feedback))


def _rounding_error(
    coded: Coded, rank: jax.Array, *, format: WireFormat, feedback: bool
) -> jax.Array:
    rows = coded.flat.reshape(len(coded.codes), *coded.shard.shape)
    of_rank = functools.partial(lax.dynamic_index_in_dim, index=rank, keepdims=False)
    first = of_rank(rows) - format.decode(of_rank(coded.codes), feedback)
    both = first + (coded.shard - format.decode(coded.shard_codes, feedback))
    others = rows - format.decode(coded.codes, feedback)
    return lax.dynamic_update_index_in_dim(others, both, rank, axis=0)
