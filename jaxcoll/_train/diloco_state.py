"""DiLoCo: its state, its parts and when these are exchanged, and the step of a replica."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcoll._mesh.placement import is_array
from jaxcoll._mesh.replica_rows import ReplicaRows
from jaxcoll._plan.packs.leaves import flattened


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When fragments are sent: each once in `every` steps, at distances as equal as can be."""

    every: int  # steps of a round
    fragments: int  # how many
    delay: int  # steps between sending a fragment and applying what came of it

    def sent(self, step: int) -> tuple[int, ...]:
        """The fragments that are sent after this step, counted from 1; the last ends the round."""
        return tuple(
            k
            for k in range(self.fragments)
            if (step - (k + 1) * self.every // self.fragments) % self.every == 0
        )


@functools.lru_cache(maxsize=64)
def fragments_of(sizes: tuple[int, ...], fragments: int) -> tuple[tuple[int, ...], ...]:
    """Leaves of these sizes in so many fragments, as equal as leaves in one piece allow.

    Guarantee: every leaf is in one fragment, in order; the largest fragment exceeds an equal share
    by less than the largest leaf.
    """
    members: list[list[int]] = [[] for _ in range(fragments)]
    filled = [0] * fragments
    # The largest leaf first, each to the fragment that has least; leaves of one size in order.
    for leaf in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        k = min(range(fragments), key=lambda k: (filled[k], len(members[k])))
        members[k].append(leaf)
        filled[k] += sizes[leaf]
    return tuple(tuple(sorted(each)) for each in members)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiLoCoState:
    """The state of `DiLoCo` in one process: a pytree that `jc.save_checkpoint` takes.

    Attributes:
      steps: that are finished; in host memory, as is `sent`.
      replicas: parameters and optimizer state, with a row for each replica of this process.
      shared: the parameters that all replicas share.
      outer: the outer optimizer's state, of each fragment.
      sums: the last mean of each fragment, which may be on its way; () without a delay. Whoever
        reads the leaves of the state waits for it.
      sent: the step after which each fragment was sent, until it is applied; else 0.
    """

    steps: Any
    replicas: tuple[Any, Any]
    shared: Any
    outer: tuple[Any, ...]
    sums: tuple[Any, ...]
    sent: Any


class Sum:
    """A reduced tree that may be on its way; a pytree, to read whose leaves is to wait for it."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    @functools.cached_property
    def tree(self) -> Any:
        """The tree, waited for."""
        return self._wait()


def arrived(tree: Any) -> Sum:
    """A `Sum` that nobody has to wait for."""
    return Sum(lambda: tree)


jax.tree_util.register_pytree_node(
    Sum, lambda held: ((held.tree,), None), lambda _, held: arrived(*held)
)


def part(tree: Any, at: Collection[int]) -> Any:
    """The tree with these leaves, and None in the place of all others."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([x if i in at else None for i, x in enumerate(leaves)])


def joined(tree: Any, part: Any) -> Any:
    """The tree with those leaves that `part` has."""
    leaves, treedef = jax.tree.flatten(tree)
    new = treedef.flatten_up_to(part)
    return treedef.unflatten([x if y is None else y for x, y in zip(leaves, new, strict=True)])


def check_leaves(name: str, tree: Any) -> None:
    """Refuse leaves of `params` or `opt_state` that no replica can train."""
    for path, leaf in flattened(tree)[0]:
        what = f"`diloco`: {name}{path} is"
        if not is_array(leaf):
            raise ValueError(f"{what} not an array of numbers; got {type(leaf).__name__}.")
        dtype = jnp.result_type(leaf)
        if name == "params" and not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"{what} of {dtype}, whose mean has another type. Counters and the like belong to "
                "`opt_state`, which each replica keeps for itself."
            )


def check_state(state: Any, here: int, schedule: Schedule) -> None:
    """Refuse a state that does not fit the replicas that are here, or the schedule."""
    if not isinstance(state, DiLoCoState):
        raise ValueError(
            f"`diloco` expects the state that `init` returned; got {type(state).__name__}."
        )
    if isinstance(state.steps, Tracer):
        raise ValueError(
            "`diloco` trains between programs and cannot be traced as one. For "
            "`jc.inspect` there are the attributes `step` and `sum`."
        )
    rows = {len(x) for x in jax.tree.leaves(state.replicas)}
    if rows - {here}:
        raise ValueError(
            f"`diloco`: the state has rows for {max(rows - {here})} replicas, and this "
            f"process has {here}. `restart(state)` makes one for these."
        )
    if len(state.sent) != schedule.fragments or bool(state.sums) != bool(schedule.delay):
        raise ValueError(
            f"`diloco`: the state is of {len(state.sent)} fragments "
            f"with{'' if state.sums else 'out'} a delay, and here are {schedule.fragments} and a "
            f"delay of {schedule.delay}. Begin again: `init(params(state), opt_state)`."
        )


def check_batch(batch: Any, here: int) -> None:
    """Refuse a batch whose rows do not divide over the replicas that are here."""
    for path, x in flattened(batch)[0]:
        rows = np.shape(x)[:1]
        if not rows or rows[0] % here:
            raise ValueError(
                f"`diloco`: batch{path} has the shape {np.shape(x)}, "
                f"and its rows are to be shared by {here} replicas of this process, equally."
            )


def step_program(step: Callable[..., Any], places: ReplicaRows) -> Any:
    """The step of every replica of this process: of `(replicas, batch)`, both by rows."""
    # Without types: a gradient in here is this replica's own.
    mapped = jax.shard_map(
        functools.partial(_rows_of_step, step),
        mesh=places.mesh,
        in_specs=places.rows.spec,
        out_specs=places.rows.spec,
        check_vma=False,
    )
    return jax.jit(functools.update_wrapper(mapped, step, updated=()))


def _rows_of_step(step: Callable[..., Any], replica: Any, batch: Any) -> Any:
    """A step on the one row that a device has of its replica, and its rows of the batch."""
    given = jax.tree.map(lambda x: x[0], replica)
    try:
        result = step(*given, batch)
    except NameError as error:
        error.add_note(
            "jaxcoll: the step of `diloco` is that of one device and reduces nothing; no "
            "axis has a name in it."
        )
        raise
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            "The step of `diloco` returns (params, opt_state, metrics); this one returns "
            f"{f'{len(result)} values' if isinstance(result, tuple) else type(result).__name__}."
        )
    *kept, metrics = jax.tree.map(jnp.asarray, result)
    before, after = _types(given), _types(tuple(kept))
    for name in before | after:
        was, became = before.get(name, "not there"), after.get(name, "not there")
        if was != became:
            raise ValueError(
                "The step of `diloco` must return parameters and an optimizer state like "
                f"those that it was given; {name} was {was} and is {became}."
            )
    return jax.tree.map(lambda x: x[None], (tuple(kept), metrics))


def _types(kept: tuple[Any, Any]) -> dict[str, str]:
    """The type of each leaf of parameters and optimizer state, by its path."""
    return {
        name + path: f"{x.dtype}{list(x.shape)}"
        for name, tree in zip(("params", "opt_state"), kept, strict=True)
        for path, x in flattened(tree)[0]
    }
