"""Primitives that tell a reader of a traced program what its equations do not show.

None of them computes anything forward, and nothing of them is left in a compiled program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcoll._compat.axes import retyped, tracks_variance, types_tell, varying_axes_of_type
from jaxcoll._compat.primitives import first_of, unchanged

SAME = "same_everywhere"
CHECKED = "checked_leaves"
PARTS = "parts_of_sum"
ALL = {SAME, CHECKED, PARTS}
"""The names of these primitives, each of which has a parameter `axes`."""

THROUGH = "sync_in_backward"
"""The name of the primitive of `through_backward`, whose result k is its operand k."""


def same(
    results: Sequence[Any], axes: Sequence[str], before: Sequence[Any] = (), *, sums: bool = False
) -> list[Any]:
    """`results`, marked as equal on every replica along `axes`; where types say so, unmarked.

    Args:
      results: arrays.
      axes: mapped axes.
      before: for each result what was reduced, or gathered, to make it; empty: it is equal for a
        reason of its own.
      sums: whether the results are sums, in which what is the same everywhere counts repeatedly.
    """
    if not results or not axes or types_tell():
        return list(results)
    return _same_p.bind(*results, *before, axes=tuple(axes), sums=sums, count=len(results))


def checked(
    x: Any, leaves: Mapping[str, Any], axes: Sequence[str], caller: str, *, rows: bool = False
) -> Any:
    """`x`, beside leaves of `caller`, by name, that must be the same everywhere along `axes`.

    With `rows` they must not be: each replica holds its own rows.
    """
    params = {"axes": tuple(axes), "caller": caller, "leaves": tuple(leaves), "rows": rows}
    return _checked_p.bind(x, *map(jnp.asarray, leaves.values()), **params)


def part_of_sum(x: Any, axes: Sequence[str]) -> Any:
    """`x`, marked as this replica's part of what was reduced over `axes`."""
    return _parts_p.bind(x, axes=tuple(axes))


def _same_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, count: int, **params: Any
) -> tuple[list[Any], list[Any]]:
    out = _same_p.bind(*primals, count=count, **params)
    moved = [k for k in range(count) if not isinstance(tangents[k], ad.Zero)]
    results: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    if moved:  # a tangent of something reduced is reduced likewise
        same_tangents = _same_p.bind(
            *(tangents[k] for k in moved), axes=params["axes"], sums=False, count=len(moved)
        )
        for k, tangent in zip(moved, same_tangents, strict=True):
            results[k] = tangent
    return out, results


def _same_transpose(cotangents: Sequence[Any], *args: Any, count: int, **_: Any) -> list[Any]:
    # Under `pmap`'s meaning each replica has a cotangent of its own.
    return [*cotangents, *[None] * (len(args) - count)]


_same_p = Primitive(SAME)
_same_p.multiple_results = True
_same_p.def_impl(lambda *xs, count, **_: list(xs[:count]))
_same_p.def_abstract_eval(lambda *xs, count, **_: list(xs[:count]))
mlir.register_lowering(_same_p, lambda ctx, *xs, count, **_: list(xs[:count]))
batching.primitive_batchers[_same_p] = lambda xs, dims, count, **params: (
    _same_p.bind(*xs, count=count, **params),
    dims[:count],
)
ad.primitive_jvps[_same_p] = _same_jvp
ad.primitive_transposes[_same_p] = _same_transpose

_checked_p = first_of(CHECKED)
_parts_p = unchanged(PARTS)


def through_backward(
    arrays: Sequence[Any],
    through: Callable[[dict[int, Any], dict[int, frozenset[str]]], dict[int, Any]],
    axes: Sequence[str],  # that the results vary over by their type, whatever the arrays do
) -> list[Any]:
    """Floating `arrays` themselves, whose cotangents go through a hashable function together.

    It is given the cotangents by their arrays' numbers, those that are moved to be zero left out,
    and the axes that each array varies over by its type, which its result must vary over, too.

    A custom derivative rule would say as much, but takes no forward mode, and sends the zeros of
    arrays that nobody differentiates.
    """
    typed = tuple(a for a in axes if tracks_variance(a))
    which = tuple(range(len(arrays)))
    return _through_p.bind(*arrays, through=through, which=which, axes=typed) if arrays else []


def _through_avals(*avals: Any, axes: tuple[str, ...], **_: Any) -> list[Any]:
    if not axes:
        return list(avals)
    # What was made outside of the mesh, a constant, does not know it yet.
    mesh = jax.sharding.get_abstract_mesh()
    avals = tuple(aval.update(sharding=aval.sharding.update(mesh=mesh)) for aval in avals)
    return [retyped(a, varying_axes_of_type(a).union(axes)) for a in avals]


def _through_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, which: tuple[int, ...], **params: Any
) -> tuple[list[Any], list[Any]]:
    out = _through_p.bind(*primals, which=which, **params)
    moved = [k for k, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    tangents_out: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    if moved:
        some = tuple(which[k] for k in moved)
        results = _through_p.bind(*(tangents[k] for k in moved), which=some, **params)
        for k, result in zip(moved, results, strict=True):
            tangents_out[k] = result
    return out, tangents_out


def _through_transpose(
    cotangents: Sequence[Any], *args: Any, through: Any, which: tuple[int, ...], **_: Any
) -> list[Any]:
    avals = dict(zip(which, (arg.aval for arg in args), strict=True))
    moved = {i: ct for i, ct in zip(which, cotangents, strict=True) if not isinstance(ct, ad.Zero)}
    varying = {i: varying_axes_of_type(avals[i]) for i in moved}
    results = through(moved, varying) if moved else {}
    return [
        results[i] if i in results else ad.Zero(aval.to_tangent_aval()) for i, aval in avals.items()
    ]


_through_p = Primitive(THROUGH)
_through_p.multiple_results = True
_through_p.def_impl(lambda *xs, **_: list(xs))
_through_p.def_abstract_eval(_through_avals)
mlir.register_lowering(_through_p, lambda ctx, *xs, **_: list(xs))
batching.primitive_batchers[_through_p] = lambda xs, dims, **params: (
    _through_p.bind(*xs, **params),
    dims,
)
ad.primitive_jvps[_through_p] = _through_jvp
ad.primitive_transposes[_through_p] = _through_transpose


def in_backward(eqn: Any) -> bool:
    """True if an equation was made by the transposition of a derivative.

    Those of a program that it runs need not say so themselves. A scope of the user's may have any
    name, so that the word "transpose" alone shows nothing.
    """
    return any(
        type(each).__name__ == "Transform" and each.name == "transpose" for each in _scopes(eqn)
    )


def is_our_reduction(eqn: Any) -> bool:
    """True if an equation carries a pack of a reduction of ours."""
    return any(re.fullmatch(r"all_reduce_[0-9a-f]{6}/pack\d+", x.name) for x in _scopes(eqn))


def _scopes(eqn: Any) -> tuple[Any, ...]:
    return tuple(eqn.source_info.name_stack.stack)
