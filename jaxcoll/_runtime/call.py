"""A call of a compiled program, and the deadlines of the reductions inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from jaxcoll._compat import settings
from jaxcoll._plan.options import UNSET, CommunicationOptions


class InnerDeadlines:
    """The deadlines that the reductions inside one program request.

    Guarantee: the shortest deadline of any reduction inside, in any trace of the program, bounds
    the whole call. The host waits for a compiled program as a whole, and cannot see when a
    reduction inside begins.
    """

    def __init__(self) -> None:
        self.shortest: float | None = None

    def ask(self, seconds: float) -> None:
        """Record the deadline of a reduction that is being traced."""
        self.shortest = min(seconds, self.shortest or seconds)


def describe_kind(arguments: Any) -> Hashable:
    """Describe the structure and types of placed arguments, for which JAX has one trace.

    Cost: about half a microsecond per array.
    """
    leaves, tree = jax.tree.flatten(arguments)
    return settings.configuration(), tree, tuple(leaf.aval for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a jitted program, made by every process that has some of its devices."""

    program: Any  # what `jax.jit` returned; None: processes only exchange `value`
    args: Sequence[Any]  # positional arguments, on devices
    devices: Sequence[jax.Device]  # of the program's mesh
    name: str  # for messages
    options: CommunicationOptions = CommunicationOptions()  # `timeout_seconds` bounds the call
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by name, on devices
    # Must be equal on all processes, as the program must; hashable, and compared by its `repr`.
    # None: `options`, which never change for one program
    settings: Any = None
    # Whether sharded arrays are a batch, of which each process has its own rows
    rows: bool = False
    # Whether processes compare replicated arrays when the program first runs
    compares: bool = True
    # The name of an argument in messages, given its position or its keyword
    name_of: Callable[[int | str], str] = "args[{}]".format
    value: Any = None  # a JSON value for the others, if there is no program
    inner: InnerDeadlines | None = None  # deadlines of reductions inside the program
    group: Any = None  # the `Group` that makes the call; None: that of the devices' processes
    # The deadline for processes to agree on the program, for calls whose own begins afterwards;
    # None: `timeout_seconds` bounds both
    meeting_seconds: float | None = None
    # Texts of `SameRowsWarning`s; the thread that waits for the call warns, at the user's line
    same_rows: list[str] = dataclasses.field(default_factory=list)

    @property
    def timeout_seconds(self) -> float | None:
        """The deadline of the options and of all traces so far, in seconds; None or 0: none."""
        outer = self.options.timeout_seconds
        inner = self.inner.shortest if self.inner else None
        return min(outer, inner) if outer and inner else inner or outer

    def settings_text(self) -> str:
        if self.settings is None:
            return repr(self.options.replace(timeout_seconds=UNSET))
        return self.settings if isinstance(self.settings, str) else repr(self.settings)
