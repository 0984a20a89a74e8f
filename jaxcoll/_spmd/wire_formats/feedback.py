"""Error feedback around one reduction: what is owed is added before, what is left is kept after."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._plan import wire_formats
from jaxcoll._plan.algorithms import is_coded
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.plan import Plan
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.arithmetic import Recipe
from jaxcoll._spmd.axes import count
from jaxcoll._spmd.pack import unpack
from jaxcoll._spmd.wire_formats.blocks import all_finite
from jaxcoll._spmd.wire_formats.two_phase import Coded, How

_ALIKE = """\
`all_reduce` with a residual: {leaf} is already the same on every replica along one of the axes, \
where each replica's own residual would make it differ. Reduce it in a call of its own, without \
`residual`."""


def with_owed(
    arrays: Sequence[jax.Array], leaves: Sequence[Leaf], residual: Mapping[str, jax.Array], n: int
) -> list[jax.Array]:
    """The arrays and what this replica owes of them, in the types of sums over all `n` replicas."""
    found = []
    for array, leaf in zip(arrays, leaves, strict=True):
        owed = residual.get(leaf.path)
        if owed is not None and math.prod(leaf.over) != n:
            raise ValueError(_ALIKE.format(leaf=where(leaf.path)))
        if owed is not None and jnp.issubdtype(leaf.dtype, np.inexact):
            array = array.astype(leaf.wire) + owed.astype(leaf.wire)
        found.append(array)
    return found


def cut_off(total: jax.Array, result: jax.Array, recipe: Recipe) -> jax.Array | None:
    """What the leaf's own type cannot hold is owed, too: by all replicas alike."""
    if recipe.dtype == recipe.wire:
        return None
    replicas = count({a: lax.axis_size(a) for a in recipe.over})
    held = result.astype(recipe.wire) * (recipe.divisor or 1)
    return (total - held) / replicas


def left(
    residual: Mapping[str, jax.Array],
    plan: Plan,
    sums: Sequence[jax.Array],
    results: Sequence[jax.Array],
    coded: Mapping[int, tuple[Coded | None, jax.Array | None]],
    hidden: str | None,
) -> dict[str, jax.Array]:
    """The next residual, by path: as it was where what was to be sent came out not finite.

    `results` are those of `plan.leaves`; `coded` has, by the numbers of packs in a wire format,
    what was coded and what was lost beside; `hidden` is a mapped axis, as in `unpack`.
    """
    # A loss or a metric that is not finite says nothing of gradients, which are then applied.
    alone = [
        result
        for leaf, result in zip(plan.leaves, results, strict=True)
        if leaf.path in residual and not leaf.travels
    ]
    with jax.named_scope(f"{plan.name}/finite"):
        fine = finite([*_sent(residual, plan, sums), *alone])
    packs = {k: plan.packs[k] for k in coded}
    settled = {
        planned.segments[0].leaf
        for k, planned in packs.items()
        if planned.is_leaf(plan.leaves) and coded[k][0] is not None and coded[k][1] is None
    }
    lost = []
    for k, planned in packs.items():
        leaf = planned.segments[0].leaf
        # In the loop that finds what is lost, where its shape is that of the residual.
        instead = (fine, residual[plan.leaves[leaf].path]) if leaf in settled else None
        codes, beside = coded[k]
        if codes is None:
            found = jnp.zeros_like(sums[k], np.float32)
        else:
            how, axes = How(True, plan.world.platform), cast(Recipe, planned.kind).axes
            found = algorithms.lost(codes, plan.stages(planned), axes, how, sums[k], instead)
        lost.append(found if beside is None else found + beside)
    rest = unpack(lost, [*packs.values()], plan.leaves, one_kernel_a_shape=hidden)
    found = {}
    for i, (leaf, new) in enumerate(zip(plan.leaves, rest, strict=True)):
        owed = residual.get(leaf.path)
        if owed is not None:
            new = jnp.zeros_like(owed) if new is None else new
            found[leaf.path] = new if i in settled else jnp.where(fine, new, owed)
    return found


def finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether all floats, real or complex, among these arrays are finite."""
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, np.inexact) and x.size]
    return functools.reduce(jnp.logical_and, map(all_finite, floats), jnp.array(True))


def _sent(
    residual: Mapping[str, jax.Array], plan: Plan, sums: Sequence[jax.Array]
) -> Iterator[jax.Array]:
    """The parts of packs that leaves with a residual have, neighbours together."""
    for planned, total in zip(plan.packs, sums, strict=True):
        if is_coded(plan.stages(planned)) and total.dtype == planned.dtype:
            # All leaves in it have a residual, and a block that is not finite is so everywhere.
            yield total.reshape(-1)[:: wire_formats.of(planned.format).block]
            continue
        start = 0
        pieces = zip(planned.segments, planned.lengths, strict=True)
        for owing, run in itertools.groupby(
            pieces, key=lambda piece: plan.leaves[piece[0].leaf].path in residual
        ):
            size = sum(length for _, length in run)
            if owing:
                alone = len(planned.segments) == 1 or size == total.size
                yield total if alone else total[start : start + size]
            start += size
