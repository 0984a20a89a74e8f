"""The effect of rounding on a step, measured on one device with the rows in other orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll._mesh.placement import is_array

ORDERS = 8
"""Orders that are tried. A gradient that is zero but for rounding has a random sign, and with few
orders an element would often have the same one in all of them."""

_UNSEEN = 0.1
"""The fraction of wrong elements that may have been the same in all orders."""
_TIMES = 8.0
"""How far rounding may go, as a multiple of the largest difference between the orders."""


def spreads(
    run: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    batch: Sequence[int | str],
    one: Sequence[np.ndarray],
    numbers: Callable[[Any], Sequence[np.ndarray]],
) -> list[np.ndarray] | None:
    """How far each element of each of `one` moves when the batch's rows are in other orders.

    None without rows. Outputs with one row for each of the batch's are put back into its order
    first, where that brings them nearer.
    """
    rows = {
        np.shape(x)[0]
        for at in batch
        for x in jax.tree.leaves(kwargs[at] if isinstance(at, str) else args[at])
        if _has_rows(x)
    }
    if not any(n > 1 for n in rows):
        return None
    found = [np.zeros(x.shape) for x in one]
    for seed in range(ORDERS):
        orders = {n: np.random.default_rng((seed, n)).permutation(n) for n in sorted(rows)}
        given = [_reordered(x, orders) if i in batch else x for i, x in enumerate(args)]
        named = {k: _reordered(x, orders) if k in batch else x for k, x in kwargs.items()}
        # An order changes how rows are added up, but not how each row's own term is rounded. On
        # other devices, where matrices have other shapes, that may change too: hence the noise.
        given, named = _moved_a_little((given, named), seed)
        outputs = numbers(run(*given, **named))
        each = zip(found, one, outputs, strict=True)
        found = [np.maximum(most, _moved(a, b, orders)) for most, a, b in each]
    return found


def is_rounding(one: np.ndarray, many: np.ndarray, spread: np.ndarray, allowed: float) -> bool:
    """Whether `many` is off by no more than rounding is, and only where rounding is as large."""
    off = apart(one, many)
    beyond = off > allowed
    unseen = beyond & ~(spread > allowed)
    few = np.count_nonzero(unseen) <= _UNSEEN * np.count_nonzero(beyond)
    return bool(few and np.max(off, initial=0.0) <= _TIMES * np.max(spread, initial=0.0) < np.inf)


def _has_rows(x: Any) -> bool:
    return is_array(x) and np.ndim(x) > 0


def _reordered(tree: Any, orders: dict[int, np.ndarray]) -> Any:
    return jax.tree.map(lambda x: x[orders[np.shape(x)[0]]] if _has_rows(x) else x, tree)


def _moved_a_little(tree: Any, seed: int) -> Any:
    """Every number of a tree up or down by its own rounding, by chance."""
    rng = np.random.default_rng(seed)

    def moved(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or not jax.dtypes.issubdtype(x.dtype, np.floating):
            return x
        step = float(jax.numpy.finfo(x.dtype).eps)
        sign = rng.integers(0, 2, x.shape) * 2 - 1
        return (x.astype(np.float64) * (1 + step * sign)).astype(x.dtype)

    return jax.tree.map(moved, tree)


def _moved(one: np.ndarray, other: np.ndarray, orders: dict[int, np.ndarray]) -> np.ndarray:
    as_it_is = apart(one, other)
    if not one.ndim or one.shape[0] not in orders:
        return as_it_is
    # An output by rows came out in the new order, any other did not: which it is, no type says.
    back = apart(one, other[np.argsort(orders[one.shape[0]])])
    return min(as_it_is, back, key=np.max) if one.size else as_it_is


def apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How far two arrays are apart, element by element; two NaNs are not."""
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    with np.errstate(invalid="ignore"):
        gap = np.abs(one.astype(wide) - other.astype(wide))
    same = (one == other) | (np.isnan(one.astype(wide)) & np.isnan(other.astype(wide)))
    return np.where(same, 0.0, np.where(np.isnan(gap), np.inf, gap))
