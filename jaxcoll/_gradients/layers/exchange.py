"""Communication of a scan over layers: gathers of a layer's rows, and reductions of gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.algorithms import table as algorithms
from jaxcoll._collectives.all_gather import rows_of_all
from jaxcoll._collectives.all_reduce import AllReduce
from jaxcoll._collectives.parts import describe_part
from jaxcoll._collectives.pipeline import carry_out, make_summand, pack, scale_sum, unpack
from jaxcoll._collectives.reduce_scatter import make_recipe, set_wire_types
from jaxcoll._collectives.scope import Scope, count
from jaxcoll._compat import marks
from jaxcoll._gradients.layers.stack import Stack
from jaxcoll._plan.choose import packing_for
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import Leaf, exact_dtype
from jaxcoll._plan.packs.packing import Pack, plan_packs
from jaxcoll._plan.packs.shard_layout import Half, plan_rows
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._show.units import pluralize

Arrays = list[jax.Array]

Exchange = Callable[[Sequence[jax.Array]], Arrays]
"""A collective on the arrays of one layer; takes and returns a list of leaves."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of a stack's parameters and gradients."""

    stack: Stack  # the parameters
    axes: Mapping[str, int]  # outer first
    # The reduction of gradients; SUM, the derivative of a gather, inside of a `jc.value_and_grad`
    reduce_op: ReduceOp
    gather_dtype: Any  # the type that real floating rows are cast to for gathers; None: no cast
    # True if a `jc.value_and_grad` around this reduces gradients of whole leaves and divides sums
    inside: bool
    scope: Scope  # options and world

    def gathers(self, ahead: int) -> dict[tuple[int, ...], Exchange]:
        """Make the gather of each group of leaves that share packs; its result is *varying*."""
        layers = self.stack.layers
        ahead = min(ahead, layers)
        of_use = f"gathered {pluralize(ahead, 'layer')} ahead of its use"
        # The backward pass begins with the last layers, which are still gathered then.
        when = f"{of_use if ahead else 'where it is used'} in the forward pass ({layers}), "
        when += "and again in the backward pass"

        def make_gather(members: tuple[int, ...], axes: dict[str, int]) -> Exchange:
            leaves = self._leaves(members, axes)
            packs, plan = self._plan("all_gather", leaves, axes, 2 * layers - ahead, when)

            def gather(rows: Sequence[jax.Array]) -> Arrays:
                sent = [x.astype(y.dtype).astype(y.wire) for x, y in zip(rows, leaves, strict=True)]
                wholes = rows_of_all(sent, packs, plan, tuple(axes))
                return [
                    lax.collapse(whole, 0, 2).astype(leaf.dtype)
                    for whole, leaf in zip(cast(Arrays, wholes), leaves, strict=True)
                ]

            return gather

        groups = self._groups(range(len(self.stack.arrays)))
        return {members: make_gather(members, axes) for members, axes in groups.items()}

    def scatters(self, wanted: Sequence[int]) -> dict[tuple[int, ...], Exchange]:
        """Make the gradient reduction of each group of leaves that share packs.

        Gradients have the type of the gathered leaves on the wire, and then the leaves' own.
        """
        groups = self._groups(wanted)
        return {members: self._make_scatter(members, axes) for members, axes in groups.items()}

    def _make_scatter(self, members: tuple[int, ...], axes: dict[str, int]) -> Exchange:
        world, over = self.scope.world(axes), tuple(axes)
        leaves = self._leaves(members, axes)
        recipes = [make_recipe(leaf, self.reduce_op, axes, world) for leaf in leaves]
        leaves = set_wire_types(leaves, recipes)
        recipes = [
            dataclasses.replace(recipe, dtype=np.dtype(self.stack.arrays[i].dtype))
            for i, recipe in zip(members, recipes, strict=True)
        ]
        when = "its gradients reduced while those of the layer before it are computed"
        packs, plan = self._plan("reduce_scatter", leaves, axes, self.stack.layers, when)
        others = self._axes_to_reduce(over)

        def carry(pack: Pack, blocks: jax.Array) -> jax.Array:
            return algorithms.reduce_scatter(blocks, plan.stages(pack), over)

        def scatter(gradients: Sequence[jax.Array]) -> Arrays:
            blocks = [
                make_summand(x, recipe).reshape(world.replicas, *leaf.shape)
                for x, leaf, recipe in zip(gradients, leaves, recipes, strict=True)
            ]
            packed = jax.vmap(lambda arrays: pack(arrays, packs, leaves))(blocks)
            totals = carry_out(plan, packed, carry)
            # Divide in the leaf's own type, which may be wider than the wire type.
            summed = cast(Arrays, unpack(totals, packs, leaves))  # every leaf is in a pack
            rows = [
                scale_sum(total.astype(recipe.dtype), recipe)
                for total, recipe in zip(summed, recipes, strict=True)
            ]
            rows = [_compat.store(x) for x in rows] if plan.reproducible else rows
            # Replicas along the other axes, such as other hosts, hold the same rows: 1/n of a leaf.
            if not others:
                return rows
            axes = {a: self.axes[a] for a in others}
            return AllReduce(self.reduce_op, axes, self.scope).reduce(rows)

        return scatter

    def _plan(
        self, half: Half, leaves: Sequence[Leaf], axes: dict[str, int], turns: int, when: str
    ) -> tuple[tuple[Pack, ...], CollectivePlan]:
        """Pack this replica's rows; record and return the collective's plan."""
        world, options, n = self.scope.world(axes), self.scope.options, count(axes)
        packs = plan_packs(leaves, packing_for(options, world))
        whole = [dataclasses.replace(x, shape=(n * x.shape[0], *x.shape[1:])) for x in leaves]
        op = ReduceOp.SUM if half == "all_gather" else self.reduce_op
        plan = plan_rows(half, op, whole, packs, options, world, turns, when)
        self.scope.record(plan)
        return packs, plan

    def _groups(self, leaves: Sequence[int]) -> dict[tuple[int, ...], dict[str, int]]:
        """Group sharded leaves by the axes that they are cut over; return these for each group."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for i in leaves:
            if self.stack.over[i]:
                groups.setdefault(self.stack.over[i], []).append(i)
        return {tuple(members): {a: self.axes[a] for a in over} for over, members in groups.items()}

    def _leaves(self, members: Sequence[int], axes: Mapping[str, int]) -> list[Leaf]:
        """Describe one layer's rows of these leaves, in the type for gathers."""
        leaves = []
        for name, x in ((self.stack.names[i], self.stack.arrays[i]) for i in members):
            dtype = np.dtype(x.dtype)
            if self.gather_dtype is not None and jax.dtypes.issubdtype(dtype, np.floating):
                dtype = np.dtype(self.gather_dtype)
            shape = jax.ShapeDtypeStruct(x.shape[1:], dtype)
            leaf = describe_part(name, shape, x, axes)
            leaves.append(dataclasses.replace(leaf, wire=exact_dtype(dtype)))
        return leaves

    def _axes_to_reduce(self, over: Sequence[str]) -> tuple[str, ...]:
        """The axes over which this all-reduces the gradient of a leaf that is cut `over`."""
        return () if self.inside else tuple(a for a in self.axes if a not in over)

    def retype(self, varying: Sequence[str]) -> Arrays:
        """Give the stack the types that its gradients will have."""
        return [
            _compat.cast_varying(x, [a for a in varying if a not in self._axes_to_reduce(over)])
            for x, over in zip(self.stack.arrays, self.stack.over, strict=True)
        ]

    def reduce_whole(self, gradients: dict[int, jax.Array]) -> list[jax.Array | None]:
        """Reduce the gradients of whole leaves, unless `inside`; return all in order."""
        names, over = self.stack.names, self.stack.over
        whole = {names[i]: x for i, x in gradients.items() if not over[i]}
        if whole and not self.inside:
            notes = ("when: after the backward pass of all layers, of leaves that are whole",)
            whole = AllReduce(self.reduce_op, self.axes, self.scope, notes=notes).reduce(whole)
        reduced: dict[int, jax.Array] = {
            i: marks.part_of_sum(_compat.cast_invariant(x, self._axes_to_reduce(over[i])), over[i])
            if over[i]
            else whole[names[i]]
            for i, x in gradients.items()
        }
        return [reduced.get(i) for i in range(len(names))]
