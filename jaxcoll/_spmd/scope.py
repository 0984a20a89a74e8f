"""What whoever stands above a traced program hands down to the reductions in it.

The scope is part of JAX's trace-cache key: a function that was traced under one scope is
traced anew under one that differs, so an inner `jax.jit` cannot carry options from one program to
the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll import _compat
from jaxcoll._compat import marks
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Terms
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.plan import Plan
from jaxcoll._plan.world import World
from jaxcoll._spmd.axes import listed
from jaxcoll._spmd.checks.checksum import Heard
from jaxcoll._spmd.sparse import is_sparse, unchecked


@dataclasses.dataclass(frozen=True)
class Scope:
    """A frozen value; its functions are values, too, so that equal programs share their traces."""

    # From the axes of a reduction and their sizes to where it runs
    world: Callable[[dict[str, int]], World]
    # What a world costs, for the plans' choices and predictions
    terms: Callable[[World], Terms] = preset
    # Defaults under the options of each call
    options: CommunicationOptions = CommunicationOptions()
    record: Callable[[Plan], None] = lambda plan: None  # called with each plan that is carried out
    # Called for each device, when a program runs, with the packs found corrupted (`checksum.py`)
    heard: Heard = lambda found, group, member: None
    # Called with each deadline that a call inside is given; None: the program is called by others,
    # so that nobody could keep one
    deadline: Callable[[float], None] | None = None
    # Axes along which no type, but a mark, says that results are equal (see `replication.py`)
    marked: frozenset[str] = frozenset()
    # Whether a reduction along them of what is the same everywhere is refused, as types refuse it
    once: bool = False
    # Axes along which results are marked whatever the types say, for `summed_again.py`
    watched: frozenset[str] = frozenset()

    def merged(self, options: CommunicationOptions | None) -> Scope:
        """This scope with a call's own options over its defaults."""
        seconds = options.timeout_seconds if options else None
        if seconds and self.deadline is None:
            raise ValueError(
                f"`timeout_seconds` {seconds:g} was given inside a program that jaxcoll does not "
                "call, where nobody waits with a deadline. It is kept inside `jc.data_parallel` "
                "and `strategy.run`, and by calls between programs. Use one of these, or leave it "
                "out here: `options.replace(timeout_seconds=jc.UNSET)`."
            )
        if seconds and self.deadline is not None:
            self.deadline(seconds)
        return dataclasses.replace(self, options=self.options.merge(options))

    @property
    def exactly(self) -> Scope:
        """This scope for what is not a gradient, and is not rounded on the wire."""
        return dataclasses.replace(self, options=self.options.replace(compression=UNSET))

    def vouched(self, result: Any, axes: Iterable[str]) -> Any:
        """The result of a reduction over `axes`, marked where somebody will look for it.

        That is along these axes, and along those over which autodiff has summed it before, which
        its type shows.
        """
        axes = (self.marked | self.watched).intersection(axes)

        def marked(leaf: Any) -> Any:
            by_type = self.watched - self.marked - _compat.varying_axes(leaf)
            along = tuple(sorted(axes | by_type))
            return marks.marked(leaf, marks.SAME, axes=along) if along else leaf

        return jax.tree.map(marked, result) if axes or self.watched else result

    def reduced_once(self, value: Any, axes: Any, name: str = "", *, mean: bool = False) -> Any:
        """What is going to be reduced over `axes`, marked where somebody will look for it."""
        if not self.once:
            return value
        along = self.marked.intersection(axes if isinstance(axes, tuple | list) else (axes,))

        def marked(path: Any, leaf: Any) -> Any:
            if is_sparse(leaf):
                return unchecked(marked(path, leaf.values), leaf.indices, leaf.dense_shape)
            if isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic):
                leaf = jnp.asarray(leaf)
            if not isinstance(leaf, jax.Array):
                return leaf
            place = name + jax.tree_util.keystr(path)
            for axis in along:
                leaf = marks.marked(leaf, marks.ONCE, axis=axis, path=place, mean=mean)
            return leaf

        return jax.tree_util.tree_map_with_path(marked, value, is_leaf=is_sparse)


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """That what is traced is a loss whose gradient is going to be reduced; equal by value."""

    axes: tuple[str, ...]  # what the gradient is reduced over
    options: CommunicationOptions = CommunicationOptions()  # of that reduction
    # Whether types have been taken away that tell replicas apart along `axes`
    untyped: bool = False
    enclosing: frozenset[str] = frozenset()  # axes of all losses around this one

    def check_mean(self, reduce_op: ReduceOp, axes: Iterable[str], caller: str) -> None:
        """Refuse a SUM, inside of the loss, of gradients that are made a sum around it."""
        if reduce_op is not ReduceOp.MEAN:
            raise ValueError(
                f"`{caller}` over {listed(axes)} with reduce_op SUM, inside the loss of "
                "`jc.value_and_grad`, `jc.grad` or `jc.accumulate`: what they differentiate is "
                "this replica's own loss, and they make a sum or a weighted mean of its gradients "
                'themselves. Leave reduce_op at "mean" here, whatever theirs is.'
            )


entered = jax.make_user_context(default_value=None)
"""`with entered(scope):` traces what follows under a `Scope`; `entered.value` is the one that holds
here, None outside every jaxcoll program."""

differentiated = jax.make_user_context(default_value=None)
"""`with differentiated(differentiation):` traces what follows as part of a loss."""


def differentiation() -> Differentiation | None:
    """Whose loss this point of the trace belongs to; None outside every such loss."""
    return differentiated.value


def retyped() -> frozenset[str]:
    """Axes along which a value is typed as varying here, whether it differs or not."""
    inside = differentiation()
    return frozenset() if inside is None else inside.enclosing.union(inside.axes)
