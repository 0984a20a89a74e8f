"""Checks of a sharded optimizer: it is tried, its program is read, and so are its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._jaxpr.mixing import Origin, origins
from jaxcoll._mesh.mesh import no_mesh
from jaxcoll._mesh.placement import is_array, shape_of
from jaxcoll._mesh.shard_arrays import abstract, cut, joined, own_shapes
from jaxcoll._plan.packs.leaves import flattened, where
from jaxcoll._plan.packs.shard_layout import ShardLayout, layout_of
from jaxcoll._spmd.parts import check_fits, sharded_leaves
from jaxcoll._spmd.shards import Shards, is_shards, shards_in

CALLER = "sharded_optimizer"
_REPLICAS = 2
_LEARNED = (
    "A sharded optimizer sees packs of elements, of each replica's part only, so it must treat "
    "every element by itself. In place of `optax.clip_by_global_norm` pass `max_norm` to "
    "`sharded_optimizer`. Masks and labels by leaf (`masked`, `multi_transform`, weight decay with "
    "`mask`), norms of leaves (lamb, lars), factored moments (adafactor, shampoo), noise, flags of "
    "NaNs (`zero_nans`) and what leaves out steps (`apply_if_finite`, `MultiSteps` with "
    "`should_skip_update_fn`) are not elementwise: use that optimizer unsharded, with the "
    "gradients of `jc.value_and_grad`."
)


def check_elementwise(tx: Any) -> None:
    """Run `tx` on a small tree, as it is and in two shards, and compare; then read its program.

    Running it shows a dependence on the shapes or the order of leaves. The program shows every
    dependence on several elements: on a norm, or on a NaN elsewhere, however rare or late it is.
    """
    rng = np.random.default_rng(0)
    # Large enough for moments to be factored, were they to be.
    tree = {"matrix": _normal(rng, (128, 256)), "vector": _normal(rng, (130,))}
    # Gradients of very different magnitudes, then a NaN.
    steps = [jax.tree.map(lambda x, s=s: s * x, tree) for s in (1.0, 1e-2, 1e15)]
    broken = jax.tree.map(np.copy, tree)
    broken["matrix"][0, 0] = np.nan
    params = jax.tree.map(lambda x: 30 * x[::-1].copy(), tree)
    _compare(tx, params, [*steps, broken, tree], True, jax.tree.structure(0))
    parts = own_shapes(abstract(_layout(tree), ("probe",)))
    _check_programs(tx, jax.tree.map(shape_of, tree), parts)


def check_on_structure(tx: Any, whole: Any, parts: Any) -> None:
    """`check_elementwise` with the names, ranks and shapes of a user's parameters."""
    rng = np.random.default_rng(1)

    def small(leaf: Any) -> Any:
        floating = jnp.issubdtype(getattr(leaf, "dtype", np.float32), np.inexact)
        return _normal(rng, (2,) * np.ndim(leaf)) if floating else np.zeros((2,) * np.ndim(leaf))

    tree = jax.tree.map(small, whole)
    nodes = jax.tree.structure(parts, is_leaf=is_shards)
    _compare(tx, jax.tree.map(lambda x: 30 * x, tree), [tree, tree, tree], False, nodes)
    _check_programs(tx, jax.tree.map(shape_of, whole), parts)


def like(tree: Any) -> Callable[[Any], bool]:
    """Whether a part of an optimizer's state is like `tree`; to be passed as `is_leaf`."""
    structure = jax.tree.structure(tree)
    return lambda x: jax.tree.structure(x) == structure


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """Leave the caller's mesh, and the settings by which dtypes and ranks may mix."""
    between = not jax.sharding.get_abstract_mesh().manual_axes
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        no_mesh() if between else contextlib.nullcontext(),
    ):
        yield


def _check_programs(tx: Any, shapes: Any, parts: Any) -> None:
    """Refuse `tx` where its program for these shapes, whole or in shards, mixes elements."""
    with _by_itself():
        nodes, treedef = jax.tree.flatten(jax.eval_shape(tx.init, parts), is_leaf=like(parts))
        for given in (parts, shapes):
            state = jax.eval_shape(tx.init, given)
            try:
                found = treedef.flatten_up_to(state)
            except (ValueError, TypeError) as error:
                raise _other_state(str(error)) from error
            numbers = [
                number
                for node, part in zip(nodes, found, strict=True)
                for number in _numbers(part, given if like(parts)(node) else None)
            ]
            _check_program(tx.update, given, state, numbers)


def check_with_more(tx: Any, parts: Any, state: Any, extra: dict[str, Any]) -> None:
    """Refuse `tx` where the `extra` arguments of `update` make it mix one replica's elements."""
    leaves, treedef = jax.tree.flatten(extra)
    given = {i: jax.typeof(x) for i, x in enumerate(leaves) if is_array(x)}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given.values()]
    own, of_state = jax.eval_shape(lambda: (parts, state))

    def update(grads: Any, state: Any, params: Any, arrays: Any = ()) -> Any:
        known = dict(zip(given, arrays, strict=True))
        named = treedef.unflatten(known.get(i, x) for i, x in enumerate(leaves))
        return tx.update(grads, state, params, **named)

    numbers = [
        number
        for node in jax.tree.leaves(of_state, is_leaf=like(own))
        for number in _numbers(node, own if like(own)(node) else None)
    ]
    of_more: list[Origin] = ["an array beside the gradients" if x.shape else None for x in shapes]
    with _by_itself():
        _check_program(update, own, of_state, numbers, shapes, of_more)


def _other_state(why: str) -> ValueError:
    return ValueError(
        "`sharded_optimizer` expects an elementwise optimizer, whose state holds numbers and trees "
        f"like the parameters; in the state of this one {why}. {_LEARNED}"
    )


def _numbers(part: Any, params: Any) -> list[Origin]:
    """Which array of `params` each leaf of a part of the state belongs to; None: to none."""
    leaves = jax.tree.leaves(part)
    if params is None:
        return [None] * len(leaves)
    expected = jax.tree.leaves(params)
    if len(leaves) != len(expected):
        raise _other_state(f"a tree has {len(leaves)} leaves in the place of {len(expected)}")
    for kept, leaf in zip(leaves, expected, strict=True):
        if kept.shape != leaf.shape:
            raise _other_state(f"what belongs to a leaf of shape {leaf.shape} has {kept.shape}")
    return list(range(len(leaves)))


def _check_program(
    update: Callable[..., Any],
    params: Any,
    state: Any,
    numbers: list[Origin],
    more: Sequence[Any] = (),
    of_more: Sequence[Origin] = (),
) -> None:
    extra = (list(more),) if more else ()
    program, shapes = jax.make_jaxpr(update, return_shape=True)(params, state, params, *extra)
    own: list[Origin] = list(range(len(jax.tree.leaves(params))))
    found = origins(program, [*own, *numbers, *own, *of_more])
    outputs = zip(flattened(shapes)[0], found, [*own, *numbers], strict=True)
    for (path, _), origin, wanted in outputs:
        if origin not in (None, wanted):
            what = "the update of" if path.startswith("[0]") else "its state at"
            raise ValueError(
                "`sharded_optimizer` expects an elementwise optimizer, and in the program of this "
                f"one {what} {path[3:] or 'the value'} depends on several elements (by "
                f"`{origin}`). " + _LEARNED
            )


def _compare(tx: Any, params: Any, grads: list[Any], compiled: bool, nodes: Any) -> None:
    """Refuse `tx` where its updates differ at any element that is finite in all steps."""
    # Whether dtypes may mix is for the program to find out, not for this one.
    with jax.ensure_compile_time_eval(), _by_itself():
        try:
            whole, state = _run(tx, params, grads, compiled)
        except Exception as error:
            raise ValueError(
                "`sharded_optimizer` tried the optimizer on a small tree of its own, and it does "
                f"not run there ({type(error).__name__}: {error}). If its `update` needs further "
                "arguments, or parameters of certain names, but treats every element by itself, "
                "say so with `assume_elementwise=True`. " + _LEARNED
            ) from error
        try:
            found, states = _in_shards(tx, params, grads, compiled, nodes)
        except Exception as error:
            raise ValueError(
                "`sharded_optimizer`: the optimizer does not run on shards "
                f"({type(error).__name__}: {error}). " + _LEARNED
            ) from error
    known = jax.tree.map(lambda *steps: np.isfinite(np.stack(steps)).all(0), *grads)
    for step, (one, other) in enumerate(zip(whole, found, strict=True), 1):
        _check_equal(step, one, other, known)
    _check_states(state, states)


def _check_states(whole: Any, of_ranks: list[Any]) -> None:
    """Refuse states whose numbers differ from the unsharded one: each replica would have one."""
    # Numbers in shards need no check: the updates, which are made of them, were compared.
    nodes, treedef = jax.tree.flatten(of_ranks[0], is_leaf=is_shards)
    columns = [treedef.flatten_up_to(state) for state in (whole, *of_ranks)]
    for node, *found in zip(nodes, *columns, strict=True):
        if is_shards(node):
            continue
        one, *others = (np.asarray(x) for x in map(_data, found))
        for other in others:
            exact = not jnp.issubdtype(one.dtype, np.inexact)
            near = one.shape == other.shape and (
                (one == other) if exact else np.isclose(one, other, 1e-4, equal_nan=True)
            )
            if not np.all(near):
                raise ValueError(
                    "`sharded_optimizer` expects an elementwise optimizer, and tried this one on a "
                    f"small tree, as one and in {_REPLICAS} shards: a number of its state ends as "
                    f"{one} and {other}. " + _LEARNED
                )


def _data(x: Any) -> Any:
    key = jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
    return jax.random.key_data(x) if key else x


def _check_equal(step: int, whole: Any, found: Any, known: Any) -> None:
    leaves, _ = flattened(whole)
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
                f"small tree, as one and in {_REPLICAS} shards: the update of an element of "
                f"{path} in step {step} is {a[at]:.6g} and {b[at]:.6g}. " + _LEARNED
            )


def _run(tx: Any, params: Any, grads: list[Any], compiled: bool) -> tuple[list[Any], Any]:
    """The updates of each step, and the state after the last."""
    params = jax.tree.map(jnp.asarray, params)
    update = jax.jit(tx.update) if compiled else tx.update
    state, updates = tx.init(params), []
    for grad in grads:
        update_of_step, state = update(jax.tree.map(jnp.asarray, grad), state, params)
        updates.append(jax.tree.map(np.asarray, update_of_step))
    return updates, state


def _in_shards(
    tx: Any, params: Any, grads: list[Any], compiled: bool, nodes: Any
) -> tuple[list[Any], list[Any]]:
    """The updates of each step by two replicas that know nothing of each other; their states."""

    def parts_of(tree: Any, rank: int) -> Any:
        return nodes.unflatten(_part(part, rank) for part in nodes.flatten_up_to(tree))

    runs = [
        _run(tx, parts_of(params, rank), [parts_of(g, rank) for g in grads], compiled)
        for rank in range(_REPLICAS)
    ]
    of_each, states = zip(*runs, strict=True)
    return [_together(updates) for updates in zip(*of_each, strict=True)], list(states)


def _layout(tree: Any) -> ShardLayout:
    treedef, leaves = sharded_leaves(tree, {"probe": _REPLICAS}, CALLER)
    return layout_of(treedef, leaves, _REPLICAS)


def _part(tree: Any, rank: int) -> Shards:
    layout = _layout(tree)
    shards = cut(jax.tree.leaves(tree), layout, None, ("probe",))
    rows = [layout.rows(pack) for pack in layout.packs]
    parts = [x[rank * r : (rank + 1) * r] for x, r in zip(shards.parts, rows, strict=True)]
    return shards.replace(parts)


def _together(of_each: Sequence[Any]) -> Any:
    """The whole updates, from each replica's."""
    joined_up = jax.tree.map(lambda *parts: np.concatenate(parts), *of_each)
    if not shards_in(joined_up):
        raise ValueError(f"expected updates like the gradients; got {type(joined_up).__name__}")
    return jax.tree.map(joined, joined_up, is_leaf=is_shards)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def check_like(grads: Shards, layout: ShardLayout | None, replicas: int) -> None:
    """Refuse shards that are laid out otherwise than the state's."""
    if layout is None or grads.layout == layout:
        return
    check_fits(layout, grads.layout.treedef, grads.layout.leaves, replicas, f"{CALLER}.update")
    raise ValueError(
        f"`{CALLER}.update`: the gradients' shards are packed otherwise than the state's "
        f"({grads.layout} and {layout}). Give `bytes_per_pack` to both, in the options of "
        "`sharded_optimizer` and of `data_parallel` or `value_and_grad`, or to none."
    )


def check_all_in_shards(params: Any) -> None:
    """Refuse a tree with arrays beside `Shards`, of which it would not be known who holds what."""
    for path, x in flattened(params, is_shards)[0]:
        if not is_shards(x):
            raise ValueError(
                f"`{CALLER}`: {where(path)} of the parameters is an array "
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
            f"`{CALLER}.update` got parameters in `Shards` and whole gradients, which belong to "
            "the tree that was gathered. Differentiate the Shards: `jc.value_and_grad(loss, axis)"
            "(shards, ...)`, whose loss calls `jc.all_gather` or `jc.scan_layers` itself."
        )
    raise ValueError(
        f"`{CALLER}.update`: the gradients are not in the shards of the parameters: "
        f"{jax.tree.structure(grads)} and {jax.tree.structure(params)}."
    )
