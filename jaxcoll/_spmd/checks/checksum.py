"""Whether the sum that came back is the sum of what was put in.

A weighted sum over elements commutes with the sum over replicas. So each replica folds what it
puts into a pack to a few columns, these are summed over the replicas on their own, and the
folded result has to be that: exactly for integers, modulo 2 to the width they travel in; for
floats within what rounding can do. What is folded is weighted by its row, so that elements which
change places are seen as well.

The bound, with u for half a unit in the last place of the pack's type and v for that of the
checksum's, n replicas, and d roundings on the way to a column: summing n numbers errs by at most
(1+u)^(n-1) - 1 of their magnitudes (Higham, "Accuracy and Stability of Numerical Algorithms", 2002,
section 4.2), folding by (1+v)^d - 1, and summing the folds by (1+v)^(n-1) - 1 more. All are
charged on M, the weighted magnitudes of all replicas, which is folded and summed alike. A quarter
more pays for the products of these small numbers and for M's own rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat
from jaxcoll._compat import callback
from jaxcoll._plan.plan import Corruption, Plan
from jaxcoll._spmd.arithmetic import wide

COLUMNS = 128
_ROWS = 32

Heard = Callable[[tuple[Corruption, ...], Hashable, int], None]
"""Is given the packs that a program found corrupted; see `reported`."""


def corrupted(
    sent: Sequence[jax.Array],
    totals: Sequence[jax.Array],
    over: tuple[str, ...],
    replicas: int,
    add: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """How many replicas hold, for each pack, what cannot be the sum of what was sent.

    Inputs that are not finite, or so large that the sum of their magnitudes is not, make the
    columns they are in incomparable: these pass. A result that is not finite where it must be is
    corrupted. All packs are of one type of checksum (see `kind`); `add` sums a flat array.

    Returns:
      Of shape (packs,), *invariant* over `over`. Cost: two all-reduces, of at most 256 numbers and
      of one int32 for each pack; for floats two passes over what was sent, else one; and one over
      the result.
    """
    folds = [_folded(lax.stop_gradient(x)) for x in sent]
    sizes = np.cumsum([fold.size for fold in folds])[:-1]
    whole = add(_compat.as_varying(jnp.concatenate(folds, axis=None), over))
    bad = [
        _differs(expected.reshape(fold.shape), lax.stop_gradient(total), replicas)
        for expected, fold, total in zip(jnp.split(whole, sizes), folds, totals, strict=True)
    ]
    # Zero, as no compiler knows: a result that it takes for equal everywhere may just not be that.
    zero = lax.shift_right_logical(lax.axis_index(over), np.int32(31))
    here = _compat.as_varying(jnp.stack(bad).astype(np.int32), over) + zero
    return add(here)


def kind(dtype: np.dtype) -> np.dtype:
    """The type in which a pack of `dtype` is folded."""
    if jnp.issubdtype(dtype, np.inexact):
        return jnp.finfo(wide(dtype)).dtype
    return np.dtype(np.uint64 if dtype.itemsize > 4 else np.uint32)


def marked(result: jax.Array, bad: jax.Array) -> jax.Array:
    """`result`, or where it is corrupted NaN; of integers the lowest (of unsigned, the highest)."""
    dtype = result.dtype
    if jnp.issubdtype(dtype, np.inexact):
        mark = np.nan
    else:
        limits = jnp.iinfo(dtype)
        mark = limits.min or limits.max
    return jnp.where(bad > 0, jnp.array(mark, dtype), result)


def _folded(array: jax.Array) -> jax.Array:
    """Columns, and for floats their magnitudes in a second row."""
    flat = _numbers(array)
    exact = not jnp.issubdtype(flat.dtype, np.floating)
    # Not both at once: side by side they would be a copy of twice the size.
    return jnp.stack([_columns(flat)] if exact else [_columns(flat), _columns(abs(flat))])


def _numbers(array: jax.Array) -> jax.Array:
    """A flat array of real numbers in the type of the checksum."""
    flat = array.reshape(-1)
    if jnp.iscomplexobj(flat):
        flat = jnp.concatenate([flat.real, flat.imag])
    return flat.astype(kind(np.dtype(flat.dtype)))


def _weights(height: int, level: int, dtype: np.dtype) -> np.ndarray:
    """For floats in [1, 2), of 8 bits; for integers odd, so that no one change is lost."""
    spread = np.arange(1, height + 1) * (2 * level + 37) % 128
    if jnp.issubdtype(dtype, np.floating):
        return (1 + spread / 128).astype(dtype)
    return (2 * spread + 1).astype(dtype)


def _heights(size: int) -> list[int]:
    """How many rows are added up at a time, until few columns are left."""
    heights = []
    while size > COLUMNS:
        heights.append(min(_ROWS, -(-size // COLUMNS)))
        size = -(-size // heights[-1])
    return heights


def _columns(flat: jax.Array) -> jax.Array:
    """A few columns of a flat array."""
    for level, height in enumerate(_heights(flat.size)):
        width = -(-flat.size // height)
        padded = jnp.pad(flat, (0, height * width - flat.size))
        weights = _weights(height, level, np.dtype(flat.dtype))
        if jnp.issubdtype(flat.dtype, np.floating):
            # A product of matrices, because XLA's CPU compiler computes a sum that goes into
            # another one again for each of its terms.
            rows = padded.reshape(height, width)
            flat = jnp.einsum("h,hw->w", weights, rows, precision="highest")
        else:
            # Of neighbours, because XLA's CPU compiler is ten times slower down columns.
            flat = (padded.reshape(width, height) * weights[None]).sum(1, dtype=flat.dtype)
    return flat


def _differs(expected: jax.Array, total: jax.Array, replicas: int) -> jax.Array:
    """Whether any column of `total` is not the expected one."""
    found = _columns(_numbers(total))
    if jnp.issubdtype(found.dtype, np.unsignedinteger):
        # A sum that wraps around is right modulo the width it travels in.
        difference = (expected[0] - found) << np.array(
            8 * found.dtype.itemsize - jnp.iinfo(total.dtype).bits, found.dtype
        )
        return (difference != 0).any()
    travels, folds = jnp.finfo(total.dtype), jnp.finfo(found.dtype)
    heights = _heights(total.size * (1 + jnp.iscomplexobj(total)))
    roundings = sum(heights) + replicas  # additions, and a product for each level
    summed = math.expm1((replicas - 1) * float(travels.eps) / 2)
    folded = math.expm1(roundings * float(folds.eps) / 2)
    # Where the hardware takes subnormal numbers for zero, each may lose as much.
    tiny = float(travels.tiny) if travels.minexp <= -126 else 0.0
    lost = 4 * replicas * math.prod(2 * height for height in heights) * tiny
    magnitude = expected[1]
    bound = np.array(1.25 * (summed + 2 * folded), found.dtype) * magnitude
    within = abs(found - expected[0]) <= bound + np.array(lost, found.dtype)
    # Half of the largest number leaves no partial sum a way to overflow.
    finite = magnitude <= np.array(float(travels.max) / 2, found.dtype)
    overflowed = ~jnp.isfinite(found) & ~finite
    return ~(within | overflowed | ~jnp.isfinite(magnitude)).all()


@dataclasses.dataclass(frozen=True)
class _Reporter:
    """Reports some packs of one plan; equal by value, because it is part of a program's key."""

    plan: Plan
    packs: tuple[int, ...]
    heard: Heard

    def __call__(self, wrong: np.ndarray, group: int, member: int) -> None:
        worst = wrong.reshape(-1, len(self.packs)).max(0)
        found = [(k, int(n)) for k, n in zip(self.packs, worst, strict=True) if n > 0]
        corruptions = tuple(Corruption.of(self.plan, k, n) for k, n in found)
        self.heard(corruptions, (self.plan.world, group), member)


def reported(
    wrong: jax.Array, over: tuple[str, ...], plan: Plan, packs: Sequence[int], heard: Heard
) -> jax.Array:
    """`wrong` itself, *invariant* over `over`; where it is not zero, the host is called.

    The result depends on that call, so a program that uses it does not end before the call. Each
    device calls `heard` with what was found, what tells its group of replicas from others that
    reduce at the same place of a program, and its number in the group.
    """
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    others = tuple(a for a in mapped if a not in over)
    group = lax.axis_index(others) if others else np.int32(0)
    member = lax.axis_index(over)
    reporter = _Reporter(plan, tuple(packs), heard)
    return _compat.as_invariant(callback.reported(wrong, group, member, reporter), over)
