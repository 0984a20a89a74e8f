"""Values that say themselves how replicas reduce them: the reduction asks, and knows none of them.

A subclass stands in a file of its own, which is read where somebody has such a value.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from jaxcoll._plan.collective_plan import CollectivePlan
    from jaxcoll._plan.packs.leaves import Leaf
    from jaxcoll._plan.packs.packing import Pack
    from jaxcoll._spmd.algorithms.coded import Coded, Coding
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


class Feedback(abc.ABC):
    """What this replica owes to one sum, and how what is owed next follows from it."""

    @abc.abstractmethod
    def added(
        self, arrays: Sequence[jax.Array], leaves: Sequence[Leaf], replicas: int
    ) -> list[jax.Array]:
        """Return the arrays with what is owed, in the types of sums over all `replicas`."""

    @abc.abstractmethod
    def lost(
        self,
        plan: CollectivePlan,
        pack: Pack,
        total: jax.Array,  # of the pack, as it arrived
        result: jax.Array,  # what was made of it
        coded: Coded | None,
        coding: Coding,
    ) -> jax.Array | None:
        """Return what this replica's part of a pack lost on the way; None if nothing can be."""

    @abc.abstractmethod
    def next(
        self,
        plan: CollectivePlan,
        carried: Sequence[tuple[jax.Array, Any]],  # reduced packs, and what each of them lost
        results: Sequence[jax.Array],  # the reduced leaves
        hidden: str | None,  # as in `unpack`
    ) -> Any:
        """Return the residual to give to the next call."""


class Owed(abc.ABC):
    """A residual between calls."""

    @abc.abstractmethod
    def opened(self, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = "") -> Feedback:
        """Return what is owed to the sum of `tree`, whose paths in that sum begin with `prefix`."""


_NO_RESIDUAL = """\
`{caller}` expects what `jc.compression.residual(params)` returns as its residual, or what this \
call returned the last time; got {got}."""


def opened(
    residual: Any, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = ""
) -> Feedback:
    """Return what a residual says is owed to the sum of a tree; refuse what is no residual."""
    if not isinstance(residual, Owed):
        raise ValueError(_NO_RESIDUAL.format(caller=caller, got=type(residual).__name__))
    return residual.opened(tree, axes, caller, prefix)
