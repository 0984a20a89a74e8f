"""The parameters of all layers: which leaves are cut over which axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll import _compat
from jaxcoll._collectives.common_over_replicas import check_same
from jaxcoll._collectives.parts import join_blocks, unpack_leaves
from jaxcoll._collectives.scope import count, differentiation, loss_axes, require_array, show_axes
from jaxcoll._collectives.shards import Shards, broadcast_prefix, is_shards
from jaxcoll._compat import marks
from jaxcoll._plan.packs.leaves import flatten_with_paths, where
from jaxcoll._show.units import pluralize
from jaxcoll.errors import AlreadyReducedError

CALLER = "scan_layers"

_WHOLE = """\
`scan_layers` over {axis!r}: {leaf} of `stacked` is the same on every replica, so gathering it \
would repeat it {n} times. If it is whole (a bias, a norm), put False in its place in `sharded`, \
as in sharded={{"w": True, "b": False}}; if it is cut only over other axes, put their names \
there. To cut it, pass it in rows with `in_specs=P(None, {axis!r})`, or as `Shards`."""

_DIFFERS = """\
`scan_layers`: {leaf} of `stacked` differs between replicas along {axes} by its type, and \
`sharded` says that every replica holds it whole. Put True there, or the axes of its rows."""

_UNSAID = """\
`scan_layers` over {axis!r}: types say nothing here (`pmap`, `vmap`, check_vma=False), so jaxcoll \
cannot know whether {leaf} of `stacked` holds this replica's rows or is whole. Pass `sharded`: \
True, False, or a tree of them; or pass `Shards`."""

_UNTYPED_GRADIENT = """\
`scan_layers` over {axis!r}, inside the loss of `jc.value_and_grad` or its like: that would treat \
{leaf} of `stacked` as equal on all replicas, and average the gradients of different rows. Pass \
the parameters as `Shards`, or take `jax.grad` of this replica's own loss."""

_NOTHING = """\
`scan_layers`: every replica holds every leaf of `stacked` whole, so there is nothing to gather. \
Use `jax.lax.scan`, or pass the large leaves in rows (`in_specs=P(None, axis)`) or as `Shards`."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Parameters of all layers as a flat list of arrays; `Shards` contribute their parts."""

    names: tuple[str, ...]  # the arrays' paths in the tree
    arrays: tuple[jax.Array, ...]  # the layers are the first dimension
    # For each array the axes that its rows are cut over, outer first; () if it is whole
    over: tuple[tuple[str, ...], ...]
    treedef: Any  # the tree's structure

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.arrays[0].shape[0]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """Build one layer's parameters as a tree, from gathered arrays; unpack `Shards`."""
        tree = jax.tree.unflatten(self.treedef, list(arrays))
        return jax.tree.map(lambda x: _join(x) if is_shards(x) else x, tree, is_leaf=is_shards)


def make_stack(stacked: Any, sharded: Any, axes: Mapping[str, int]) -> Stack:
    """List the arrays of `stacked`, a tree of arrays and `Shards`, with the axes of each."""
    nodes, _ = flatten_with_paths(stacked, is_shards)
    notes = _notes(sharded, stacked, any(is_shards(x) for _, x in nodes))
    names, arrays, over = [], [], []
    for (name, node), note in zip(nodes, notes, strict=True):
        for k, part in enumerate(node.parts if is_shards(node) else [node]):
            names.append(name + _leaf_range(node, k) if is_shards(node) else name)
            arrays.append(_array(names[-1], part))
            if is_shards(node):
                over.append(_axes_of_shards(name, node, note, axes))
            else:
                over.append(_axes_of_rows(names[-1], arrays[-1], note, axes))
                if over[-1] and not _compat.types_tracked():  # the proof checks this mark
                    rows = {f"{where(name)} of `stacked`": part}
                    arrays[-1] = marks.require(arrays[-1], rows, over[-1], CALLER, "rows")
    _check_layers(names, arrays)
    if not any(over):
        raise ValueError(_NOTHING)
    # Whole leaves must be equal on all replicas; without types, a mark on the first array says so.
    leaves = zip(names, arrays, over, strict=True)
    whole = {k: x for k, x, cut in leaves if jnp.issubdtype(x.dtype, jnp.inexact) and not cut}
    arrays[0] = check_same(arrays[0], whole, axes, CALLER)
    return Stack(tuple(names), tuple(arrays), tuple(over), jax.tree.structure(stacked))


def _leaf_range(shards: Shards, k: int) -> str:
    segments = shards.layout.packs[k].segments
    ends = [shards.layout.leaves[s.leaf].path for s in (segments[0], segments[-1])]
    return " … ".join(dict.fromkeys(ends))


def _notes(sharded: Any, stacked: Any, has_shards: bool) -> list[Any]:
    """List what `sharded` says of each leaf and each `Shards`, in order; None if nothing."""
    if sharded is None:
        return [
            False if has_shards and not is_shards(x) else None
            for x in jax.tree.leaves(stacked, is_leaf=is_shards)
        ]
    misfit = f"`{CALLER}`: `sharded` is a tree that does not fit `stacked`"
    notes = broadcast_prefix(sharded, stacked, misfit, _is_names)
    if odd := [x for x in notes if not (isinstance(x, bool | str) or _is_names(x))]:
        raise ValueError(
            f"`{CALLER}` expects `sharded` to be True, False, an axis or a tuple of axes, or a "
            f"tree of these; got {odd[0]!r}."
        )
    return notes


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and bool(x) and all(isinstance(a, str) for a in x)


def _array(name: str, leaf: Any) -> jax.Array:
    who = f"`{CALLER}`: {where(name)} of `stacked`"
    array = require_array(leaf, who, "an array with the layers first")
    if not array.ndim:
        raise ValueError(f"{who} is a scalar; expected the layers first.")
    return array


def _check_layers(names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
    if not arrays:
        raise ValueError(f"`{CALLER}`: `stacked` has no arrays.")
    layers = arrays[0].shape[0]
    for name, array in zip(names, arrays, strict=True):
        if array.shape[0] != layers:
            raise ValueError(
                f"`{CALLER}`: {where(name)} of `stacked` has {array.shape[0]} layers, and "
                f"{where(names[0])} has {layers}; all leaves have the layers first."
            )
    if not layers:
        raise ValueError(f"`{CALLER}`: `stacked` has no layers ({where(names[0])} is empty).")


def _axes_of_shards(
    name: str, shards: Shards, note: Any, axes: Mapping[str, int]
) -> tuple[str, ...]:
    if note is False or (note not in (None, True) and _list_names(note) != shards.axes):
        raise ValueError(
            f"`{CALLER}`: {where(name)} of `stacked` holds Shards along {show_axes(shards.axes)}, "
            f"and `sharded` says {note!r}: leave it out there."
        )
    mapped = {a: axes[a] for a in shards.axes if a in axes}
    if tuple(mapped) != shards.axes or count(mapped) != shards.layout.replicas:
        raise ValueError(
            f"`{CALLER}` over {show_axes(axes)} got Shards of "
            f"{pluralize(shards.layout.replicas, 'replica')} along {show_axes(shards.axes)} at "
            f"{where(name)}; name their axes in `axis_name`."
        )
    for k, part in enumerate(shards.parts):
        rows = (shards.layout.rows(shards.layout.packs[k]), part.shape[-1])
        if part.ndim != 3 or part.shape[1:] != rows:
            raise ValueError(
                f"`{CALLER}`: {where(name)} of `stacked` holds Shards whose parts have the shape "
                f"{part.shape}; expected (layers, {rows[0]}, {rows[1]}), those of stacked layers."
            )
    return shards.axes


def _axes_of_rows(
    name: str, array: jax.Array, note: Any, axes: Mapping[str, int]
) -> tuple[str, ...]:
    """Decide the axes that a plain leaf is cut over; raise an error if its type contradicts."""
    inside = differentiation()
    typed = [a for a in axes if _compat.tracks_variance(a) and a not in loss_axes()]
    over = () if note is False else tuple(axes) if note in (None, True) else _list_names(note)
    if unknown := [a for a in over if a not in axes]:
        raise ValueError(
            f"`{CALLER}` over {show_axes(axes)}: `sharded` names {unknown[0]!r} for {where(name)}, "
            "which is not among these axes."
        )
    if over and array.ndim < 2:
        raise ValueError(
            f"`{CALLER}`: {where(name)} of `stacked` has shape {array.shape}, one number a layer "
            "and so no rows to gather: put False in its place in `sharded`."
        )
    if not array.size:
        return ()
    varying = _compat.varying_axes(array)
    # Rows of one replica differ from those of others. What is the same on all is whole: a gather
    # would put it n times behind itself.
    if same := {a: axes[a] for a in over if a in typed and a not in varying and axes[a] > 1}:
        fields = {"axis": next(iter(same)), "leaf": where(name), "n": count(same)}
        raise AlreadyReducedError(_WHOLE.format(**fields))
    if differ := [a for a in axes if a not in over and a in typed and a in varying]:
        raise ValueError(_DIFFERS.format(leaf=where(name), axes=show_axes(differ)))
    if untyped := [a for a in over if not _compat.tracks_variance(a)]:
        is_mixed = inside is not None and not set(untyped).isdisjoint(inside.axes)
        if is_mixed or note is None:
            words = _UNTYPED_GRADIENT if is_mixed else _UNSAID
            raise ValueError(words.format(axis=untyped[0], leaf=where(name)))
    return over


def _join(shards: Shards) -> Any:
    """Unpack one layer's `Shards`, given with whole packs as parts."""
    layout = shards.layout
    packs = zip(layout.packs, shards.parts, strict=True)
    arrays = unpack_leaves([join_blocks(part, pack) for pack, part in packs], layout)
    return jax.tree_util.tree_unflatten(layout.treedef, arrays)  # pyright: ignore[reportArgumentType]


def _list_names(note: Any) -> tuple[str, ...]:
    return (note,) if isinstance(note, str) else tuple(note)
