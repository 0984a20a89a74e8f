"""Values that are the same on every replica for a reason that no program shows."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._compat import marks, settings
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd.axes import as_array, bound_axes
from jaxcoll._spmd.checks.check_replicas import digest

CALLER = "jc.same"
WORDS = 3
"""Numbers that a replica reports of a value: two of its digests, added up, and their count."""


@dataclasses.dataclass(eq=False)
class Claims:
    """Values that `jc.same` was called with in one program, and their digests by replica."""

    compares: bool = False  # the program reports every value to the host
    found: bool = False  # there is such a call in it
    compared: set[Hashable] = dataclasses.field(default_factory=set)  # shapes of calls
    # By the value's place in the user's program and the replica's number
    reported: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict)
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def hear(self, place: str, replica: Any, words: Any) -> None:
        """Add what one replica holds, as uint32[2]; called by the program, on any thread."""
        row = np.array([*np.asarray(words), 1], np.uint32)
        with self._lock:
            before = self.reported.get((place, int(replica)), np.zeros(WORDS, np.uint32))
            self.reported[place, int(replica)] = before + row  # uint32 wraps around


def same(value: Any, axis_name: Any, claims: Claims | None) -> Any:
    """`value`, taken for the same on every replica; see `jc.same`."""
    axes = bound_axes(axis_name, CALLER)
    flat, treedef = flattened(value)
    arrays = [as_array(leaf, f"`{CALLER}`: {where(path)}") for path, leaf in flat]
    if claims is not None:
        claims.found = True
        if claims.compares:
            line = settings.line_here()
            for (path, _), x in zip(flat, arrays, strict=True):
                _report(claims, f"{path or 'the value'} ({line})", tuple(axes), x)
    typed = [_compat.as_invariant(x, tuple(axes)) for x in arrays]
    return treedef.unflatten(marks.same(typed, tuple(axes)))


def _report(claims: Claims, place: str, axes: tuple[str, ...], x: jax.Array) -> None:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = lax.stop_gradient(x)
    replica = jnp.asarray(lax.axis_index(axes))
    jax.debug.callback(lambda r, words: claims.hear(place, r, words), replica, digest(x))
