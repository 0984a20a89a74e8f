"""The algorithms: their names, and the steps and bytes of a composition of them.

An algorithm is known here by its name and its arithmetic alone; `_spmd` holds the programs.
The costs are the standard ones, per device and for n replicas: Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005); Patarasuk and Yuan
(2009) for the ring; Träff (2024) for halving and doubling with any n.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jaxcoll._plan.world import World
from jaxcoll._show.units import counted
from jaxcoll._wire.format import WireFormat

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
"""True of an algorithm that sums every element over n replicas as ((0+1)+(2+3))+((4+5)+(6+7))."""


def exchange(replicas: int) -> str:
    """The exchange of our own that is fastest over so many CPU devices."""
    return "halving_doubling" if _is_power_of_two(replicas) else "shuffle"


def exchange_within(replicas: int, world: World) -> str:
    """The same along an inner axis; devices of one process wait least often in a shuffle."""
    return exchange(replicas) if world.processes == world.replicas else "shuffle"


def canonical(name: str) -> str:
    """The name of an algorithm, or of several with "/" between, in our words; TensorFlow's too."""
    parts = [TENSORFLOW.get(part.lower(), part.lower()) for part in name.split("/")]
    if not set(parts) <= set(DESCRIPTIONS):
        raise ValueError(
            f"`algorithm` must be None or one of {', '.join(DESCRIPTIONS)} (TensorFlow's "
            f"{', '.join(TENSORFLOW)} are taken too), or 'inner/outer' made of two of them for a "
            f"pair of axes; got {name!r}."
        )
    return "/".join(parts)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One algorithm of a composition, at work along its own axes."""

    algorithm: str  # its name
    axes: tuple[int, ...]  # positions of its axes among those of the reduction, outer first
    replicas: int  # replicas along those axes together
    shards: int  # how many parts it cuts its array into; part j is summed by replica j
    format: WireFormat | None = None  # what its parts travel in; None: exactly


def coded_by(algorithm: str) -> str:
    """Return the algorithm that carries codes where `algorithm` would carry numbers.

    Codes cannot be added on the way, so that each part goes to its owner at once: the outermost
    one is a shuffle.
    """
    return "/".join([*algorithm.split("/")[:-1], "shuffle"])


@functools.lru_cache(maxsize=1024)
def stages(
    algorithm: str, shards: int, over: tuple[int, ...], format: WireFormat | None = None
) -> tuple[Stage, ...]:
    """Return the stages of a named algorithm along the axes `over`, inner first.

    Every stage but the last reduce-scatters, hands its shard to the next, and all-gathers what
    comes back; the last one all-reduces. An axis of size 1 has no stage. The first part of a name
    with "/" takes the innermost axis, the next the one around it, and the last part all those that
    remain; it has the wire format, and if it is a shuffle the `shards` (0: one for each replica).

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
    """Return whether `shards` counts owners, rather than parts that travel alone."""
    return algorithm.split("/")[-1] == "shuffle"


def check_fits(algorithm: str, shards: int, world: World) -> None:
    """Refuse more parts of a name than `world` has axes, or more shards than replicas own them."""
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
            f"{counted(owners, 'replica')}, and each shard needs an owner of its own: pass at most "
            f"{owners}, or 0 for one each."
        )


def in_tree_order(stages: Sequence[Stage]) -> bool:
    """Return whether the stages sum every element in the order of the one tree over replicas.

    That tree is of pairs, over the replicas as the axes count them, outer first; a missing leaf
    is passed over. An owner of a shuffle without as many others as replicas adds what comes as it
    comes. Trees within and between groups are that tree if the groups are whole
    branches of it: if all but the outermost are of a power of two.

    Examples:
      >>> [in_tree_order(stages("shuffle/shuffle", 0, over)) for over in ((3, 4), (4, 3))]
      [True, False]
    """
    branches = all(_is_power_of_two(stage.replicas) for stage in stages[:-1])
    return branches and all(
        s.shards == s.replicas and IN_TREE_ORDER[s.algorithm](s.replicas) for s in stages
    )


def check_in_tree_order(algorithm: str, shards: int, world: World) -> None:
    """Refuse an algorithm whose sums depend on where an element stands, and list others."""
    if in_tree_order(stages(algorithm, shards, world.sizes)):
        return
    n = world.replicas
    owned = shards and owns_shards(algorithm)
    what = f"{algorithm!r} with {counted(shards, 'owner')}" if owned else repr(algorithm)
    fixed = " or ".join(repr(name) for name, law in IN_TREE_ORDER.items() if law(n))
    fixed += " with `shards` unset" if owned else ""
    pairs = ", or 'inner/outer' of these over groups of a power of two"
    raise ValueError(
        f"`reproducible` asks for one order of summation, and {what} has none over "
        f"{' × '.join(map(str, world.sizes))} replicas: its bits depend on the packing, or are the "
        f"backend's affair. Leave `algorithm` and `implementation` unset, or ask for {fixed}"
        f"{pairs if len(world.sizes) > 1 else ''}."
    )


def steps(stages: Sequence[Stage]) -> int:
    """Collectives that are requested for one array, one after another.

    Examples:
      >>> [steps(stages(name, 0, (6,))) for name in DESCRIPTIONS]
      [1, 10, 6, 2]
    """
    return sum(_STEPS[stage.algorithm](stage, stage is stages[-1]) for stage in stages)


_STEPS: dict[str, Callable[[Stage, bool], int]] = {
    "native": lambda stage, is_last: 1 if is_last else 2,
    "ring": lambda stage, is_last: 2 * (stage.replicas - 1),
    "halving_doubling": lambda stage, is_last: 2 * (stage.replicas - 1).bit_length(),
    "shuffle": lambda s, is_last: 2 if s.shards == s.replicas else 2 * (s.replicas - 1),
}
"""Collectives of one stage of a composition; the last one all-reduces."""


def wire_bytes(stages: Sequence[Stage], size: int, itemsize: int) -> int:
    """Bytes of an array of `size` that leave the device that sends most, padding included.

    Guarantee: over n replicas with a shard for each it is 2(n-1)/n of the array, rounded up to
    whole shards, since the programs here pad it to that, and so do the halves of a composition; the
    stages of one come to the same for all its replicas together. The backend's own all-reduce pads
    nothing: its shares may differ by an element, and a device sends all but one of them, twice.
    With m < n shards an owner sends m-1 of them to others and its own to n-1. Shards of a stage
    with a wire format are whole blocks, coded; `itemsize` is of an element that travels exactly.

    Examples:
      >>> from jaxcoll.compression import Int8
      >>> wire_bytes(stages("shuffle", 0, (8,), Int8()), 4096, 4)
      7224
    """
    size, total = aligned(stages, size), 0
    for stage in stages:
        if stage.algorithm == "native" and stage is stages[-1]:
            return total + 2 * (size - size // stage.replicas) * itemsize
        size = -(-size // stage.shards)
        shard = stage.format.nbytes(size) if stage.format else size * itemsize
        total += (stage.shards - 1 + stage.replicas - 1) * shard
    return total


def format_of(stages: Sequence[Stage]) -> WireFormat | None:
    """Return the format of the last stage; an axis of size 1 has no stage."""
    return stages[-1].format if stages else None


def aligned(stages: Sequence[Stage], size: int) -> int:
    """Return `size` with the padding that makes the shards of coded stages whole blocks."""
    if (format := format_of(stages)) is None:
        return size
    unit = math.prod(stage.shards for stage in stages) * format.block
    return -(-size // unit) * unit
