"""Trees of which every replica holds an n-th: packs in rows of 128, as many on every replica."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._plan.packs.leaves import Leaf, Whole, dtype_of, flattened, no_array, where
from jaxcoll._plan.packs.packing import LANES, Pack, padded
from jaxcoll._plan.packs.shard_layout import ShardedLeaf, ShardLayout, first_difference
from jaxcoll._show.units import counted, size
from jaxcoll._spmd.pipeline import pack, unpack
from jaxcoll._spmd.scope import bound_axes, listed
from jaxcoll._spmd.sparse import is_sparse
from jaxcoll.errors import AlreadyReducedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shards(Whole):
    """A tree of which every replica holds an n-th: a pytree, on which elementwise code works as is.

    Inside a program `parts` are this replica's, *varying*; between programs they are the global
    arrays of all replicas' parts, laid out over the mesh. `jc.data_parallel` takes and returns
    them so by itself. Of stacked layers every part has the layers first, and the layout is that of
    one layer: `lax.scan` over such Shards gives each turn the Shards of its layer.

    What adds, scales or compares elements by themselves (`jax.tree.map`, an elementwise optimizer)
    sees the zeros at the end of each pack as well; what looks at the shape of leaves, or sums over
    them, sees rows of 128 and one replica's part.

    Attributes:
      parts: an array for each pack, of shape (rows, 128); of all n replicas (n * rows, 128). Of
        stacked layers (layers, rows, 128) and (layers, n * rows, 128).
      layout: which elements of which leaf they hold; static, hashable, the same on all replicas.
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
        leaves = counted(len(self.layout.leaves), "leaf", "leaves")
        layers = f"{counted(self.stack[0], 'layer')} of " if self.stack else ""
        nbytes = size(math.prod(self.stack) * sum(leaf.nbytes for leaf in self.layout.leaves))
        held = f"1/{self.layout.replicas} on each replica along {listed(self.axes)}"
        return f"Shards({layers}{leaves}, {nbytes}, {held})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_not_gathered(self, f"no attribute {name!r}"), name=name, obj=self)

    def _is_whole(self, axes: Iterable[str]) -> bool:
        """Return whether the parts are of different elements along one of `axes`."""
        return not set(axes).isdisjoint(self.axes) and bool(jax.tree.leaves(self.parts))

    def _taken(self, path: str, caller: str) -> Whole:
        """Refuse to reduce parts, which are of different elements on every replica."""
        axes = listed(self.axes)
        raise AlreadyReducedError(_PARTS.format(caller=caller, leaf=where(path), axes=axes))

    def replace(self, parts: Sequence[Any]) -> Self:
        """Other values in the same places."""
        return dataclasses.replace(self, parts=tuple(parts))

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves in the types of the parts that hold them, which may have been cast."""
        leaves = list(self.layout.leaves)
        for planned, part in zip(self.layout.packs, self.parts, strict=True):
            for s in planned.segments:
                leaves[s.leaf] = dataclasses.replace(
                    leaves[s.leaf], dtype=part.dtype, wire=part.dtype
                )
        return leaves

    @property
    def stack(self) -> tuple[int, ...]:
        """(number of layers,) if the parts are those of stacked layers; () otherwise."""
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
    axes = vars(shards).get("axes", ())  # a copy that is being made has none yet
    return _NOT_GATHERED.format(what=what, axis=repr(axes[0] if len(axes) == 1 else axes))


_NOT_GATHERED = """\
`Shards` have {what}: every replica holds another part of the tree, in rows of 128. Gather it \
first: `params = jc.all_gather(shards, {axis})` in a step (inside the loss, where it is \
differentiated), `params = jc.unshard(shards)` outside. An elementwise function takes the parts as \
they are: `jax.tree.map(f, shards)`."""


def is_shards(x: Any) -> TypeGuard[Shards]:
    """True if `x` is a `Shards`; to be passed as `is_leaf`."""
    return isinstance(x, Shards)


def shards_in(tree: Any) -> list[Shards]:
    """Every `Shards` in a tree, in order."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_shards) if is_shards(x)]


def said_of_each(tree: Any, value: Any, odd: str, is_leaf: Any = None) -> list[Any]:
    """For each array and each `Shards` of `value`, what a tree says of which it is an extension."""
    places = jax.tree.map(lambda _: 0, value, is_leaf=is_shards)
    try:
        spread = jax.tree.broadcast(tree, places, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(f"{odd}: {error}") from None
    return jax.tree.leaves(spread, is_leaf=is_leaf)


def axes_of_shards(tree: Any) -> list[tuple[str, ...]]:
    """For each array of a tree the axes of the `Shards` that it is a part of; () outside of any."""
    nodes = jax.tree.leaves(tree, is_leaf=is_shards)
    return [x.axes if is_shards(x) else () for x in nodes for _ in jax.tree.leaves(x)]


def check_no_shards(value: Any, axis_name: str | tuple[str, ...], caller: str) -> None:
    """Refuse to reduce parts of `Shards`, which are of different elements on every replica."""
    for path, x in flattened(value, is_shards)[0]:
        if is_shards(x) and x._is_whole(bound_axes(axis_name, caller)):
            x._taken(path, caller)


_PARTS = """\
`{caller}`: {leaf} is `Shards` along {axes}: each replica holds another part of it, and this would \
add up elements that have nothing to do with each other. Gradients in Shards are reduced already, \
by the derivative of `jc.all_gather` or `jc.scan_layers` or by `jc.reduce_scatter`: give them to \
the optimizer as they are. Their norm is `jc.global_norm`; `jc.all_gather` makes the tree."""


def sharded_leaves(tree: Any, axes: Mapping[str, int], caller: str) -> tuple[Any, tuple[Leaf, ...]]:
    """The structure of a tree that is to be cut over `axes`, and the leaves of its layout."""
    flat, treedef = flattened(tree, _is_node)
    leaves = []
    for name, leaf in flat:
        if (obstacle := _obstacle(leaf)) is not None:
            raise ValueError(f"`{caller}` cannot cut {where(name)} in shards: {obstacle}")
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype_of(leaf)))
        varying = _compat.varying_axes(leaf) if isinstance(leaf, jax.Array) else frozenset()
        kind = (dtype.name, *sorted(varying - set(axes)))
        leaves.append(
            ShardedLeaf(name, tuple(np.shape(leaf)), dtype, dtype, tuple(axes.values()), kind)
        )
    return treedef, tuple(leaves)


def _is_node(x: Any) -> bool:
    """True of a tree to JAX that must not be cut."""
    return isinstance(x, Whole)


def _obstacle(leaf: Any) -> str | None:
    """Why a leaf cannot be cut in shards."""
    if _is_node(leaf):
        more = " `to_dense()` makes it one." if is_sparse(leaf) else ""
        return f"expected an array, got {type(leaf).__name__}.{more}"
    got = None if isinstance(leaf, jax.ShapeDtypeStruct) else no_array(leaf)
    if got is not None:
        return f"expected an array or a number, got {got}."
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return f"{dtype} holds no numbers; leave it out of the tree (None in its place)."
    if isinstance(leaf, jax.Array) and _compat.is_partially_sharded(leaf):
        return (
            "it is sharded over another axis of the mesh already. Map that axis, too, in "
            "`jax.shard_map`."
        )
    return None


def all_parts(
    value: Any, layout: ShardLayout, axes: tuple[str, ...], stack: tuple[int, ...] = ()
) -> Shards:
    """All replicas' parts together of a whole tree, in a program that maps no axis."""

    def rows(*arrays: jax.Array) -> list[jax.Array]:
        packed = zip(layout.packs, pack(arrays, layout.packs, layout.leaves), strict=True)
        return [blocks_of(x, layout, p).reshape(-1, LANES) for p, x in packed]

    arrays = [jnp.asarray(x) for x in jax.tree.leaves(value)]
    return Shards(tuple((jax.vmap(rows) if stack else rows)(*arrays)), layout, axes)


def check_fits(
    layout: ShardLayout, treedef: Any, leaves: Sequence[Leaf], replicas: int, caller: str
) -> None:
    """Refuse a tree, or a number of replicas, that `layout` was not made for."""
    if layout.replicas != replicas:
        raise ValueError(
            f"`{caller}`: these shards are one of {layout.replicas} each, and here are {replicas} "
            "replicas. Bring the state to them between programs, with the optimizer's `unshard` "
            "and then `shard` of one that is made for them, and parameters with `jc.unshard` and "
            "`jc.shard`."
        )
    difference = first_difference(leaves, layout.leaves)
    if not difference and treedef != layout.treedef:
        difference = f"its structure is {treedef}, and was {layout.treedef}"
    if difference:
        raise ValueError(
            f"`{caller}`: the tree is not the one that the shards were made of: {difference}. An "
            "optimizer's state belongs to the parameters that `init` was given: call `init` again, "
            "or bring the leaf back to the shape and type it had."
        )


def blocks_of(packed: jax.Array, layout: ShardLayout, pack: Pack) -> jax.Array:
    """Return a whole pack as one block for each replica."""
    flat = packed.reshape(-1)
    filled = jnp.pad(flat, (0, padded(pack.size, layout.replicas) - flat.size))
    return filled.reshape(layout.replicas, layout.rows(pack), LANES)


def whole_of(blocks: jax.Array, layout: ShardLayout, pack: Pack) -> jax.Array:
    """Return a pack without its padding; of one leaf, in that leaf's shape."""
    flat = blocks.reshape(-1)[: pack.size]
    leaf = layout.leaves[pack.segments[0].leaf]
    return flat.reshape(leaf.shape) if pack.is_leaf(layout.leaves) else flat


def leaves_of(
    wholes: Sequence[jax.Array], layout: ShardLayout, on_cpus_along: Collection[str] = ()
) -> list[jax.Array]:
    """The leaves again, from their whole packs without their padding; see `unpack`."""
    arrays = unpack(wholes, layout.packs, layout.leaves, on_cpus_along)
    return [
        jnp.zeros(leaf.shape, leaf.dtype) if array is None else array
        for array, leaf in zip(arrays, layout.leaves, strict=True)
    ]
