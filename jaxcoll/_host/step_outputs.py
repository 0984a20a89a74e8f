"""How what a step returns lies on the devices, which its type says."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from jaxcoll import _compat
from jaxcoll._host.shards import specs_of
from jaxcoll._spmd.shards import is_shards

VaryingOutputs = Literal["error", "concatenate"]


def output_specs(results: Any, order: tuple[str, ...], varying_outputs: VaryingOutputs) -> Any:
    """The specs of results that are being traced inside a checked `shard_map`.

    Args:
      results: a pytree of arrays and `Shards`.
      order: all axes of the mesh; of those that an array varies over, rows count in this order.
      varying_outputs: whether such arrays are refused, or their rows put together.

    Returns:
      The tree with a spec in place of each array.

    Raises:
      ValueError: an array varies and is refused, or is a scalar that varies.
    """
    spec = functools.partial(_spec, order, varying_outputs)
    return jax.tree_util.tree_map_with_path(spec, results, is_leaf=is_shards)


def _spec(
    order: tuple[str, ...], varying_outputs: VaryingOutputs, path: Any, output: Any
) -> PartitionSpec:
    if is_shards(output):
        return specs_of(output)
    varying = [a for a in order if a in _compat.varying_axes(output)]
    if not varying:
        return PartitionSpec()
    name = f"output {jax.tree_util.keystr(path)}" if path else "the output"
    if varying_outputs == "error":
        raise ValueError(
            f"`data_parallel`: {name} of the step differs between replicas (it varies over "
            f"{', '.join(map(repr, varying))}), so there is no one value to return. Reduce "
            'it with `jc.all_reduce("mean", ...)`, or pass varying_outputs="concatenate" to '
            "get every replica's rows."
        )
    if not output.ndim:
        raise ValueError(
            f"`data_parallel`: {name} of the step differs between replicas and is a scalar, "
            'which cannot be concatenated. Reduce it with `jc.all_reduce("mean", ...)`, or '
            "return it with a leading dimension, as in `x[None]`."
        )
    return PartitionSpec(tuple(varying))
