"""Marks in a traced program for those who read it; nothing of them is left in a compiled one."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

GRADIENT = "gradient_to_reduce"
"""The name of the primitive of `gradient_of`."""


def gradient_of(leaf: Any, gradient: Any, axis: str, caller: str, name: str) -> Any:
    """`gradient` with a mark that it is going to be reduced along `axis`, and is that of `leaf`.

    The mark holds the leaf itself, on which the gradient need not depend, so that whoever drops
    equations without results drops it with the gradient only.

    Args:
      leaf: what was differentiated.
      gradient: one replica's.
      axis: a mapped axis.
      caller: the function that reduces, for a message.
      name: the leaf's, for a message.
    """
    return _gradient_p.bind(gradient, leaf, axis=axis, caller=caller, path=name)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return _gradient_p.bind(*primals, **params), tangents[0]


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    return _gradient_p.bind(*args, **params), dims[0]


_gradient_p = Primitive(GRADIENT)
_gradient_p.def_impl(lambda gradient, leaf, **_: gradient)
_gradient_p.def_abstract_eval(lambda gradient, leaf, **_: gradient)
mlir.register_lowering(_gradient_p, lambda ctx, gradient, leaf, **_: [gradient])
batching.primitive_batchers[_gradient_p] = _batched
ad.primitive_jvps[_gradient_p] = _jvp
