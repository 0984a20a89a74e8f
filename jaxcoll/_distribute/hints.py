"""Options under the names that they had in tf.distribute before."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from jaxcoll._plan.checks import refuse
from jaxcoll._plan.options import CommunicationOptions, checked


def given(options: Any, experimental_hints: Any) -> CommunicationOptions:
    """The options of a call that also takes them under their older name."""
    if experimental_hints is None:
        return checked(options)
    if options is not None:
        raise ValueError(
            "`experimental_hints` is the older name of `options`: give one of the two."
        )
    if isinstance(experimental_hints, CommunicationOptions):
        return experimental_hints
    what = "a CollectiveHints, a CommunicationOptions or None"
    refuse("experimental_hints", what, experimental_hints)


@jax.tree_util.register_static
class CollectiveHints(CommunicationOptions):
    """Deprecated spelling of `CommunicationOptions`, without `implementation`.

    It is one, with both options set: equal to it, and taken wherever one is.

    Args:
      bytes_per_pack: as in `CommunicationOptions`.
      timeout_seconds: as in `CommunicationOptions`.

    Raises:
      ValueError: as in `CommunicationOptions`.

    Warns:
      DeprecationWarning: always.

    Examples:
      >>> import warnings
      >>> with warnings.catch_warnings(action="ignore"):
      ...     hints = CollectiveHints(timeout_seconds=120)
      >>> isinstance(hints, CollectiveHints), isinstance(hints, CommunicationOptions)
      (True, True)
    """

    __slots__ = ()

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> None:
        warnings.warn(
            "CollectiveHints is deprecated; use CommunicationOptions, which takes the same "
            "arguments.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(bytes_per_pack, timeout_seconds)
