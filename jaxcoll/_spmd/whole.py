"""Values that say themselves how replicas reduce them: the reduction asks, and knows none of them.

A subclass stands in a file of its own, which is read where somebody has such a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcoll._spmd.arithmetic import Recipe


class Whole:
    """A node of a tree, a pytree to JAX, that a reduction takes as one leaf."""

    values: Any  # rows, the array that a plan describes
    indices: Any  # which rows they are

    def is_whole(self, axes: Iterable[str]) -> bool:
        """Return whether a reduction over `axes` takes it so, and not its arrays by themselves."""
        return True

    def taken(self, path: str, caller: str) -> Whole:
        """Return it as it is reduced, or raise an error that names its place in the tree."""
        raise NotImplementedError

    def reduced(self, recipe: Recipe) -> Whole:
        """Return the sum or the mean over the replicas, *invariant*."""
        raise NotImplementedError


def is_whole(node: Any, axes: Iterable[str]) -> bool:
    """Return whether a reduction over `axes` takes a node of a tree as one leaf."""
    return isinstance(node, Whole) and node.is_whole(axes)


_NO_RESIDUAL = """\
`{caller}` expects what `jc.compression.residual(params)` returns as its residual, or what this \
call returned the last time; got {got}."""


def opened(residual: Any, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = "") -> Any:
    """Return what a residual says is owed to the sum of a tree; refuse what is no residual.

    The paths of the tree in that sum begin with `prefix`.

    Raises:
      ValueError: it is no residual, or that of another tree or world.
    """
    owed_to = getattr(residual, "opened", None) if isinstance(residual, Whole) else None
    if owed_to is None:
        raise ValueError(_NO_RESIDUAL.format(caller=caller, got=type(residual).__name__))
    return owed_to(tree, axes, caller, prefix)
