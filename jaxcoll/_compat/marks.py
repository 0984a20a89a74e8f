"""What those who read a traced program go by; nothing of it is left in a compiled one."""

from __future__ import annotations

import re
from typing import Any

from jaxcoll._compat.primitives import first_of, unchanged
from jaxcoll._compat.settings import frames

GRADIENT = "gradient_to_reduce"
"""The name of the primitive of `gradient_of`."""


def gradient_of(
    leaf: Any, gradient: Any, axis: str, caller: str, name: str, *, own: bool = False
) -> Any:
    """`gradient` with a mark that it is going to be reduced along `axis`, and is that of `leaf`.

    The mark holds the leaf itself, on which the gradient need not depend, so that whoever drops
    equations without results drops it with the gradient only. If it is a replica's `own`, as types
    say, it is not going to be reduced.
    """
    return _gradient_p.bind(gradient, leaf, axis=axis, caller=caller, path=name, own=own)


_gradient_p = first_of(GRADIENT)


SAME = "same_everywhere"
"""It is equal everywhere along `axes`."""
COTANGENT = "cotangent_of_same"
"""It is the cotangent of what is marked by `SAME`."""
ONCE = "reduced_once"
"""It is going to be reduced along `axis`, to its `mean` or a sum, where it must differ."""
ROWS = "own_rows"
"""It is going to be gathered along `axis`, where it must differ."""
PARTS = "parts_of_sum"
"""It is this replica's part of what was reduced over `axes`."""


def marked(x: Any, mark: str, **params: Any) -> Any:
    """`x` with one of these marks, whose parameters readers of the program find beside it."""
    return _marks[mark].bind(x, **params)


_marks = {name: unchanged(name) for name in (COTANGENT, ONCE, ROWS, PARTS)}
_marks[SAME] = unchanged(
    SAME, transpose=lambda cotangent, *, axes: [marked(cotangent, COTANGENT, axes=axes)]
)


ALL = (GRADIENT, *_marks)
"""The names of all of these primitives."""


def in_backward(eqn: Any) -> bool:
    """Whether an equation was made by the transposition of a derivative.

    Those of a program that it runs need not say so themselves. A scope of the user's may have any
    name, so that the word "transpose" alone shows nothing.
    """
    return any(
        type(each).__name__ == "Transform" and each.name == "transpose" for each in _scopes(eqn)
    )


def is_made_again(eqn: Any) -> bool:
    """Whether an equation repeats one of the forward pass, as `jax.checkpoint` does."""
    return any(each.name == "rematted_computation" for each in _scopes(eqn))


def is_our_reduction(eqn: Any, kind: str = "all_reduce") -> bool:
    """Whether an equation carries a pack of such a reduction of ours."""
    return any(re.fullmatch(rf"{kind}_[0-9a-f]{{6}}/pack\d+", x.name) for x in _scopes(eqn))


def _scopes(eqn: Any) -> tuple[Any, ...]:
    return tuple(eqn.source_info.name_stack.stack)


def is_transposed_reduction(eqn: Any) -> bool:
    """Whether the cotangent of a reduced value is typed as varying here, by that reduction.

    A rule of differentiation types its own constants so, too; only the Python that the derivative
    was made for tells the two apart.
    """
    for frame in frames(eqn):
        if frame.function_name == "as_invariant":  # of ours
            return True
        if frame.file_name.endswith(_COLLECTIVES):
            return frame.function_name != "pcast"
        if not _JAX.search(frame.file_name):
            return False
    return False


def is_seed_of_gradient(eqn: Any) -> bool:
    """Whether an equation makes the ones, of a loss's type, that `jax.grad` goes backwards from.

    Nothing but the Python that made it shows that: JAX's own interface called JAX's own arrays,
    with no line of a user, or of a rule of differentiation, between the two.
    """
    for frame in frames(eqn):
        if frame.file_name.endswith(_INTERFACE):
            return True
        if not _JAX.search(frame.file_name) or frame.file_name.endswith(_AUTODIFF):
            return False
    return False


_JAX = re.compile(r"[/\\]jax[/\\]")
_INTERFACE = ("jax/_src/api.py", "jax\\_src\\api.py")
_AUTODIFF = ("interpreters/ad.py", "interpreters\\ad.py")
_COLLECTIVES = ("lax/parallel.py", "lax\\parallel.py")
