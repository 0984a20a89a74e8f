"""A replica's loss: what it may return, and its derivative. Nothing is reduced here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._collectives.scope import Differentiation, differentiated
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.packs.leaves import accumulation_dtype, dtype_or_none

_TUPLE_LOSS = """\
`{caller}`: the loss returned a tuple of {n}. If the rest is auxiliary output, \
`jc.value_and_grad` takes it with `has_aux=True`. If it is a weight (tokens, unpadded examples), \
return `jc.WeightedLoss(total, weight)`, the sums of weighted losses and of weights."""

_NO_SCALAR = """\
`{caller}` expects the loss to be a scalar or a `jc.WeightedLoss`; got {got}. Return its mean over \
this replica's share (`jnp.mean`), or, for examples that count differently, their weighted sum and \
the sum of the weights as `jc.WeightedLoss(total, weight)`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """The result of a loss with a weighted mean: over tokens, or over unpadded examples.

    Guarantee: the mean over replicas is sum(total) / sum(weight), what one device would compute
    from the whole batch. It is exact for uneven shares; a share of nothing but padding has weight 0
    and total 0.

    Attributes:
      total: scalar; the sum of weight times loss over this replica's share. In float16 this sum
        must fit; the sums over microbatches and replicas need not.
      weight: scalar of any real type; the sum of the weights over this replica's share, converted
        to float32 or wider. Differentiation treats it as a constant.

    Examples:
      >>> import jax.numpy as jnp
      >>> losses, mask = jnp.array([1.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 0.0])
      >>> loss = WeightedLoss(jnp.sum(losses * mask), jnp.sum(mask))
      >>> float(loss.total / loss.weight)
      2.0
    """

    total: Any
    weight: Any


def value_and_weight(out: Any, caller: str) -> tuple[Any, jax.Array | None]:
    """Check the value to differentiate, and its weight, in float32 or wider; None without one."""
    if not isinstance(out, WeightedLoss):
        if isinstance(out, tuple):
            raise TypeError(_TUPLE_LOSS.format(caller=caller, n=len(out)))
        if dtype_or_none(out) is None or np.shape(out):
            raise TypeError(_NO_SCALAR.format(caller=caller, got=describe_type(out)))
        return out, None
    for name, shape in (("total", jnp.shape(out.total)), ("weight", jnp.shape(out.weight))):
        if shape:
            raise ValueError(
                f"`{caller}` expects the {name} of a WeightedLoss to be a scalar, the sum over "
                f"this replica's share; got shape {shape}."
            )
    # It counts rows: a loss with another gradient would not be their mean.
    weight = jnp.asarray(out.weight)
    return out.total, lax.stop_gradient(weight.astype(accumulation_dtype(weight.dtype)))


def loss_and_aux(out: Any, caller: str) -> tuple[Any, Any]:
    """Check that a loss returned a pair, and split it."""
    if isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    got = f"a tuple of {len(out)}" if isinstance(out, tuple) else describe_type(out)
    raise TypeError(
        f"`{caller}` with has_aux=True expects the loss to return (loss, aux); got {got}."
    )


def value_and_local_grad(
    loss: Callable[..., tuple[Any, Any]],
    argnums: int | Sequence[int],
    differentiation: Differentiation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, Any], Any]:
    """Apply `jax.value_and_grad(loss, argnums, has_aux=True)` to this replica's loss alone.

    In a checked `shard_map` autodiff would sum the gradient of a replicated parameter, with one
    `psum` for each leaf. The parameters are typed as varying first, so that it does not.
    """
    chosen = {argnums} if isinstance(argnums, int) else set(argnums)
    chosen = {i % len(args) for i in chosen if -len(args) <= i < len(args)}
    if _compat.types_tracked():

        def vary(x: Any) -> jax.Array:
            return _compat.cast_varying(jnp.asarray(x), differentiation.axes)

        args = tuple(jax.tree.map(vary, a) if i in chosen else a for i, a in enumerate(args))
    with differentiated(differentiation):
        return jax.value_and_grad(loss, argnums, has_aux=True)(*args, **kwargs)


def check_differentiable(leaves: Mapping[str, Any], caller: str) -> None:
    """Raise an error that names a leaf without a gradient; JAX's own does not name it."""
    for name, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", None)
        is_number = isinstance(leaf, float | complex)
        if not is_number and (dtype is None or not jnp.issubdtype(dtype, jnp.inexact)):
            got = type(leaf).__name__ if dtype is None else dtype
            raise TypeError(
                f"`{caller}` differentiates arrays of floating point or complex numbers; {name} is "
                f"{got}. Pass only the trainable part, as from `eqx.partition(module, "
                "eqx.is_inexact_array)` or `nnx.split(module, nnx.Param, ...)`."
            )


class Extras(NamedTuple):
    """Results of a loss besides its value: the weight, and auxiliary output with metrics."""

    weight: Any
    aux: Any


Differentiated = tuple[tuple[Any, Extras], Any]
Differentiate = Callable[[tuple[Any, ...], dict[str, Any]], Differentiated]
