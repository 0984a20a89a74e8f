"""Whether an optimizer treats every element by itself, found out by trying."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._host.mesh import no_mesh
from jaxcoll._host.shards import cut, joined
from jaxcoll._plan.shard_layout import ShardLayout, layout_of
from jaxcoll._spmd.shards import Shards, is_shards, sharded_leaves

_REPLICAS = 2
_LEARNED = (
    "A sharded optimizer sees packs of elements, of each replica's part only, so it must treat "
    "every element by itself. In place of `optax.clip_by_global_norm` pass `max_norm` to "
    "`sharded_optimizer`. Masks and labels by leaf (`masked`, `multi_transform`, weight decay with "
    "`mask`), norms of leaves (lamb, lars), factored moments (adafactor, shampoo), noise and "
    "`apply_if_finite` are not elementwise: use that optimizer unsharded, with the gradients of "
    "`jc.value_and_grad`."
)


def check_elementwise(tx: Any) -> None:
    """Run `tx` on a small tree, whole and in two shards, and compare.

    It sees what depends on the shapes of leaves, on norms and means of them or of all (of
    magnitudes from 1e-2 to 1e15), on random numbers, and on a NaN elsewhere. It does not see what
    depends on other sizes or magnitudes, or on more than five steps.

    Raises:
      ValueError: the updates differ, or `tx` does not run on one of them; the message says where.
    """
    rng = np.random.default_rng(0)
    # Large enough for moments to be factored, were they to be.
    tree = {"matrix": _normal(rng, (128, 256)), "vector": _normal(rng, (130,))}
    steps = [jax.tree.map(lambda x, s=s: s * x, tree) for s in (1.0, 1e-2, 1e15)]
    broken = jax.tree.map(np.copy, tree)
    broken["matrix"][0, 0] = np.nan
    _compare(tx, jax.tree.map(lambda x: 30 * x[::-1].copy(), tree), [*steps, broken, tree], True)


def check_on_structure(tx: Any, params: Any) -> None:
    """The same on a tree with the names and ranks of `params`, for what goes by those.

    Raises:
      ValueError: as `check_elementwise`.
    """
    rng = np.random.default_rng(1)

    def small(leaf: Any) -> Any:
        floating = jnp.issubdtype(getattr(leaf, "dtype", np.float32), np.inexact)
        return _normal(rng, (2,) * np.ndim(leaf)) if floating else np.zeros((2,) * np.ndim(leaf))

    tree = jax.tree.map(small, params)
    _compare(tx, jax.tree.map(lambda x: 30 * x, tree), [tree, tree, tree], False)


def _compare(tx: Any, params: Any, grads: list[Any], compiled: bool) -> None:
    """Refuse `tx` where its updates differ at any element that is finite in all steps."""
    between = not jax.sharding.get_abstract_mesh().manual_axes
    # Whether dtypes may mix is for the program to find out, not for this one.
    with (
        jax.ensure_compile_time_eval(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        no_mesh() if between else contextlib.nullcontext(),
    ):
        try:
            whole = _run(tx, params, grads, compiled)
        except Exception as error:
            raise ValueError(
                "`sharded_optimizer` tried the optimizer on a small tree of its own, and it does "
                f"not run there ({type(error).__name__}: {error}). If its `update` needs further "
                "arguments, or parameters of certain names, but treats every element by itself, "
                "say so with `assume_elementwise=True`. " + _LEARNED
            ) from error
        try:
            found = _in_shards(tx, params, grads, compiled)
        except Exception as error:
            raise ValueError(
                "`sharded_optimizer`: the optimizer does not run on shards "
                f"({type(error).__name__}: {error}). " + _LEARNED
            ) from error
    known = jax.tree.map(lambda *steps: np.isfinite(np.stack(steps)).all(0), *grads)
    for step, (one, other) in enumerate(zip(whole, found, strict=True), 1):
        _check_equal(step, one, other, known)


def _check_equal(step: int, whole: Any, found: Any, known: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(whole)
    largest = max(
        (np.nanmax(np.abs(x), initial=0.0, where=np.isfinite(x)) for _, x in leaves), default=0.0
    )
    for (path, a), b, certain in zip(
        leaves, jax.tree.leaves(found), jax.tree.leaves(known), strict=True
    ):
        equal = np.isclose(a, b, rtol=1e-4, atol=1e-5 * largest, equal_nan=True) | ~certain
        if not equal.all():
            at = np.unravel_index(np.argmin(equal), equal.shape)
            raise ValueError(
                "`sharded_optimizer` expects an elementwise optimizer, and tried this one on a "
                f"small tree, whole and in {_REPLICAS} shards: the update of an element of "
                f"{jax.tree_util.keystr(path)} in step {step} is {a[at]:.6g} and {b[at]:.6g}. "
                + _LEARNED
            )


def _run(tx: Any, params: Any, grads: list[Any], compiled: bool) -> list[Any]:
    """The updates of each step."""
    params = jax.tree.map(jnp.asarray, params)
    update = jax.jit(tx.update) if compiled else tx.update
    state, updates = tx.init(params), []
    for grad in grads:
        update_of_step, state = update(jax.tree.map(jnp.asarray, grad), state, params)
        updates.append(jax.tree.map(np.asarray, update_of_step))
    return updates


def _in_shards(tx: Any, params: Any, grads: list[Any], compiled: bool) -> list[Any]:
    """The updates of each step, by two replicas that know nothing of each other."""
    treedef, leaves = sharded_leaves(params, {"probe": _REPLICAS}, "sharded_optimizer")
    layout = layout_of(treedef, leaves, _REPLICAS)

    def parts_of(tree: Any, rank: int) -> Shards:
        return _part(cut(jax.tree.leaves(tree), layout, None, ("probe",)), layout, rank)

    of_each = [
        _run(tx, parts_of(params, rank), [parts_of(g, rank) for g in grads], compiled)
        for rank in range(_REPLICAS)
    ]
    return [joined(_stacked(*updates)) for updates in zip(*of_each, strict=True)]


def _part(shards: Shards, layout: ShardLayout, rank: int) -> Shards:
    rows = [layout.rows(pack) for pack in layout.packs]
    parts = [x[rank * r : (rank + 1) * r] for x, r in zip(shards.parts, rows, strict=True)]
    return shards.replace(parts)


def _stacked(*of_each: Any) -> Shards:
    first = of_each[0]
    if not is_shards(first):
        raise ValueError(f"expected updates like the gradients; got {type(first).__name__}")
    columns = zip(*(shards.parts for shards in of_each), strict=True)
    return dataclasses.replace(first, parts=tuple(np.concatenate(column) for column in columns))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)
