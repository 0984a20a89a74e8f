"""How what a step returns lies on the devices: copies of one value, or every replica's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
from jax.sharding import PartitionSpec

from jaxcoll._mesh.shard_arrays import specs_of
from jaxcoll._spmd.axes import listed
from jaxcoll._spmd.shards import is_shards, said_of_each

VaryingOutputs = Literal["error", "concatenate"]


def checked_rule(rule: Any) -> Any:
    """`varying_outputs` as it was given."""
    words = get_args(VaryingOutputs)
    odd = [leaf for leaf in jax.tree.leaves(rule) if leaf not in words]
    if odd or not jax.tree.leaves(rule):
        raise ValueError(
            "`data_parallel` expects `varying_outputs` to be 'error' or 'concatenate', or a tree "
            f"of these, one for each output; got {rule!r}."
        )
    return rule


def output_specs(
    results: Any,  # shapes and `Shards`
    varying: Sequence[frozenset[str]],  # of each leaf the mesh axes along which it may differ
    axes: tuple[str, ...],  # those that the batch is split over: rows count in this order
    rule: Any,  # "error" or "concatenate", or a tree of them, of which `results` is an extension
    shown: str,  # what else there is to say of an output that differs
) -> Any:
    """The specs of the results of a step that is being traced.

    Law: whether an output's rows are put together depends on the rule alone, never on whether the
    output happens to be the same everywhere: of one that is, each replica still has its rows.
    """
    each = iter(varying)

    def spec(word: VaryingOutputs, path: Any, output: Any) -> PartitionSpec:
        if is_shards(output):
            return _of_shards(output, path, [next(each) for _ in jax.tree.leaves(output)])
        along = next(each)
        name = output_name(path)
        if word == "concatenate" and (output.ndim or along):
            return _joined(name, output, along, axes)
        if along:
            raise ValueError(_DIFFERS.format(name=name, axes=listed(sorted(along)), shown=shown))
        return PartitionSpec()

    flat, treedef = jax.tree_util.tree_flatten_with_path(results, is_leaf=is_shards)
    unfit = "`data_parallel`: `varying_outputs` is a tree that does not fit what the step returns"
    words: list[VaryingOutputs] = said_of_each(rule, results, unfit)
    return jax.tree.unflatten(
        treedef, [spec(word, *leaf) for word, leaf in zip(words, flat, strict=True)]
    )


def output_name(path: Any) -> str:
    """How a message speaks of a step's output."""
    return f"output {jax.tree_util.keystr(path)}" if path else "the output"


_DIFFERS = """\
`data_parallel`: {name} of the step differs between replicas (it varies over {axes}), so there is \
no one value to return. {shown}Reduce it with `jc.all_reduce("mean", ...)`; or, if it was put \
together by `lax.all_gather`, whose result JAX types as different everywhere, gather it with \
`jc.all_gather`; or pass varying_outputs="concatenate" to get every replica's rows."""


def _joined(name: str, output: Any, along: frozenset[str], axes: tuple[str, ...]) -> PartitionSpec:
    if others := along.difference(axes):
        raise ValueError(
            f"`data_parallel`: {name} of the step varies over {listed(sorted(others))}, "
            f"and rows are put together along {listed(axes)} alone. Reduce it over "
            "the others, or name them in `axis_name`."
        )
    if not output.ndim:
        raise ValueError(
            f"`data_parallel`: {name} of the step differs between replicas and is a scalar, "
            'which cannot be concatenated. Reduce it with `jc.all_reduce("mean", ...)`, or '
            "return it with a leading dimension, as in `x[None]`."
        )
    return PartitionSpec(axes)


def _of_shards(output: Any, path: Any, along: Sequence[frozenset[str]]) -> PartitionSpec:
    others = frozenset().union(*along).difference(output.axes)
    if others:
        raise ValueError(
            f"`data_parallel`: output {jax.tree_util.keystr(path)} of the step holds Shards along "
            f"{listed(output.axes)} that differ along {listed(sorted(others))}, too. Reduce "
            "over all of these axes before you shard."
        )
    return specs_of(output)
