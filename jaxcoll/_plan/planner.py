"""From options, shapes and the world to a plan: every decision is made here, once."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcoll._plan.collective_plan import CollectivePlan
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs import overlap
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import Pack, PackingRule, cut, plan_packs
from jaxcoll._plan.rule import choose, packing_for
from jaxcoll._plan.world import World


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
    """Return the plan of one reduction, decided from shapes, options and the world.

    Args:
      reduce_op: SUM or MEAN.
      leaves: of the tree, in its order.
      options: what is asked.
      world: where it runs.
      packing: a rule that was asked for by other means (`num_packs`), which stands.
      in_backward: it stands in the backward pass, where gradients appear.
      notes: what else the plan should say.

    Raises:
      ValueError: options ask for what does not fit the world, the leaves, or one another.
    """
    choice = choose(options, world)
    apart = overlap.is_wanted(options, world, leaves, choice.algorithm, in_backward)
    if packing is None and apart:
        packing = overlap.packing_for(leaves, options.bytes_per_pack, world, in_backward)
    elif packing is None:
        packing = packing_for(options, world, any(leaf.format for leaf in leaves))
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
