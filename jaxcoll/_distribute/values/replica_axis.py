"""The mesh axis of the replicas: how values lie along it, and programs that exchange along it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run_all
from jaxcoll._mesh.mesh import line_of, no_mesh, of_this_process
from jaxcoll._mesh.scopes import mesh_scope
from jaxcoll._plan.options import CommunicationOptions
from jaxcoll._spmd.gather import all_gather
from jaxcoll._spmd.scope import Scope

AXIS = "replica"
"""The mesh axis along which every distributed value lies."""

_TEXT_BYTES = 512  # more than the shape and the dtype of any array take in words


@functools.lru_cache(maxsize=1024)
def rows_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """One row of the leading dimension on each device."""
    return NamedSharding(line_of(devices, AXIS), PartitionSpec(AXIS))


@functools.lru_cache(maxsize=1024)
def copies_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """One complete copy on each device."""
    return NamedSharding(line_of(devices, AXIS), PartitionSpec())


def without_row(tree: Any) -> Any:
    """The arrays of one replica, inside a program that maps the rows over the replicas."""
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


@dataclasses.dataclass(frozen=True)
class Step:
    """A jitted program, its argument, and the devices of its mesh."""

    program: Callable[[Any], Any]
    argument: Any
    devices: tuple[jax.Device, ...]
    settings: Any = None  # what all processes must have in common beside the program


def run_steps(
    steps: Sequence[Step], name: str, options: CommunicationOptions = CommunicationOptions()
) -> list[Any]:
    """Run programs one after another, together with the other processes that have their devices.

    The deadline of `options` bounds all of them together; `name` stands in messages.
    """
    return run_all(
        [
            Call(
                step.program, (step.argument,), step.devices, name, options, settings=step.settings
            )
            for step in steps
        ]
    )


@functools.lru_cache(maxsize=256)
def replicating(
    name: str,
    devices: tuple[jax.Device, ...],
    body: Callable[..., Any],
    options: CommunicationOptions = CommunicationOptions(),
    *more: Hashable,
) -> Callable[[Any], Any]:
    """A program from one row on each device to one result on all, compiled once for each shape.

    `body` goes from the tree of one replica, a scope, and `more`, to an *invariant* tree.
    """
    mesh = line_of(devices, AXIS)
    scope = dataclasses.replace(mesh_scope(mesh), options=options)

    def program(rows: Any) -> Any:
        return body(without_row(rows), scope, *more)

    program.__name__ = name
    return jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec())
    )


def known_to_all(
    facts: Mapping[int, Sequence[Any] | np.ndarray],
    devices: tuple[jax.Device, ...],
    what: str,
    timeout_seconds: float | None = None,
    settings: str = "",
) -> np.ndarray:
    """A table of integers for each replica, of which each process brings those of its replicas.

    A program depends on such facts (lengths, say) before all processes can compile the same one.
    If all devices belong to this process, nothing is sent. All tables have one shape, and integers
    of 32 bits. `settings` is a text that all processes must have in common; "": `what`.
    """
    here = of_this_process(devices)
    rows = [np.asarray(facts[i], np.int32)[None] for i in here]
    if len(here) == len(devices):
        return np.concatenate(rows)
    parts = jax.device_put(rows, [devices[i] for i in here])
    shape = (len(devices), *rows[0].shape[1:])
    table = jax.make_array_from_single_device_arrays(shape, rows_over(devices), parts)
    program = replicating("exchange", devices, _every_row)
    options = CommunicationOptions(timeout_seconds=timeout_seconds)
    (result,) = run_steps([Step(program, table, devices, settings or what)], f"`{what}`", options)
    return np.asarray(result.addressable_data(0))


def _every_row(row: jax.Array, scope: Scope) -> jax.Array:
    return all_gather(row[None], AXIS, axis=0, scope=scope)


class Shape(NamedTuple):
    """The shape and dtype of one replica's array; a digest of its bits if copies are compared."""

    shape: tuple[int, ...]
    dtype: str
    digest: str = ""


def shapes_of_all(
    caller: str,
    parts: Mapping[int, Sequence[Any]],
    devices: tuple[jax.Device, ...],
    structure: str,
    *,
    timeout_seconds: float | None = None,
    digests: bool = False,
) -> list[dict[int, Shape]]:
    """Return for each array of a replica's value its shape on every replica of `devices`.

    `parts` are the arrays of each replica of this process, equally many for all; `structure` is
    what processes must have in common of the value. Over several processes it is one round trip,
    whatever the number of arrays. What a shape decides is checked after this, so that all raise
    the same.
    """
    shapes = {i: [_shape(array, digests) for array in arrays] for i, arrays in parts.items()}
    if len(shapes) < len(devices) and any(shapes.values()):
        facts = {i: [_text(shape) for shape in row] for i, row in shapes.items()}
        settings = f"{caller} {structure} {digests}"
        table = known_to_all(facts, devices, caller, timeout_seconds, settings)
        rows = ([json.loads(text.tobytes()) for text in row] for row in table)
        shapes = {i: [Shape(tuple(x), *more) for x, *more in row] for i, row in enumerate(rows)}
    return [dict(zip(shapes, column, strict=True)) for column in zip(*shapes.values(), strict=True)]


def _shape(array: Any, digest: bool) -> Shape:
    if not digest:
        return Shape(tuple(array.shape), array.dtype.name)
    bits = array
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        with no_mesh():
            bits = jax.random.key_data(array)
    hashed = hashlib.blake2b(np.asarray(bits).tobytes(), digest_size=16).hexdigest()
    return Shape(tuple(array.shape), array.dtype.name, hashed)


def _text(shape: Shape) -> np.ndarray:
    """Return as many integers for every array: nobody knows yet whether they agree."""
    return np.frombuffer(json.dumps(shape).encode().ljust(_TEXT_BYTES), np.int32)
