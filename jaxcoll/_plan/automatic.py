"""The automatic packing: the packs, and what sums each, that the cost model calls fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.cost import Cost, Prices, loads
from jaxcoll._plan.leaves import Leaf
from jaxcoll._plan.packing import BytesPerPack, Pack, PackingRule, Unpacked, plan_packs
from jaxcoll._plan.world import World

KiB, MiB = 1 << 10, 1 << 20

RULES: tuple[PackingRule, ...] = (
    Unpacked(),
    # A pack holds eight of the largest leaves it takes: XLA's CPU compiler joins few leaves by a
    # branch for every element, and many by plain copies.
    *(BytesPerPack(8 * alone, alone) for alone in (256 * KiB, MiB, 2 * MiB, 4 * MiB, 8 * MiB)),
    BytesPerPack(1 << 50),
)
"""What is compared where every array handed over costs its own time."""


WORTH = 0.75
"""Of the compiler's own time, what an exchange may take, which compiles to a dozen kernels."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One way to pack, and what it is predicted to take.

    Attributes:
      packing: the rule, in words.
      packs: how many arrays travel.
      seconds: the prediction.
    """

    packing: str
    packs: int
    seconds: float


def said(rule: PackingRule) -> str:
    """A rule in words.

    Examples:
      >>> said(BytesPerPack(8 << 20, 1 << 20))
      'leaves over 1 MiB alone, others in packs of at most 8 MiB'
    """
    if isinstance(rule, Unpacked):
        return "every leaf alone"
    if not isinstance(rule, BytesPerPack):
        return str(rule)
    if rule.limit >= 1 << 50:
        return "one pack of each type"
    packs = f"packs of at most {_size(rule.limit)}"
    return (
        packs if rule.alone is None else f"leaves over {_size(rule.alone)} alone, others in {packs}"
    )


def priced(
    leaves: Sequence[Leaf], rules: Sequence[PackingRule], names: Sequence[str], prices: Prices
) -> Iterator[tuple[PackingRule, tuple[Pack, ...], Cost]]:
    """Each rule's packs, each by the algorithm that is predicted to be fastest, and the cost.

    Args:
      leaves: the tree.
      rules: ways to pack it.
      names: the algorithm of all packs; or the compiler's own and one that may stand in for it. A
        leaf that must keep its shape has the compiler's own.
      prices: what the world costs.

    Yields:
      Rule, packs and cost.
    """
    fastest: dict[tuple[tuple[int, ...], int], str] = {}
    tried: set[tuple[Pack, ...]] = set()

    def algorithm(pack: Pack) -> str:
        if pack.solid or len(names) == 1:
            return "native" if pack.solid else names[0]
        key = pack.over, pack.nbytes
        if key not in fastest:
            own, exchange = (_seconds(name, pack, prices) for name in names)
            fastest[key] = names[exchange < WORTH * own]
        return fastest[key]

    for rule in rules:
        packs = tuple(
            dataclasses.replace(pack, algorithm=algorithm(pack))
            for pack in plan_packs(leaves, rule)
        )
        if packs not in tried:
            tried.add(packs)
            cost = prices.predict(loads(packs, leaves, lambda p: stages(p.algorithm, 0, p.over)))
            yield rule, packs, cost


def algorithms_for(world: World) -> tuple[str, ...]:
    """Algorithms from which each pack may get its own, the compiler's first.

    Exchanges of our own are for CPU processes, where halving and doubling in pairs was never
    slower than a shuffle, nor a shuffle than a ring (docs/performance.md); elsewhere the
    backend's library chooses among its own. They need one axis, and all axes mapped.
    """
    if not is_gloo(world) or len(world.sizes) > 1 or world.partly_mapped:
        return ("native",)
    in_pairs = world.replicas.bit_count() == 1
    return ("native", "halving_doubling" if in_pairs else "shuffle")


def rules_for(world: World) -> tuple[PackingRule, ...]:
    """Ways to pack that are worth a comparison.

    Within one process, and on accelerators, the compiler combines all-reduces by itself, and a
    copy of ours would be a second one.
    """
    return RULES if is_gloo(world) else (Unpacked(),)


def is_gloo(world: World) -> bool:
    """Whether Gloo carries what leaves a device."""
    return world.platform == "cpu" and world.processes > 1


def usual(world: World) -> PackingRule:
    """How to pack what no cost model speaks of."""
    return BytesPerPack(16 * MiB, 2 * MiB) if is_gloo(world) else Unpacked()


def _seconds(name: str, pack: Pack, prices: Prices) -> float:
    handed_over = prices.terms.array if name == "native" else 0.0
    return prices.of(stages(name, 0, pack.over), pack.nbytes).seconds + handed_over


def _size(nbytes: int) -> str:
    return f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"
