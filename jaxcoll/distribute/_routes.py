"""Routes: the algorithm and the packing of arrays, by their size, in a program of all-reduces."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax

from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.scope import Scope, resolve_axes
from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._plan.algorithms import canonical, check_fits
from jaxcoll._plan.checks import is_integer, refuse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import PackingRule, Segment, alike, cut_evenly, whole
from jaxcoll._plan.world import World
from jaxcoll._show.units import binary_size


@dataclasses.dataclass(frozen=True)
class Route:
    """The algorithm and the packing of arrays up to some size."""

    options: CommunicationOptions  # choose the algorithm, and the packing if there is no rule
    packing: PackingRule | None  # a rule that replaces the one of the options
    limit: int = -1  # bytes of the largest array that takes this route; -1: any


def reduce_batch(
    trees: list[Any], scope: Scope, reduce_op: ReduceOp, routes: tuple[Route, ...]
) -> list[Any]:
    """All-reduce trees, in their order and structure.

    Every array takes the first route whose limit it does not exceed (the last one has none); the
    arrays of one route are packed together.
    """

    def choose_route(leaf: Any) -> int:
        array = leaf.values if is_sparse(leaf) else leaf
        nbytes = array.size * array.dtype.itemsize
        return next(k for k, r in enumerate(routes) if r.limit == -1 or nbytes <= r.limit)

    axes = resolve_axes(scope.axes, "all_reduce")
    leaves, treedef = jax.tree.flatten(trees, is_leaf=is_sparse)
    taken = [choose_route(leaf) for leaf in leaves]
    for k, route in enumerate(routes):
        mine = [leaf if at == k else None for leaf, at in zip(leaves, taken, strict=True)]
        here = dataclasses.replace(scope, options=route.options)
        reduction = AllReduce(reduce_op, axes, here, "replicated", route.packing)
        # The whole tree, so that messages have the leaves' paths
        sums = reduction.reduce(treedef.unflatten(mine))
        pairs = zip(leaves, treedef.flatten_up_to(sums), strict=True)
        leaves = [leaf if total is None else total for leaf, total in pairs]
    return treedef.unflatten(leaves)


def parse_routes(spec: Any, packing: PackingRule | None, world: World) -> tuple[Route, ...]:
    """Make a route of each tuple of a specification in any of its forms.

    Raises:
      ValueError: it has another form; a tuple does not fit the workers and devices of `world`; the
        limits do not increase, or do not end in -1.
    """
    if isinstance(spec, str):
        spec = (spec,)
    tuples = [spec] if isinstance(spec, tuple) else spec
    if not isinstance(tuples, list) or not tuples or not all(map(_may_be_route, tuples)):
        forms = 'a name such as "nccl/xring", a tuple (name, shards, limit in bytes) whose last two'
        refuse("all_reduce_spec", f"{forms} are optional, or a list of such tuples", spec)
    routes = []
    for item in tuples:
        # A short tuple leaves out the limit (-1: any size), or also the number of shards (1).
        name, shards, limit = item[0], *(*item[1:], *(1, -1)[len(item) - 1 :])
        try:
            options = CommunicationOptions(algorithm=name, shards=shards)
            check_fits(canonical(name), options.shards, world)
        except ValueError as error:
            workers, devices = world.sizes
            over = f"{workers} workers of {devices} devices"
            raise ValueError(f"`all_reduce_spec` has {item!r}, for {over}: {error}") from None
        routes.append(Route(options, packing, limit))
    *limits, last = [route.limit for route in routes]
    integers = all(is_integer(limit) and limit >= 0 for limit in limits)
    if last != -1 or not integers or sorted(set(limits)) != limits:
        raise ValueError(
            "the limits of `all_reduce_spec` must be numbers of bytes that increase from tuple to "
            f"tuple, and end in -1 (any size); got {[*limits, last]} in {spec!r}."
        )
    return tuple(routes)


def _may_be_route(item: Any) -> bool:
    return isinstance(item, tuple) and 1 <= len(item) <= 3 and isinstance(item[0], str)


@dataclasses.dataclass(frozen=True)
class NumPacks(PackingRule):
    """`count` packs of near-equal bytes; leaves are cut where a pack ends."""

    count: int

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield at least one pack for each group of alike leaves, more for the largest groups."""
        groups = alike(leaves)
        sizes = [sum(leaves[i].size for i in members) for members in groups]
        widths = [leaves[members[0]].wire.itemsize for members in groups]
        shares = [1] * len(groups)
        for _ in range(self.count - len(groups)):
            packs = zip(sizes, widths, shares, strict=True)
            nbytes = [size * width / k if k < size else 0 for size, width, k in packs]
            if not any(nbytes):
                break
            shares[nbytes.index(max(nbytes))] += 1
        for members, share in zip(groups, shares, strict=True):
            yield from cut_evenly([whole(leaves, i) for i in members], share)

    def __str__(self) -> str:
        return f"{self.count} of near-equal bytes"


@dataclasses.dataclass(frozen=True)
class GroupSmall(PackingRule):
    """Groups of neighbouring leaves of at most `max_bytes` each; other leaves travel alone.

    A group has one dtype and kind, and at most `max_group` leaves; a larger leaf ends it.
    """

    max_bytes: int
    max_group: int

    def runs(self, leaves: Sequence[Leaf]) -> Iterator[list[Segment]]:
        """Yield groups of neighbours."""
        group_of = {i: k for k, members in enumerate(alike(leaves)) for i in members}

        def key_of_run(i: int) -> Hashable:
            # A leaf that is too large for a group is a run of its own.
            return group_of.get(i), i if leaves[i].nbytes > self.max_bytes else None

        travelling = (i for i, leaf in enumerate(leaves) if leaf.travels)
        for _, run in itertools.groupby(travelling, key_of_run):
            members = [i for i in run if i in group_of]
            for start in range(0, len(members), self.max_group):
                yield [whole(leaves, i) for i in members[start : start + self.max_group]]

    def __str__(self) -> str:
        most = binary_size(self.max_bytes)
        return f"neighbours of at most {most}, up to {self.max_group} together"
