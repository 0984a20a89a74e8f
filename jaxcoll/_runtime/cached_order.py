"""Programs whose collectives XLA's CPU backend runs out of order once JAX's cache has loaded them.

Freshly compiled, all collectives of a program keep one order. Of a loaded program each loop and
branch keeps its own (JAX 0.10.2 to 0.12.0): a collective inside may then run before one outside on
one device, after it on another, and the two exchange each other's values, or wait for ever.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxcoll._compat import settings
from jaxcoll._gradients.proof.primitives import SILENT
from jaxcoll._gradients.proof.subjaxprs import equations, open_jaxpr, programs
from jaxcoll._runtime.call import Call, describe_kind

_SEQUENCES = {"while", "scan", "cond"}
_found: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()
"""Remembers if a jitted program has nested collectives, by the types of its arguments."""


def compiled_in_order(call: Call) -> contextlib.AbstractContextManager[Any]:
    """Make a context to compile a call's program in, past JAX's cache if it must not be loaded.

    Cost, where that cache is used on several CPU devices: half a microsecond per array.
    """
    on_cpus = len(call.devices) > 1 and call.devices[0].platform == "cpu"
    if call.program is None or not on_cpus or not settings.read_option("compilation_cache_dir"):
        return contextlib.nullcontext()
    found, kind = _found.setdefault(call.program, {}), describe_kind((call.args, call.kwargs))
    if kind not in found:
        traced = call.program.trace(*call.args, **call.kwargs)  # JAX keeps it, to compile it
        found[kind] = has_nested_collective(traced.jaxpr)
    return settings.past_cache() if found[kind] else contextlib.nullcontext()


def has_nested_collective(program: Any, automatic: Collection[Any] | None = None) -> bool:
    """Return True if a loop or branch of a traced program may contain a collective.

    Each may where the compiler divides arrays over devices, as along the axes of a mesh that are
    `automatic`; None: all, outside of every `jax.shard_map`.
    """
    for eqn in open_jaxpr(program).eqns:
        inner, any_may = automatic, automatic is None or len(automatic) > 0
        if eqn.primitive.name == "shard_map":
            sizes, manual = eqn.params["mesh"].shape, eqn.params["newly_manual_axes"]
            names = sizes if automatic is None else automatic
            inner = {name for name in names if name not in manual and sizes[name] > 1}
        for body in programs(eqn):
            is_sequence = eqn.primitive.name in _SEQUENCES
            if is_sequence and (any_may or any(map(_communicates, equations(body)))):
                return True
            if has_nested_collective(body, inner):
                return True
    return False


def _communicates(eqn: JaxprEqn) -> bool:
    """Return True if an equation names axes of devices; not all that do have an effect."""
    names = jax.tree.leaves([eqn.params.get(key) for key in ("axis_name", "axes")])
    return eqn.primitive.name not in SILENT and any(isinstance(name, str) for name in names)
