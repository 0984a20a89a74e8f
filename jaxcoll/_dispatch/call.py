"""A call of a compiled program, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxcoll._dispatch.inner_deadlines import InnerDeadlines
from jaxcoll._plan.options import UNSET, CommunicationOptions

_NO_OPTIONS = CommunicationOptions()


def settings_of(options: CommunicationOptions) -> str:
    """The options that all processes must have in common, as they compare them."""
    return repr(options.replace(timeout_seconds=UNSET))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a jitted program, by every process that has some of its devices.

    Attributes:
      program: what `jax.jit` returned.
      args: positional arguments, placed.
      devices: those of the program's mesh.
      name: for messages.
      options: `timeout_seconds` bounds the call; with `checksum` a corrupted reduction raises.
      kwargs: arguments by name, placed.
      settings: what all processes must have in common beside the program; hashable, and its
        `repr` is compared. None: `options`, of which a program has one value.
      rows: whether arrays that are split are a batch, of which each process has its own rows.
      inner: deadlines that reductions inside the program ask for.
    """

    program: Any
    args: Sequence[Any]
    devices: Sequence[jax.Device]
    name: str
    options: CommunicationOptions = _NO_OPTIONS
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Any = None
    rows: bool = False
    inner: InnerDeadlines | None = None

    @property
    def timeout_seconds(self) -> float | None:
        """The deadline, as far as the traces made until now ask for one; None and 0: none."""
        own = self.options.timeout_seconds
        return own if self.inner is None else self.inner.bound(own)

    def settings_text(self) -> str:
        """What all processes must have in common beside the program, as they compare it."""
        if self.settings is None:
            return settings_of(self.options)
        return self.settings if isinstance(self.settings, str) else repr(self.settings)
