"""A traced program as a value: it can be read before its equations become part of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a function did when it was traced, with its arguments and whatever it captured.

    Attributes:
      program: its equations. Arguments, but for `inputs`, and captured values are constants of it;
        its outputs are the arrays among the leaves of the result, in the order of the tree.
      treedef: of the result.
      others: for each leaf of the result None if it is an array, else the leaf in a tuple.
    """

    program: ClosedJaxpr
    treedef: jax.tree_util.PyTreeDef
    others: tuple[tuple[Any] | None, ...]

    def evaluate(self) -> Any:
        """The result, of equations that are now part of the program at hand."""
        return self.result(self.outputs())

    def outputs(self, *inputs: Any) -> list[jax.Array]:
        """The arrays of the result, likewise; for inputs like those that it was traced with."""
        return jaxpr_as_fun(self.program)(*jax.tree.leaves(inputs))

    def result(self, outputs: Sequence[Any]) -> Any:
        """A tree like the result, with `outputs` where the arrays are."""
        arrays = iter(outputs)
        leaves = [next(arrays) if other is None else other[0] for other in self.others]
        return jax.tree.unflatten(self.treedef, leaves)


def traced(
    fun: Callable[..., Any], *args: Any, inputs: tuple[Any, ...] = (), **kwargs: Any
) -> Traced:
    """Trace `fun(*inputs, *args, **kwargs)` without putting its equations into the program at hand.

    Law: `traced(fun, ...).evaluate()` is `fun(...)`, in value, types and source lines; `fun` is
    called once. Leaves of the result that are not a `jax.Array` are those of that call. `inputs`
    are variables of the program; all else, and what `fun` captures, may belong to that at hand.
    """
    found: list[tuple[Any, tuple[tuple[Any] | None, ...]]] = []

    def program(*inputs: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(fun(*inputs, *args, **kwargs))
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        others = tuple(None if a else (x,) for a, x in zip(is_array, leaves, strict=True))
        found.append((treedef, others))
        return [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]

    closed = jax.make_jaxpr(program)(*inputs)
    ((treedef, others),) = found
    return Traced(closed, treedef, others)
