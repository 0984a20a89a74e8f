"""The mesh axis of the replicas: shardings along it, and programs that exchange along it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcoll._collectives.scope import Scope
from jaxcoll._plan.options import UNSET, CommunicationOptions
from jaxcoll._plan.packs.leaves import is_key
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.dispatch import run
from jaxcoll._runtime.executable import remember
from jaxcoll._step.mesh.mesh import make_line, no_mesh
from jaxcoll._step.mesh.world import make_worlds

AXIS = "replica"
"""The name of the mesh axis of the replicas."""

# The context of the replica function that is being traced. It is part of the key of JAX's trace
# cache: a function that the user jits, and that was traced inside a replica function, is traced
# again for another strategy, and outside.
context_in_trace: Any = jax.make_user_context(default_value=None)


@functools.lru_cache(maxsize=1024)
def rows_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """Lay one row of the leading dimension on each device."""
    return NamedSharding(make_line(devices, AXIS), PartitionSpec(AXIS))


@functools.lru_cache(maxsize=1024)
def copies_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """Lay one complete copy on each device."""
    return NamedSharding(make_line(devices, AXIS), PartitionSpec())


@functools.lru_cache(maxsize=256)
def drop_deadline(options: CommunicationOptions) -> CommunicationOptions:
    """A program is compiled without its deadline."""
    return options.replace(timeout_seconds=UNSET)


def check_cross_replica(caller: str, instead: str) -> None:
    """Refuse a call from inside a replica function; say what to call `instead`."""
    if context_in_trace.value is not None:
        raise RuntimeError(
            f"`{caller}` was called inside a function that `strategy.run` runs on every replica; "
            f"it works on the values of all replicas, between programs. Inside, {instead}."
        )


def refuse_traced(what: str) -> NoReturn:
    """Raise the ValueError for a traced value, in a call that belongs between programs."""
    raise ValueError(
        f"{what} is being traced, so it lies on no device. Call this between programs; inside one, "
        "`jc.all_reduce` and the like work on the value of one replica."
    )


def drop_row(tree: Any) -> Any:
    """Take the arrays of one replica, inside a program that maps the rows over the replicas."""
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


@functools.lru_cache(maxsize=256)
def make_program(
    name: str,
    mesh: Mesh,
    body: Callable[..., Any],
    replicated: tuple[bool, ...],
    *more: Hashable,
    options: CommunicationOptions = CommunicationOptions(),
) -> Callable[..., Any]:
    """Make a program that computes one result from values over `mesh`, on all of its devices.

    A value has a row on each device, or a copy if it is `replicated`. `body` takes the values of
    one replica, a scope, and `more`, and returns an *invariant* tree. The program is compiled once
    for each shape.
    """
    scope = Scope(make_worlds(mesh), options, remember, axes=tuple(mesh.axis_names))

    def program(*values: Any) -> Any:
        local = [
            value if copies else drop_row(value)
            for value, copies in zip(values, replicated, strict=True)
        ]
        return body(local, scope, *more)

    program.__name__ = name
    rows = PartitionSpec(mesh.axis_names)
    specs = tuple([PartitionSpec() if copies else rows for copies in replicated])
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))


def exchange_facts(
    facts: Mapping[int, Any],
    devices: tuple[jax.Device, ...],
    what: str,
    timeout_seconds: float | None = None,
    settings: str = "",
) -> list[Any]:
    """Exchange the facts of every replica, which are JSON; each process sends its replicas'.

    Processes need such facts (lengths, say) before they can all compile the same program. If all
    devices belong to this process, nothing is sent. `settings` is a text that must be equal on all
    processes; "": `what`.
    """
    if len(facts) < len(devices):
        options = CommunicationOptions(timeout_seconds=timeout_seconds)
        # As pairs: JSON would turn the numbers of a mapping into strings.
        text, value = settings or what, list(facts.items())
        call = Call(None, (), devices, f"`{what}`", options, settings=text, value=value)
        facts = {i: fact for pairs in run(call).values() for i, fact in pairs}
    return [facts[i] for i in range(len(devices))]


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
    """Exchange the shape on every replica of `devices` of each array of a replica's value.

    `parts` are the arrays of this process's replicas, equally many for each; `structure` is a text
    that must be equal on all processes. With several processes this is one round trip for any
    number of arrays. Check shapes only afterwards, so that all processes raise the same error.
    """
    shapes = {i: [_shape(array, digests) for array in arrays] for i, arrays in parts.items()}
    if len(shapes) < len(devices) and any(shapes.values()):
        settings = f"{caller} {structure} {digests}"
        rows = exchange_facts(shapes, devices, caller, timeout_seconds, settings)
        shapes = {i: [Shape(tuple(x), *more) for x, *more in row] for i, row in enumerate(rows)}
    return [dict(zip(shapes, column, strict=True)) for column in zip(*shapes.values(), strict=True)]


def _shape(array: Any, digest: bool) -> Shape:
    if not digest:
        return Shape(tuple(array.shape), array.dtype.name)
    bits = array
    if is_key(array):
        with no_mesh():
            bits = jax.random.key_data(array)
    hashed = hashlib.blake2b(np.asarray(bits).tobytes(), digest_size=16).hexdigest()
    return Shape(tuple(array.shape), array.dtype.name, hashed)
