"""The state of an elastic run after each of the last two steps, as one worker holds it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from jaxcoll._collectives.broadcast import broadcast
from jaxcoll._collectives.residual import is_residual
from jaxcoll._collectives.shards import Shards, is_shards
from jaxcoll._compat.axes import make_weak
from jaxcoll._plan.packs.leaves import flatten_with_paths, is_array
from jaxcoll._runtime.fingerprint import view_bytes
from jaxcoll._step.data_parallel import data_parallel
from jaxcoll._step.mesh.mesh import no_mesh
from jaxcoll._step.mesh.placement import place
from jaxcoll._step.mesh.shard_arrays import whole_shapes
from jaxcoll._train.elastic import residuals
from jaxcoll._train.elastic.checkpoint import (
    Stamp,
    copy_to_host,
    read_stamp,
    restore_checkpoint,
    save_newest,
)
from jaxcoll._train.elastic.comparison import (
    check_agreed,
    check_copies,
    describe_difference,
    describe_structure,
    digest_state,
    make_divergence_error,
    make_structure_error,
)
from jaxcoll._train.elastic.membership import Membership

_LOG = logging.getLogger("jaxcoll")

Together = Callable[..., Any]
"""A function of `(call, seconds, what)` that makes a `Call` with all members."""

Offers = dict[str, dict[str, Any]]
"""The first record of each member of a generation, by name."""


class ReplicatedState:
    """The state after the last step and after the one before.

    All workers hold the same state except for residuals: each has its own replicas' rows of them.
    All also know the sum of residuals at the start, until no worker can go back to that step.
    """

    def __init__(self, state: Any) -> None:
        self.finished = 0  # number of finished steps
        self.term = 0  # number of generations, including runs that wrote the checkpoint before
        self._held: dict[int, Any] = {}
        # Sums of residuals over all workers, by step: at the start, and for checkpoints.
        self._begun: dict[int, list[Shards]] = {}
        self._added: dict[int, list[Shards]] = {}
        self._adder: Any = None
        self._weak = _weak_leaves(state)  # paths of leaves that stay weakly typed, as numbers are
        self.reset(state, 0)

    @property
    def latest(self) -> Any:
        """The state after the last finished step."""
        return self._held[self.finished]

    @property
    def held(self) -> tuple[int, ...]:
        """The steps after which this worker holds the state."""
        return tuple(self._held)

    @property
    def residual_norm(self) -> float:
        """The norm of the residuals that would be lost with this worker now."""
        shared = self.finished in self._begun  # all workers know their sum
        return 0.0 if shared else residuals.norm(residuals.find_residuals(self.latest))

    def copy_to_host(self, step: int) -> Any:
        """Copy the state after `step` to host arrays, with this worker's rows of residuals."""
        state = self._held[step]
        rows = map(residuals.own_rows, residuals.find_residuals(state))
        return jax.tree_util.tree_map_with_path(
            lambda path, x: copy_to_host(keystr(path), x),
            residuals.replace_residuals(state, rows),
        )

    def collect(self, step: int) -> Any:
        """Copy the state after `step` to host arrays, with residuals summed over all workers."""
        state = self.copy_to_host(step)
        rows, sums = residuals.find_residuals(state), {**self._added, **self._begun}.get(step)
        if rows and sums is None:
            _LOG.warning(
                "The checkpoint after step %d has only the residual of worker %d: those of the "
                "other workers are lost, because the workers can no longer add them up.",
                *(step, jax.process_index()),
            )
        return residuals.replace_residuals(state, sums or map(residuals.sum_replicas, rows))

    def reset(self, state: Any, step: int) -> None:
        """Hold only this state, after `step`. Its residuals are sums over all workers."""
        self._begun, self._added = {step: _sums_at_start(state)}, {}
        self._held = {step: residuals.replace_residuals(state, self._begun[step])}
        self.finished = step
        self._held[step] = self.copy_to_host(step)

    def restore(self, path: Path) -> None:
        """Start from the state in a file, if it exists."""
        if path.exists():
            state, step = restore_checkpoint(path, self.restore_weak_types(self.like()))
            self._weak = _weak_leaves(state)
            self.reset(state, step)
            self.term = read_stamp(path).term

    def prepare_save(self, path: Path, step: int, patience: float) -> Callable[[], int]:
        """Copy the state after `step`. The result writes it, unless the file has a later one."""
        # In any thread; and returns the step of the file's.
        if step not in self._held:
            raise OSError(f"worker {jax.process_index()} does not hold the state after step {step}")
        state, stamp = self.restore_weak_types(self.collect(step)), Stamp(step, self.term)

        def write() -> int:
            in_file = save_newest(path, state, stamp, patience).step
            if in_file > step:
                text = "Kept %s, which holds the state after step %d; this one, after %d, is older."
                _LOG.warning(text, path, in_file, step)
            return in_file

        return write

    def keep(self, step: int, state: Any) -> None:
        """Hold this state, and the previous one."""
        self._held = {self.finished: self.latest, step: state}
        self._begun = {k: sums for k, sums in self._begun.items() if k in self._held}
        self.finished, self._added = step, {}

    def offer(self, step: int) -> tuple[Any, dict[str, Any]]:
        """Copy the state that this worker brings to a generation to the host, and describe it."""
        state, has = self.copy_to_host(step if step in self._held else self.finished), "nothing"
        if step in self._held:
            has = "sum" if step in self._begun else "rows"
        return state, {"structure": describe_structure(self.select_types(state)), "residuals": has}

    def settle(
        self, state: Any, offers: Offers, membership: Membership, mesh: Mesh, together: Together
    ) -> None:
        """Hold the state with which this generation starts, on the devices of `mesh`.

        `state` is this worker's, by `offer`; `offers` describes those of all.
        """
        generation = membership.generation
        start = not generation.number
        structures = {name: offer["structure"] for name, offer in offers.items()}
        check_agreed(structures, membership, make_structure_error, start)
        alike = self.select_alike(state)
        if generation.sends_state:
            alike = _broadcast(alike, membership, mesh, together)
        digests = membership.gather("digest", digest_state(self.select_compared(alike)))
        check_agreed(digests, membership, make_divergence_error, start)
        held = {name: offer["residuals"] for name, offer in offers.items()}
        placed = self.place_state(state, alike, held, membership, mesh)
        self.finished, self._held = generation.step, {generation.step: placed}
        self._added, self._adder = {}, None
        self._begun = {k: sums for k, sums in self._begun.items() if k in self._held}

    def like(self) -> Any:
        return self.copy_to_host(self.finished)

    def restore_weak_types(self, state: Any) -> Any:
        """Give arrays the weak types that the state has; host arrays have none."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: make_weak(jnp.asarray(x)) if keystr(path) in self._weak else x, state
        )

    def select_types(self, state: Any) -> Any:
        """Select the part whose structure, shapes and dtypes must be equal on all workers."""
        whole = map(whole_shapes, residuals.find_residuals(state))
        return residuals.replace_residuals(state, whole)

    def select_alike(self, state: Any) -> Any:
        """Select the part that a newcomer receives."""
        return residuals.clear_residuals(state)

    def select_compared(self, state: Any) -> Any:
        """Select the part whose values must be equal on all workers."""
        return residuals.clear_residuals(state)

    def place_state(
        self, state: Any, alike: Any, held: dict[str, str], membership: Membership, mesh: Mesh
    ) -> Any:
        """Place the part that all workers have alike, and this worker's residuals, on devices.

        `held` says what each worker has of the residuals: "rows", their "sum", or "nothing".
        """
        started = self._start_residuals(state, held, membership, mesh)
        rows = [residuals.place_rows(x, mesh) for x in started]
        with no_mesh():
            alike = place(self.restore_weak_types(alike), NamedSharding(mesh, PartitionSpec()))
        return residuals.replace_residuals(alike, rows)

    def _start_residuals(
        self, state: Any, held: dict[str, str], membership: Membership, mesh: Mesh
    ) -> list[Shards]:
        rows, mine, all_held = residuals.find_residuals(state), held[membership.name], held.values()
        if not rows or mine == "rows":
            return rows
        # If others have rows, these are everything: a newcomer must not add the sum in its file.
        shared = mine == "sum" and "rows" not in all_held
        totals = (
            self._begun[membership.generation.step] if shared else map(residuals.sum_replicas, rows)
        )
        workers = [*all_held].count("sum") if shared else 0
        return [residuals.divide(x, workers, len(mesh.local_devices)) for x in totals]

    def compare(self, membership: Membership) -> None:
        """Compare the last state on all members and on all devices of each, bit by bit.

        Cost: about a second per gigabyte.
        """
        state = self.select_compared(self.latest)
        digests = membership.gather(f"digest/{self.finished}", digest_state(state))
        check_copies(state)
        check_agreed(digests, membership, make_divergence_error)

    def add_up(self, membership: Membership, together: Together) -> None:
        """Sum residuals over all workers for a checkpoint. All members must call this."""
        if rows := residuals.find_residuals(self.latest):
            add = self._adder = self._adder or residuals.make_adder(rows)
            with no_mesh():
                call, _ = add.prepare([x.parts for x in rows])
            # Equal residuals, such as zeros, are no sign of equal batches.
            call = dataclasses.replace(call, rows=False)
            sums = together(call, membership.startup, "adding residuals")
            self._added = {self.finished: list(map(residuals.fetch_sums, sums, rows))}

    def check_result(self, out: Any) -> None:
        """Refuse a step that returns a state unlike its argument; the message names the leaf."""
        if not isinstance(out, tuple) or len(out) != 2:
            got = f"{len(out)} values" if isinstance(out, tuple) else "one value"
            raise ValueError(
                "The step of `Elastic` must return the pair (state, metrics), as in "
                f"`return state, loss`; this one returns {got}."
            )
        trees = {"argument": self.latest, "returned": out[0]}
        structures = {name: describe_structure(tree) for name, tree in trees.items()}
        if structures["argument"] != structures["returned"]:
            raise ValueError(
                "The step of `Elastic` must return a state with the structure, shapes and dtypes "
                f"of its argument. {describe_difference(structures)}."
            )


def _weak_leaves(state: Any) -> set[str]:
    leaves, _ = flatten_with_paths(state)
    return {path for path, x in leaves if is_array(x) and jax.typeof(x).weak_type}


def _sums_at_start(state: Any) -> list[Shards]:
    """Sum residuals at the start; refuse other `Shards`, which could be lost."""
    sums = []
    for path, x in flatten_with_paths(state, is_shards)[0]:
        if is_residual(x):
            sums.append(residuals.sum_at_start(path, x))
        elif is_shards(x):
            raise ValueError(
                f"`Elastic`: state{path} is `Shards`, of which each device "
                "has a part that no other device has. `Elastic` needs the complete state on every "
                "worker, to continue when one dies. Keep the state whole (`jc.unshard`) and the "
                "optimizer unsharded; or train without `Elastic`, with `jc.save_checkpoint` "
                "every few steps: any number of devices can restore a checkpoint of Shards."
            )
    return sums


def _broadcast(state: Any, membership: Membership, mesh: Mesh, together: Together) -> Any:
    """Send the state of the worker that has it to all: as bytes, so that NaNs keep their bits."""
    leaves, structure = jax.tree.flatten(state)
    parts = [view_bytes(x).reshape(-1) for x in leaves]
    mine = np.concatenate([np.zeros(0, np.uint8), *parts])
    axis, generation = mesh.axis_names[0], membership.generation
    here = len(mesh.local_devices)
    source = generation.members.index(generation.source) * here
    send = data_parallel(
        lambda rows: broadcast(rows[0], axis, source=source), mesh=mesh, axis_name=axis
    )
    rows = np.broadcast_to(mine, (here, *mine.shape))
    with no_mesh():
        call, _ = send.prepare(rows)
    call = dataclasses.replace(call, rows=False)  # of which all but the source's are of no use
    bits = copy_to_host("", together(call, membership.startup, "sending the state"))
    cuts = np.cumsum([part.size for part in parts])[:-1]
    return structure.unflatten(
        [
            part.view(x.dtype).reshape(x.shape)
            for part, x in zip(np.split(bits, cuts), leaves, strict=True)
        ]
    )
