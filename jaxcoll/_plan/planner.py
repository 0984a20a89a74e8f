"""From options, shapes and the world to a plan: every decision is made here, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxcoll._plan import wire_formats
from jaxcoll._plan.choose import choose
from jaxcoll._plan.cost.model import Cost, Prices
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs import automatic, overlap
from jaxcoll._plan.packs.leaves import Leaf, where
from jaxcoll._plan.packs.packing import Pack, PackingRule, cut
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.wire_formats import PowerSGD, named
from jaxcoll._plan.world import World
from jaxcoll._show.units import counted


def make_plan(
    reduce_op: ReduceOp,
    leaves: Sequence[Leaf],
    options: CommunicationOptions,
    world: World,
    packing: PackingRule | None = None,
    terms: Terms | None = None,
    in_backward: bool = False,
) -> Plan:
    """Everything about one reduction, decided from shapes, options and the world.

    A `packing` that was asked for by other means (`num_packs`) stands. Without `terms` the preset
    for the world holds. `in_backward`: it stands in the backward pass, where gradients appear.
    """
    terms = terms or preset(world)
    choice = choose(options, world, packing)
    prices = Prices(terms, world.sizes)
    apart = overlap.is_wanted(options, world, leaves, choice.algorithm, in_backward)
    given = tuple(leaves)
    if apart and packing is None:
        # Where gradients are reduced as they appear, the backward pass itself gives the order.
        leaves = leaves if in_backward else overlap.with_guess(leaves)
        rule = overlap.rule_for(leaves, options.bytes_per_pack, prices, in_backward)
        choice = dataclasses.replace(choice, packing=rule)
    names = (choice.algorithm,) if choice.fixed else automatic.algorithms_for(world)
    rules = (choice.packing,) if choice.packing else automatic.rules_for(world, leaves)
    if options.compression == "auto":
        leaves = _coded_if_faster(leaves, rules, names, prices)
    found = list(automatic.priced(leaves, rules, names, prices))
    rule, packs, cost, _ = automatic.fastest(found, leaves)
    # After pricing: the number of parts was asked for, and is not searched.
    packs = cut(packs, choice.parts)
    if options.reproducible:
        _check_mapped(leaves, packs)
        _check_uncut(leaves, packs)
    reasons = list(choice.reasons)
    if not choice.packing:
        reasons.insert(0, _why(rule, cost, found[0].cost, terms, world))
    exact = [pack for pack in packs if not pack.solid and not pack.format]
    if any("/" in pack.algorithm for pack in packs if pack.algorithm != choice.algorithm):
        reasons.append(
            f"two levels: summed within each of the {world.hosts} hosts first, so that less "
            "crosses between them, which is predicted to be faster"
        )
    elif any(pack.algorithm != choice.algorithm for pack in exact):
        reasons.append("small packs: by exchanges of our own, which are predicted to be faster")
    if apart:
        reasons += overlap.reasons(given, packs, rule, world, in_backward)
    elif any(pack.algorithm == "native" and not pack.is_leaf(leaves) for pack in exact):
        reasons.append("compiled: the compiler may combine packs further; packs are what is asked")
    reasons += _formats(leaves, packs, options)
    widened = sorted(
        {f"{x.dtype.name} as {x.wire.name}" for x in leaves if x.wire != x.dtype and not x.format}
    )
    if widened:
        reasons.append(f"dtypes: {', '.join(widened)}")
    if choice.algorithm != "native" and any(pack.solid for pack in packs):
        reasons.append(
            "leaves that are sharded over another axis: by the compiler's own all-reduce, which "
            "alone leaves them in their shape"
        )
    if any(leaf.gathers for leaf in leaves):
        reasons.append(
            "sparse leaves: their rows and indices, by the compiler's own all-gather, in no pack"
        )
    return Plan(
        reduce_op, tuple(leaves), packs, choice.owners, world, terms, tuple(reasons),
        options.reproducible, apart, in_backward,
    )  # fmt: skip


def in_factors(leaves: Sequence[Leaf], format: PowerSGD) -> tuple[list[Leaf], int]:
    """Leaves as they travel: left factors in place of matrices, and right ones behind; how many.

    Right factors share no pack with others: they are computed of the left ones' sums.
    """
    f32 = np.dtype(np.float32)
    first, second = [], []
    for leaf in leaves:
        matrix = format.matrix(leaf.shape, leaf.dtype) if leaf.travels else None
        if matrix is None:
            first.append(leaf)
            continue
        factor = dataclasses.replace(leaf, dtype=f32, wire=f32, format="")
        left, right = ((size, format.rank) for size in matrix)
        first.append(dataclasses.replace(factor, path=f"{leaf.path}.left", shape=left))
        path = f"{leaf.path}.right"
        second.append(dataclasses.replace(factor, path=path, shape=right, kind="right"))
    return [*first, *second], len(second)


def _why(rule: PackingRule, cost: Cost, alone: Cost, terms: Terms, world: World) -> str:
    """Why an automatic packing is the one it is; `alone` is the cost of packing nothing."""
    packing = automatic.in_words(rule)
    if not world.over_gloo and rule in (automatic.FEW, automatic.PACKED):
        return f"packs: {packing}, because no compiler combines exchanges of codes"
    if not world.over_gloo:
        return (
            "packs: none, because inside one process and on accelerators the compiler combines "
            "all-reduces itself and a copy would only cost time"
        )
    return (
        f"packs: {packing}, predicted to take {cost.seconds * 1e3:.3g} ms, against "
        f"{alone.seconds * 1e3:.3g} ms for every leaf alone ({terms.source})"
    )


def _coded_if_faster(
    leaves: Sequence[Leaf], rules: Sequence[PackingRule], names: Sequence[str], prices: Prices
) -> Sequence[Leaf]:
    """Leaves with their formats, or, where exact sums are predicted to be as fast, without.

    Those that have another type than their sum keep theirs.
    """
    exact = [x if x.wire != x.dtype else dataclasses.replace(x, format="") for x in leaves]
    coded, plain = (
        automatic.fastest(list(automatic.priced(each, rules, names, prices)), each).cost.seconds
        for each in (leaves, exact)
    )
    return leaves if coded < plain else exact


def _formats(
    leaves: Sequence[Leaf], packs: Sequence[Pack], options: CommunicationOptions
) -> Iterator[str]:
    """What travels in a wire format, and what does not, in a sentence."""
    for name in dict.fromkeys(x.format for x in leaves if x.format):
        format = wire_formats.of(name)
        of = sum(x.format == name for x in leaves)
        blocks = f" in blocks of {format.block}" if format.block > 1 else ""
        between = any("/" in pack.algorithm and pack.format == name for pack in packs)
        why = "as asked" if options.compression else "because XLA would widen them for Gloo"
        why = "predicted to be faster over Gloo" if options.compression == "auto" else why
        yield (
            f"format: {name}{blocks} for {counted(of, 'leaf', 'leaves')}, {why}: codes go to the "
            "owner of each shard, who adds them in float32 and sends the sum as codes"
            + ", between groups only"
            * between
        )
    exact = [x for x in leaves if x.travels and not x.format]
    if named(options.compression) and exact:
        yield (
            f"exactly: {counted(len(exact), 'leaf', 'leaves')}, under a block of "
            f"{options.compression} or of types that it does not code"
        )


def _check_uncut(leaves: Sequence[Leaf], packs: Sequence[Pack]) -> None:
    """Refuse a packing that cuts a leaf inside of a block where bits must not depend on it."""
    for pack in packs:
        block = wire_formats.of(pack.format).block if pack.format else 1
        if any(s.start % block for s in pack.segments):
            leaf = where(leaves[pack.segments[0].leaf].path)
            raise ValueError(
                f"`reproducible` with `compression` {pack.format!r}: packs end inside {leaf}, "
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
