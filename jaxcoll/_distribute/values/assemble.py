"""Global arrays made of one part on each device, and the parts of global arrays again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxcoll._distribute.values.replica_axis import copies_over, known_to_all, rows_over
from jaxcoll._mesh.mesh import no_mesh, of_this_process
from jaxcoll._mesh.placement import host_array
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._spmd.sparse import is_sparse


def assembled(
    name: str,
    devices: tuple[jax.Device, ...],
    value_of: Callable[[int], Any],
    *,
    rows: bool,
) -> Any:
    """The replicas' tree, each leaf a global array whose part on device i is replica i's value.

    `value_of` gives it, and is called for this process's replicas. The parts are `rows` of the
    result, those of IndexedSlices padded to the longest; or else copies, which are compared.
    """
    here = of_this_process(devices)
    values = {i: value_of(i) for i in here}
    if rows:
        with no_mesh():
            values = padded_alike(name, values, devices)
    paths, treedef = _agreed(name, values)
    columns = zip(*(treedef.flatten_up_to(value) for value in values.values()), strict=True)
    leaves = []
    for path, column in zip(paths, columns, strict=True):
        parts = {i: _part(name, i, path, x) for i, x in zip(here, column, strict=True)}
        _check_alike(name, path, parts, equal=not rows)
        # Under the caller's mesh JAX refuses eager operations on other devices.
        with no_mesh():
            local = [part[None] if rows else part for part in parts.values()]
            placed = jax.device_put(local, [devices[i] for i in here])
        shape = (len(devices), *placed[0].shape[1:]) if rows else placed[0].shape
        sharding = rows_over(devices) if rows else copies_over(devices)
        leaves.append(jax.make_array_from_single_device_arrays(shape, sharding, placed))
    return treedef.unflatten(leaves)


def own_devices(values: Sequence[Any]) -> tuple[jax.Device, ...] | None:
    """The device of each value, if each is made of arrays that lie on one device of its own."""
    found: list[jax.Device] = []
    for value in values:
        leaves = jax.tree.leaves(value)
        if any(not isinstance(x, jax.Array) or isinstance(x, Tracer) for x in leaves):
            return None
        devices = {device for x in leaves for device in x.sharding.device_set}
        if len(devices) != 1:
            return None
        found += devices
    return tuple(found) if len(set(found)) == len(found) else None


def _agreed(name: str, values: Mapping[int, Any]) -> tuple[list[str], Any]:
    """The paths and the structure that all replicas' values have."""
    if not values:
        raise ValueError(
            f"`{name}` expects a device of process {jax.process_index()} among its devices; "
            "all belong to other processes."
        )
    first = next(iter(values))
    with_paths, treedef = flattened(values[first])
    if not with_paths:
        raise ValueError(f"`{name}` got values without leaves; each needs an array or a number.")
    check_structures(name, {i: jax.tree.structure(value) for i, value in values.items()})
    return [path for path, _ in with_paths], treedef


def check_structures(name: str, structures: Mapping[int, Any]) -> None:
    """Refuse replicas whose trees have different structures."""
    first = next(iter(structures))
    for i, structure in structures.items():
        if structure != structures[first]:
            raise ValueError(
                f"`{name}` expects one structure for all replicas; replica {i} has {structure}, "
                f"replica {first} {structures[first]}."
            )


def _part(name: str, replica: int, path: str, value: Any) -> np.ndarray | jax.Array:
    which = f"`{name}`: " + (f"leaf {path} of " if path else "") + f"replica {replica}"
    if isinstance(value, Tracer):
        raise ValueError(
            f"{which} is being traced, so it lies on no device. Make distributed values between "
            "programs; inside one, each replica already holds its own value."
        )
    if isinstance(value, jax.Array):
        if len(value.sharding.device_set) > 1:
            raise ValueError(
                f"{which} spans {len(value.sharding.device_set)} devices; expected an array on "
                f"one. `{name}.from_global` takes arrays that span the devices."
            )
        return value
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        part = np.asarray(host_array(value))
        if jax.dtypes.issubdtype(part.dtype, np.number) or part.dtype == bool:
            return part
    raise ValueError(
        f"{which} must be an array or a number; got {value!r} ({type(value).__name__})."
    )


def _check_alike(
    name: str, path: str, parts: Mapping[int, np.ndarray | jax.Array], *, equal: bool
) -> None:
    """Refuse parts of different shapes or dtypes, or, where they must be `equal`, bits."""
    leaf = where(path)
    first, *others = parts
    expected = parts[first]
    for i in others:
        for what in ("shape", "dtype"):
            mine, theirs = getattr(parts[i], what), getattr(expected, what)
            if mine != theirs:
                raise ValueError(
                    f"`{name}` expects one shape and one dtype for all replicas; {leaf} has "
                    f"{what} {mine} on replica {i}, {theirs} on replica {first}."
                )
        if equal and _bits(parts[i]) != _bits(expected):
            raise ValueError(
                f"`{name}` expects equal copies; {leaf} of replica {i} differs from that of "
                f"replica {first}. If they are meant to differ, they are a `PerReplica`."
            )


def _bits(part: np.ndarray | jax.Array) -> bytes:
    if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
        with no_mesh():
            part = jax.random.key_data(part)
    return np.asarray(part).tobytes()


def padded_alike(
    name: str, values: Mapping[int, Any], devices: tuple[jax.Device, ...]
) -> Mapping[int, Any]:
    """`values` with every IndexedSlices padded to the longest one in its place.

    Structures that disagree are left for others to refuse. Where other processes have replicas,
    lengths are exchanged.
    """
    first = next(iter(values.values()), None)
    flat, treedef = flattened(first, is_sparse)
    rows = {i: jax.tree.leaves(value, is_leaf=is_sparse) for i, value in values.items()}
    alike = all(jax.tree.structure(v, is_leaf=is_sparse) == treedef for v in values.values())
    if not alike or not any(is_sparse(leaf) for row in rows.values() for leaf in row):
        return values
    sparse = []
    for k, (path, _) in enumerate(flat):
        column = {i: row[k] for i, row in rows.items()}
        if _is_sparse_everywhere(f"`{name}`: {where(path)}", column):
            sparse.append(k)
    lengths = _longest(name, {i: [row[k] for k in sparse] for i, row in rows.items()}, devices)
    for row in rows.values():
        for k, length in zip(sparse, lengths, strict=True):
            row[k] = row[k].padded(length)
    return {i: treedef.unflatten(row) for i, row in rows.items()}


def _longest(
    name: str, rows: Mapping[int, list[Any]], devices: tuple[jax.Device, ...]
) -> list[int]:
    """The length of the longest of all replicas' slices, for each leaf that is sparse."""
    # Of the dense shape 31 bits, for a table of 32-bit integers.
    facts = {
        i: [(s.indices.shape[0], zlib.crc32(repr(s.dense_shape).encode()) >> 1) for s in row]
        for i, row in rows.items()
    }
    table = known_to_all(facts, devices, f"{name} of IndexedSlices")
    lengths, hashes = table[..., 0], table[..., 1]
    if (hashes != hashes[:1]).any():
        shapes = [slices.dense_shape for slices in next(iter(rows.values()))]
        raise ValueError(
            f"`{name}` expects the IndexedSlices of all replicas to be rows of one array; those "
            f"here have the dense_shape {', '.join(map(str, shapes))}, and other processes have "
            "others."
        )
    return lengths.max(0).tolist()


def _is_sparse_everywhere(name: str, leaves: Mapping[int, Any]) -> bool:
    """Whether a leaf is sparse, which it is on all replicas or on none."""
    sparse = {i: leaf for i, leaf in leaves.items() if is_sparse(leaf)}
    if not sparse:
        return False
    first = next(iter(sparse))
    dense = next((i for i in leaves if i not in sparse), None)
    if dense is not None:
        raise ValueError(
            f"{name} is an IndexedSlices on replica {first}, but of type "
            f"{type(leaves[dense]).__name__} on replica {dense}; it must be sparse on all replicas "
            "or dense on all. `slices.to_dense()` makes it dense."
        )
    for i, slices in sparse.items():
        slices.check(f"{name} of replica {i}")
        if slices.dense_shape != sparse[first].dense_shape:
            raise ValueError(
                f"{name} has dense_shape {slices.dense_shape} on replica {i}, "
                f"{sparse[first].dense_shape} on replica {first}; all replicas' rows must be rows "
                "of one array."
            )
    return True
