"""Micro-batches: a share of the batch in pieces, one after another, whose gradients are added up.

Nothing is reduced here. The loop is local, and what comes out of it is what one pass over the
whole share would have given.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._jaxpr.retrace import traced_call
from jaxcoll._plan.packs.leaves import no_array
from jaxcoll._show.units import counted
from jaxcoll._spmd.arithmetic import wide


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """The arguments that are cut along their leading dimension, and the number of pieces."""

    count: int
    argnums: tuple[int, ...]


class Beside(NamedTuple):
    """Results of a loss besides its value: a weight, and the rest, metrics among it."""

    weight: Any
    aux: Any


Differentiated = tuple[tuple[Any, Beside], Any]
Differentiate = Callable[[tuple[Any, ...], dict[str, Any]], Differentiated]


def accumulated(
    differentiate: Differentiate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    micro: MicroBatches,
    *,
    learned: Sequence[int],  # positions of what is differentiated
    mean: bool,
    halvings: int,
) -> Differentiated:
    """`differentiate(args, kwargs)`, piece by piece.

    Guarantee: value, weight and gradients are the sums over the pieces (value and gradients their
    mean, for a mean without weights); `aux` has a leading dimension more. Gradients
    narrower than 32 bits are added in float32 and have their own type again at the end: adding
    eight numbers in bfloat16 may cost three of its eight bits. Of a weighted mean in float16 value
    and gradients have as many powers of two taken off as it takes for their sums to fit.
    """
    pieces = _in_pieces(args, micro, learned)

    def one(piece: dict[int, Any]) -> tuple[Any, Any]:
        arguments = tuple(piece.get(i, arg) for i, arg in enumerate(args))
        (value, beside), grads = differentiate(arguments, kwargs)
        aux = jax.tree.map(lambda x: x if no_array(x) else jnp.asarray(x), beside.aux)
        return (value, beside.weight, grads), aux

    # Traced once by itself, for the types with which the sums must begin.
    first = jax.tree.map(lambda x: x[0], pieces)
    program = traced_call(one, first)
    types, _ = program.result(program.program.out_avals)
    summed = jax.tree.leaves(types)

    def turn(totals: list[jax.Array], piece: dict[int, Any]) -> tuple[list[jax.Array], Any]:
        found = program.outputs(piece)
        added = [t + x.astype(t.dtype) for t, x in zip(totals, found, strict=False)]
        return added, found[len(summed) :]

    zeros = [_compat.zeros_like_aval(aval, wide(aval.dtype)) for aval in summed]
    totals, stacked = lax.scan(turn, zeros, pieces)
    (value, weight, grads), aux = program.result([*totals, *stacked])
    parts = micro.count if mean and weight is None else 1
    taken_off = 0 if weight is None else halvings

    def averaged(total: jax.Array, like: Any) -> jax.Array:
        total = total / parts if parts > 1 else total
        if taken_off and like.dtype == np.float16:
            total = total * np.float32(2.0**-taken_off)
        return total.astype(like.dtype)

    value, grads = jax.tree.map(averaged, (value, grads), (types[0], types[2]))
    return (value, Beside(weight, aux)), grads


def _in_pieces(
    args: tuple[Any, ...], micro: MicroBatches, learned: Sequence[int]
) -> dict[int, Any]:
    """The arguments to be cut, each leaf with its pieces along a new leading dimension."""
    for i in micro.argnums:
        if not -len(args) <= i < len(args):
            raise ValueError(
                f"`jc.accumulate`: argument {i} is named in `batch_argnums`, but the function was "
                f"called with {counted(len(args), 'positional argument')}."
            )
    chosen = sorted({i % len(args) for i in micro.argnums})
    if both := {*chosen}.intersection(learned):
        raise ValueError(
            f"`jc.accumulate`: argument {min(both)} is in `argnums` and in `batch_argnums`; what "
            "is differentiated must be whole in every micro-batch."
        )
    return {
        i: jax.tree_util.tree_map_with_path(functools.partial(_cut, i, micro.count), args[i])
        for i in chosen
    }


def _cut(i: int, count: int, path: Any, leaf: Any) -> Any:
    name, shape = f"args[{i}]{jax.tree_util.keystr(path)}", np.shape(leaf)
    if not shape:
        raise ValueError(
            f"`jc.accumulate`: {name} is a scalar and cannot be split into {count} micro-batches; "
            "leave its argument out of `batch_argnums` to give every micro-batch the same value."
        )
    if shape[0] % count:
        raise ValueError(
            f"`jc.accumulate`: {name} has {shape[0]} rows on each replica, which do not divide "
            f"into {count} micro-batches ({shape[0]} = {count} × {shape[0] // count} + "
            f"{shape[0] % count}); take a number that divides {shape[0]}, or pad the batch and "
            "return a `jc.WeightedLoss`."
        )
    array = leaf if hasattr(leaf, "reshape") else jnp.asarray(leaf)
    return array.reshape(count, shape[0] // count, *shape[1:])
