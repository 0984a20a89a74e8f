"""The only file that asks which JAX this is: probes, not version numbers.

Everything here is built on public JAX. Two facts move between releases and are
pinned down in this room so that no other room has to know them: where a type
keeps the mesh axes it varies over, and how a type is told that it varies no longer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def _manual(x: Any) -> Any:
    """The part of `x`'s type that says how it relates to manual mesh axes (None: nothing)."""
    return getattr(jax.typeof(x), "manual_axis_type", None)


def varying_axes(x: Any) -> frozenset[str]:
    """Axes over which `x` is typed as varying; empty wherever types are not tracked."""
    manual = _manual(x)
    return frozenset() if manual is None else frozenset(manual.varying)


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
    known = tuple(a for a in axes if a in varying_axes(x))
    return _as_invariant_p.bind(x, axes=known, summed=summed) if known else x


def _as_invariant_aval(aval: Any, *, axes: tuple[str, ...], summed: bool) -> Any:
    manual = aval.manual_axis_type
    kept = {k: getattr(manual, k) for k in ("unreduced", "reduced")}
    settled = type(manual)(varying=frozenset(manual.varying) - set(axes), **kept)
    return aval.update(manual_axis_type=settled)


def _as_invariant_transpose(cotangent: Any, *, axes: tuple[str, ...], summed: bool) -> list[Any]:
    cotangent = as_varying(cotangent, axes)
    if summed:
        cotangent = lax.select(
            lax.broadcast(lax.axis_index(axes) == 0, cotangent.shape),
            cotangent,
            lax.full_like(cotangent, 0),
        )
    return [cotangent]


_as_invariant_p = Primitive("as_invariant")
_as_invariant_p.def_impl(lambda x, **_: x)
_as_invariant_p.def_abstract_eval(_as_invariant_aval)
mlir.register_lowering(_as_invariant_p, lambda ctx, x, **_: [x])
batching.defvectorized(_as_invariant_p)
ad.deflinear(_as_invariant_p, _as_invariant_transpose)


def as_same(x: Any, axis: str) -> Any:
    """`x` with a mark, for readers of the program, that it is equal everywhere along `axis`."""
    return _same_p.bind(x, axes=(axis,))


SAME = "same_everywhere"
"""The name of the mark's primitive."""

_same_p = Primitive(SAME)
_same_p.def_impl(lambda x, **_: x)
_same_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_same_p, lambda ctx, x, **_: [x])
batching.defvectorized(_same_p)
ad.deflinear(_same_p, lambda cotangent, **_: [cotangent])


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


def is_variance_mismatch(error: TypeError) -> bool:
    """Whether `error` is JAX's refusal of a loop or branch whose types vary differently."""
    return "manual axis types" in str(error)


def is_partially_sharded(x: Any) -> bool:
    """Whether `x` is sharded, by its type, over a mesh axis that is not mapped here."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = getattr(sharding, "spec", ()) if sharding is not None else ()
    return any(part is not None for part in spec)


def compiler_options(traced: Any) -> dict[str, Any]:
    """The `compiler_options` that a function was jitted with, which JAX keeps to itself."""
    return dict(getattr(traced, "_params", {}).get("compiler_options_kvs", ()))


def configuration() -> Any:
    """All of this thread's configuration that a trace depends on, as a hashable value.

    JAX keeps it to itself; None where it is not found, as if it never changed.
    """
    module = sys.modules[type(jax.config).__module__]
    return getattr(module, "trace_context", lambda: None)()


def cluster_devices(request: dict[str, Any], mesh_sizes: Sequence[int]) -> tuple[list[Any], str]:
    """Devices of a cluster that is not here, to compile for, and how they are ordered.

    Args:
      request: the arguments of `jax.experimental.topologies.get_topology_desc`.
      mesh_sizes: the sizes of the mesh they are for.
    """
    from jax.experimental import topologies

    cluster = topologies.get_topology_desc(**request)
    names = tuple(f"axis{i}" for i in range(len(mesh_sizes)))
    try:
        mesh = topologies.make_mesh(cluster, tuple(mesh_sizes), names)
    except (NotImplementedError, AssertionError, ValueError):  # it knows no order of this shape
        return list(cluster.devices), "as JAX lists them"
    return list(mesh.devices.flat), "as `jax.make_mesh` puts them"


def compile_text(program: str, devices: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Compile StableHLO text for `devices`, as `jax.jit` compiles what it lowered.

    JAX compiles ahead of time for what it has traced itself; a text of another process goes to
    the client, by the same call that JAX makes.

    Args:
      program: with one partition for each device, in their order.
      devices: of a cluster that is not here, or of this process.
      options: compiler options.

    Returns:
      "text", the compiled program, and "memory", bytes by name.
    """
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.xla_client import CompileOptions, DeviceAssignment, DeviceList

    asked = CompileOptions()
    asked.num_replicas, asked.num_partitions = 1, len(devices)
    asked.device_assignment = DeviceAssignment.create(np.array([[d.id for d in devices]]))
    build = asked.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = "sdy." in program
    for name in ("optimization_level", "memory_fitting_level"):
        if name in options:
            setattr(build, name, options[name])
    asked.env_option_overrides = [(k, v) for k, v in options.items() if not hasattr(build, k)]
    client = devices[0].client
    # One of real devices compiles what it then loads, the other cannot load anything.
    run = client.compile_and_load if devices[0] in jax.devices() else client.compile
    with make_ir_context():
        module = ir.Module.parse(program)
        main: Any = next(f for f in module.body if str(f.attributes["sym_name"]) == '"main"')
        build.allow_spmd_sharding_propagation_to_parameters = _unsharded(main, "arg_attrs")
        build.allow_spmd_sharding_propagation_to_output = _unsharded(main, "res_attrs")
        compiled = run(module, DeviceList(tuple(devices)), asked)
    stats = compiled.get_compiled_memory_stats()
    return {
        "text": compiled.hlo_modules()[0].to_string(),
        "memory": {
            name: getattr(stats, f"{name}_size_in_bytes")
            for name in ("argument", "output", "alias", "temp", "generated_code")
        },
    }


def _unsharded(function: Any, which: str) -> list[bool]:
    """Of each argument or result whether its sharding is the compiler's to choose."""
    if which not in function.attributes:
        return []
    return [
        not {"sdy.sharding", "mhlo.sharding"} & {named.name for named in attributes}
        for attributes in function.attributes[which]
    ]


def has_backend() -> bool:
    """Whether JAX has begun to use devices, after which processes cannot be joined any more."""
    from jax.experimental import multihost_utils

    bridge = getattr(multihost_utils, "xla_bridge", None)
    return bool(bridge and bridge.backends_are_initialized())


def let_gloo_listen_at(host: str) -> bool:
    """Have CPU devices meet over Gloo at one address of this host.

    By itself Gloo listens at whatever the host's own name stands for. To be called when the
    processes are joined, and before there are devices.

    Args:
      host: the address.

    Returns:
      Whether this JAX can be told.
    """
    from jax.experimental import multihost_utils
    from jax.extend.backend import register_backend_factory
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    bridge = getattr(multihost_utils, "xla_bridge", None)
    state = getattr(getattr(multihost_utils, "distributed", None), "global_state", None)
    make_client = getattr(bridge, "make_cpu_client", None)
    if (
        make_client is None
        or state is None
        or configured("cpu_collectives_implementation") != "gloo"
    ):
        return False

    def client() -> Any:
        if state.client is None:  # the processes have parted since
            return make_client()
        return make_client(_jax.make_gloo_tcp_collectives(state.client, hostname=host))

    register_backend_factory("cpu", client, priority=0, fail_quietly=False)
    return True


def configured(name: str) -> Any:
    """The value of an option of JAX: `jax.config.jax_<name>`, unknown to type checkers."""
    return getattr(jax.config, f"jax_{name}")
