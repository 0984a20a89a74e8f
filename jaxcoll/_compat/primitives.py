"""Primitives of jaxcoll that move no data: types, order, cotangents, rounding; and calls apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcoll._compat.axes import (
    as_varying,
    retyped,
    unreduced_axes,
    varying_axes,
    varying_axes_of_type,
)


def unchanged(name: str, lower: Any = None, transpose: Any = None) -> Primitive:
    """A primitive whose result is its operand, differentiated as well, unless it says otherwise."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lower or (lambda ctx, x, **_: [x]))
    batching.defvectorized(primitive)
    ad.deflinear(primitive, transpose or (lambda cotangent, **_: [cotangent]))
    return primitive


def first_of(name: str, lower: Any = None) -> Primitive:
    """A primitive whose result is the first of its operands, differentiated as well."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, *_, **__: x)
    primitive.def_abstract_eval(lambda x, *_, **__: x)
    mlir.register_lowering(primitive, lower or (lambda ctx, x, *_, **__: [x]))
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(*args, **params),
        dims[0],
    )
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (
        primitive.bind(*primals, **params),
        tangents[0],
    )
    return primitive


def as_invariant(x: Any, axes: Sequence[str], *, summed: bool = False) -> Any:
    """`x` typed as equal on every replica along `axes`: no data moves, nothing is checked.

    The caller vouches for the equality. JAX itself offers this step only together with a
    collective (`psum`, or `all_gather(to="invarying")`), which an axis of size one, an empty
    leaf, or an algorithm that ends with the same bits everywhere does not need.

    Args:
      x: an array.
      axes: mapped axes; those without tracked types are left out.
      summed: `x` is the end of a hand-written sum over replicas. JAX hands back the cotangent
        of an invariant value already totalled, so only the first replica sends it back through
        the sum; otherwise each replica keeps it.
    """
    varying = tuple(a for a in axes if a in varying_axes(x))
    return _as_invariant_p.bind(x, axes=varying, summed=summed) if varying else x


def _as_invariant_transpose(cotangent: Any, *, axes: tuple[str, ...], summed: bool) -> list[Any]:
    cotangent = as_varying(cotangent, axes)
    if summed:
        cotangent = lax.select(
            lax.broadcast(lax.axis_index(axes) == 0, cotangent.shape),
            cotangent,
            lax.full_like(cotangent, 0),
        )
    return [cotangent]


AS_INVARIANT = "as_invariant"
"""The name of the primitive of `as_invariant`."""

_as_invariant_p = unchanged(AS_INVARIANT, transpose=_as_invariant_transpose)
_as_invariant_p.def_abstract_eval(
    lambda aval, *, axes, **_: retyped(aval, varying_axes_of_type(aval) - set(axes))
)


def terms_of_sum(x: Any, axes: Iterable[str]) -> Any:
    """This replica's term of what is, by its type, a sum over `axes` that is still to be made.

    It is what the type `unreduced` stands for, typed as varying: no data moves. What is of another
    type is left as it is.
    """
    unsummed = tuple(a for a in axes if a in unreduced_axes(x))
    return _terms_p.bind(x, axes=unsummed) if unsummed else x


def _terms_aval(aval: Any, *, axes: tuple[str, ...]) -> Any:
    manual = aval.manual_axis_type
    terms = {"varying": manual.varying.union(axes), "unreduced": manual.unreduced.difference(axes)}
    if not terms["unreduced"] and hasattr(manual, "unreduced_kind"):  # since JAX 0.12
        terms["unreduced_kind"] = None
    return aval.update(manual_axis_type=manual.update(**terms))


_terms_p = unchanged(
    "terms_of_sum",
    # Each replica has the cotangent of the sum, which is of the type `reduced`.
    transpose=lambda cotangent, axes: [
        lax.pcast(as_invariant(cotangent, axes), axes, to="reduced")
    ],
)
_terms_p.def_abstract_eval(_terms_aval)


def ordered(x: Any, after: Any) -> Any:
    """`x` as it is, but not before `after` is there, as far as compilers keep the order.

    JAX 0.10 types both results of a barrier as varying over what either does, so `after` is made
    to vary over no more than `x`: nobody sees what comes of it.
    """
    more = varying_axes(after) - varying_axes(x)
    return lax.optimization_barrier((x, as_invariant(after, sorted(more))))[0]


def needing(x: Any, after: Sequence[Any]) -> Any:
    """`x` as it is, but computed from `after` as far as any compiler can see.

    Nothing else orders a collective against those inside a loop: XLA's CPU compiler drops barriers.
    Over Gloo a process then may meet another's gather where it expects the sum of a loss, which was
    seen once (a message of 1048576 bytes for one of 4), and could not be made to happen again.
    """
    some = [y for y in after if y.size]
    return _needing_p.bind(x, *some) if some and x.size else x


def at_once(arrays: Sequence[Any], after: Sequence[Any] = ()) -> list[Any]:
    """`arrays`, each of which needs all of them and of `after`; see `needing`."""
    first = next((k for k, x in enumerate(arrays) if x.size), None)
    if first is None:
        return list(arrays)
    one = needing(arrays[first], [*arrays[:first], *arrays[first + 1 :], *after])
    return [one if k == first else needing(x, [one]) for k, x in enumerate(arrays)]


def _needed(x: jax.Array, *after: jax.Array) -> jax.Array:
    never = jnp.zeros((), bool)
    for y in after:
        one = (lax.real(y) if jnp.iscomplexobj(y) else y)[(0,) * y.ndim]
        bits = lax.bitcast_convert_type(lax.convert_element_type(one, "float32"), "uint32")
        never |= _is_never(bits)
    return lax.select(lax.broadcast(never, x.shape), lax.full_like(x, 0), x)


_needing_p = first_of("needing", mlir.lower_fun(_needed, multiple_results=False))


def as_stored(x: Any, *, backward: bool = False) -> Any:
    """`x` with the bits that it has once it is stored, whatever it is computed from or goes into.

    A compiler may compute `a * b + c` with one rounding for two, where both meet in one loop; if
    they do depends on the program around them. Nothing is so joined across this step. It costs
    no pass of its own where it is fused. `lax.optimization_barrier` is not enough: XLA's CPU
    compiler of 2026 drops it before it decides what to compute in one loop. With `backward` it is
    the cotangent that this is done to, and `x` is left alone.
    """
    stored = jnp.issubdtype(x.dtype, jnp.inexact) and x.size
    return _as_stored_p.bind(x, backward=backward) if stored else x


def _stored(x: jax.Array) -> jax.Array:
    """The bits of `x`, changed by a number that is zero: but only number theory knows it."""
    if jnp.iscomplexobj(x):
        return lax.complex(_stored(lax.real(x)), _stored(lax.imag(x)))
    bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    never = _is_never(bits[(0,) * bits.ndim])
    mask = lax.broadcast(never.astype(bits.dtype), bits.shape)
    return lax.bitcast_convert_type(bits ^ mask, x.dtype)


def _is_never(bits: jax.Array) -> jax.Array:
    """False, as only number theory knows: a cube leaves 0, 1 or 6 when it is divided by 7."""
    seven = lax.full_like(bits, 7)
    some = bits % seven
    return some * some * some % seven == lax.full_like(seven, 3)


_as_stored_p = unchanged(
    "as_stored",
    mlir.lower_fun(lambda x, backward: x if backward else _stored(x), multiple_results=False),
    lambda cotangent, backward: [as_stored(cotangent, backward=not backward)],
)


def traced_once(fun: Callable[..., Any], *args: Any) -> tuple[Any, Callable[..., Any]]:
    """The program of `fun(*args)`, and a function that calls this same trace."""
    jitted = jax.jit(fun)
    return jitted.trace(*args).jaxpr, jitted


def apart(function: Callable[..., Any], **parameters: Any) -> Callable[..., Any]:
    """`function` with some arguments known, which no compiler joins with what is around it.

    Its arrays are stored before and after, and calls of the same shapes are compiled once. For
    CPUs alone: other compilers make a call of it that waits.
    """
    jitted = _jitted(function, tuple(parameters))

    def call(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jitted(*arrays, **parameters)

    return call


@functools.cache
def _jitted(function: Callable[..., Any], names: tuple[str, ...]) -> Any:
    @functools.wraps(function)
    def inside(*arrays: Any, **parameters: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # of calls within it, which are joined
            return function(*arrays, **parameters)

    return jax.jit(inside, static_argnames=names)
