"""The automatic packing: the packs, and what sums each, that the cost model calls fastest."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxcoll._plan.algorithms import Stage, coded_by, exchange, exchange_within, stages
from jaxcoll._plan.cost.model import Cost, Prices, loads
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import (
    UNPACKED,
    BytesPerPack,
    Pack,
    PackingRule,
    ReadyOrder,
    plan_packs,
)
from jaxcoll._plan.world import World

KiB, MiB = 1 << 10, 1 << 20

RULES: tuple[PackingRule, ...] = (
    UNPACKED,
    # A pack holds eight of the largest leaves it takes: XLA's CPU compiler joins few leaves by a
    # branch for every element, and many by plain copies.
    *(BytesPerPack(8 * alone, alone) for alone in (256 * KiB, MiB, 2 * MiB, 4 * MiB, 8 * MiB)),
    BytesPerPack(1 << 50),
)
"""What is compared where every array handed over costs its own time."""


PACKED = BytesPerPack(16 * MiB, 2 * MiB)
"""Packs where no cost model is asked."""

FEW = BytesPerPack(64 * MiB)
"""Packs of codes between simulated devices, which are there to try things out: each pack of another
size compiles a dozen kernels of its own, and what a copy costs does not count."""


WORTH = 0.75
"""Of the compiler's own time, what an exchange may take, which compiles to a dozen kernels."""

WORTH_OF_LEVELS = 1.1
"""The same for two levels that end with the compiler's own sum: which network joins the hosts is
not known, and on a slower one they gain more than they lose on a faster one."""

WORTH_OF_PAIRS = 0.9
"""The same where hosts exchange; on a slow network that takes longer than predicted."""

PAIRED = 512 * KiB
"""Bytes of the largest pack that hosts exchange, each with its partner at once."""


MODESTY = 1.25
"""How much longer a plan may take that needs no more memory than the tree, if the fastest does."""

EXCHANGED = 16 * MiB
"""Bytes of the largest pack that is exchanged: in larger ones both ways only move bytes."""

FREE = 8 * MiB
"""Bytes of packs that no program misses."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One way to pack, and what it is predicted to take."""

    packing: str  # the rule, in words
    packs: int  # how many arrays travel
    seconds: float  # the prediction


class Way(NamedTuple):
    """A rule, the packs that it makes, and what they are predicted to cost."""

    rule: PackingRule  # it
    packs: tuple[Pack, ...]  # what it makes
    cost: Cost  # the prediction
    # Seconds by which ways are compared: an exchange of ours counts for more than it takes, by as
    # much as where the sum of a pack is chosen. Otherwise two packs of exchanges would win against
    # one that is too large to be worth it, although that one is faster either way
    price: float


def fastest(ways: Sequence[Way], leaves: Sequence[Leaf]) -> Way:
    """The way to take: not the very cheapest where a little time saves much memory."""
    # Packs are copies: with all leaves packed, they take twice the memory of the tree.
    best = min(ways, key=lambda way: way.price)
    if temporary_bytes(best.packs, leaves) <= FREE:
        return best
    tree = sum(pack.nbytes for pack in best.packs)
    modest = [
        way
        for way in ways
        if temporary_bytes(way.packs, leaves) <= tree
        and way.cost.seconds <= MODESTY * best.cost.seconds
    ]
    return min(modest, key=lambda way: way.price, default=best)


def temporary_bytes(packs: Sequence[Pack], leaves: Sequence[Leaf]) -> int:
    """Bytes of the packs that are copies of leaves, before and after they are summed."""
    return 2 * sum(pack.nbytes for pack in packs if not pack.is_leaf(leaves))


def in_words(rule: PackingRule) -> str:
    """A rule in words."""
    if rule == UNPACKED:
        return "every leaf alone"
    if isinstance(rule, ReadyOrder):
        return f"as leaves become ready, packs of at most {_size(rule.limit)}"
    if not isinstance(rule, BytesPerPack):
        return str(rule)
    if rule.limit >= 1 << 50:
        return "one pack of each type"
    packs = f"packs of at most {_size(rule.limit)}"
    if rule.alone is None:
        return packs
    return f"leaves over {_size(rule.alone)} alone, others in {packs}"


def priced(
    leaves: Sequence[Leaf], rules: Sequence[PackingRule], names: Sequence[str], prices: Prices
) -> Iterator[Way]:
    """Each rule's packs, each by the algorithm that is predicted to be fastest; none twice."""
    # `names` has the algorithm of all packs; or the compiler's own first, and others that may stand
    # in for it. A leaf that must keep its shape has the compiler's own.
    coded = tuple(dict.fromkeys(map(coded_by, names)))
    # Codes are for slow networks, on which two levels gain most; within a host nothing is rounded.
    coded = tuple(name for name in coded if "/" in name) or coded
    tried: set[tuple[Pack, ...]] = set()

    @functools.cache
    def suited(over: tuple[int, ...], nbytes: int, format: str) -> tuple[str, float]:
        """What sums such a pack, and what its price is beyond its seconds."""
        choice = coded if format else names
        if len(choice) == 1:
            return choice[0], 0.0
        seconds = {
            name: prices.of(stages(name, 0, over, format), nbytes).seconds
            + prices.terms.array * (name == "native")
            for name in choice
            if format or nbytes <= _limits(name)[0]
        }
        worth = {name: 1.0 if format else _limits(name)[1] for name in seconds}
        best = min(seconds, key=lambda name: seconds[name] / worth[name])
        return best, seconds[best] * (1 / worth[best] - 1)

    for rule in rules:
        packs = plan_packs(leaves, rule)
        found = [
            ("native", 0.0) if pack.solid else suited(pack.over, pack.nbytes, pack.format)
            for pack in packs
        ]
        packs = tuple(
            pack if name == pack.algorithm else dataclasses.replace(pack, algorithm=name)
            for pack, (name, _) in zip(packs, found, strict=True)
        )
        # Of a tree of small leaves several rules make the same packs; to price is what takes time.
        if packs not in tried:
            tried.add(packs)
            cost = prices.predict(loads(packs, leaves, _stages_of))
            yield Way(rule, packs, cost, cost.seconds + sum(more for _, more in found))


def alternatives(leaves: Sequence[Leaf], world: World, terms: Terms) -> tuple[Alternative, ...]:
    """What is expected of every rule for the same leaves, fastest first."""
    found = priced(leaves, RULES, algorithms_for(world), Prices(terms, world.sizes))
    ways = [Alternative(in_words(way.rule), len(way.packs), way.cost.seconds) for way in found]
    return tuple(sorted(ways, key=lambda way: way.seconds))


def algorithms_for(world: World) -> tuple[str, ...]:
    """Algorithms from which each pack may get its own, the compiler's first.

    Exchanges of our own are for CPU processes, where halving and doubling in pairs was never
    slower than a shuffle, nor a shuffle than a ring (docs/performance.md); elsewhere the
    backend's library chooses among its own. They need all axes mapped. Over several axes they need
    inner ones that stay within a host and outer ones that do not: what is summed within hosts
    first, crosses between them once.
    """
    if not world.over_gloo or world.partly_mapped:
        return ("native",)
    if len(world.sizes) == 1:
        return ("native", exchange(world.replicas))
    if not 0 < world.inner < len(world.sizes):
        return ("native",)
    outer, inner = world.sizes[: -world.inner], world.sizes[-world.inner :]
    within = "".join(f"{exchange_within(size, world)}/" for size in reversed(inner))
    return ("native", f"{within}native", f"{within}{exchange(math.prod(outer))}")


def rules_for(world: World, leaves: Sequence[Leaf] = ()) -> tuple[PackingRule, ...]:
    """Ways to pack that are worth a comparison.

    Within one process, and on accelerators, the compiler combines all-reduces by itself, and a
    copy of ours would be a second one. It combines no exchanges of codes.
    """
    if world.over_gloo:
        return RULES
    if not any(leaf.format for leaf in leaves):
        return (UNPACKED,)
    return (FEW,) if world.platform == "cpu" else (PACKED,)


def usual(world: World) -> PackingRule:
    """How to pack what no cost model speaks of."""
    return PACKED if world.over_gloo else UNPACKED


def _limits(name: str) -> tuple[int, float]:
    """What may stand in for the compiler's own sum: the largest pack, the part of that one's time.

    By whether there are levels, and whether the compiler's own sum is the last of them.
    """
    if name.endswith("native"):
        return 1 << 62, WORTH_OF_LEVELS if "/" in name else 1.0
    return (PAIRED, WORTH_OF_PAIRS) if "/" in name else (EXCHANGED, WORTH)


def _stages_of(pack: Pack) -> tuple[Stage, ...]:
    return stages(pack.algorithm, 0, pack.over, pack.format)


def _size(nbytes: int) -> str:
    return f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"
