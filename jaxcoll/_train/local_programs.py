"""A local step of the replicas of a process, which sends nothing, and the usual outer optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll._mesh.replica_rows import ReplicaRows


class Average:
    """The outer optimizer that takes the mean of the replicas, as `optax.sgd(1.0)`."""

    def init(self, params: Any) -> Any:
        """No state."""
        return ()

    def update(self, deltas: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The way to the mean."""
        return jax.tree.map(jnp.negative, deltas), state


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
            "jaxcoll: the step of `local_updates` is that of one device and reduces nothing; no "
            "axis has a name in it."
        )
        raise
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            "The step of `local_updates` returns (params, opt_state, metrics); this one returns "
            f"{f'{len(result)} values' if isinstance(result, tuple) else type(result).__name__}."
        )
    *kept, metrics = jax.tree.map(jnp.asarray, result)
    before, after = _types(given), _types(tuple(kept))
    for name in before | after:
        was, became = before.get(name, "not there"), after.get(name, "not there")
        if was != became:
            raise ValueError(
                "The step of `local_updates` must return parameters and an optimizer state like "
                f"those that it was given; {name} was {was} and is {became}."
            )
    return jax.tree.map(lambda x: x[None], (tuple(kept), metrics))


def _types(kept: tuple[Any, Any]) -> dict[str, str]:
    """The type of each leaf of parameters and optimizer state, by its path."""
    return {
        f"{name}{jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)}"
        for name, tree in zip(("params", "opt_state"), kept, strict=True)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
