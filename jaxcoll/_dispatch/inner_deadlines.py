"""Deadlines of reductions inside a program, which bound its calls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax

from jaxcoll import _compat


class InnerDeadlines:
    """The deadlines that the reductions inside one program ask for.

    Law: a call is bounded by the shortest deadline that any reduction inside was given, in any
    trace of the program. A compiled program is one wait: nobody outside can see where in it a
    reduction begins.
    """

    def __init__(self) -> None:
        self._shortest: float | None = None
        self._traced: set[Hashable] = set()

    def ask(self, seconds: float) -> None:
        """Note the deadline of a reduction that is being traced."""
        self._shortest = self.bound(seconds)

    def bound(self, seconds: float | None) -> float | None:
        """`seconds`, or the shortest deadline inside if that is less; 0 and None are none."""
        return min((s for s in (seconds, self._shortest) if s), default=seconds)

    def traced(self, program: Any, args: tuple[Any, ...]) -> None:
        """Trace a jitted program for arguments like these, once, so that it can ask; JAX keeps it.

        Cost, when it is done: about half a microsecond an array.
        """
        leaves, tree = jax.tree.flatten(args)
        key = (_compat.configuration(), tree, tuple(leaf.aval for leaf in leaves))
        if key not in self._traced:
            program.trace(*args)
            self._traced.add(key)
