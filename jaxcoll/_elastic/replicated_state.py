"""The state of an elastic run after each of the last two steps: what every worker holds of it."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._api.alike import broadcast
from jaxcoll._dispatch.agreement import divergent
from jaxcoll._elastic import residuals
from jaxcoll._elastic.checkpoint import (
    Stamp,
    on_host,
    restore_checkpoint,
    save_newest,
    stamp_of_checkpoint,
)
from jaxcoll._elastic.generation import Generation, RegroupError, rank_of, words
from jaxcoll._elastic.membership import Membership
from jaxcoll._mesh.mesh import no_mesh
from jaxcoll._mesh.placement import place
from jaxcoll._mesh.shard_arrays import whole_shapes
from jaxcoll._show.units import counted
from jaxcoll._spmd.residual import is_residual
from jaxcoll._spmd.shards import Shards, is_shards
from jaxcoll._step.data_parallel import data_parallel
from jaxcoll.errors import ProgramMismatchError, ReplicaDivergenceError

_LOG = logging.getLogger("jaxcoll")

Together = Callable[..., Any]
"""`(call, seconds, what)`: the result of `call`, which all members make."""


class ReplicatedState:
    """The state after one step and after the one before.

    All workers hold the same, but for residuals: of these each has its replicas' rows, and all of
    them know the sum with which the run began, until no worker can go back there.
    """

    def __init__(self, state: Any) -> None:
        self.finished = 0  # steps
        self.term = 0  # counts generations, also of the runs that wrote the checkpoint before
        self._held: dict[int, Any] = {}
        # Sums of residuals over all workers, by step: at the beginning, and of checkpoints.
        self._begun: dict[int, list[Shards]] = {}
        self._added: dict[int, list[Shards]] = {}
        self._adder: Any = None
        self.reset(state, 0)

    @property
    def latest(self) -> Any:
        """The state after the last finished step."""
        return self._held[self.finished]

    @property
    def held(self) -> tuple[int, ...]:
        """The steps after which the state is held."""
        return tuple(self._held)

    @property
    def residual_norm(self) -> float:
        """The norm of all that is lost with this worker after the last finished step."""
        known = self.finished in self._begun
        return 0.0 if known else residuals.norm(residuals.residuals_in(self.latest))

    def host(self, step: int) -> Any:
        """The state after `step`, as host arrays; of residuals what this worker has."""
        state = self._held[step]
        own = map(residuals.own_rows, residuals.residuals_in(state))
        return jax.tree_util.tree_map_with_path(
            lambda path, x: on_host(jax.tree_util.keystr(path), x),
            residuals.with_residuals(state, own),
        )

    def to_save(self, step: int) -> Any:
        """The state after `step`, as host arrays; of residuals the sum over all workers."""
        state = self.host(step)
        own, sums = residuals.residuals_in(state), {**self._added, **self._begun}.get(step)
        if own and sums is None:
            _LOG.warning(
                "The checkpoint after step %d has the residual of worker %d alone: those of other "
                "workers are lost, because they could not be added up any more.",
                *(step, jax.process_index()),
            )
        return residuals.with_residuals(state, sums or map(residuals.summed, own))

    def reset(self, state: Any, step: int) -> None:
        """Hold this state, after `step`, and no other; residuals in it are those of all workers."""
        self._begun, self._added = {step: _sums_at_start(state)}, {}
        self._held = {step: residuals.with_residuals(state, self._begun[step])}
        self.finished = step
        self._held[step] = self.host(step)

    def restore(self, path: Path) -> None:
        """Begin with the state in a file, if there is one."""
        if path.exists():
            self.reset(*restore_checkpoint(path, self.like()))
            self.term = stamp_of_checkpoint(path).term

    def save(self, path: Path, step: int, patience: float) -> int:
        """Write the state after `step`, unless a later one is there; the step in the file then."""
        return self.to_write(path, step, patience)()

    def to_write(self, path: Path, step: int, patience: float) -> Callable[[], int]:
        """Return what does the same with the state as it is now, in whichever thread."""
        if step not in self._held:
            raise OSError(f"worker {jax.process_index()} does not hold the state after step {step}")
        state, stamp = self.to_save(step), Stamp(step, self.term)

        def write() -> int:
            in_file = save_newest(path, state, stamp, patience).step
            if in_file > step:
                words = "%s holds the state after step %d, and stays: that after step %d is older."
                _LOG.warning(words, path, in_file, step)
            return in_file

        return write

    def keep(self, step: int, state: Any) -> None:
        """Hold this state and the last one before it."""
        self._held = {self.finished: self.latest, step: state}
        self._begun = {k: sums for k, sums in self._begun.items() if k in self._held}
        self.finished, self._added = step, {}

    def settle(self, membership: Membership, mesh: Mesh, together: Together) -> None:
        """Hold the state after the step of the present generation, on the devices of `mesh`."""
        generation = membership.generation
        step = generation.step if generation.step in self._held else self.finished
        state, start = self.host(step), not generation.number
        structures = membership.gather("structure", _structure(self.types(state)))
        check_agreed(structures, membership, _other_structure, start)
        alike = self.alike(state)
        if generation.given:
            alike = _given(alike, membership, mesh, together)
        digests = membership.gather("digest", _digests(self.compared(alike)))
        check_agreed(digests, membership, _other_values, start)
        placed = self.placed(state, alike, membership, mesh)
        self.finished, self._held = generation.step, {generation.step: placed}
        self._added, self._adder = {}, None
        self._begun = {k: sums for k, sums in self._begun.items() if k in self._held}

    def like(self) -> Any:
        """Return the tree that a checkpoint is read as."""
        return self.host(self.finished)

    def types(self, state: Any) -> Any:
        """Return the part with the same structure, shapes and dtypes on all workers."""
        whole = map(whole_shapes, residuals.residuals_in(state))
        return residuals.with_residuals(state, whole)

    def alike(self, state: Any) -> Any:
        """Return the part that a newcomer is given."""
        return residuals.without_residuals(state)

    def compared(self, state: Any) -> Any:
        """Return the part with the same values on all workers."""
        return residuals.without_residuals(state)

    def placed(self, state: Any, alike: Any, membership: Membership, mesh: Mesh) -> Any:
        """Place the part that is alike on all workers, and this one's own, on the devices."""
        own = [residuals.placed(x, mesh) for x in self._own(state, membership, mesh)]
        with no_mesh():
            alike = place(alike, NamedSharding(mesh, PartitionSpec()))
        return residuals.with_residuals(alike, own)

    def _own(self, state: Any, membership: Membership, mesh: Mesh) -> list[Shards]:
        """The residuals with which this worker's replicas go on."""
        found, step = residuals.residuals_in(state), membership.generation.step
        if not found:
            return []
        mine = "nothing"
        if step in self._held:
            mine = "sum" if step in self._begun else "rows"
        held = [*membership.gather("residuals", mine).values()]
        if mine == "rows":
            return found
        # Workers that went on from there have it all. A file may hold it, too, for a newcomer.
        shared = mine == "sum" and "rows" not in held
        totals = self._begun[step] if shared else map(residuals.summed, found)
        workers = held.count("sum") if shared else 0
        return [residuals.shared_out(x, workers, len(mesh.local_devices)) for x in totals]

    def compare(self, membership: Membership) -> None:
        """Compare the last state with that of all members, bit by bit."""
        # Every copy of it here is read once, in about a second per gigabyte.
        digests = membership.gather(f"digest/{self.finished}", _digests(self.compared(self.latest)))
        check_agreed(digests, membership, _other_values)

    def add_up(self, membership: Membership, together: Together) -> None:
        """Have the sum of residuals over all workers, which all call this, for a checkpoint."""
        if found := residuals.residuals_in(self.latest):
            add = self._adder = self._adder or residuals.adder(found)
            parts = [x.parts for x in found]
            sums = together(lambda: add(parts), membership.startup, "adding residuals")
            self._added = {self.finished: list(map(residuals.in_host_memory, sums, found))}

    def check_result(self, out: Any) -> None:
        """Refuse a step that does not return a state like the one it was given; name the leaf."""
        if not isinstance(out, tuple) or len(out) != 2:
            got = f"{len(out)} values" if isinstance(out, tuple) else "one value"
            raise ValueError(
                "The step of `Elastic` returns the pair (state, metrics), as in "
                f"`return state, loss`; this one returns {got}."
            )
        before, after = (_structure(tree) for tree in (self.latest, out[0]))
        if before != after:
            raise ValueError(
                "The step of `Elastic` must return a state of the structure, shapes and dtypes "
                f"that it was given. {_difference(before, after, 'given', 'returned')}."
            )


def _sums_at_start(state: Any) -> list[Shards]:
    """The sums of residuals that a run begins with; of other `Shards` a worker's part is lost."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_shards):
        if is_residual(x):
            found.append(residuals.at_start(jax.tree_util.keystr(path), x))
        elif is_shards(x):
            raise ValueError(
                f"`Elastic`: state{jax.tree_util.keystr(path)} is `Shards`. `Elastic` goes on when "
                "a worker dies because every worker holds all of the state, and of Shards each "
                "device holds a part that no other has. Keep the state whole (`jc.unshard`) and "
                "the optimizer unsharded; or train without `Elastic`, with `jc.save_checkpoint` "
                "every few steps: a checkpoint of Shards is restored on any number of devices."
            )
    return found


def _structure(tree: Any) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return "\n".join(f"state{jax.tree_util.keystr(p)}: {x.dtype}{list(x.shape)}" for p, x in leaves)


def _difference(one: str, other: str, of_one: str, of_other: str) -> str:
    sides = itertools.zip_longest(one.splitlines(), other.splitlines(), fillvalue="(nothing more)")
    mine, theirs = next((a, b) for a, b in sides if a != b)
    return f"{of_one}: {mine}; {of_other}: {theirs}"


def check_agreed(
    values: dict[str, str],
    membership: Membership,
    error: Callable[[dict[str, str]], Exception],
    start: bool = False,
    what: str = "state",
) -> None:
    """Go on only if the values of all members are equal.

    Raises:
      RegroupError: a majority agrees, this worker among them, and goes on without the others.
      Exception: `error(values)`: this worker is one of the others; or nobody knows who is right,
        as at the `start`.
    """
    if len(set(values.values())) == 1:
        return
    generation = membership.generation
    agree = () if start else agreeing(values, generation)
    if membership.name not in agree:
        raise error(values)
    odd = [name for name in generation.members if name not in agree]
    membership.ask(f"the {what} of {words(odd)} is not that of the others")
    raise RegroupError


def agreeing(values: dict[str, str], generation: Generation) -> tuple[str, ...]:
    """The members whose value more than half of them have; (): there is no such value.

    A newcomer has no vote: the others agreed before it came.
    """
    staying = [name for name in generation.members if name not in generation.joined]
    value, count = Counter(values[name] for name in staying).most_common(1)[0]
    if 2 * count <= len(staying):
        return ()
    return tuple(name for name in generation.members if values[name] == value)


def _other_structure(values: dict[str, str]) -> ProgramMismatchError:
    (first, mine), *others = sorted(values.items(), key=lambda item: rank_of(item[0]))
    name, structure = next(item for item in others if item[1] != mine)
    found = _difference(mine, structure, f"worker {rank_of(first)}", f"worker {rank_of(name)}")
    return ProgramMismatchError(f"Workers hold states of different structures. {found}.")


def _digests(tree: Any) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {f"state{jax.tree_util.keystr(path)}": _digest(x) for path, x in leaves}
    return json.dumps(found, sort_keys=True)


def _digest(x: Any) -> str:
    """The digest of a leaf, and of every copy in this process that differs from the first."""
    copies = [s.data for s in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    first, *others = map(_bytes, copies)
    found = hashlib.blake2b(first.data, digest_size=8)
    for other in others:
        if not np.array_equal(other, first):
            found.update(other.data)
    return found.hexdigest()


def _bytes(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _other_values(digests: dict[str, str]) -> ReplicaDivergenceError:
    held = {rank_of(name): json.loads(text) for name, text in digests.items()}
    found = divergent({str(rank): held[rank] for rank in sorted(held)})
    leaf, groups = next(iter(found.items()))
    return ReplicaDivergenceError(
        f"Workers hold different values in {counted(len(found), 'leaf', 'leaves')} of the "
        f"state, {leaf} first: "
        f"{' | '.join(', '.join(group) for group in groups)}. At the start give all the same "
        "initial state, made from one seed or read from one file; a step must compute the same on "
        "all from then on, whatever the worker's number.",
        divergent=found,
    )


def _given(state: Any, membership: Membership, mesh: Mesh, together: Together) -> Any:
    """The state of the worker that has it, on all: as bytes, so that NaNs keep their bits."""
    leaves, structure = jax.tree.flatten(state)
    parts = [_bytes(x) for x in leaves]
    mine = np.concatenate([np.zeros(0, np.uint8), *parts])
    axis, generation = mesh.axis_names[0], membership.generation
    here = len(mesh.local_devices)
    source = generation.members.index(generation.source) * here
    give = data_parallel(
        lambda rows: broadcast(rows[0], axis, source=source), mesh=mesh, axis_name=axis
    )
    rows = np.broadcast_to(mine, (here, *mine.shape))
    with no_mesh():
        program = give.lower(rows).compile()
        placed = place(rows, NamedSharding(mesh, PartitionSpec(axis)))
    bits = on_host("", together(lambda: program(placed), membership.startup, "giving the state"))
    cuts = np.cumsum([part.size for part in parts])[:-1]
    return structure.unflatten(
        [
            part.view(x.dtype).reshape(x.shape)
            for part, x in zip(np.split(bits, cuts), leaves, strict=True)
        ]
    )
