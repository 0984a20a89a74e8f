"""Assembles global arrays from one part on each device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._plan.packs.leaves import flatten_with_paths, where
from jaxcoll._step.mesh.mesh import local_positions, no_mesh
from jaxcoll._step.mesh.placement import host_array
from jaxcoll.distribute._replica_axis import (
    Shape,
    copies_over,
    refuse_traced,
    rows_over,
    shapes_of_all,
)


def assemble(
    name: str,
    devices: tuple[jax.Device, ...],
    value_of: Callable[[int], Any],
    *,
    rows: bool,
    exchange: bool = True,
    uneven: Callable[[dict[int, Any], tuple[jax.Device, ...]], Any] | None = None,
) -> Any:
    """Assemble a tree of global arrays; the part of each on device i is replica i's leaf.

    `value_of(i)` returns the tree of replica i, and is called for this process's replicas. With
    `rows`, parts are rows of the result, and IndexedSlices are padded to the longest; otherwise
    parts are copies, and are compared. Processes exchange shapes, so that all of them refuse parts
    that disagree; without `exchange` only shapes of IndexedSlices, as the program that takes the
    rows compares the rest. If `uneven` is set, it makes leaves of differing shapes from the parts.

    Raises:
      ValueError: a part is not an array, or the parts disagree; or no device is of this process.
    """
    here = local_positions(devices)
    if not here:
        of = f"a device of process {jax.process_index()}"
        raise ValueError(f"`{name}` expects {of} among its devices; all are of other processes.")
    values = {i: value_of(i) for i in here}
    first = values[here[0]]
    # Under the caller's mesh JAX refuses eager operations on other devices.
    with no_mesh():
        flat, treedef = flatten_with_paths(first)
        if not flat:
            raise ValueError(
                f"`{name}` got values without leaves; each needs an array or a number."
            )
        _check_structures(name, values)
        to_pad = [
            rows and is_sparse(leaf)
            for leaf in jax.tree.leaves(first, is_leaf=is_sparse)
            for _ in jax.tree.leaves(leaf)
        ]
        arrays = {i: _arrays(name, i, value) for i, value in values.items()}
        over = devices if exchange or any(to_pad) else ()
        shapes = shapes_of_all(name, arrays, over, describe(first), digests=not rows)
        differs = []
        for (path, _), by_replica, padded in zip(flat, shapes, to_pad, strict=True):
            distinct = {shape.shape for shape in by_replica.values()}
            differs.append(uneven is not None and not padded and len(distinct) > 1)
            if not differs[-1]:
                check_alike(name, path, by_replica, axes=(0,) * padded)
        if any(to_pad):
            padded = itertools.compress(shapes, to_pad)
            lengths = [max(x.shape[0] for x in by_replica.values()) for by_replica in padded]
            # The values and the indices of an IndexedSlices are neighbours, of one length.
            values = {i: _pad(value, lengths[::2]) for i, value in values.items()}
            arrays = {i: _arrays(name, i, value) for i, value in values.items()}
        sharding = rows_over(devices) if rows else copies_over(devices)
        leaves = []
        for is_uneven, *column in zip(differs, *arrays.values(), strict=True):
            parts = [x[None] for x in column] if rows and not is_uneven else column
            placed = jax.device_put(parts, [devices[i] for i in here])
            if isinstance(placed[0], Tracer):
                refuse_traced(f"A `{name}`")
            if uneven is not None and is_uneven:
                leaves.append(uneven(dict(zip(here, placed, strict=True)), devices))
                continue
            shape = (len(devices), *placed[0].shape[1:]) if rows else placed[0].shape
            leaves.append(jax.make_array_from_single_device_arrays(shape, sharding, placed))
        return treedef.unflatten(leaves)


def own_devices(values: Sequence[Any]) -> tuple[jax.Device, ...] | None:
    """Find the device of each value, if each lies on one device, different from all others."""
    leaves = [jax.tree.leaves(value) for value in values]
    if any(not isinstance(x, jax.Array) or isinstance(x, Tracer) for xs in leaves for x in xs):
        return None
    of_value = [{device for x in xs for device in x.sharding.device_set} for xs in leaves]
    devices = tuple(device for found in of_value if len(found) == 1 for device in found)
    return devices if len(set(devices)) == len(values) else None


def describe(tree: Any) -> str:
    """Write down what must agree between processes about a tree.

    It has the paths, and the dense shapes of IndexedSlices. A tree definition may show addresses,
    which differ between processes.
    """
    flat, _ = flatten_with_paths(tree, is_sparse)
    return repr([(path, getattr(leaf, "dense_shape", None)) for path, leaf in flat])


def _check_structures(name: str, values: Mapping[int, Any]) -> None:
    first = min(values)
    expected = jax.tree.structure(values[first])
    for i, value in values.items():
        if (structure := jax.tree.structure(value)) != expected:
            raise ValueError(
                f"`{name}` expects one structure for all replicas; replica {i} has {structure}, "
                f"replica {first} {expected}."
            )


def _read_array(name: str, replica: int, path: str, value: Any) -> np.ndarray | jax.Array:
    """Check one leaf of a replica's value: a host array, or an array on one device."""
    leaf = f"`{name}`: {f'leaf {path} of ' if path else ''}replica {replica}"
    if isinstance(value, Tracer):
        refuse_traced(leaf)
    if isinstance(value, jax.Array):
        if len(value.sharding.device_set) > 1:
            raise ValueError(
                f"{leaf} spans {len(value.sharding.device_set)} devices; expected an array on one. "
                f"`{name}.from_global` takes arrays that span the devices."
            )
        return value
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        array = np.asarray(host_array(value))
        if jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == bool:
            return array
    got = f"{value!r} ({type(value).__name__})"
    raise ValueError(f"{leaf} must be an array or a number; got {got}.")


def check_alike(
    name: str, path: str, shapes: Mapping[int, Shape], axes: Sequence[int] = ()
) -> None:
    """Refuse a leaf whose parts differ in dtype or bits, or in shape except along `axes`."""
    first = min(shapes)
    expected = shapes[first]
    along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(map(str, axes))}"
    but = f" (except along {along})" if axes else ""

    def fixed(shape: Sequence[int]) -> list[int]:
        return [-1 if k in axes else size for k, size in enumerate(shape)]

    for i, shape in shapes.items():
        for what, differs in (
            ("shape", fixed(shape.shape) != fixed(expected.shape)),
            ("dtype", shape.dtype != expected.dtype),
        ):
            if differs:
                mine, theirs = getattr(shape, what), getattr(expected, what)
                raise ValueError(
                    f"`{name}` expects one shape{but} and one dtype for all replicas; "
                    f"{where(path)} has {what} {mine} on replica {i}, {theirs} on replica {first}."
                )
        if shape.digest != expected.digest:
            raise ValueError(
                f"`{name}` expects equal copies; {where(path)} of replica {i} differs from that "
                f"of replica {first}. Use a `PerReplica` for values that should differ."
            )


def _arrays(name: str, replica: int, value: Any) -> list[np.ndarray | jax.Array]:
    return [_read_array(name, replica, path, leaf) for path, leaf in flatten_with_paths(value)[0]]


def _pad(value: Any, lengths: Sequence[int]) -> Any:
    remaining = iter(lengths)
    return jax.tree.map(
        lambda leaf: leaf.padded(next(remaining)) if is_sparse(leaf) else leaf,
        value,
        is_leaf=is_sparse,
    )
