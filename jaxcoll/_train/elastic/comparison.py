"""Comparison of the states of a generation's members; it decides who ends if they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._plan.packs.leaves import flatten_with_paths
from jaxcoll._runtime.agreement import group_divergent
from jaxcoll._runtime.fingerprint import digest_bytes, find_difference, view_bytes
from jaxcoll._runtime.peers import parse_rank
from jaxcoll._show.units import pluralize
from jaxcoll._train.elastic.generation import Generation, RegroupError, describe
from jaxcoll._train.elastic.membership import Membership
from jaxcoll.errors import ProgramMismatchError, ReplicaDivergenceError


def describe_structure(tree: Any) -> str:
    leaves, _ = flatten_with_paths(tree)
    return "\n".join(f"state{path}: {x.dtype}{list(x.shape)}" for path, x in leaves)


def describe_difference(structures: dict[str, str]) -> str:
    """Describe the first line in which two structures differ, in each of them."""
    lines = {name: text.splitlines() for name, text in structures.items()}
    return find_difference(lines).replace("\n", "; ")


def check_agreed(
    values: dict[str, str],
    membership: Membership,
    error: Callable[[dict[str, str]], Exception],
    start: bool = False,
    what: str = "state",
) -> None:
    """Check that the values of all members are equal.

    Raises:
      RegroupError: this worker is in a majority that agrees, and continues without the others.
      Exception: `error(values)`: this worker is in the minority, or there is no majority; at the
        `start` there never is.
    """
    if len(set(values.values())) == 1:
        return
    generation = membership.generation
    agreeing = () if start else find_majority(values, generation)
    if membership.name not in agreeing:
        raise error(values)
    differing = [name for name in generation.members if name not in agreeing]
    membership.request_regroup(f"the {what} of {describe(differing)} differs from the others'")
    raise RegroupError


def find_majority(values: dict[str, str], generation: Generation) -> tuple[str, ...]:
    """Find the members that have the value of more than half of them; () if there is none.

    Newcomers have no vote, because the others agreed before they came.
    """
    staying = [name for name in generation.members if name not in generation.joined]
    value, count = Counter(values[name] for name in staying).most_common(1)[0]
    if 2 * count <= len(staying):
        return ()
    return tuple(name for name in generation.members if values[name] == value)


def make_structure_error(values: dict[str, str]) -> ProgramMismatchError:
    (first, mine), *others = sorted(values.items(), key=lambda item: parse_rank(item[0]))
    name, structure = next(item for item in others if item[1] != mine)
    sides = {f"worker {parse_rank(first)}": mine, f"worker {parse_rank(name)}": structure}
    return ProgramMismatchError(
        f"Workers have states of different structures. {describe_difference(sides)}."
    )


def digest_state(tree: Any) -> str:
    leaves, _ = flatten_with_paths(tree)
    digests = {f"state{path}": digest_bytes(view_bytes(x)) for path, x in leaves}
    return json.dumps(digests, sort_keys=True)


def check_copies(tree: Any) -> None:
    """Refuse arrays of which this process's devices hold different copies."""
    divergent = {}
    for path, x in flatten_with_paths(tree)[0]:
        groups: dict[Any, list[str]] = {}
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            groups.setdefault(view_bytes(shard.data).tobytes(), []).append(str(shard.device.id))
        if len(groups) > 1:
            largest_first = sorted(groups.values(), key=len, reverse=True)
            divergent[f"state{path}"] = tuple(map(tuple, largest_first))
    if divergent:
        first, groups = next(iter(divergent.items()))
        raise ReplicaDivergenceError(
            f"Copies of the state differ on the devices of worker {jax.process_index()}. The first "
            f"is {first}: devices {' | '.join(', '.join(group) for group in groups)}. Every step "
            "must compute the same on all replicas; check its `jc.same`.",
            divergent=divergent,
        )


def make_divergence_error(digests: dict[str, str]) -> ReplicaDivergenceError:
    by_rank = {parse_rank(name): json.loads(text) for name, text in digests.items()}
    leaves = group_divergent({str(rank): by_rank[rank] for rank in sorted(by_rank)})
    first, groups = next(iter(leaves.items()))
    return ReplicaDivergenceError(
        f"Workers have different values in {pluralize(len(leaves), 'leaf', 'leaves')} of the "
        f"state. The first is {first}: workers "
        f"{' | '.join(', '.join(group) for group in groups)}. Give all workers the same initial "
        "state, made from one seed or read from one file. After that every step must compute the "
        "same on all workers, whatever their numbers.",
        divergent=leaves,
    )
