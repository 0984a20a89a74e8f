"""The compiler's own all-reduce behind the algorithms' signature; the baseline of all others."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax


def all_reduce(packs: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each pack over all replicas along `axes`.

    Args:
      packs: arrays of any shape and dtype, each *varying* over `axes` where types tell.
      axes: names of the axes, outer first.

    Returns:
      The sums, *invariant* over `axes`. Cost: one all-reduce an array is requested; compilers
      combine them. 2(n-1)/n of the bytes leave each device with a byte-optimal backend.
    """
    summed = []
    for k, pack in enumerate(packs):
        with jax.named_scope(f"jaxcoll_pack{k}"):
            summed.append(lax.psum(pack, axes))
    return summed
