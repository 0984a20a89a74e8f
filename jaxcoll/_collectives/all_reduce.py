"""`all_reduce`: plan, pack, sum, unpack, and divide for a mean, inside a mapped program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import table as algorithms
from jaxcoll._collectives.algorithms.coded import Coded, Coding
from jaxcoll._collectives.pipeline import Recipe, carry_out, finish_sum, make_summand, pack, unpack
from jaxcoll._collectives.scope import (
    Scope,
    already_reduced,
    count,
    resolve_axes,
    scope_here,
    show_axes,
)
from jaxcoll._compat import marks
from jaxcoll._compression.format import check_any_coded
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.choose import make_plan
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import (
    Leaf,
    Whole,
    check_reducible,
    choose_wire,
    dtype_or_none,
    flatten_with_paths,
    is_whole,
    make_leaf,
    where,
    wire_dtype,
)
from jaxcoll._plan.packs.packing import Pack, PackingRule
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._plan.world import World

if TYPE_CHECKING:
    from jaxcoll._collectives.residual import Feedback

Invariant = Literal["error", "summed", "replicated"]

_REPLICATED = """\
If every replica holds this value, like a learning rate, pass `invariant="replicated"`: then MEAN \
returns it unchanged, and SUM multiplies it by {n}."""

_SUMMED = """\
take it with `jc.value_and_grad` or `jc.grad`, which keep it per replica, or pass \
`invariant="summed"`: then SUM returns it unchanged, and MEAN divides it by {n}."""

_LEAF_BY_LEAF = """\
leaf by leaf, by the compiler's own all-reduce: the compiler splits leaves over {axes}, and would \
have to gather them into a pack"""


def all_reduce(
    reduce_op: ReduceOp | str,
    value: Any,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    options: CommunicationOptions | None = None,
    invariant: Invariant = "error",
    residual: Any = None,
) -> Any:
    """Reduce every leaf of a pytree over the replicas along one or more mapped axes.

    Guarantee: the result is within n·eps of the float64 reference, relative to the sum of
    magnitudes. It keeps the structure and order of the tree. On an axis of size 1 it is `value`
    itself, without a collective. The cotangent of an `all_reduce` is the `all_reduce` of the
    cotangents with the same op.

    Args:
      reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or their names in any case. A MEAN is one sum and
        one division. A mean of integers has JAX's default float type; it wraps around where the
        sum of 32- or 64-bit integers does. A mean of float16 overflows only if it does not fit.
      value: any pytree of numeric arrays of any shapes and dtypes, with the same structure and
        shapes on all replicas. Empty arrays and None pass through. `IndexedSlices` are gathered:
        the result has the rows and indices of all replicas in replica order, with duplicates. A
        MEAN divides the rows.
      axis_name: an axis that `jax.shard_map`, `jax.pmap` or `jax.vmap` maps, or a tuple of mesh
        axes from outer (between hosts) to inner (within a host). None: the axes of the replicas,
        inside `jc.data_parallel` and `strategy.run`.
      options: how to pack and which collectives to use. Unset options come from the enclosing
        `data_parallel` or strategy, then from the automatic choice. `timeout_seconds` bounds a call
        of the enclosing step; without such a step it is refused.
      invariant: how to treat a leaf that a checked `shard_map` knows to be the same on every
        replica. "error": refuse it. "summed": it already is the sum over replicas, like autodiff's
        gradient of a replicated parameter; SUM returns it as it is, MEAN divides it. "replicated":
        every replica holds this value; SUM multiplies it, MEAN returns it as it is.
      residual: what a wire format rounded away before, from `jc.compression.residual(value)` or
        from the last call. It is added to this replica's values before they are sent.

    Returns:
      A pytree like `value`, *invariant* over the axes, so that `out_specs=P()` type-checks. With
      `residual`, a pair of it and the next residual, which is *varying*.
      Cost: 2(n-1)/n of the bytes leave each device, in one collective per pack before the
      compiler combines them. `jc.plan` shows steps and bytes.

    Raises:
      NameError: an axis is not mapped here; the message lists the mapped ones.
      ValueError: a leaf cannot be reduced (its path is named), an argument is invalid, or the
        residual belongs to another tree or number of replicas.
      AlreadyReducedError: a leaf is invariant and `invariant` is "error".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
      >>> jax.vmap(lambda v: all_reduce("sum", v, "data"), axis_name="data")(x)[0].tolist()
      [16.0, 20.0]
      >>> jax.vmap(lambda v: all_reduce("mean", v, "data"), axis_name="data")(x)[3].tolist()
      [4.0, 5.0]
    """
    if invariant not in get_args(Invariant):
        kinds = ", ".join(map(repr, get_args(Invariant)))
        raise ValueError(f"`invariant` must be one of {kinds}; got {invariant!r}.")
    check_order(reduce_op, value)
    checked_options, op = check_options(options), ReduceOp.of(reduce_op)
    if checked_options.compression is not None:
        check_any_coded(checked_options.compression, value)
    scope = scope_here().merge(checked_options)
    axes = resolve_axes(scope.choose_axes(axis_name, "jc.all_reduce"), "all_reduce")
    given = residual is not None
    feedback = make_feedback(residual, value, axes, "all_reduce") if given else None
    return AllReduce(op, axes, scope, invariant).reduce(value, feedback)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """A sum or a mean over replicas: what is asked for, and what its caller knows of the leaves."""

    op: ReduceOp
    axes: Mapping[str, int]  # the axes with their sizes, outer first
    scope: Scope
    invariant: Invariant = "error"
    packing: PackingRule | None = None  # overrides the options
    # For each leaf, in the tree's order, its rank in the order in which leaves become ready
    ready: Sequence[int] | None = None
    # Paths of leaves that are proven equal on every replica along some axes, and these axes: leaves
    # count as "replicated" there, despite their types
    same: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()  # further reasons for the plan
    in_backward: bool = False  # it is part of a backward pass
    exact: frozenset[str] = frozenset()  # paths of leaves that travel exactly despite the options
    repeats: bool = False  # counting equal values once per replica is intended, so do not warn

    def reduce(self, value: Any, feedback: Feedback | None = None) -> Any:
        """Check and describe the leaves, plan from the descriptions, and carry out the plan.

        The program communicates what the plan shows, and nothing else.

        Args:
          value: the tree.
          feedback: this replica's residuals of the leaves.

        Returns:
          The reduced tree, *invariant* over the axes. With `feedback`, a pair of that tree and the
          next residual, *varying*.
        """
        names, world = tuple(self.axes), self.scope.world(dict(self.axes))
        flat, treedef = flatten_with_paths(value, functools.partial(is_whole, axes=self.axes))
        typed, automatic = _compat.types_tracked(), _compat.automatic_axes()
        checked = [self._check(path, leaf, typed) for path, leaf in flat]
        exactly = self.scope.exactly.options if self.exact else self.scope.options
        leaves = []
        for k, ((path, _), x) in enumerate(zip(flat, checked, strict=True)):
            options = exactly if path in self.exact else self.scope.options
            ready = None if self.ready is None else self.ready[k]
            leaves.append(self._describe(path, x, world, options, ready, typed, automatic))
        why = (_LEAF_BY_LEAF.format(axes=show_axes(automatic)),) if automatic else ()
        notes = (*self.notes, *why)
        plan = make_plan(
            self.op, leaves, self.scope.options, world, self.packing,
            in_backward=self.in_backward, notes=notes,
        )  # fmt: skip
        self.scope.record(plan)
        summands = [x.values if isinstance(x, Whole) else x for x in checked]
        if feedback is not None:
            summands = feedback.add_to(summands, leaves, count(self.axes))
        carried = _carry_packs(plan, summands, feedback)
        results = [result for result, _ in carried]
        reduced: list[Any] = unpack(results, plan.packs, leaves, world.platform == "cpu")
        for k, (x, array, leaf) in enumerate(zip(checked, summands, leaves, strict=True)):
            recipe = cast(Recipe, leaf.kind)
            if isinstance(x, Whole):
                with jax.named_scope(f"{plan.name}/rows{k}"):
                    reduced[k] = x._reduce(recipe)
            elif reduced[k] is None:  # no pack carries it
                reduced[k] = finish_sum(make_summand(array, recipe), recipe)
        # Mark the results as equal for the proof, which reads the program where types do not say so
        arrays, structure = jax.tree.flatten(reduced)
        sums_up = self.op is ReduceOp.SUM and not (self.in_backward or self.repeats)
        arrays = marks.same(arrays, names, jax.tree.leaves(checked), sums=sums_up)
        result = jax.tree_util.tree_unflatten(treedef, jax.tree.unflatten(structure, arrays))
        if feedback is None:
            return result
        return result, feedback.next(plan, carried, reduced)

    def _check(self, path: str, leaf: Any, typed: bool) -> jax.Array | Whole:
        """Return the array to sum, or raise an error that names its path."""
        if isinstance(leaf, Whole):
            return leaf._prepare(path, "all_reduce")
        dtype = dtype_or_none(leaf)
        if dtype is None or isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"`all_reduce` cannot reduce {where(path)}: expected an array or a number, got "
                f"{type(leaf).__name__}."
            )
        check_reducible(path, dtype)
        array = jnp.asarray(leaf)
        if not typed:
            return array
        array = _compat.terms_of_sum(array, self.axes)
        # Equal values count as the first replica's, which alone gets their cotangent.
        return _compat.cast_invariant(array, tuple(self.same.get(path, ())), summed=True)

    def _describe(
        self,
        path: str,
        x: jax.Array | Whole,
        world: World,
        options: CommunicationOptions,
        ready: int | None,
        typed: bool,  # types say over which axes values vary
        automatic: tuple[str, ...],  # axes that the compiler's partitioner manages
    ) -> Leaf:
        """Describe a leaf for the plan, with the axes along which its copies are equal left out."""
        array, indices = (x.values, x.indices.dtype) if isinstance(x, Whole) else (x, None)
        solid = bool(automatic) or _compat.is_partially_sharded(array)
        leaf = make_leaf(path, array, world.sizes, indices=indices, solid=solid)
        leaf = choose_wire(leaf, self.op, world, options)
        wire = leaf.wire if indices is None else wire_dtype(leaf.dtype, self.op, world)
        if wire.name == "bfloat16" and world.platform == "cpu" and automatic:
            wire = np.dtype(np.float32)  # XLA's CPU compiler aborts on a 16-bit sum here
        equal = self.same.get(path, frozenset())
        by_type = _compat.same_axes(array, self.axes) if typed else ()
        missing = {a: n for a, n in self.axes.items() if a in by_type or a in equal}
        if self.invariant == "error" and array.size and not equal.issuperset(by_type):
            advice = {"value": _REPLICATED, "gradient": _SUMMED}
            raise already_reduced("all_reduce", path, array, self.axes, missing, **advice)
        # Each of m copies counts, m times the value in all; a MEAN over n replicas then divides the
        # value by n/m. Copies of the replicas' sum count once, and a MEAN divides them by n.
        times = 1 if self.invariant == "summed" else math.prod(missing.values())
        divisor = math.prod(self.axes.values()) // times if self.op is ReduceOp.MEAN else None
        over = tuple(a for a, n in self.axes.items() if n > 1 and a not in missing)
        varying = _compat.varying_axes(array) if typed else frozenset()
        return dataclasses.replace(
            leaf,
            wire=wire if indices is None else leaf.wire,
            kind=Recipe(over, tuple(self.axes), varying, leaf.dtype, wire, times, divisor),
            over=tuple(1 if a in missing else n for a, n in self.axes.items()),
            ready=ready,
        )


def _carry_packs(
    plan: CollectivePlan, summands: Sequence[jax.Array], feedback: Feedback | None
) -> list[tuple[jax.Array, jax.Array | None]]:
    """Return for each pack its result, and with `feedback` what rounding has lost."""
    coding = Coding(feedback is not None, plan.world.platform)

    def enter(pack: Pack, array: jax.Array) -> jax.Array:
        return make_summand(array, cast(Recipe, pack.kind))

    def carry(pack: Pack, array: jax.Array) -> tuple[jax.Array, Coded | None]:
        return algorithms.all_reduce(array, plan.stages(pack), cast(Recipe, pack.kind).axes, coding)

    def leave(pack: Pack, carried: Any) -> tuple[jax.Array, jax.Array | None]:
        (total, coded), recipe = carried, cast(Recipe, pack.kind)
        result, error = finish_sum(total, recipe), None
        if feedback is not None:
            error = feedback.rounding_error(plan, pack, total, result, coded, coding)
        # Round a quotient by itself: fused with a sum that follows, both would be rounded at once.
        divided = plan.options.reproducible and (recipe.divisor or recipe.times > 1)
        return (_compat.store(result) if divided else result), error

    packed = pack(summands, plan.packs, plan.leaves, plan.elements)
    return carry_out(plan, packed, carry, enter=enter, leave=leave)


def check_order(reduce_op: Any, value: Any, caller: str = "jc.all_reduce") -> None:
    """Refuse swapped or missing arguments, and show the call that was probably meant."""
    if isinstance(reduce_op, ReduceOp | str) and not isinstance(value, ReduceOp | str):
        return
    op, got = (
        repr(x) if isinstance(x, ReduceOp | str) else describe_type(x) for x in (reduce_op, value)
    )
    lax_ = ' `jc.pmean(value, "data")` takes them in the order of `jax.lax`.' * ("all" in caller)
    raise ValueError(
        f'`{caller}` takes the operation first: `{caller}("mean", value, "data")`; got '
        f"{op} for it, and {got} for the value.{lax_}"
    )


_NO_RESIDUAL = """\
`{caller}` expects what `jc.compression.residual(params)` returns as its residual, or what this \
call returned the last time; got {got}."""


def make_feedback(
    residual: Any, tree: Any, axes: Mapping[str, int], caller: str, prefix: str = ""
) -> Any:
    """Return the `Feedback` for a sum of `tree`, where its leaves' paths begin with `prefix`."""
    if residual is None:
        return None
    if not hasattr(type(residual), "feedback"):
        raise ValueError(_NO_RESIDUAL.format(caller=caller, got=type(residual).__name__))
    return residual.feedback(tree, axes, caller, prefix)
