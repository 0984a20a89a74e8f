"""`same`: declare that a value is equal on every replica; first calls compare its digests."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.check_replicas import WORDS, digest
from jaxcoll._collectives.scope import require_array, resolve_axes, scope_here
from jaxcoll._compat import marks, settings
from jaxcoll._plan.checks import check_value_first
from jaxcoll._plan.packs.leaves import flatten_with_paths, reveal_key, where

CALLER = "jc.same"
REPORTED = WORDS + 1
"""Numbers that a replica reports for a value: the sum of its digests (two), and their count."""


@dataclasses.dataclass(eq=False)
class Claims:
    """The calls of `jc.same` in one program, and the digests of their values on each replica."""

    compares: bool = False  # the program reports every value to the host
    found: bool = False  # the program calls `jc.same`
    # By the value's place in the user's program and the replica's number
    reported: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict)
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def add(self, place: str, replica: Any, digest: Any) -> None:
        """Add one replica's digest of a value, uint32[2]; the program calls this on any thread."""
        row = np.array([*np.asarray(digest), 1], np.uint32)
        # Devices call back on threads of their own: two of one replica's could read one `before`.
        with self._lock:
            before = self.reported.get((place, int(replica)), np.zeros(REPORTED, np.uint32))
            self.reported[place, int(replica)] = before + row  # uint32 wraps around


def same(value: Any, axis_name: str | tuple[str, ...] | None = None) -> Any:
    """Declare that a value is the same on every replica where the program does not prove it.

    Use it for a number from a host callback (`jax.pure_callback`) or a hand-written sum, if it
    becomes an output, a predicate or a parameter. Nothing is sent. On the first call with arguments
    of each shape, `jc.data_parallel` and `strategy.run` compare the copies bit by bit, across
    processes too. There is no such check anywhere else, nor in a program compiled by
    `.lower(...).compile()`.

    Args:
      value: a pytree of arrays.
      axis_name: as in `all_reduce`.

    Returns:
      `value`, *invariant* over the axes. Its cotangent passes unchanged. Cost: none, but for a
      digest on first calls.

    Raises:
      NameError: an axis is not mapped here.
      ValueError: a leaf is not an array.
      ReplicaDivergenceError: on a first call, replicas hold different bits; the line is named.

    Examples:
      >>> import jax, numpy as np, jaxcoll as jc
      >>> step = jc.data_parallel(lambda x: same(jax.lax.psum(x, "data") * 0.5))
      >>> step(np.ones(8)).tolist()
      [4.0]
    """
    check_value_first(CALLER, value)
    scope = scope_here()
    claims, axes = scope.claims, resolve_axes(scope.choose_axes(axis_name, CALLER), CALLER)
    flat, treedef = flatten_with_paths(value)
    arrays = [require_array(leaf, f"`{CALLER}`: {where(path)}") for path, leaf in flat]
    if claims is not None:
        claims.found = True
        if claims.compares:
            line = settings.line_here()
            for (path, _), x in zip(flat, arrays, strict=True):
                _report(claims, f"{path or 'the value'} ({line})", tuple(axes), x)
    typed = [_compat.cast_invariant(x, tuple(axes)) for x in arrays]
    return treedef.unflatten(marks.same(typed, tuple(axes)))


def _report(claims: Claims, place: str, axes: tuple[str, ...], x: jax.Array) -> None:
    x = lax.stop_gradient(reveal_key(x))
    replica = jnp.asarray(lax.axis_index(axes))
    jax.debug.callback(lambda r, digest: claims.add(place, r, digest), replica, digest(x))
