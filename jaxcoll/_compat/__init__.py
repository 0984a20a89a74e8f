"""The only file that asks which JAX this is: probes, not version numbers.

Everything here is built on public JAX. Two facts move between releases and are
pinned down in this room so that no other room has to know them: where a type
keeps the mesh axes it varies over, and how a type is told that it varies no longer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

try:
    # Since 0.4.36: the names bound by vmap, pmap and shard_map, for error messages only.
    from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as _axis_names
except ImportError:  # pragma: no cover - a JAX that has removed the debugging aid

    def _axis_names() -> list[Any]:
        return []


def axes_in_scope() -> tuple[str, ...]:
    """Names of the mapped axes at this point of the trace, outermost first."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(dict.fromkeys([*manual, *(a for a in _axis_names() if isinstance(a, str))]))


def is_unreachable(axis: str) -> bool:
    """Whether `axis` belongs to a `vmap` inside a checked `shard_map`.

    JAX 0.10 and 0.12 fail there on every collective, with an assertion that has no words.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return axis not in manual and any(tracks_variance(a) for a in manual)


def is_vmapped(axis: str) -> bool:
    """Whether `axis` belongs to a `vmap`: an array's own dimension, behind which is no device.

    `pmap` is a `shard_map` since JAX 0.8.
    """
    return axis not in jax.sharding.get_abstract_mesh().manual_axes


def is_shadowed(axis: str) -> bool:
    """Whether a `vmap` has taken the name of an axis that the mesh maps as well.

    Told by its size, and, for one of the same size, by an index that is being batched.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.manual_axes:
        return False
    batched = type(lax.axis_index(axis)).__name__ == "BatchTracer"  # a class JAX keeps to itself
    return batched or lax.axis_size(axis) != mesh.shape[axis]


def in_mesh_order(axes: Sequence[str]) -> tuple[str, ...]:
    """`axes` in the order in which `lax.ppermute` counts replicas: that of the mesh.

    `lax.axis_index` and the gathers count in the order of the names they are given.
    """
    names = list(jax.sharding.get_abstract_mesh().axis_names)
    return tuple(sorted(axes, key=lambda a: names.index(a) if a in names else len(names)))


def varying_axes(x: Any) -> frozenset[str]:
    """Axes over which `x` is typed as varying; empty wherever types are not tracked."""
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    """The same of a type, as a traced program has them."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def zeros_like_aval(aval: Any, dtype: Any) -> jax.Array:
    """Zeros of the shape of a traced program's result, varying as it does, to begin a loop with.

    Args:
      aval: the result's type.
      dtype: the zeros' own.
    """
    manual = getattr(aval, "manual_axis_type", None)
    varying = () if manual is None else tuple(sorted(manual.varying))
    return as_varying(jnp.zeros(aval.shape, dtype), varying)


def users_line(eqn: Any) -> str:
    """The innermost line of Python behind an equation that is not a library's, as file:line."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not _LIBRARIES.search(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]jaxcoll[/\\]_\w+[/\\.]")


def tracks_variance(axis: str) -> bool:
    """Whether types tell replicas apart along `axis` (a checked `shard_map` binds it).

    `pmap`, `vmap` and `shard_map(check_vma=False)` leave every type without marks, so an
    empty set of varying axes means "the same everywhere" only where this is true.
    """
    return axis in varying_axes(lax.axis_index(axis))


def as_varying(x: Any, axes: Sequence[str]) -> Any:
    """`x` typed as varying over `axes`: no data moves. Axes without tracked types are left out."""
    missing = tuple(a for a in axes if a not in varying_axes(x) and tracks_variance(a))
    return lax.pcast(x, missing, to="varying") if missing else x


def as_invariant(x: Any, axes: Sequence[str], *, summed: bool = False, vouched: bool = True) -> Any:
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
      vouched: False if nobody knows that it is equal, and only a trace is to take it for that.
    """
    known = tuple(a for a in axes if a in varying_axes(x))
    return _as_invariant_p.bind(x, axes=known, summed=summed, vouched=vouched) if known else x


def _as_invariant_aval(aval: Any, *, axes: tuple[str, ...], **_: Any) -> Any:
    return _retyped(aval, frozenset(aval.manual_axis_type.varying) - set(axes))


def _retyped(aval: Any, varying: frozenset[str]) -> Any:
    """The same type, but for the axes it varies over."""
    manual = aval.manual_axis_type
    kept = {k: getattr(manual, k) for k in ("unreduced", "reduced")}
    return aval.update(manual_axis_type=type(manual)(varying=varying, **kept))


def _as_invariant_transpose(
    cotangent: Any, *, axes: tuple[str, ...], summed: bool, **_: Any
) -> list[Any]:
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

_as_invariant_p = Primitive(AS_INVARIANT)
_as_invariant_p.def_impl(lambda x, **_: x)
_as_invariant_p.def_abstract_eval(_as_invariant_aval)
mlir.register_lowering(_as_invariant_p, lambda ctx, x, **_: [x])
batching.defvectorized(_as_invariant_p)
ad.deflinear(_as_invariant_p, _as_invariant_transpose)


def as_same(x: Any, axis: str) -> Any:
    """`x` with a mark, for readers of the program, that it is equal everywhere along `axis`."""
    return _same_p.bind(x, axes=(axis,))


def ordered(x: Any, after: Any) -> Any:
    """`x` as it is, but not before `after` is there, as far as compilers keep the order.

    JAX 0.10 types both results of a barrier as varying over what either does, so `after` is made
    to vary over no more than `x`: nobody sees what comes of it.
    """
    more = varying_axes(after) - varying_axes(x)
    return lax.optimization_barrier((x, as_invariant(after, sorted(more))))[0]


SAME = "same_everywhere"
"""The name of the mark's primitive."""

_same_p = Primitive(SAME)
_same_p.def_impl(lambda x, **_: x)
_same_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_same_p, lambda ctx, x, **_: [x])
batching.defvectorized(_same_p)
ad.deflinear(_same_p, lambda cotangent, **_: [cotangent])


def through_backward(
    arrays: Sequence[Any],
    through: Callable[[dict[int, Any], dict[int, frozenset[str]]], dict[int, Any]],
    axes: Sequence[str],
) -> list[Any]:
    """`arrays` themselves, whose cotangents go through a function together.

    A custom derivative rule would say as much, but takes no forward mode, and sends the zeros of
    arrays that nobody differentiates.

    Args:
      arrays: floating ones.
      through: hashable; is given the cotangents by their arrays' numbers, those that are known to
        be zero left out, and the axes that each array varies over by its type, which its result
        must vary over, too.
      axes: axes that the results vary over by their type, whatever the arrays do.
    """
    typed = tuple(a for a in axes if tracks_variance(a))
    which = tuple(range(len(arrays)))
    return _through_p.bind(*arrays, through=through, which=which, axes=typed) if arrays else []


THROUGH = "sync_in_backward"
"""The name of the primitive of `through_backward`."""


def _through_avals(*avals: Any, axes: tuple[str, ...], **_: Any) -> list[Any]:
    if not axes:
        return list(avals)
    # What was made outside of the mesh, a constant, does not know it yet.
    mesh = jax.sharding.get_abstract_mesh()
    avals = tuple(aval.update(sharding=aval.sharding.update(mesh=mesh)) for aval in avals)
    return [_retyped(a, frozenset(a.manual_axis_type.varying).union(axes)) for a in avals]


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
    known = {i: ct for i, ct in zip(which, cotangents, strict=True) if not isinstance(ct, ad.Zero)}
    varying = {
        i: frozenset(getattr(getattr(avals[i], "manual_axis_type", None), "varying", ()))
        for i in known
    }
    results = through(known, varying) if known else {}
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


def as_stored(x: Any, *, backward: bool = False) -> Any:
    """`x` with the bits that it has once it is stored, whatever it is computed from or goes into.

    A compiler may compute `a * b + c` with one rounding for two, where both meet in one loop; if
    they do depends on the program around them. Nothing is so joined across this step. It costs
    no pass of its own where it is fused. `lax.optimization_barrier` is not enough: XLA's CPU
    compiler of 2026 drops it before it decides what to compute in one loop.

    Args:
      x: an array.
      backward: it is the cotangent that this is done to, and `x` is left alone.
    """
    stored = jnp.issubdtype(x.dtype, jnp.inexact) and x.size
    return _as_stored_p.bind(x, backward=backward) if stored else x


def _stored(x: jax.Array) -> jax.Array:
    """The bits of `x`, changed by a number that is zero: but only number theory knows it."""
    if jnp.iscomplexobj(x):
        return lax.complex(_stored(lax.real(x)), _stored(lax.imag(x)))
    bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    seven = lax.full_like(bits[(0,) * bits.ndim], 7)
    some = bits[(0,) * bits.ndim] % seven
    # A cube leaves 0, 1 or 6 when it is divided by 7.
    never = some * some * some % seven == lax.full_like(seven, 3)
    mask = lax.broadcast(never.astype(bits.dtype), bits.shape)
    return lax.bitcast_convert_type(bits ^ mask, x.dtype)


_as_stored_p = Primitive("as_stored")
_as_stored_p.def_impl(lambda x, **_: x)
_as_stored_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(
    _as_stored_p,
    mlir.lower_fun(lambda x, backward: x if backward else _stored(x), multiple_results=False),
)
batching.defvectorized(_as_stored_p)
ad.deflinear(_as_stored_p, lambda ct, backward: [as_stored(ct, backward=not backward)])


def is_variance_mismatch(error: BaseException) -> bool:
    """Whether `error` may be JAX's refusal of types that vary differently.

    JAX has no class for it, and as many wordings as primitives: of loops and branches, of custom
    derivatives, solvers, samplers. All of them show a type that varies, or name such types.
    """
    return _VARIANCE.search(str(error)) is not None


_VARIANCE = re.compile(r"\{V:|manual axis types|varying manual axes|check_vma=False")


def is_partially_sharded(x: Any) -> bool:
    """Whether `x` is sharded, by its type, over a mesh axis that is not mapped here."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = getattr(sharding, "spec", ()) if sharding is not None else ()
    return any(part is not None for part in spec)


def configuration() -> Any:
    """All of this thread's configuration that a trace depends on, as a hashable value.

    JAX keeps it to itself; None where it is not found, as if it never changed.
    """
    module = sys.modules[type(jax.config).__module__]
    return getattr(module, "trace_context", lambda: None)()


def has_backend() -> bool:
    """Whether JAX has begun to use devices, after which processes cannot be joined any more."""
    from jax.experimental import multihost_utils

    bridge = getattr(multihost_utils, "xla_bridge", None)
    return bool(bridge and bridge.backends_are_initialized())


def configured(name: str) -> Any:
    """The value of an option of JAX: `jax.config.jax_<name>`, unknown to type checkers."""
    return getattr(jax.config, f"jax_{name}")
