"""Programs that several processes run, and the digests of their first arguments.

Processes compare both once. Arguments that every replica gets in full must be the same on all
processes, or they compute with different parameters from then on; rows that are the same on all of
them are one batch several times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.executable import Program, name_of, plans, readers
from jaxcoll._dispatch.fingerprint import fingerprint, mark, packed
from jaxcoll._plan.collective_plan import THE_VALUE
from jaxcoll._plan.scope_names import names, pack_of


@dataclasses.dataclass
class FirstValues:
    """Digests of one process's arguments."""

    replicated: dict[str, str]  # of each leaf that every replica gets in full, by its path
    # Of each leaf of which this process has its share; leaves that hold one number in every place
    # are left out, because equal ones prove nothing
    rows: dict[str, str]

    def short(self) -> tuple[str, str]:
        """Return all of them, as two digests; the second is "" without rows."""
        whole, rows = (json.dumps(digests).encode() for digests in (self.replicated, self.rows))
        return _digest(whole), _digest(rows) if self.rows else ""


def shared_program(
    lowered: jax.stages.Lowered, name: str, leaves: Sequence[Any], settings: str
) -> Program:
    """Compile a program that other processes run, too; they compare `settings` beside its text."""
    meshes = (getattr(x.sharding, "mesh", None) for x in leaves)
    mesh = next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)), None)
    # The devices in the order in which the program counts them, as the first array lies on them.
    devices = "" if mesh is None else " ".join(str(d.id) for d in mesh.devices.flat)
    here = filter(None, (x.sharding.addressable_devices for x in leaves))
    device = min(next(here, jax.local_devices()), key=lambda d: d.id)
    lines = fingerprint(f"`{name}`", device, settings, devices, lowered)
    return Program(lowered.compile(), name_of(name, leaves), packed(lines), mark(lines))


def starts_with(program: Program) -> str:
    """Return the collective at which processes that arrived wait for the others, in words."""
    try:
        moved = [c for read in readers for c in read(program.compiled.as_text() or "")]
    except ValueError:  # it is not understood
        return ""
    if not moved:
        return f"{program.name} has no collective."
    of, first = f" of {len(moved)}" * (len(moved) > 1), moved[0]
    types = ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in first.operands)
    groups = ",".join(f"{{{','.join(map(str, group))}}}" for group in first.groups)
    paths = names(first.op_name)
    asked = f", asked for as {paths[0].rpartition('/')[2]}" if paths else ""
    packs = dict.fromkeys(filter(None, map(pack_of, paths)))
    carrying = f", carrying {' and '.join(packs)}" * bool(packs)
    what = f"{first.kind} {types} among {{{groups}}}{asked}{carrying}{_leaves(packs)}"
    return f"Collective 1{of} of {program.name} is {what}."


def _leaves(packs: Iterable[str]) -> str:
    """The leaves that a collective carries, in packs or as gathered rows."""
    carried = []
    for pack in packs:
        name, _, part = pack.partition("/")
        if plan := plans.get(name):
            k = int(part.lstrip("packrows"))
            leaves = plan.carried(k) if part.startswith("pack") else plan.leaves[k].path
            carried.append(f"{pack} has {leaves or THE_VALUE}")
    return f" ({'; '.join(carried)})" if carried else ""


def first_values(call: Call) -> FirstValues:
    """The digests of a call's arguments, of which this process's part is read once."""
    replicated, rows = {}, {}
    for tree, name in ((tuple(call.args), "args"), (dict(call.kwargs), "kwargs")):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            shards = [_bytes(shard.data) for shard in leaf.addressable_shards]
            place = name + jax.tree_util.keystr(path)
            if shards and leaf.is_fully_replicated:
                replicated[place] = _digest(shards[0])
            elif shards and call.rows and any(np.any(x != x[:1]) for x in shards):
                rows[place] = _digest(b"".join(x.tobytes() for x in shards))
    return FirstValues(replicated, rows)


def _bytes(x: jax.Array) -> np.ndarray:
    """The elements as bytes, a row each: bits are compared, whatever they mean."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    flat = np.ascontiguousarray(np.asarray(x)).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, -1) if flat.size else np.zeros((0, 1), np.uint8)


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
