"""Error feedback around one reduction: what is owed is added before, what is left is kept after."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._plan import wire_formats
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.plan import Plan
from jaxcoll._spmd.wire_formats.blocks import all_finite

_ALIKE = """\
`all_reduce` with a residual: {leaf} is already the same on every replica along one of the axes, \
where each replica's own residual would make it differ. Reduce it in a call of its own, without \
`residual`."""


def with_owed(
    arrays: Sequence[jax.Array], leaves: Sequence[Leaf], residual: Mapping[str, jax.Array], n: int
) -> list[jax.Array]:
    """The arrays and what this replica owes of them, each in the type of its sum.

    Raises:
      ValueError: a leaf that has a residual is not summed over all `n` replicas.
    """
    return [
        _with(array, residual[leaf.path], leaf, n) if leaf.path in residual else array
        for array, leaf in zip(arrays, leaves, strict=True)
    ]


def _with(array: jax.Array, owed: jax.Array, leaf: Leaf, n: int) -> jax.Array:
    if math.prod(leaf.over) != n:
        raise ValueError(_ALIKE.format(leaf=where(leaf.path)))
    if not jnp.issubdtype(leaf.dtype, np.inexact):
        return array
    return array.astype(leaf.wire) + owed.astype(leaf.wire)


def left(
    residual: Mapping[str, jax.Array],
    plan: Plan,
    sums: Sequence[jax.Array],
    results: Sequence[jax.Array],
    lost: Sequence[jax.Array | None],
) -> dict[str, jax.Array]:
    """The next residual, by path: as it was where what was to be sent came out not finite.

    Args:
      residual: what was owed.
      plan: of the reduction.
      sums: its packs' results.
      results: its leaves' results, in the order of `plan.leaves`.
      lost: for each leaf what was rounded away; None: nothing.
    """
    # A loss or a metric that is not finite says nothing of gradients, which are then applied.
    alone = [
        result
        for leaf, result in zip(plan.leaves, results, strict=True)
        if leaf.path in residual and not leaf.travels
    ]
    with jax.named_scope(f"{plan.name}/finite"):
        fine = finite([*_sent(residual, plan, sums), *alone])
    return {
        leaf.path: jnp.where(fine, jnp.zeros_like(owed) if rest is None else rest, owed)
        for leaf, rest in zip(plan.leaves, lost, strict=True)
        for owed in [residual.get(leaf.path)]
        if owed is not None
    }


def finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether all floats, real or complex, among these arrays are finite."""
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, np.inexact) and x.size]
    return functools.reduce(jnp.logical_and, map(all_finite, floats), jnp.array(True))


def _sent(
    residual: Mapping[str, jax.Array], plan: Plan, sums: Sequence[jax.Array]
) -> Iterator[jax.Array]:
    """The parts of packs that leaves with a residual have, neighbours together."""
    for pack, total in zip(plan.packs, sums, strict=True):
        stages = plan.stages(pack)
        if stages and stages[-1].format and total.dtype == pack.dtype:
            # All leaves in it have a residual, and a block that is not finite is so everywhere.
            yield total.reshape(-1)[:: wire_formats.of(pack.format).block]
            continue
        start = 0
        pieces = zip(pack.segments, pack.lengths, strict=True)
        for owing, run in itertools.groupby(
            pieces, key=lambda piece: plan.leaves[piece[0].leaf].path in residual
        ):
            size = sum(length for _, length in run)
            if owing:
                alone = len(pack.segments) == 1 or size == total.size
                yield total if alone else total[start : start + size]
            start += size
