"""Trees cut into shards: every replica holds the same number of rows of 128 elements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeGuard

import jax
import numpy as np

from jaxcoll._collectives.scope import resolve_axes, show_axes
from jaxcoll._plan.packs.leaves import Leaf, Whole, flatten_with_paths, where
from jaxcoll._show.units import pluralize, size
from jaxcoll.errors import AlreadyReducedError

if TYPE_CHECKING:
    from jaxcoll._plan.packs.shard_layout import ShardLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shards(Whole):
    """A tree cut over n replicas, each of which holds 1/n: a pytree that elementwise code can use.

    Inside a program `parts` are this replica's, *varying*. Between programs they are global arrays
    of all replicas' parts, sharded over the mesh; `jc.data_parallel` converts between the two. In
    Shards of stacked layers, the layers are the first dimension of every part, and the layout is
    that of one layer: `lax.scan` over such Shards gives each step the Shards of its layer.

    Elementwise code (`jax.tree.map`, an elementwise optimizer) also sees the zeros that pad each
    pack. Code that depends on the shape of leaves, or sums over them, sees rows of 128 elements and
    only one replica's part.

    Attributes:
      parts: an array for each pack, of shape (rows, 128) inside a program and (n * rows, 128)
        between programs; for stacked layers (layers, rows, 128) and (layers, n * rows, 128).
      layout: which elements of which leaf the parts hold; static, hashable, equal on all replicas.
      axes: the mesh axes that the parts are split over, outer first.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def mean(v):
      ...     shards = reduce_scatter("mean", {"w": v}, "data")
      ...     return all_gather(jax.tree.map(lambda x: 2 * x, shards), "data")
      >>> jax.vmap(mean, axis_name="data")(jnp.array([[1.0, 2.0], [3.0, 6.0]]))["w"].tolist()
      [[4.0, 8.0], [4.0, 8.0]]
    """

    parts: tuple[Any, ...]
    layout: ShardLayout = dataclasses.field(metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        leaves = pluralize(len(self.layout.leaves), "leaf", "leaves")
        layers = f"{pluralize(self.stack[0], 'layer')} of " if self.stack else ""
        nbytes = size(math.prod(self.stack) * sum(leaf.nbytes for leaf in self.layout.leaves))
        held = f"1/{self.layout.replicas} on each replica along {show_axes(self.axes)}"
        return f"Shards({layers}{leaves}, {nbytes}, {held})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_not_gathered(self, f"no attribute {name!r}"), name=name, obj=self)

    def _is_whole(self, axes: Iterable[str]) -> bool:
        """Return whether replicas along one of `axes` hold different elements."""
        return not set(axes).isdisjoint(self.axes) and bool(jax.tree.leaves(self.parts))

    def _prepare(self, path: str, caller: str) -> Whole:
        """Raise an error: parts hold different elements on every replica, and have no sum."""
        axes = show_axes(self.axes)
        raise AlreadyReducedError(_PARTS.format(caller=caller, leaf=where(path), axes=axes))

    def replace(self, parts: Sequence[Any]) -> Self:
        return dataclasses.replace(self, parts=tuple(parts))

    @property
    def leaves(self) -> list[Leaf]:
        """The layout's leaves, with the types of the parts, which may have been cast."""
        leaves = list(self.layout.leaves)
        for planned, part in zip(self.layout.packs, self.parts, strict=True):
            for s in planned.segments:
                leaves[s.leaf] = dataclasses.replace(
                    leaves[s.leaf], dtype=part.dtype, wire=part.dtype
                )
        return leaves

    @property
    def stack(self) -> tuple[int, ...]:
        """The shape (layers,) for stacked layers; () otherwise."""
        return tuple(np.shape(self.parts[0])[:-2]) if self.parts else ()


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(shards: Shards, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(_not_gathered(shards, what))

    return refuse


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul".split()
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *"neg abs lt le gt ge".split()):
    setattr(Shards, f"__{_name}__", _refusing("no arithmetic"))
for _name in ("array", "jax_array", "float", "int"):
    setattr(Shards, f"__{_name}__", _refusing("no values of an array"))
for _name in ("getitem", "iter"):
    setattr(Shards, f"__{_name}__", _refusing("no items"))


def _not_gathered(shards: Shards, what: str) -> str:
    axes = vars(shards).get("axes", ())  # `copy` looks up attributes before it sets them
    return _NOT_GATHERED.format(what=what, axis=repr(axes[0] if len(axes) == 1 else axes))


_NOT_GATHERED = """\
`Shards` have {what}: each replica holds another part of the tree, in rows of 128. Gather it \
first: `params = jc.all_gather(shards, {axis})` in a step (in the loss, if differentiated), \
`jc.unshard(shards)` outside. An elementwise function needs no gather: `jax.tree.map(f, shards)`."""


def is_shards(x: Any) -> TypeGuard[Shards]:
    """Return whether `x` is a `Shards`; to be passed as `is_leaf`."""
    return isinstance(x, Shards)


def shards_in(tree: Any) -> list[Shards]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_shards) if is_shards(x)]


def broadcast_prefix(prefix: Any, tree: Any, misfit: str, is_leaf: Any = None) -> list[Any]:
    """Return, for each array and each `Shards` of `tree`, the leaf of a tree prefix above it."""
    places = jax.tree.map(lambda _: 0, tree, is_leaf=is_shards)
    try:
        spread = jax.tree.broadcast(prefix, places, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(f"{misfit}: {error}") from None
    return jax.tree.leaves(spread, is_leaf=is_leaf)


def axes_of_shards(tree: Any) -> list[tuple[str, ...]]:
    """Return, for each array of a tree, the axes of the `Shards` around it; () if there is none."""
    nodes = jax.tree.leaves(tree, is_leaf=is_shards)
    return [x.axes if is_shards(x) else () for x in nodes for _ in jax.tree.leaves(x)]


def check_no_shards(value: Any, axis_name: str | tuple[str, ...], caller: str) -> None:
    """Raise an error if `value` holds `Shards` along an axis that it would be reduced over."""
    for path, x in flatten_with_paths(value, is_shards)[0]:
        if is_shards(x) and x._is_whole(resolve_axes(axis_name, caller)):
            x._prepare(path, caller)


_PARTS = """\
`{caller}`: {leaf} is `Shards` along {axes}: each replica holds another part of it, and this would \
add up unrelated elements. Gradients in Shards are reduced already, by `jc.reduce_scatter` or by \
the derivative of `jc.all_gather` or `jc.scan_layers`: pass them to the optimizer unchanged. For \
their norm call `jc.global_norm`, for the whole tree `jc.all_gather`."""
