"""`accumulate`: the gradient of a share, in microbatches, which add up to one pass over it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._gradients.batch import Signature, check_shares, slots
from jaxcoll._gradients.gradient import Differentiator
from jaxcoll._gradients.loss import Differentiate, Differentiated, Extras
from jaxcoll._gradients.proof.retrace import trace_call
from jaxcoll._gradients.value_and_grad import make_gradient
from jaxcoll._plan.checks import positive
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import accumulation_dtype, no_array


def accumulate(
    fun: Callable[..., Any],
    axis_name: str | tuple[str, ...] | None = None,
    num_microbatches: int | None = None,
    *,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scatter: bool = False,
    feedback: bool = False,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Accumulate `value_and_grad` over microbatches: one reduction per step, not per microbatch.

    Guarantee: the result is that of `jc.value_and_grad(fun, axis_name)` on the whole batch, to
    rounding: for MEAN, as microbatches are equally large; for SUM; and for a `WeightedLoss`, with
    weights spread in any way over microbatches and replicas. The loop over microbatches has no
    collectives but those of `fun`.

    Args:
      fun: the loss of one microbatch, as in `value_and_grad`.
      axis_name: one mapped axis, or a tuple of mesh axes, outer to inner; None as in `all_reduce`.
      num_microbatches: number of microbatches, of consecutive rows, in each replica's share.
      batch_argnums: positions or names of the arguments to split along their leading dimension, as
        in `data_parallel`: by default the second of two. Others are whole in every microbatch. For
        new random numbers in each microbatch, split an array of keys too.
      reduce_op: as in `value_and_grad`.
      argnums: as in `value_and_grad`.
      has_aux: as in `value_and_grad`.
      scatter: as in `value_and_grad`.
      feedback: as in `value_and_grad`.
      options: as in `all_reduce`.

    Returns:
      A function with the arguments and results of `value_and_grad`'s. Each `WeightedMean` and
      `Total` in `aux` becomes one number over microbatches and replicas. Other arrays and numbers
      in `aux` are this replica's (*varying*), stacked over microbatches along a new leading
      dimension; anything else is unchanged. Gradients narrower than 32 bits are added up in float32
      and travel in their own dtype. Cost: the memory of one microbatch and one more gradient (in
      float32); one `all_reduce` for all.

    Raises:
      ValueError: the batch is not named, does not divide into the microbatches, or has a scalar;
        an argument is both split and differentiated, or `num_microbatches` is not a positive
        integer; and as in `value_and_grad`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> step = accumulate(lambda w, x: jnp.mean(w * x), "data", 2)
      >>> shares = jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
      >>> value, grad = jax.vmap(step, in_axes=(None, 0), axis_name="data")(2.0, shares)
      >>> value.tolist(), grad.tolist()
      ([9.0, 9.0], [4.5, 4.5])
    """
    if num_microbatches is None:
        raise ValueError(
            "`jc.accumulate` needs a number of microbatches after the axis, as in "
            '`jc.accumulate(loss, "data", 4)` or `jc.accumulate(loss, num_microbatches=4)`.'
        )
    count = positive("jc.accumulate", "num_microbatches", num_microbatches)
    batch = None if batch_argnums is None else slots("batch_argnums", batch_argnums)
    if batch == ():
        raise ValueError("`jc.accumulate` needs an argument to split: `batch_argnums` is ().")
    line = f"jc.accumulate({{name}}, {axis_name!r}, {count}, batch_argnums={{batch}})"
    signature = Signature(fun, batch, "jc.accumulate", line, "in every microbatch")
    op = ReduceOp.of(reduce_op)
    loss = Differentiator(
        fun, "jc.accumulate", op, argnums, has_aux, scatter, feedback,
        pieces=count, over_pieces=functools.partial(_differentiate_pieces, count, signature),
    )  # fmt: skip
    return make_gradient(loss, axis_name, check_options(options))


def _differentiate_pieces(
    count: int,
    signature: Signature,  # finds the arguments to split
    differentiate: Differentiate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    learned: Sequence[int],  # positions of the differentiated arguments
    mean: bool,
    halvings: int,  # a power of two
) -> Differentiated:
    """Call `differentiate(args, kwargs)` for each of `count` microbatches; combine the results.

    Value, weight and gradients are summed; for a mean without weights, value and gradients are
    averaged. `aux` is stacked along a new leading dimension. Sums are taken in float32: adding
    eight numbers in bfloat16 may cost three of its eight bits. In a weighted mean, a float16 value
    and its gradients are divided by 2^`halvings`, so that the sums over replicas fit.

    Raises:
      ValueError: an argument is both split and differentiated, or does not divide.
    """
    call = signature.call(args, kwargs)
    pieces = []
    for slot in call.batch:
        if slot in learned:
            raise ValueError(
                f"`jc.accumulate`: argument {signature.name(slot)!r} is in `argnums`, and is the "
                "batch; a differentiated argument cannot be split into microbatches."
            )
        cut = functools.partial(_cut, signature.name(slot), count)
        pieces.append(jax.tree_util.tree_map_with_path(cut, call.get(slot)))

    def one(pieces: list[Any]) -> tuple[Any, Any]:
        piece = call.replace_batch(pieces)
        (value, extras), grads = differentiate(piece.args, piece.kwargs)
        aux = jax.tree.map(lambda x: x if no_array(x) else jnp.asarray(x), extras.aux)
        # A loss may return a constant, or a Python number that is differentiated.
        return jax.tree.map(jnp.asarray, (value, extras.weight, grads)), aux

    # Trace one piece for the types of the initial sums.
    first = jax.tree.map(lambda x: x[0], pieces)
    program = trace_call(one, first)
    check_shares(differentiate, call.replace_batch(first), count, signature.name, "jc.accumulate")
    types, _ = program.result(program.program.out_avals)
    summed = jax.tree.leaves(types)

    def step(totals: list[jax.Array], piece: list[Any]) -> tuple[list[jax.Array], Any]:
        outputs = program.outputs(piece)
        added = [t + x.astype(t.dtype) for t, x in zip(totals, outputs, strict=False)]
        return added, outputs[len(summed) :]

    # Totals are as wide as sums need, and are rounded once, after the last microbatch.
    zeros = [_compat.zeros_like_aval(aval, accumulation_dtype(aval.dtype)) for aval in summed]
    totals, stacked = lax.scan(step, zeros, pieces)
    (value, weight, grads), aux = program.result([*totals, *stacked])
    parts = count if mean and weight is None else 1
    taken_off = 0 if weight is None else halvings

    def average(total: jax.Array, like: Any) -> jax.Array:
        total = total / parts if parts > 1 else total
        # As `scale_down` does for a share in one piece; the mean over replicas takes it back.
        if taken_off and like.dtype == np.float16:
            total = total * np.float32(2.0**-taken_off)
        return total.astype(like.dtype)

    value, grads = jax.tree.map(average, (value, grads), (types[0], types[2]))
    return (value, Extras(weight, aux)), grads


def _cut(name: str, count: int, path: Any, leaf: Any) -> Any:
    """Split a leaf of the batch: it gets the shape (count, rows / count, ...)."""
    name, shape = name + jax.tree_util.keystr(path), np.shape(leaf)
    if not shape:
        raise ValueError(
            f"`jc.accumulate`: {name} is a scalar and cannot be split into {count} microbatches; "
            "leave its argument out of `batch_argnums` to pass every microbatch the same value."
        )
    rows, left = divmod(shape[0], count)
    if left:
        raise ValueError(
            f"`jc.accumulate`: {name} has {shape[0]} rows on each replica, which do not divide "
            f"into {count} microbatches ({shape[0]} = {count} × {rows} + {left}); take a number "
            f"that divides {shape[0]}, or pad the batch and return a `jc.WeightedLoss`."
        )
    array = leaf if hasattr(leaf, "reshape") else jnp.asarray(leaf)
    return array.reshape(count, rows, *shape[1:])
