"""Places the arguments of a step on its mesh, or computes their types if nothing is to run."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll._collectives.shards import is_shards, shards_in
from jaxcoll._gradients.batch import Call, Signature
from jaxcoll._step.mesh.mesh import axis_names, choose_mapped_axes
from jaxcoll._step.mesh.placement import (
    abstract_shape,
    check_concrete,
    check_rows,
    is_in_place,
    place,
    place_leaf,
    place_shards,
    shape_once_placed,
)

_SHARDS_AS_BATCH = """\
`data_parallel`: {name} holds `Shards`, but is taken for the batch, to be split over the replicas \
by rows; Shards are already split. Name the arguments that are the batch in `batch_argnums`."""


@dataclasses.dataclass
class Arguments:
    """The placement of a step's arguments on a mesh."""

    _signature: Signature
    _mesh: Any
    _axis_name: str | tuple[str, ...]
    _processes: int  # processes in the mesh; 0 if some have more devices than others
    _donated: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = axis_names(self._axis_name)
        self._replicas = math.prod(self._mesh.shape[a] for a in axes)
        self._rows = NamedSharding(self._mesh, PartitionSpec(self._axis_name))
        self._whole = NamedSharding(self._mesh, PartitionSpec())
        self._has_others = bool({*self._mesh.axis_names} - choose_mapped_axes(self._mesh, axes))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Check a call, and bring it in the order of the signature, with its batch."""
        check_concrete(args, kwargs, self._signature.name)
        call = self._signature.call(args, kwargs)
        for i in self._donated:
            if not -len(call.args) <= i < len(call.args):
                raise ValueError(self._signature.explain_missing(call, i, "donate_argnums"))
        for slot in call.batch:
            name = self._signature.name(slot)
            if shards_in(call.get(slot)):
                raise ValueError(_SHARDS_AS_BATCH.format(name=name))
            check_rows(call.get(slot), name, self._replicas, self._processes, self._axis_name)
        return call

    def place(self, call: Call) -> Call:
        """Split the batch over the replicas by rows, and replicate all other arguments."""
        call = self._copy_shared(call) if self._donated else call
        return call.map(lambda x: place(x, self._rows), self._replicate)

    def _copy_shared(self, call: Call) -> Call:
        """Copy arrays that are passed twice, such as weights and their initial average.

        XLA refuses to donate an array that has a second use. With several devices it does so on
        each of them separately, which ends the process.
        """
        leaves = jax.tree.leaves((call.args, call.kwargs))
        # Where such an array is placed, its own memory becomes one of the parts.
        alone = {(x.shape, x.dtype) for x in leaves if _on_one_device(x)}
        memory = functools.partial(_find_memory, alone)
        held = [*map(memory, leaves)]
        if len(set().union(*held)) == sum(map(len, held)):
            return call
        donated = {i % len(call.args) for i in self._donated}
        kept = [x for i, x in enumerate(call.args) if i not in donated]
        seen = set().union(*map(memory, jax.tree.leaves((kept, call.kwargs))))

        def copy_if_shared(leaf: Any) -> Any:
            shared = isinstance(leaf, jax.Array) and not memory(leaf).isdisjoint(seen)
            seen.update(memory(leaf))
            return leaf.copy() if shared else leaf

        args = [
            jax.tree.map(copy_if_shared, x) if i in donated else x for i, x in enumerate(call.args)
        ]
        return call._replace(args=tuple(args))

    def shapes(self, call: Call) -> Call:
        """Infer the types that `place` would make. Arrays are not read and may be deleted."""
        row = functools.partial(shape_once_placed, sharding=self._rows, processes=self._processes)

        def whole(x: Any) -> Any:
            if is_shards(x):  # their parts are already global arrays
                return place_shards(jax.tree.map(abstract_shape, x), self._mesh)
            return shape_once_placed(x, self._choose_sharding(x), 1)

        return call.map(
            lambda tree: jax.tree.map(row, tree),
            lambda tree: jax.tree.map(whole, tree, is_leaf=is_shards),
        )

    def _replicate(self, tree: Any) -> Any:
        """Replicate arrays over all devices; each device gets only its part of `Shards`."""
        if is_in_place(tree, self._whole):
            return tree

        def place_one(x: Any) -> Any:
            return (
                place_shards(x, self._mesh)
                if is_shards(x)
                else place_leaf(x, self._choose_sharding(x))
            )

        return jax.tree.map(place_one, tree, is_leaf=is_shards)

    def _choose_sharding(self, x: Any) -> NamedSharding:
        """A replicated array stays split along other axes."""
        current = getattr(x, "sharding", None)
        if not self._has_others or not isinstance(current, NamedSharding):
            return self._whole
        split = {a for part in current.spec if part for a in axis_names(part)}
        fits = current.mesh == self._mesh and split.isdisjoint(axis_names(self._axis_name))
        return current if fits else self._whole


def _on_one_device(leaf: Any) -> bool:
    is_one = isinstance(leaf, jax.Array) and not leaf.is_deleted()
    numbers = is_one and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    return numbers and len(leaf.sharding.device_set) == 1 and leaf.is_fully_addressable


def memory_key(leaf: Any) -> int:
    """Two arrays may share memory that `jax.device_put` made."""
    return leaf.unsafe_buffer_pointer() if _on_one_device(leaf) else id(leaf)


def _find_memory(alone: set[Any], leaf: Any) -> set[int]:
    """Find the memory of an array, and of its parts where they are like an array on one device."""
    if alone and isinstance(leaf, jax.Array) and not _on_one_device(leaf) and not leaf.is_deleted():
        if (leaf.sharding.shard_shape(leaf.shape), leaf.dtype) in alone:
            return {part.data.unsafe_buffer_pointer() for part in leaf.addressable_shards}
    return {memory_key(leaf)}
