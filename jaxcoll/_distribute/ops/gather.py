"""The gather between programs: one compiled all-gather where it can be one, copies elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run
from jaxcoll._distribute.values.destinations import check_here, copied, copy_near, delivered, spread
from jaxcoll._distribute.values.parts import Held, check_parts, held, parts_of
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica
from jaxcoll._distribute.values.replica_axis import AXIS, replicating, without_row
from jaxcoll._mesh.mesh import of_this_process, span_processes
from jaxcoll._mesh.placement import is_array
from jaxcoll._plan.options import UNSET, CommunicationOptions
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd import gather
from jaxcoll._spmd.scope import Scope
from jaxcoll._spmd.sparse import check_dense

_SPARSE = (
    "`gather` expects dense arrays; {leaf} is an IndexedSlices. `reduce` gathers the rows of all "
    "replicas, which is their sum; `to_dense` makes it an array."
)


@dataclasses.dataclass(frozen=True)
class Gather:
    """A gather between programs, as `CrossDeviceOps.gather` has it, of the op of this name.

    `group` are the devices that the op is for; (): any.
    """

    name: str
    destinations: tuple[jax.Device, ...]
    axis: int
    options: CommunicationOptions
    group: tuple[jax.Device, ...]
    path: str  # where the value stands in a tree, the same on all processes

    def of(self, value: Any) -> Any:
        """The joined value, with the errors of `CrossDeviceOps.gather`."""
        if isinstance(value, PerReplica | Mirrored):
            value = value.settled()
            check_dense(value.tree, _SPARSE, NotImplementedError)
            for path, leaf in flattened(value.tree)[0]:
                shape = leaf.shape[int(not value.replicated) :]
                gather.dimension(self.axis, shape, f"`gather`: {where(path)}")
            found = held(self.name, value, self.group)
            return self._of_held(found) if isinstance(found, Held) else self._of_all(found)
        check_dense(value, _SPARSE, NotImplementedError)
        if not isinstance(value, list | tuple) and not is_array(value):
            raise ValueError(
                "`gather` expects a PerReplica, a Mirrored, an array, or a list or tuple with one "
                f"array for each replica; got {value!r} ({type(value).__name__})."
            )
        if span_processes(self.group):
            return self._of_held(Held.of_plain("gather", value, self.group))
        parts = parts_of("gather", [value] if is_array(value) else value)
        who = "`gather`: the part of replica 0" if len(parts) > 1 else "`gather`: the value"
        check_parts("gather", parts, [gather.dimension(self.axis, parts[0].shape, who)])
        return self._copies(parts)

    def _of_all(self, value: PerReplica | Mirrored) -> Any:
        """Of a value that lies over all its devices."""
        spans = span_processes(value.devices)
        in_place = len(value) > 1 and set(value.devices) == set(self.destinations)
        if isinstance(value, PerReplica):
            if spans or in_place:
                return delivered(self._all_gathered(value), self.destinations)
            return self._copies([value.part(device) for device in value.devices], rows=True)
        parts = [copy_near(value, self.destinations)] * len(value)
        if not spans:
            return self._copies(parts)
        # Every process joins its own copies, which are equal: nothing is sent.
        here = value.devices[of_this_process(value.devices)[0]]
        return spread(self._on_one(parts, here), self.destinations)

    def _copies(self, parts: list[Any], rows: bool = False) -> Any:
        """Parts joined on the first destination, and the result copied to the others."""
        if span_processes(self.destinations):
            raise ValueError(
                "`gather` copies between the devices of one process; over several, gather a value "
                "that lies on the devices of all, and take the copy of this process with "
                "`result[i]`."
            )
        check_here(self.destinations[0])
        return copied(self._on_one(parts, self.destinations[0], rows), self.destinations)

    def _on_one(self, parts: list[Any], device: jax.Device, rows: bool = False) -> Any:
        """Parts joined on one device of this process."""
        program = _joining_program(self.axis, rows)
        moved = jax.device_put(parts, device)
        return run(Call(program, (moved,), (device,), f"`{self.name}.gather`", self.options))

    def _all_gathered(self, value: PerReplica) -> Mirrored:
        """One compiled all-gather of a value, to its own devices."""
        carried = self.options.replace(timeout_seconds=UNSET)
        program = replicating("gathered", value.devices, _gathered, carried, int(self.axis))
        name, settings = f"`{self.name}.gather`", (self.path, self.axis, carried)
        return run(Call(program, (value,), value.devices, name, self.options, settings=settings))

    def _of_held(self, value: Held) -> Any:
        """The parts of this process, joined with those of all others."""
        first, (part, *_) = min(value.parts), value.parts.values()
        leaves, treedef = jax.tree.flatten(part)
        who = f"`gather`: the part of replica {first}"
        axes = [gather.dimension(self.axis, np.shape(leaf), who) for leaf in leaves]
        timeout, settings = self.options.timeout_seconds, f"gather {self.path} along {self.axis}"
        shapes = value.shapes("gather", [(k,) for k in axes], timeout, settings)
        sizes = [[spec.shape[k] for spec in specs] for specs, k in zip(shapes, axes, strict=True)]

        def padded(part: Any) -> Any:
            found = zip(jax.tree.leaves(part), axes, sizes, strict=True)
            return treedef.unflatten(_padded(leaf, k, max(of_all)) for leaf, k, of_all in found)

        rows = Held({i: padded(part) for i, part in value.parts.items()}, value.devices)
        result = copy_near(self._all_gathered(rows.assembled()), self.destinations)
        found = zip(treedef.flatten_up_to(result), axes, sizes, strict=True)
        joined = treedef.unflatten(_cut(leaf, k, of_all) for leaf, k, of_all in found)
        return spread(joined, self.destinations)


def _padded(part: Any, axis: int, size: int) -> Any:
    missing = size - part.shape[axis]
    widths = [(0, missing * (k == axis)) for k in range(part.ndim)]
    return jnp.pad(part, widths) if missing else part


def _cut(joined: jax.Array, axis: int, sizes: Sequence[int]) -> jax.Array:
    """Padded parts that stand side by side, without their padding."""
    longest = max(sizes)
    if min(sizes) == longest:
        return joined
    pieces = [
        jax.lax.slice_in_dim(joined, i * longest, i * longest + size, axis=axis)
        for i, size in enumerate(sizes)
    ]
    return jnp.concatenate(pieces, axis)


def _gathered(value: PerReplica, scope: Scope, axis: int) -> Mirrored:
    return Mirrored.of(gather.all_gather(value.tree, AXIS, axis=axis, scope=scope))


@functools.lru_cache(maxsize=256)
def _joining_program(axis: int, rows: bool) -> Callable[[Sequence[Any]], Any]:
    """The joining of parts that lie on one device; rows have a leading dimension of one."""

    def joined(parts: Sequence[Any]) -> Any:
        if rows:
            parts = without_row(parts)
        return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis), *parts)

    return jax.jit(joined)
