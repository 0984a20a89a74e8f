"""A primitive whose derivative is whatever a function makes of the cotangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcoll._compat.axes import retyped, tracks_variance, varying_axes_of_type
from jaxcoll._compat.marks import THROUGH


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
