"""Make a plan from options, shapes and the world: every decision is made here, once.

Options that are set are followed. What they leave open follows from the constants below. Nothing
is searched, measured or read while a program is traced, so all processes of a job choose alike.
`python -m benchmarks.regret` compares these rules with the best choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxcoll._compression.format import find_format
from jaxcoll._plan.algorithms import (
    DESCRIPTIONS,
    IN_TREE_ORDER,
    check_fits,
    check_in_tree_order,
    coding_algorithm,
    fastest_exchange,
    fastest_inner_exchange,
    owns_shards,
)
from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import (
    LAST,
    UNPACKED,
    BytesPerPack,
    Pack,
    PackingRule,
    ReadyOrder,
    cut,
    packing_in_order,
    plan_packs,
)
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._plan.world import World

KiB, MiB = 1 << 10, 1 << 20

# Constants, each with the command that measures it; `bench` is `python -m benchmarks.all_reduce`.

PACKED = BytesPerPack(64 * MiB, alone=4 * MiB)
"""Packs over Gloo. A leaf of more than 4 MiB takes longer to copy into a pack and out of it than
Gloo takes for another array: `bench --processes N --tree resnet50 --algorithms
native@all,native@16MiB,native@4MiB,per-leaf`, N = 2, 4 and 8."""
# Where threads share cores, an array over Gloo costs milliseconds whatever its size: Gloo's thread
# polls a connection for as long as another thread holds it.

SHARDED = BytesPerPack(16 * MiB, alone=2 * MiB)
"""Packs of shards, the same in every world, so that a layout made outside a program fits the one
inside; and packs of codes on accelerators."""

CODES = BytesPerPack(64 * MiB)
"""Packs of codes between simulated devices, where copies cost nothing and each new pack size
compiles 18 kernels: build times of `bench --devices 4 --tree resnet50 --algorithms
native+int8@16MiB,native+int8@64MiB`."""

EXCHANGED, MOST_PROCESSES = 512 * KiB, 8
"""Largest pack that jaxcoll's exchanges sum on one host: `EXCHANGED` bytes for each process, up to
`MOST_PROCESSES`. They save at least a quarter of Gloo's time, the price of five to ten kernels:
`bench --processes N --sizes 512KiB:8MiB --algorithms native,halving_doubling`, N = 2, 4 and 8."""

BETWEEN_HOSTS = 8
"""Divisor of that limit for exchanges between hosts, where both sides send over the same links,
which takes half as long again: `bench --rate 1gbit --hosts 2 --per-host 2 --sizes 64KiB:2MiB
--algorithms shuffle/native,shuffle/halving_doubling`."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The algorithms of one reduction, by canonical names."""

    algorithm: str  # for packs of more than `limit` bytes
    small: str  # for packs of at most `limit` bytes
    limit: int
    coded: str  # for packs in a wire format
    parts: int = 1  # arrays that each pack is cut into
    owners: int = 0  # shards of an outermost shuffle; 0: one for each replica

    def algorithm_for(self, pack: Pack) -> str:
        """Return the algorithm of a pack; a leaf that must keep its shape is summed natively."""
        if pack.solid:
            return "native"
        if pack.format:
            return self.coded
        return self.small if self.limit and pack.nbytes <= self.limit else self.algorithm


_NATIVE = Choice("native", "native", 0, "shuffle")


def choose(options: CommunicationOptions, world: World) -> Choice:
    """Return the algorithms that options request, or else those that suit the world.

    Raises:
      ValueError: options do not fit the world, or one another.
    """
    if not fixes_algorithm(options):
        return _automatic(world)
    algorithm = resolve_algorithm(options, world)
    owned = owns_shards(algorithm)
    parts, owners = (1, options.shards) if owned else (options.shards or 1, 0)
    return Choice(algorithm, algorithm, 0, coding_algorithm(algorithm), parts, owners)


def fixes_algorithm(options: CommunicationOptions) -> bool:
    """Return whether options fix the algorithm, so that the planner may not choose another."""
    return bool(options.algorithm or options.reproducible or options.shards) or (
        options.implementation is not CommunicationImplementation.AUTO
    )


def _automatic(world: World) -> Choice:
    """Return the algorithms that suit a world, where options leave the choice.

    jaxcoll's own exchanges are for CPU processes, where halving and doubling in pairs was never
    slower than a shuffle, nor a shuffle than a ring (docs/performance.md); elsewhere the
    backend's library chooses among its own. They need all axes mapped. Inner axes that stay within
    a host are summed first, for packs of every size, so that fewer bytes cross between hosts. The
    network is not known, but this gains more on a slow one than it costs on a fast one.
    """
    if not world.over_gloo or world.partly_mapped:
        return _NATIVE
    limit = EXCHANGED * min(world.processes, MOST_PROCESSES)
    if world.hosts > 1:
        limit //= BETWEEN_HOSTS
    if 0 < world.inner < len(world.sizes):
        outer, inner = world.sizes[: -world.inner], world.sizes[-world.inner :]
        within = "".join(f"{fastest_inner_exchange(size, world)}/" for size in reversed(inner))
        between = fastest_exchange(math.prod(outer))
        return Choice(f"{within}native", f"{within}{between}", limit, f"{within}shuffle")
    if len(world.sizes) == 1 and world.processes == world.replicas:
        return Choice("native", fastest_exchange(world.replicas), limit, "shuffle")
    return _NATIVE


def packing_for(
    options: CommunicationOptions, world: World, leaves: Sequence[Leaf] = ()
) -> PackingRule:
    """Return the rule that groups leaves into packs.

    Within one process, and on accelerators, the compiler combines all-reduces by itself, so a
    copy made here would be a second one. It does not combine exchanges of codes.
    """
    if options.bytes_per_pack:
        return BytesPerPack(options.bytes_per_pack)
    if world.over_gloo:
        return PACKED
    if not any(leaf.format for leaf in leaves):
        return UNPACKED
    return CODES if world.platform == "cpu" else SHARDED


def wants_order(options: CommunicationOptions, world: World) -> bool:
    """Return whether packs should follow the order in which leaves become ready.

    By default they do on GPUs, where the compiler starts collectives early and computes meanwhile;
    not on CPUs, which wait for each collective, nor on TPUs, most generations of which wait too.
    """
    if options.overlap is None:
        return world.platform == "gpu" and world.replicas > 1
    return options.overlap


def resolve_algorithm(options: CommunicationOptions, world: World) -> str:
    """Return the algorithm that options name or imply, with Gloo's own reduce-scatter replaced.

    Gloo's sends more than necessary, so one of jaxcoll's exchanges replaces it on inner axes.

    Raises:
      ValueError: it does not fit the world, or does not go with another option.
    """
    algorithm = options.algorithm or _default_algorithm(options, world)
    if find_format(options.compression) is not None:
        _check_carries_codes(algorithm, options)
    check_fits(algorithm, options.shards, world)
    if options.reproducible:
        check_in_tree_order(algorithm, options.shards, world)
    *inner, outermost = algorithm.split("/")
    if "native" not in inner or not world.over_gloo:
        return algorithm
    within = zip(inner, reversed(world.sizes), strict=False)
    ours = (fastest_inner_exchange(n, world) if name == "native" else name for name, n in within)
    return "/".join([*ours, outermost])


def half_algorithm(options: CommunicationOptions, world: World) -> str:
    """Return the algorithm of a separate reduce-scatter or all-gather, which is never Gloo's."""
    algorithm = resolve_algorithm(options, world)
    if not world.over_gloo or "native" not in algorithm.split("/"):
        return algorithm
    in_pairs = algorithm == "native" and world.replicas.bit_count() == 1
    return "halving_doubling" if in_pairs else algorithm.replace("native", "shuffle")


def _default_algorithm(options: CommunicationOptions, world: World) -> str:
    if options.implementation is CommunicationImplementation.RING:
        return "ring"
    if options.implementation is CommunicationImplementation.NCCL or not options.reproducible:
        return "native"
    return next(name for name, law in IN_TREE_ORDER.items() if law(world.replicas))


def _check_carries_codes(algorithm: str, options: CommunicationOptions) -> None:
    """Refuse algorithms that cannot sum codes, and options that cannot go with them."""
    format, outermost = str(options.compression), algorithm.split("/")[-1]
    is_named = options.algorithm or options.implementation is CommunicationImplementation.RING
    if is_named and outermost not in ("native", "shuffle"):
        raise ValueError(
            f"`compression` {format!r} does not go with {algorithm!r}: {DESCRIPTIONS[outermost]} "
            "adds numbers on the way, and each of its steps would round again. Leave "
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
            f"`reproducible` needs bits that do not depend on the algorithm, and {algorithm!r} "
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
    """Return the plan of one reduction; `packing` replaces the rule that options imply."""
    choice = choose(options, world)
    overlap = wants_order(options, world)
    if overlap and options.overlap is None:
        # By default only for native all-reduces of large trees, in an order that is not guessed.
        order_is_known = in_backward or any(leaf.ready is not None for leaf in leaves)
        large = sum(leaf.nbytes for leaf in leaves if leaf.travels) > 2 * LAST
        overlap = choice.algorithm == "native" and order_is_known and large
    if packing is None and overlap:
        packing = packing_in_order(leaves, options.bytes_per_pack, world, in_backward)
    elif packing is None:
        packing = packing_for(options, world, leaves)
    packs = plan_packs(leaves, packing, choice.algorithm_for)
    if choice.parts > 1:
        packs = cut(packs, choice.parts)
    if options.reproducible:
        _check_mapped(leaves, packs)
        _check_uncut(leaves, packs, packing)
    return CollectivePlan(
        reduce_op, tuple(leaves), packs, world, options, packing, choice.owners, overlap,
        in_backward, notes=notes,
    )  # fmt: skip


def _check_uncut(leaves: Sequence[Leaf], packs: Sequence[Pack], packing: PackingRule) -> None:
    """Refuse packs that end inside a block of codes: its bits would depend on the packing."""
    for pack in packs:
        block = pack.format.block if pack.format else 1
        if any(s.start % block for s in pack.segments):
            leaf = where(leaves[pack.segments[0].leaf].path)
            setting = "overlap" if isinstance(packing, ReadyOrder) else "num_packs"
            raise ValueError(
                f"`reproducible` with `compression` {str(pack.format)!r}: packs end inside {leaf}, "
                f"so its bits would depend on them. Leave `{setting}` unset."
            )


def _check_mapped(leaves: Sequence[Leaf], packs: Sequence[Pack]) -> None:
    """Refuse leaves that are sharded over an axis which is not mapped."""
    for pack in packs:
        if pack.solid:
            leaf = where(leaves[pack.segments[0].leaf].path)
            raise ValueError(
                f"`reproducible` cannot hold for {leaf}: it is sharded over another axis of the "
                "mesh, so only the compiler's own all-reduce can sum it, in an order that the "
                "compiler chooses. Map that axis too in `jax.shard_map`, or reduce this leaf in a "
                "separate call without `reproducible`."
            )
