"""A call of a compiled program, as one value, and the deadlines inside that bound it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._compat import settings
from jaxcoll._plan.options import UNSET, CommunicationOptions


def settings_of(options: CommunicationOptions) -> str:
    """The options that all processes must have in common, as they compare them."""
    return repr(options.replace(timeout_seconds=UNSET))


class InnerDeadlines:
    """The deadlines that the reductions inside one program ask for.

    Guarantee: a call is bounded by the shortest deadline that any reduction inside was given, in
    any trace of the program. A compiled program is one wait: nobody outside can see where in it a
    reduction begins.
    """

    def __init__(self) -> None:
        self.shortest: float | None = None
        self._traced: set[Hashable] = set()

    def ask(self, seconds: float) -> None:
        """Note the deadline of a reduction that is being traced."""
        self.shortest = min(seconds, self.shortest or seconds)

    def traced(self, program: Any, args: tuple[Any, ...]) -> None:
        """Trace a jitted program for arguments like these, once, so that it can ask; JAX keeps it.

        Cost, when it is done: about half a microsecond an array.
        """
        leaves, tree = jax.tree.flatten(args)
        key = (settings.configuration(), tree, tuple(leaf.aval for leaf in leaves))
        if key not in self._traced:
            program.trace(*args)
            self._traced.add(key)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a jitted program, by every process that has some of its devices."""

    program: Any  # what `jax.jit` returned
    args: Sequence[Any]  # positional arguments, placed
    devices: Sequence[jax.Device]  # those of the program's mesh
    name: str  # for messages
    options: CommunicationOptions = CommunicationOptions()  # `timeout_seconds` bounds the call
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments by name, placed
    # What all processes must have in common beside the program; hashable, and its `repr` is
    # compared. None: `options`, of which a program has one value
    settings: Any = None
    # Whether arrays that are split are a batch, of which each process has its own rows
    rows: bool = False
    inner: InnerDeadlines | None = None  # deadlines that reductions inside the program ask for
    # Words of a `SameRowsWarning`, for the thread that waits for the call: the user's line is there
    same_rows: list[str] = dataclasses.field(default_factory=list)

    @property
    def timeout_seconds(self) -> float | None:
        """The deadline, as far as the traces made until now ask for one; None and 0: none."""
        own = self.options.timeout_seconds
        inner = self.inner.shortest if self.inner else None
        return min(own, inner) if own and inner else inner or own

    def settings_text(self) -> str:
        """Return the settings that all processes must have in common, as they compare them."""
        if self.settings is None:
            return settings_of(self.options)
        return self.settings if isinstance(self.settings, str) else repr(self.settings)
