"""What a loss may return: a number, or a weighted sum; and beside it auxiliary output."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._spmd.arithmetic import wide

_TUPLE_LOSS = """\
`{caller}`: the loss returned a tuple of {n}. If the rest is auxiliary output, pass \
`has_aux=True`. If it is a weight (tokens, unpadded examples), return \
`jc.WeightedLoss(total, weight)`: the sum of the weighted losses of this replica and the sum of \
their weights."""

_NO_SCALAR = """\
`{caller}` expects the loss to be a scalar or a `jc.WeightedLoss`; got {got}. Return its mean over \
this replica's share (`jnp.mean`), or, for examples that count differently, their weighted sum and \
the sum of the weights as `jc.WeightedLoss(total, weight)`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """What a loss returns when its mean is weighted: by tokens, or by examples that are real.

    Law: the mean over replicas is sum(total) / sum(weight), which is exact for uneven shares
    (a replica whose whole share is padding has weight 0 and total 0) and is what one device
    would compute from the whole batch.

    Attributes:
      total: scalar; the sum of weight times loss over this replica's share. In float16 that sum
        must fit by itself; those over micro-batches and replicas need not.
      weight: scalar of any real type; the sum of the weights over this replica's share, taken as
        a float32 or wider. A constant to differentiation.

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
    """The number to differentiate, and its weight as a float of at least 32 bits, if it has one."""
    if not isinstance(out, WeightedLoss):
        _check_scalar(out, caller)
        return out, None
    _check_scalars(out, caller)
    weight = jnp.asarray(out.weight)
    return out.total, lax.stop_gradient(weight.astype(wide(weight.dtype)))


def loss_and_aux(out: Any, caller: str) -> tuple[Any, Any]:
    """The parts of what a loss with auxiliary output returned."""
    if isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    got = f"a tuple of {len(out)}" if isinstance(out, tuple) else _kind(out)
    raise TypeError(
        f"`{caller}` with has_aux=True expects the loss to return (loss, aux); got {got}."
    )


def _check_scalar(loss: Any, caller: str) -> None:
    if isinstance(loss, tuple):
        raise TypeError(_TUPLE_LOSS.format(caller=caller, n=len(loss)))
    is_number = _is_array(loss) or isinstance(loss, bool | int | float | complex)
    if not is_number or np.shape(loss):
        raise TypeError(_NO_SCALAR.format(caller=caller, got=_kind(loss)))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _kind(x: Any) -> str:
    """What `x` is, in a message."""
    if not _is_array(x):
        return type(x).__name__
    return f"{jnp.result_type(x).name}[{', '.join(map(str, np.shape(x)))}]"


def _check_scalars(loss: WeightedLoss, caller: str) -> None:
    for name, value in (("total", loss.total), ("weight", loss.weight)):
        if jnp.shape(value):
            raise ValueError(
                f"`{caller}` expects the {name} of a WeightedLoss to be a scalar, the sum over "
                f"this replica's share; got shape {jnp.shape(value)}."
            )
