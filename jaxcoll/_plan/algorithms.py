"""Names of algorithms, and the steps and bytes of a composition of them.

This file has only names and arithmetic; the programs are in `_collectives/algorithms`. The costs
are the standard ones, per device and for n replicas: Thakur, Rabenseifner and Gropp, "Optimization
of collective communication operations in MPICH" (2005); Patarasuk and Yuan (2009) for the ring;
Träff (2024) for halving and doubling with any n.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jaxcoll._compression.format import WireFormat
from jaxcoll._plan.world import World
from jaxcoll._show.units import pluralize

DESCRIPTIONS = {
    "native": "the compiler's own collectives",
    "ring": "a ring of neighbour exchanges",
    "halving_doubling": "halving and doubling",
    "shuffle": "a shuffle that sends each shard to its owner and back",
}

TENSORFLOW = {
    "nccl": "native",
    "xring": "ring",
    "rechd": "halving_doubling",
    "pscpu": "shuffle",
    "psgpu": "shuffle",
}


def _is_power_of_two(n: int) -> bool:
    return n.bit_count() == 1


IN_TREE_ORDER: dict[str, Callable[[int], bool]] = {
    "native": lambda n: False,
    "ring": lambda n: False,
    "halving_doubling": _is_power_of_two,
    "shuffle": lambda n: True,
}
"""Tests of n: true if an algorithm sums over n replicas as ((0+1)+(2+3))+((4+5)+(6+7))."""


def fastest_exchange(replicas: int) -> str:
    """Return the fastest of jaxcoll's own algorithms over `replicas` CPU devices."""
    return "halving_doubling" if _is_power_of_two(replicas) else "shuffle"


def fastest_inner_exchange(replicas: int, world: World) -> str:
    """Return the same for an inner axis; devices of one process wait least often in a shuffle."""
    return fastest_exchange(replicas) if world.processes == world.replicas else "shuffle"


def canonical(name: str) -> str:
    """Return jaxcoll's name of an algorithm, or of several joined by "/"; it knows TensorFlow's."""
    parts = [TENSORFLOW.get(part.lower(), part.lower()) for part in name.split("/")]
    if not set(parts) <= set(DESCRIPTIONS):
        raise ValueError(
            f"`algorithm` must be None or one of {', '.join(DESCRIPTIONS)} (TensorFlow's "
            f"{', '.join(TENSORFLOW)} work too), or 'inner/outer' made of two of them for a "
            f"pair of axes; got {name!r}."
        )
    return "/".join(parts)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One algorithm of a composition, and the axes that it runs along."""

    algorithm: str  # its name
    axes: tuple[int, ...]  # positions of its axes among those of the reduction, outer first
    replicas: int  # replicas along those axes together
    shards: int  # number of parts that it cuts its array into; replica j sums part j
    format: WireFormat | None = None  # wire format of the parts; None: they travel exactly


def coding_algorithm(algorithm: str) -> str:
    """Return the algorithm that carries codes where `algorithm` would carry numbers.

    Codes cannot be added on the way, so each part goes straight to its owner: the outermost
    algorithm becomes a shuffle.
    """
    return "/".join([*algorithm.split("/")[:-1], "shuffle"])


@functools.lru_cache(maxsize=1024)
def stages(
    algorithm: str, shards: int, over: tuple[int, ...], format: WireFormat | None = None
) -> tuple[Stage, ...]:
    """Return the stages of a named algorithm along the axes `over`, inner first.

    Every stage but the last reduce-scatters, hands its shard to the next, and all-gathers what
    comes back; the last one all-reduces. An axis of size 1 has no stage. The first part of a name
    with "/" takes the innermost axis, the next one the axis around it, and the last one all that
    remain. Only the last uses `format` and, if it is a shuffle, `shards` (0: one for each replica).

    Examples:
      >>> [(s.algorithm, s.axes, s.replicas) for s in stages("native/ring", 0, (2, 4))]
      [('native', (1,), 4), ('ring', (0,), 2)]
    """
    *inner, outermost = algorithm.split("/")
    result, axis = [], len(over) - 1
    for name in inner:
        if (n := over[axis]) > 1:
            result.append(Stage(name, (axis,), n, n))
        axis -= 1
    axes = tuple([k for k in range(axis + 1) if over[k] > 1])
    n = math.prod(over[: axis + 1])
    if n > 1:
        # Only an outermost shuffle may have fewer owners: an inner stage has a shard for each.
        owners = min(shards, n) if shards and outermost == "shuffle" else n
        result.append(Stage(outermost, axes, n, owners, format))
    return tuple(result)


def owns_shards(algorithm: str) -> bool:
    """Return whether `shards` is a number of owners, and not of separate reductions."""
    return algorithm.split("/")[-1] == "shuffle"


def check_fits(algorithm: str, shards: int, world: World) -> None:
    """Refuse a name with more parts than `world` has axes, and more shards than replicas."""
    names, axes = algorithm.split("/"), len(world.sizes)
    if len(names) > axes:
        raise ValueError(
            f"the algorithm {algorithm!r} is hierarchical, one part for each axis from inner to "
            f"outer: it needs a tuple of {len(names)} axes as `axis_name`, as in (outer, inner), "
            f"and got {axes}."
        )
    owners = math.prod(world.sizes[: axes - len(names) + 1])
    if owns_shards(algorithm) and shards > owners:
        raise ValueError(
            f"`shards` is {shards}, but the shuffle of {algorithm!r} runs over "
            f"{pluralize(owners, 'replica')}, and each shard needs its own owner: pass at most "
            f"{owners}, or 0 for one shard per replica."
        )


def sums_in_tree_order(stages: Sequence[Stage]) -> bool:
    """Return whether the stages sum every element in the order of one binary tree over replicas.

    The tree has the replicas as leaves, in the order of the axes, outer first; a missing leaf is
    skipped. A shuffle with fewer owners than replicas adds parts one after another. Trees within
    and between groups make up that tree if every group is a whole branch of it: if all group
    sizes but the outermost are powers of two.

    Examples:
      >>> [sums_in_tree_order(stages("shuffle/shuffle", 0, over)) for over in ((3, 4), (4, 3))]
      [True, False]
    """
    branches = all(_is_power_of_two(stage.replicas) for stage in stages[:-1])
    return branches and all(
        s.shards == s.replicas and IN_TREE_ORDER[s.algorithm](s.replicas) for s in stages
    )


def check_in_tree_order(algorithm: str, shards: int, world: World) -> None:
    """Refuse an algorithm whose sums depend on the position of an element, and suggest others."""
    if sums_in_tree_order(stages(algorithm, shards, world.sizes)):
        return
    n = world.replicas
    owned = shards and owns_shards(algorithm)
    what = f"{algorithm!r} with {pluralize(shards, 'owner')}" if owned else repr(algorithm)
    fixed = " or ".join(repr(name) for name, law in IN_TREE_ORDER.items() if law(n))
    fixed += " with `shards` unset" if owned else ""
    pairs = ", or 'inner/outer' of these over groups of a power of two"
    raise ValueError(
        f"`reproducible` asks for one order of summation, and {what} has none over "
        f"{' × '.join(map(str, world.sizes))} replicas: its bits depend on the packing or on the "
        f"backend. Leave `algorithm` and `implementation` unset, or ask for {fixed}"
        f"{pairs if len(world.sizes) > 1 else ''}."
    )


def steps(stages: Sequence[Stage], in_halves: bool = False) -> int:
    """Return the number of collectives requested for one array, one after another.

    With `in_halves`, something else comes between the reduce-scatter and the all-gather.

    Examples:
      >>> [steps(stages(name, 0, (8,))) for name in DESCRIPTIONS]
      [1, 14, 5, 2]
      >>> [steps(stages(name, 0, (8,)), in_halves=True) for name in DESCRIPTIONS]
      [2, 14, 6, 2]
    """
    last = len(stages) if in_halves else len(stages) - 1
    return sum(_STEPS[stage.algorithm](stage, k == last) for k, stage in enumerate(stages))


_STEPS: dict[str, Callable[[Stage, bool], int]] = {
    "native": lambda stage, is_last: 1 if is_last else 2,
    "ring": lambda stage, is_last: 2 * (stage.replicas - 1),
    "halving_doubling": lambda stage, is_last: (
        2 * (stage.replicas - 1).bit_length() - (is_last and _is_power_of_two(stage.replicas))
    ),
    "shuffle": lambda s, is_last: 2 if s.shards == s.replicas else 2 * (s.replicas - 1),
}
"""Numbers of collectives in one stage of a composition; the last stage all-reduces."""


def wire_bytes(stages: Sequence[Stage], size: int, itemsize: int) -> int:
    """Return the bytes of an array of `size` sent by the device that sends most, with padding.

    Guarantee: over n replicas with one shard each, this is 2(n-1)/n of the array, padded to whole
    shards as the programs here pad it. The stages of a composition add up to the same, for all of
    its replicas together. The backend's own all-reduce does not pad: its shards may differ by one
    element, and a device sends all but one of them, twice. With m < n shards, an owner sends m-1
    shards to other owners and its own to n-1 replicas. Shards of a stage with a wire format are
    whole blocks of codes; `itemsize` is that of an element that travels exactly.

    Examples:
      >>> from jaxcoll.compression import Int8
      >>> wire_bytes(stages("shuffle", 0, (8,), Int8()), 4096, 4)
      7224
    """
    size, total = align(stages, size), 0
    for stage in stages:
        if stage.algorithm == "native" and stage is stages[-1]:
            return total + 2 * (size - size // stage.replicas) * itemsize
        size = -(-size // stage.shards)
        shard = stage.format.nbytes(size) if stage.format else size * itemsize
        total += (stage.shards - 1 + stage.replicas - 1) * shard
    return total


def stage_format(stages: Sequence[Stage]) -> WireFormat | None:
    """Return the wire format of the last stage; None without stages, as over axes of size 1."""
    return stages[-1].format if stages else None


def align(stages: Sequence[Stage], size: int) -> int:
    """Return `size` with the padding that makes the shards of coded stages whole blocks."""
    if (format := stage_format(stages)) is None:
        return size
    unit = math.prod(stage.shards for stage in stages) * format.block
    return -(-size // unit) * unit
