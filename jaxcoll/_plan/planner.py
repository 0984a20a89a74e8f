"""From options, shapes and the world to a plan: every decision is made here, once.

Options that are given stand. What they leave open follows from the constants below; nothing is
searched, measured or read while a program is traced, so all processes of a job choose alike.
`python -m benchmarks.regret` compares the rule with the best choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxcoll._plan.algorithms import (
    DESCRIPTIONS,
    IN_TREE_ORDER,
    check_fits,
    check_in_tree_order,
    coded_by,
    exchange,
    exchange_within,
    owns_shards,
)
from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import (
    LAST,
    UNPACKED,
    BytesPerPack,
    Pack,
    PackingRule,
    cut,
    packing_in_order,
    plan_packs,
)
from jaxcoll._plan.world import World
from jaxcoll._wire.format import named

KiB, MiB = 1 << 10, 1 << 20

# The constants, each with its command; `bench` is `python -m benchmarks.all_reduce`.

PACKED = BytesPerPack(16 * MiB, alone=2 * MiB)
"""Packs over Gloo, and packs of codes on accelerators. A larger leaf takes longer to copy into a
pack and out of it than Gloo takes to start: `bench --processes N --tree resnet50 --algorithms
native@all,native@16MiB,native@2MiB,per-leaf`, N = 2, 4 and 8."""

CODES = BytesPerPack(64 * MiB)
"""Packs of codes between simulated devices, where copies do not count and each pack of another size
compiles 18 kernels: build times of `bench --devices 4 --tree resnet50 --algorithms
native+int8@16MiB,native+int8@64MiB`."""

EXCHANGED, MOST_PROCESSES = 512 * KiB, 8
"""Bytes, for each of at most so many processes on one host, of the largest pack that exchanges of
our own sum: up to there they save a quarter of Gloo's time, for they compile a dozen kernels.
`bench --processes N --sizes 512KiB:8MiB --algorithms native,halving_doubling`, N = 2, 4 and 8."""

BETWEEN_HOSTS = 8
"""The part of that where they cross between hosts, on whose links pairs that both send take half as
long again: `bench --rate 1gbit --hosts 2 --per-host 2 --sizes 64KiB:2MiB --algorithms
shuffle/native,shuffle/halving_doubling`."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The algorithms of one reduction, by canonical names."""

    algorithm: str  # of packs over `limit` bytes
    small: str  # of packs up to it
    limit: int
    coded: str  # of packs in a wire format
    parts: int = 1  # arrays that each pack is cut in
    owners: int = 0  # shards of an outermost shuffle; 0: one for each replica

    def of(self, pack: Pack) -> str:
        """Return what sums a pack; a leaf that must keep its shape has the compiler's own."""
        if pack.solid:
            return "native"
        if pack.format:
            return self.coded
        return self.small if self.limit and pack.nbytes <= self.limit else self.algorithm


_NATIVE = Choice("native", "native", 0, "shuffle")


def choose(options: CommunicationOptions, world: World) -> Choice:
    """Return the algorithms that are asked for, or else those that suit the world.

    Raises:
      ValueError: options ask for what does not fit the world, or one another.
    """
    if not is_asked(options):
        return _automatic(world)
    algorithm = asked_algorithm(options, world)
    owned = owns_shards(algorithm)
    parts, owners = (1, options.shards) if owned else (options.shards or 1, 0)
    return Choice(algorithm, algorithm, 0, coded_by(algorithm), parts, owners)


def is_asked(options: CommunicationOptions) -> bool:
    """Return whether options fix the algorithm, so that no other may stand in for it."""
    return bool(options.algorithm or options.reproducible or options.shards) or (
        options.implementation is not CommunicationImplementation.AUTO
    )


def _automatic(world: World) -> Choice:
    """Return the algorithms that suit a world, where options leave the choice.

    Exchanges of our own are for CPU processes, where halving and doubling in pairs was never
    slower than a shuffle, nor a shuffle than a ring (docs/performance.md); elsewhere the
    backend's library chooses among its own. They need all axes mapped. Inner axes that stay within
    a host are summed first, whatever is small or large, so that less crosses between hosts: which
    network joins them is not known, and on a slow one that gains more than it costs on a fast one.
    """
    if not world.over_gloo or world.partly_mapped:
        return _NATIVE
    limit = EXCHANGED * min(world.processes, MOST_PROCESSES)
    if world.hosts > 1:
        limit //= BETWEEN_HOSTS
    if 0 < world.inner < len(world.sizes):
        outer, inner = world.sizes[: -world.inner], world.sizes[-world.inner :]
        within = "".join(f"{exchange_within(size, world)}/" for size in reversed(inner))
        pairs = exchange(math.prod(outer))
        return Choice(f"{within}native", f"{within}{pairs}", limit, f"{within}shuffle")
    if len(world.sizes) == 1 and world.processes == world.replicas:
        return Choice("native", exchange(world.replicas), limit, "shuffle")
    return _NATIVE


def packing_for(
    options: CommunicationOptions, world: World, leaves: Sequence[Leaf] = ()
) -> PackingRule:
    """Return which leaves travel together.

    Within one process, and on accelerators, the compiler combines all-reduces by itself, and a
    copy of ours would be a second one. It combines no exchanges of codes.
    """
    if options.bytes_per_pack:
        return BytesPerPack(options.bytes_per_pack)
    if world.over_gloo:
        return PACKED
    if not any(leaf.format for leaf in leaves):
        return UNPACKED
    return CODES if world.platform == "cpu" else PACKED


def wants_order(options: CommunicationOptions, world: World) -> bool:
    """Return whether it matters in which order leaves become ready.

    Without being asked on GPUs, whose compiler starts collectives early and computes meanwhile;
    not on CPUs, which wait for each, nor on TPUs, where most generations do.
    """
    if options.overlap is None:
        return world.platform == "gpu" and world.replicas > 1
    return options.overlap


def asked_algorithm(options: CommunicationOptions, world: World) -> str:
    """Return the algorithm that options name or imply, with Gloo's own reduce-scatter replaced.

    Gloo has a reduce-scatter, but not a good one, so an exchange of ours does that part within.

    Raises:
      ValueError: it does not fit the world, or does not go with another option.
    """
    algorithm = options.algorithm or _implied(options, world)
    if named(options.compression) is not None:
        _check_carries_codes(algorithm, options)
    check_fits(algorithm, options.shards, world)
    if options.reproducible:
        check_in_tree_order(algorithm, options.shards, world)
    *inner, outermost = algorithm.split("/")
    if "native" not in inner or not world.over_gloo:
        return algorithm
    within = zip(inner, reversed(world.sizes), strict=False)
    ours = (exchange_within(n, world) if name == "native" else name for name, n in within)
    return "/".join([*ours, outermost])


def half_algorithm(options: CommunicationOptions, world: World) -> str:
    """Return what carries a reduce-scatter or an all-gather alone, without Gloo's own."""
    algorithm = asked_algorithm(options, world)
    if not world.over_gloo or "native" not in algorithm.split("/"):
        return algorithm
    in_pairs = algorithm == "native" and world.replicas.bit_count() == 1
    return "halving_doubling" if in_pairs else algorithm.replace("native", "shuffle")


def _implied(options: CommunicationOptions, world: World) -> str:
    """Return the algorithm where none is named."""
    if options.implementation is CommunicationImplementation.RING:
        return "ring"
    if options.implementation is CommunicationImplementation.NCCL or not options.reproducible:
        return "native"
    return next(name for name, law in IN_TREE_ORDER.items() if law(world.replicas))


def _check_carries_codes(algorithm: str, options: CommunicationOptions) -> None:
    """Refuse what codes cannot be summed by, or what cannot hold of them."""
    format, outermost = str(options.compression), algorithm.split("/")[-1]
    is_named = options.algorithm or options.implementation is CommunicationImplementation.RING
    if is_named and outermost not in ("native", "shuffle"):
        raise ValueError(
            f"`compression` {format!r} does not go with {algorithm!r}: {DESCRIPTIONS[outermost]} "
            "adds numbers on the way, and each of its steps would round once more. Leave "
            "`algorithm` and `implementation` unset, or ask for 'shuffle', or 'inner/shuffle' over "
            "two axes."
        )
    if options.shards:
        raise ValueError(
            f"`compression` {format!r} has one shard for each replica, and `shards="
            f"{options.shards}` asks for another number: leave `shards` unset."
        )
    if options.reproducible and "/" in algorithm:
        raise ValueError(
            f"`reproducible` asks for bits that do not depend on the algorithm, and {algorithm!r} "
            f"with `compression` {format!r} codes sums of groups, which 'shuffle' does not: leave "
            "`algorithm` unset."
        )


def make_plan(
    reduce_op: ReduceOp,
    leaves: Sequence[Leaf],
    options: CommunicationOptions,
    world: World,
    packing: PackingRule | None = None,
    *,
    in_backward: bool = False,
    notes: tuple[str, ...] = (),
) -> CollectivePlan:
    """Return the plan of one reduction, with a `packing` that was asked for by other means."""
    choice = choose(options, world)
    apart = wants_order(options, world)
    if apart and options.overlap is None:
        # Not without being asked for exchanges of our own, of what is small, or in a guessed order.
        known = in_backward or any(leaf.ready is not None for leaf in leaves)
        large = sum(leaf.nbytes for leaf in leaves if leaf.travels) > 2 * LAST
        apart = choice.algorithm == "native" and known and large
    if packing is None and apart:
        packing = packing_in_order(leaves, options.bytes_per_pack, world, in_backward)
    elif packing is None:
        packing = packing_for(options, world, leaves)
    packs = plan_packs(leaves, packing, choice.of)
    if choice.parts > 1:
        packs = cut(packs, choice.parts)
    if options.reproducible:
        _check_mapped(leaves, packs)
        _check_uncut(leaves, packs)
    return CollectivePlan(
        reduce_op, tuple(leaves), packs, world, options, packing, choice.owners, apart, in_backward,
        notes=notes,
    )  # fmt: skip


def _check_uncut(leaves: Sequence[Leaf], packs: Sequence[Pack]) -> None:
    """Refuse a packing that cuts a leaf inside of a block where bits must not depend on it."""
    for pack in packs:
        block = pack.format.block if pack.format else 1
        if any(s.start % block for s in pack.segments):
            leaf = where(leaves[pack.segments[0].leaf].path)
            raise ValueError(
                f"`reproducible` with `compression` {str(pack.format)!r}: packs end inside {leaf}, "
                "which would have other blocks than alone. Leave `overlap` and `num_packs` unset."
            )


def _check_mapped(leaves: Sequence[Leaf], packs: Sequence[Pack]) -> None:
    """Refuse leaves that are sharded over an axis which is not mapped."""
    for pack in packs:
        if pack.solid:
            leaf = where(leaves[pack.segments[0].leaf].path)
            raise ValueError(
                f"`reproducible` cannot hold for {leaf}: it is sharded over another axis of the "
                "mesh, so that only the compiler's own all-reduce can sum it, in an order of its "
                "own. Map that axis, too, in `jax.shard_map`, or reduce this leaf in a call of its "
                "own without `reproducible`."
            )
