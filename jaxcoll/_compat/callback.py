"""How a compiled program tells the host of numbers that should have been zero.

JAX's own callbacks either have an effect, which not every loop, rule or cache takes and for which
only a barrier over all programs waits, or run for each element of a `vmap`, or need a CPU device
beside the others. Here it is a value that passes through: who uses it waits for it.

A program that is exported, or lowered for a platform that is not here, notifies no host, since JAX
ties a callback to a process and its devices; nor does one on TPUs, where it was not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Hear = Callable[[np.ndarray, int, int], None]


def reported(x: Any, group: Any, member: Any, hear: Hear) -> Any:
    """`x` itself; if any of its numbers is above zero, `hear` is called on each device's process.

    In a program that `jax.vmap` maps it is called once for all elements. Cost, while all are
    zero: a branch that is not taken. JAX keeps no program with it in its persistent cache.

    Args:
      x: integers.
      group: an int32 scalar, handed to `hear`.
      member: likewise; a `vmap`'s first element has the word for all.
      hear: hashable; is given `x`, with the axes of `vmap` in front, and the scalars. It runs in
        a thread of the compiler's and must not raise.
    """
    return _report_p.bind(x, group, member, hear=hear)


def _where_wrong(x: Any, group: Any, member: Any, *, hear: Hear) -> Any:
    return lax.cond((x > 0).any(), lambda: _heard_p.bind(x, group, member, hear=hear), lambda: x)


def _batched(args: Sequence[Any], dims: Sequence[int | None], *, hear: Hear) -> tuple[Any, Any]:
    (x, *scalars), (dim, *of_scalars) = args, dims
    scalars = [
        s if d is None else lax.index_in_dim(s, 0, d, keepdims=False)
        for s, d in zip(scalars, of_scalars, strict=True)
    ]
    if dim is not None:
        x = jax.numpy.moveaxis(x, dim, 0)
    return _report_p.bind(x, *scalars, hear=hear), None if dim is None else 0


def _can_call_back(ctx: Any) -> bool:
    module = ctx.module_context
    if getattr(module.lowering_parameters, "for_export", False):
        return False
    try:
        return module.get_backend().platform != "tpu"
    except (ValueError, NotImplementedError):  # it is lowered for what is not here
        return False


def _report_lowering(ctx: Any, x: Any, *scalars: Any, hear: Hear) -> Any:
    telling = mlir.lower_fun(_where_wrong, multiple_results=False)
    return telling(ctx, x, *scalars, hear=hear) if _can_call_back(ctx) else [x]


def _heard_lowering(ctx: Any, x: Any, group: Any, member: Any, *, hear: Hear) -> Any:
    def heard(x: Any, group: Any, member: Any) -> tuple[np.ndarray]:
        numbers = np.asarray(x)
        if (numbers > 0).any():
            hear(numbers, int(group), int(member))
        return (numbers,)

    results, _, _ = mlir.emit_python_callback(
        ctx,
        heard,
        None,
        [x, group, member],
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=False,
        returns_token=False,
        sharding=None,
    )
    return results


_report_p = Primitive("report_to_host")
_report_p.def_impl(
    lambda *args, hear: jax.jit(_report_p.bind, static_argnames="hear")(*args, hear=hear)
)
_report_p.def_abstract_eval(lambda x, *_, hear: x)
mlir.register_lowering(_report_p, _report_lowering)
batching.primitive_batchers[_report_p] = _batched

_heard_p = Primitive("heard")
_heard_p.def_abstract_eval(lambda x, *_, hear: x)
mlir.register_lowering(_heard_p, _heard_lowering, cacheable=False)
