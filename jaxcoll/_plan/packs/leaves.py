"""A leaf as a plan describes it: its path, its shape, and the type that it travels in."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

from jaxcoll._compression.format import AUTOMATIC, FORMATS, WireFormat, find_format
from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from jaxcoll._plan.world import World

LEAST_CODED = 64 << 10
"""Bytes of the smallest leaf that `compression="auto"` codes over Gloo."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a tree, without its values."""

    path: str  # its path, as `jax.tree_util.keystr` writes it ("" if the tree is one array)
    shape: tuple[int, ...]  # its shape on one replica
    dtype: np.dtype  # the type it has in the tree
    wire: np.dtype  # the type it travels and is summed in
    # Sizes of the reduction's axes, outer first; 1 along those it is not summed over
    over: tuple[int, ...]
    kind: Hashable = ()  # whatever else must agree before two leaves may share a pack
    solid: bool = False  # it must keep its shape, so it shares no pack
    # The dtype of the indices of sparse rows, which are gathered outside the packs; None: dense
    indices: np.dtype | None = None
    # Its position in the order in which leaves become ready; None: not known
    ready: int | None = None
    format: WireFormat | None = None  # its wire format; None: it travels exactly
    in_shards: bool = False  # its elements are cut, so a pack carries it even on one replica

    @functools.cached_property
    def size(self) -> int:
        """Elements on one replica."""
        return math.prod(self.shape)

    @property
    def travels(self) -> bool:
        """True if a pack carries it: it has elements, and is cut, or summed over some axis."""
        moves = self.in_shards or math.prod(self.over) > 1
        return self.size > 0 and moves and self.indices is None

    @property
    def gathers(self) -> int:
        """Bytes of rows and indices that every other replica gathers from one; 0 if dense."""
        if self.indices is None or math.prod(self.over) == 1:
            return 0
        return self.nbytes + self.shape[0] * self.indices.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes it puts into a pack."""
        return self.size * self.wire.itemsize


class Whole:
    """A pytree node that a reduction treats as one leaf, and that reduces itself.

    Each subclass has a separate file, which is imported only where such values exist.
    """

    values: Any  # rows, the array that a plan describes
    indices: Any  # the numbers of these rows

    def _is_whole(self, axes: Iterable[str]) -> bool:
        """Return whether a reduction over `axes` treats it as one leaf, not as two arrays."""
        return True

    def _prepare(self, path: str, caller: str) -> Whole:
        """Return the node to reduce, or raise an error that names its path."""
        raise NotImplementedError

    def _reduce(self, recipe: Any) -> Whole:
        """Return the sum or the mean over the replicas, *invariant*."""
        raise NotImplementedError


def is_whole(node: Any, axes: Iterable[str]) -> bool:
    """Return whether a reduction over `axes` treats a node of a tree as one leaf."""
    return isinstance(node, Whole) and node._is_whole(axes)


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], jax.tree_util.PyTreeDef]:
    """Return the leaves of a tree with their paths as messages write them, and its structure."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat], treedef


def argument_name(path: tuple[Any, ...], name_of: Callable[[int | str], str]) -> str:
    """Return the name in messages of a leaf, given its path in a call's `(args, kwargs)`.

    `name_of` returns the name of an argument, given its position or its keyword.
    """
    argument = getattr(path[1], "idx", None)
    name = name_of(path[1].key if argument is None else argument)
    return name + jax.tree_util.keystr(path[2:])


_TIED = """\
`{caller}`: {one} and {other} are one variable of a flax nnx module, and would become two, trained \
apart. Pass its state: `graph, state = nnx.split(module)`, and use `nnx.merge(graph, state)` in \
the step or the loss. If they should be two, copy one, by `nnx.clone`."""


def refuse_tied(tree: Any, caller: str) -> None:
    """Refuse nnx modules in a tree if two paths lead to one variable: a pytree makes two of it."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # there are no such modules
        return
    module, seen = getattr(nnx, "Pytree", nnx.Module), dict[int, str]()

    def is_module(x: Any) -> bool:
        return isinstance(x, module)

    # Every call with host arrays comes here, and paths cost five times as much as leaves.
    if not any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
        return
    for path, node in flatten_with_paths(tree, is_module)[0]:
        inside = flatten_with_paths(node, lambda x: isinstance(x, nnx.Variable))[0]
        for name, x in inside if is_module(node) else ():
            first = seen.setdefault(id(x), path + name) if isinstance(x, nnx.Variable) else ""
            if first not in ("", path + name):
                fields = {"one": where(first), "other": where(path + name), "caller": caller}
                raise ValueError(_TIED.format(**fields))


def check_not_empty(caller: str, batch: Any) -> None:
    """Refuse a batch without any row: the mean over none is NaN."""
    shapes = [shape for x in jax.tree.leaves(batch) if (shape := getattr(x, "shape", ()))]
    if shapes and not any(shape[0] for shape in shapes):
        raise ValueError(
            f"`{caller}`: the batch has no rows (its shape is {list(shapes[0])}), and the mean "
            "over none is NaN. Skip such a batch. If replicas have unequal numbers of rows, pad "
            "these and give the padding weight 0 with `jc.WeightedLoss`."
        )


def wire_dtype(dtype: np.dtype, reduce_op: ReduceOp, world: World) -> np.dtype:
    """Return the type in which a leaf of `dtype` travels and is summed.

    It is `dtype`, with four exceptions:
    - integers of 4 bits travel as `exact_dtype` says.
    - 8-bit floats travel as float32: they cannot hold a sum, and few backends add them.
    - the MEAN of integers travels as the float that it is, as their sum may not fit their type.
    - bfloat16 on CPUs with a partly mapped mesh travels as float32: there XLA's CPU compiler
      aborts the process on bfloat16 (elsewhere it widens it by itself).
    """
    if jax.dtypes.issubdtype(dtype, np.floating):
        aborts = world.platform == "cpu" and world.partly_mapped and dtype.name == "bfloat16"
        return np.dtype(np.float32) if dtype.itemsize == 1 or aborts else dtype
    is_mean = reduce_op is ReduceOp.MEAN and jax.dtypes.issubdtype(dtype, np.integer)
    return accumulation_dtype(dtype) if is_mean else exact_dtype(dtype)


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type for means and local sums of `dtype`: a float of at least 32 bits."""
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return dtype
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def make_leaf(path: str, array: Any, over: tuple[int, ...], **more: Any) -> Leaf:
    """Describe an array, or its shape and dtype, that travels unchanged."""
    dtype = np.dtype(array.dtype)
    return Leaf(path, tuple(array.shape), dtype, dtype, over, **more)


def choose_wire(
    leaf: Leaf, reduce_op: ReduceOp, world: World, options: CommunicationOptions
) -> Leaf:
    """Choose how a leaf travels that an all-reduce sums over all replicas.

    `jc.plan` and a trace call this. A trace then leaves out the axes along which copies are equal,
    and adds the arithmetic.
    """
    dtype, shape = leaf.dtype, leaf.shape
    # Leaves with another result dtype are of another kind, which has separate packs.
    leaf = dataclasses.replace(leaf, kind=dtype.name)
    if leaf.indices is not None:
        return leaf
    exactly = dataclasses.replace(leaf, wire=wire_dtype(dtype, reduce_op, world))
    if leaf.solid or (options.compression is None and dtype.name != "bfloat16"):
        return exactly
    format = find_format(options.compression)
    auto = options.compression == "auto" and dtype.name == "float32"
    # Several devices of a process would all code, and small leaves would travel as extra arrays.
    auto = auto and (world.processes == world.replicas or world.inner > 0)
    auto = auto and math.prod(shape) * dtype.itemsize >= LEAST_CODED
    if format is None and (auto or dtype.name == "bfloat16") and _may_use_bf16(world, options):
        format = FORMATS[AUTOMATIC]()
    if format is None or not format.codes(shape, dtype):
        return exactly
    return dataclasses.replace(leaf, wire=np.dtype(np.float32), format=format)


def _may_use_bf16(world: World, options: CommunicationOptions) -> bool:
    """Return whether Gloo carries the sum, and no option rules out 16 bits."""
    fixed = options.algorithm or options.shards or options.reproducible
    automatic = options.implementation is CommunicationImplementation.AUTO
    return world.over_gloo and not world.partly_mapped and automatic and not fixed


def exact_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type in which numbers of `dtype` travel unchanged: `dtype`, or a byte for each.

    No backend sums integers of 2 bits, and XLA's CPU compiler gathers them wrongly.
    """
    return np.dtype(_WHOLE_BYTES.get(dtype.name, dtype))


_WHOLE_BYTES = {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8}


_OVERWRITES = """\
it is flax's fp8 state, and its gradient is its next value, of which one device takes the maximum \
over the batch. Take each replica's own gradient, by `jax.value_and_grad`; then reduce this part \
with `lax.pmax`, and the others with `jc.pmean`"""


def check_reducible(path: str, dtype: np.dtype, caller: str = "all_reduce") -> None:
    """Refuse a leaf that has no sum; the message gives the reason and a remedy."""
    reason = _OVERWRITES if "_overwrite_with_gradient" in path else _why_not_reducible(dtype)
    if reason:
        raise ValueError(f"`{caller}` cannot reduce {where(path)}: {reason}.")


def is_reducible(dtype: np.dtype) -> bool:
    return not _why_not_reducible(dtype)


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key)


def reveal_key(value: Any) -> Any:
    """Return the numbers of typed PRNG keys, which no copy or digest reads otherwise."""
    return jax.random.key_data(value) if is_key(value) else value


def abstract_shape(x: Any) -> Any:
    """Return the `ShapeDtypeStruct` of an array, deleted or not, or number; or `x` unchanged."""
    if not is_array(x) and not isinstance(x, jax.ShapeDtypeStruct):
        return x
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def no_array(value: Any) -> str | None:
    """Describe a value that is neither an array nor a number, for a message; None if it is."""
    if isinstance(value, bool | int | float | complex):
        return None
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(value, jax.ShapeDtypeStruct):
        return type(value).__name__
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    is_jax_type = any(jax.dtypes.issubdtype(dtype, kind) for kind in kinds)
    return None if is_jax_type or dtype == jax.dtypes.float0 else f"an array of {dtype}"


def dtype_or_none(value: Any) -> Any:
    """Return the dtype of an array, or of a number as an array; None for anything else."""
    if isinstance(value, bool | int | float | complex):
        return np.result_type(value)
    return getattr(value, "dtype", None)


def where(path: str) -> str:
    """Return how a message names the leaf at `path`."""
    return f"leaf {path}" if path else "the value"


@functools.cache
def _why_not_reducible(dtype: np.dtype) -> str | None:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            "a typed PRNG key has no sum; leave keys out of the tree (None in their place), or "
            "send them with `jc.broadcast`; their numbers are `jax.random.key_data(key)`"
        )
    if dtype == jax.dtypes.float0:
        return "float0 is the gradient of an integer input; leave that input out of `argnums`"
    if dtype == np.dtype(bool):
        return "booleans have no sum of their own type; say which you mean with `.astype(...)`"
    if dtype.name in ("int2", "uint2"):
        return f"{dtype.name} cannot hold the sum of two; send a wider type with `.astype(...)`"
    if not jax.dtypes.issubdtype(dtype, np.number):
        return f"an array of {dtype} holds no numbers"
    return None
