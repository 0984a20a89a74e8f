"""Primitives that move no data (types, order, cotangents, rounding), and unfused functions."""

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
    axes_left_to_sum,
    cast_varying,
    retype,
    varying_axes,
    varying_axes_of_type,
)


def make_identity_primitive(name: str, lower: Any = None, transpose: Any = None) -> Primitive:
    """Make a primitive that returns its operand; `transpose` may change its cotangent."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lower or (lambda ctx, x, **_: [x]))
    batching.defvectorized(primitive)
    ad.deflinear(primitive, transpose or (lambda cotangent, **_: [cotangent]))
    return primitive


def make_first_primitive(name: str, lower: Any = None) -> Primitive:
    """Make a primitive that returns the first of its operands; tangents likewise."""
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


def cast_invariant(x: Any, axes: Sequence[str], *, summed: bool = False) -> Any:
    """Type `x` as the same on every replica along `axes`. Nothing is sent or checked.

    The caller is responsible for the equality. JAX offers this type change only as a part of a
    collective (`psum`, or `all_gather(to="invarying")`), which is not needed for an axis of size
    one, an empty leaf, or an algorithm that ends with the same bits on all replicas.

    Axes without tracked types are left out. `summed`: `x` is the result of a hand-written sum over
    replicas. The cotangent of an invariant value is already the total, so only the first replica
    sends it back through the sum. Otherwise each replica keeps the cotangent.
    """
    varying = tuple(a for a in axes if a in varying_axes(x))
    return _cast_invariant_p.bind(x, axes=varying, summed=summed) if varying else x


def _cast_invariant_transpose(cotangent: Any, *, axes: tuple[str, ...], summed: bool) -> list[Any]:
    cotangent = cast_varying(cotangent, axes)
    if summed:
        cotangent = lax.select(
            lax.broadcast(lax.axis_index(axes) == 0, cotangent.shape),
            cotangent,
            lax.full_like(cotangent, 0),
        )
    return [cotangent]


CAST_INVARIANT = "cast_invariant"
"""The name of the primitive of `cast_invariant`."""

_cast_invariant_p = make_identity_primitive(CAST_INVARIANT, transpose=_cast_invariant_transpose)
_cast_invariant_p.def_abstract_eval(
    lambda aval, *, axes, **_: retype(aval, varying_axes_of_type(aval) - set(axes))
)


def terms_of_sum(x: Any, axes: Iterable[str]) -> Any:
    """Take this replica's term of an unfinished sum over `axes` (type `unreduced`), as varying.

    No data moves. A value of another type is returned unchanged.
    """
    unsummed = tuple(a for a in axes if a in axes_left_to_sum(x))
    return _terms_p.bind(x, axes=unsummed) if unsummed else x


def _terms_aval(aval: Any, *, axes: tuple[str, ...]) -> Any:
    manual = aval.manual_axis_type
    terms = {"varying": manual.varying.union(axes), "unreduced": manual.unreduced.difference(axes)}
    if not terms["unreduced"] and hasattr(manual, "unreduced_kind"):  # since JAX 0.12
        terms["unreduced_kind"] = None
    return aval.update(manual_axis_type=manual.update(**terms))


_terms_p = make_identity_primitive(
    "terms_of_sum",
    # Each replica has the cotangent of the sum, with the type `reduced`.
    transpose=lambda cotangent, axes: [
        lax.pcast(cast_invariant(cotangent, axes), axes, to="reduced")
    ],
)
_terms_p.def_abstract_eval(_terms_aval)


def order_after(x: Any, after: Any) -> Any:
    """Make `x` available only after `after`, as far as compilers keep the order.

    JAX 0.10 types both results of a barrier as varying over the axes of either operand. So `after`
    is retyped to vary over no more axes than `x`; that result is dropped.
    """
    more = varying_axes(after) - varying_axes(x)
    return lax.optimization_barrier((x, cast_invariant(after, sorted(more))))[0]


def depend_on(x: Any, after: Sequence[Any]) -> Any:
    """Compute `x` from `after`, as far as any compiler can see.

    Nothing else orders a collective against those inside a loop: XLA's CPU compiler drops barriers.
    Over Gloo, a process may then get another's gather when it expects the sum of a loss. That was
    seen once (a message of 1048576 bytes instead of 4) and could not be reproduced.
    """
    nonempty = [y for y in after if y.size]
    return _depend_on_p.bind(x, *nonempty) if nonempty and x.size else x


def depend_on_all(arrays: Sequence[Any], after: Sequence[Any] = ()) -> list[Any]:
    """Compute each of `arrays` from all of them and `after`; see `depend_on`."""
    first = next((k for k, x in enumerate(arrays) if x.size), None)
    if first is None:
        return list(arrays)
    # All through one of them: 2n dependencies, and not n² of large programs.
    one = depend_on(arrays[first], [*arrays[:first], *arrays[first + 1 :], *after])
    return [one if k == first else depend_on(x, [one]) for k, x in enumerate(arrays)]


def _select_as_if_needed(x: jax.Array, *after: jax.Array) -> jax.Array:
    never = jnp.zeros((), bool)
    for y in after:
        # One element of each is enough: an array exists as a whole.
        one = (lax.real(y) if jnp.iscomplexobj(y) else y)[(0,) * y.ndim]
        bits = lax.bitcast_convert_type(lax.convert_element_type(one, "float32"), "uint32")
        never |= _is_never(bits)
    return lax.select(lax.broadcast(never, x.shape), lax.full_like(x, 0), x)


_depend_on_p = make_first_primitive(
    "depend_on", mlir.lower_fun(_select_as_if_needed, multiple_results=False)
)


def store(x: Any, *, only_cotangent: bool = False) -> Any:
    """Give `x` and its cotangent the bits that they have in memory, in every program.

    A compiler that fuses `a * b + c` into one loop may round it once instead of twice; this depends
    on the surrounding program. It cannot fuse arithmetic across this primitive. XLA's CPU compiler
    does write `x` to memory, once, and so compiles what makes it into none of its uses; elsewhere
    this adds no pass over memory. `lax.optimization_barrier` is not enough: XLA's CPU compiler of
    2026 drops it before fusion.
    """
    return _store_p.bind(x, only_cotangent=only_cotangent) if x.size else x


def _flip_no_bits(x: jax.Array) -> jax.Array:
    """Change the bits of `x` by a number that is zero, which no compiler can prove."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.iscomplexobj(x):
        return lax.complex(_flip_no_bits(lax.real(x)), _flip_no_bits(lax.imag(x)))
    bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    never = _is_never(bits[(0,) * bits.ndim])
    mask = lax.broadcast(never.astype(bits.dtype), bits.shape)
    return lax.bitcast_convert_type(bits ^ mask, x.dtype)


def _is_never(bits: jax.Array) -> jax.Array:
    """Compute False, which no compiler can prove: a cube modulo 7 is 0, 1 or 6, never 3."""
    seven = lax.full_like(bits, 7)
    rest = bits % seven
    return rest * rest * rest % seven == lax.full_like(seven, 3)


def unify_nans(x: Any) -> Any:
    """Give all NaNs in `x` the same bits: compilers choose which of two NaNs their sum is."""
    return _unify_nans_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _choose_one_nan(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return lax.complex(_choose_one_nan(lax.real(x)), _choose_one_nan(lax.imag(x)))
    return lax.select(jnp.isnan(x), lax.full_like(x, jnp.nan), x)


_unify_nans_p = make_identity_primitive(
    "unify_nans", mlir.lower_fun(_choose_one_nan, multiple_results=False)
)


def trace_once(fun: Callable[..., Any], *args: Any) -> tuple[Any, Callable[..., Any]]:
    """Trace `fun(*args)`: its program, and a function that calls it without another trace."""
    jitted = jax.jit(fun)
    return jitted.trace(*args).jaxpr, jitted


def make_arrays(values: Sequence[Any], like: Sequence[Any]) -> list[jax.Array]:
    pairs = zip(values, like, strict=True)
    return [x if isinstance(x, jax.Array) else jnp.asarray(x, y.dtype) for x, y in pairs]


def forbid_fusion(function: Callable[..., Any], **parameters: Any) -> Callable[..., Any]:
    """Bind parameters to `function`, and keep compilers from fusing it with surrounding code.

    Its arguments and results are stored in memory, and calls with the same shapes are compiled
    once. Use it on CPUs only: other compilers turn it into a call that waits.
    """
    jitted = _jit(function, tuple(parameters))

    def call(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jitted(*arrays, **parameters)

    return call


@functools.cache
def _jit(function: Callable[..., Any], names: tuple[str, ...]) -> Any:
    @functools.wraps(function)
    def call(*arrays: Any, **parameters: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # calls inside it are inlined
            return function(*arrays, **parameters)

    return jax.jit(call, static_argnames=names)


def _lower_store(on_cpus: bool) -> Any:
    forward = forbid_fusion(lambda x: x) if on_cpus else _flip_no_bits
    return mlir.lower_fun(
        lambda x, only_cotangent: x if only_cotangent else forward(x), multiple_results=False
    )


_store_p = make_identity_primitive(
    "store", _lower_store(on_cpus=False), lambda cotangent, only_cotangent: [store(cotangent)]
)
mlir.register_lowering(_store_p, _lower_store(on_cpus=True), platform="cpu")
