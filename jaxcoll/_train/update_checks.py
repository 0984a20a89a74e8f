"""Refusals of what an update of a sharded optimizer cannot be right with."""

from __future__ import annotations

from typing import Any

import jax

from jaxcoll import _compat
from jaxcoll._plan.packs.leaves import where
from jaxcoll._plan.packs.shard_layout import ShardLayout
from jaxcoll._spmd.shards import Shards, check_fits, is_shards, shards_in

_CALLER = "sharded_optimizer"


def check_like(grads: Shards, layout: ShardLayout | None, replicas: int) -> None:
    """Refuse shards that are laid out otherwise than the state's."""
    if layout is None or grads.layout == layout:
        return
    check_fits(layout, grads.layout.treedef, grads.layout.leaves, replicas, f"{_CALLER}.update")
    raise ValueError(
        f"`{_CALLER}.update`: the gradients' shards are packed otherwise than the state's "
        f"({grads.layout} and {layout}). Give `bytes_per_pack` to both, in the options of "
        "`sharded_optimizer` and of `data_parallel` or `value_and_grad`, or to none."
    )


def check_all_in_shards(params: Any) -> None:
    """Refuse a tree with arrays beside `Shards`, of which it would not be known who holds what."""
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_shards):
        if not is_shards(x):
            raise ValueError(
                f"`{_CALLER}`: {where(jax.tree_util.keystr(path))} of the parameters is an array "
                "beside `Shards`. Make Shards of it as well, by `jc.shard`, which takes any "
                "shapes; or use another optimizer for what every replica holds whole."
            )


def check_gradients_in_shards(grads: Any, params: Any) -> None:
    """Refuse gradients that are not in the shards of the parameters."""
    check_all_in_shards(params)
    if jax.tree.structure(grads) == jax.tree.structure(params):
        return
    if not shards_in(grads):
        raise ValueError(
            f"`{_CALLER}.update` got parameters in `Shards` and whole gradients, which belong to "
            "the tree that was gathered. Differentiate the Shards: `jc.value_and_grad(loss, axis)"
            "(shards, ...)`, whose loss calls `jc.all_gather` or `jc.scan_layers` itself."
        )
    raise ValueError(
        f"`{_CALLER}.update`: the gradients are not in the shards of the parameters: "
        f"{jax.tree.structure(grads)} and {jax.tree.structure(params)}."
    )


def check_same(extra: dict[str, Any], axes: tuple[str, ...]) -> None:
    """Refuse arguments that differ between replicas, whose parts would be updated differently."""
    for path, x in jax.tree_util.tree_leaves_with_path(extra, is_leaf=is_shards):
        if isinstance(x, jax.Array) and _compat.varying_axes(x) & set(axes):
            raise ValueError(
                f"`{_CALLER}.update`: {jax.tree_util.keystr(path)} differs between replicas, and "
                "each would update its part of the parameters by its own. Reduce it first, as "
                "with `jc.all_reduce`; the loss that `jc.value_and_grad` returns is reduced."
            )
