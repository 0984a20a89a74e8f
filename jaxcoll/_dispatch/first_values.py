"""Digests of the arguments of a program's first run, which processes compare once.

Arguments that every replica gets in full must be the same on all processes, or they compute with
different parameters from then on; rows that are the same on all of them are one batch several
times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll._dispatch.peers import Peers
from jaxcoll._errors import ReplicaDivergenceError, SameRowsWarning

SHOW_SECONDS = 10.0
"""How long the digests of another process's leaves are waited for."""

_DIFFERENT = """\
{name}: processes hold different values in {n} of {of} leaves that every replica gets whole, \
{leaf} first: processes {groups}. Nothing was run. Make them from one seed, or read them from \
one file, on every process; what is meant to differ is a batch, or a `PerReplica`."""

_SAME_ROWS = """\
{name}: all {n} processes pass the same rows in {leaf}. Each process passes its own share of the \
batch, so that these rows count {n} times; if this is the whole batch, pass this process's part \
of it, as in `rows[jax.process_index()::jax.process_count()]`."""


@dataclasses.dataclass
class FirstValues:
    """Digests of one process's arguments."""

    replicated: dict[str, str]  # of each leaf that every replica gets in full, by its path
    # Of each leaf of which this process has its share; leaves that hold one number in every place
    # are left out, because equal ones prove nothing
    rows: dict[str, str]
    done: bool = False  # whether they were compared, and nothing differed that should be the same

    @property
    def short(self) -> str:
        """All of them, as short as two numbers."""
        rows = _digest(json.dumps(self.rows).encode()) if self.rows else ""
        return f"{_digest(json.dumps(self.replicated).encode())}:{rows}"


def first_values(args: Sequence[Any], kwargs: Mapping[str, Any], rows: bool) -> FirstValues:
    """The digests of placed arguments, of which this process's part is read once.

    `rows` says whether arrays that are split are a batch.
    """
    found = FirstValues({}, {})
    for tree, name in ((tuple(args), "args"), (dict(kwargs), "kwargs")):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            shards = [_host(shard.data) for shard in leaf.addressable_shards]
            if not shards:
                continue
            place = name + jax.tree_util.keystr(path)
            if leaf.is_fully_replicated:
                found.replicated[place] = _digest(shards[0].view(np.uint8))
            elif rows and any(np.any(x != x[:1]) for x in shards):
                found.rows[place] = _digest(b"".join(x.tobytes() for x in shards))
    return found


def uncompared(program: Any) -> FirstValues | None:
    """What this process brings to the first run of a `Program`, if that is still to be compared."""
    first: FirstValues | None = getattr(program, "first", None)
    return None if first is None or first.done else first


def compared(
    peers: Peers, folder: str, processes: Sequence[int], mine: FirstValues, name: str
) -> ReplicaDivergenceError | None:
    """Compare the digests of all processes: the error that they raise, or None if none differ.

    They stand in `folder`, beside the marks of the program `name`.
    """
    # Digests of all leaves in one: leaves by themselves are exchanged only where these differ.
    short = {int(p): text.split(":") for p, text in peers.store.all(f"{folder}/values").items()}
    groups: dict[str, list[int]] = {}
    for process in sorted(short):
        groups.setdefault(short[process][0], []).append(process)
    if len(groups) > 1:
        return _difference(
            peers, folder, mine, sorted(groups.values(), key=len, reverse=True), name
        )
    rows = {text for _, text in short.values()}
    if len(short) == len(processes) > 1 and len(rows) == 1 and rows != {""}:
        leaf = next(iter(mine.rows))
        text = _SAME_ROWS.format(name=name, n=len(processes), leaf=leaf)
        warnings.warn(text, SameRowsWarning, stacklevel=2)
    mine.done = True
    return None


def _difference(
    peers: Peers, folder: str, mine: FirstValues, groups: list[list[int]], name: str
) -> ReplicaDivergenceError:
    """The error, which names the leaves in which the first of two groups differ."""
    sides = [group[0] for group in groups[:2]]
    if peers.process in sides:
        peers.store.set(f"{folder}/leaves/{peers.process}", json.dumps(mine.replicated))
    try:
        one, other = (
            json.loads(peers.store.get(f"{folder}/leaves/{side}", SHOW_SECONDS)) for side in sides
        )
    except TimeoutError:
        one, other = mine.replicated, {}
    leaves = [path for path in one if one[path] != other.get(path)]
    words = " | ".join(", ".join(map(str, group)) for group in groups)
    text = _DIFFERENT.format(
        name=name, n=len(leaves), of=len(mine.replicated), leaf=leaves[0], groups=words
    )
    named = tuple(tuple(map(str, group)) for group in groups)
    return ReplicaDivergenceError(text, divergent=dict.fromkeys(leaves, named))


def _host(x: jax.Array) -> np.ndarray:
    """The elements as bytes, a row each: bits are compared, whatever they mean."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    flat = np.ascontiguousarray(np.asarray(x)).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, -1) if flat.size else np.zeros((0, 1), np.uint8)


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
