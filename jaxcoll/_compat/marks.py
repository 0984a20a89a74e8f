"""Primitives that record facts in a traced program which its other equations do not show.

They compute nothing in the forward pass and leave nothing in a compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcoll._compat.axes import retype, tracks_variance, types_tracked, varying_axes_of_type
from jaxcoll._compat.primitives import make_first_primitive, make_identity_primitive

SAME = "same_everywhere"
CHECKED = "checked_leaves"
PARTS = "parts_of_sum"
ALL = {SAME, CHECKED, PARTS}
"""The names of these primitives. Each has a parameter `axes`."""

THROUGH = "sync_in_backward"
"""The name of the primitive of `through_backward`. Its result k is its operand k."""


def same(
    results: Sequence[Any], axes: Sequence[str], before: Sequence[Any] = (), *, sums: bool = False
) -> list[Any]:
    """Mark `results` as the same on every replica along `axes`, unless types show that already.

    `before` has for each result the array that was reduced or gathered to make it; it is empty if
    the results are the same for another reason. `sums`: they are sums, which count a value
    repeatedly if all replicas hold it.
    """
    if not results or not axes or types_tracked():
        return list(results)
    return _same_p.bind(*results, *before, axes=tuple(axes), sums=sums, count=len(results))


def require(
    x: Any,
    leaves: Mapping[str, Any],
    axes: Sequence[str],
    caller: str,
    needs: Literal["same", "rows", "summands"] = "same",
) -> Any:
    """Record that `caller` needs named leaves to be the same along `axes`, and return `x`.

    Or they must be "rows", which differ, as each replica holds its own; or they are the "summands"
    of `x`, which count repeatedly if all replicas hold them.
    """
    params = {"axes": tuple(axes), "caller": caller, "leaves": tuple(leaves), "needs": needs}
    return _checked_p.bind(x, *map(jnp.asarray, leaves.values()), **params)


def part_of_sum(x: Any, axes: Sequence[str]) -> Any:
    """Mark `x` as this replica's part of a value that was reduced over `axes`."""
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
    # With the semantics of `pmap`, each replica has its own cotangent.
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

_checked_p = make_first_primitive(CHECKED)
_parts_p = make_identity_primitive(PARTS)


def through_backward(
    arrays: Sequence[Any],
    through: Callable[[dict[int, Any], dict[int, frozenset[str]]], dict[int, Any]],
    axes: Sequence[str],  # the results vary over these by their types, even if the arrays do not
) -> list[Any]:
    """Send the cotangents of floating `arrays` together through a hashable function.

    It gets the nonzero cotangents by the indices of their arrays, and the axes over which each
    array varies by its type. Its results must vary over the same axes.

    A custom derivative rule would not support forward mode, and would send zeros for arrays that
    are not differentiated.
    """
    typed = tuple(a for a in axes if tracks_variance(a))
    which = tuple(range(len(arrays)))
    return _through_p.bind(*arrays, through=through, which=which, axes=typed) if arrays else []


def _through_avals(*avals: Any, axes: tuple[str, ...], **_: Any) -> list[Any]:
    if not axes:
        return list(avals)
    # The type of a constant, made outside of the mesh, does not have the mesh yet.
    mesh = jax.sharding.get_abstract_mesh()
    avals = tuple(aval.update(sharding=aval.sharding.update(mesh=mesh)) for aval in avals)
    return [retype(a, varying_axes_of_type(a).union(axes)) for a in avals]


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
