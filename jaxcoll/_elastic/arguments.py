"""What `Elastic` takes, checked before anything is done."""

from __future__ import annotations

import math
from typing import Any

from jaxcoll._step.data_parallel import DataParallel


def check_step(step: Any) -> None:
    """Refuse what `Elastic` cannot train with.

    Raises:
      ValueError: it is no `jc.data_parallel` step, or has several axes, or donates.
    """
    if not isinstance(step, DataParallel):
        raise ValueError(
            f"`Elastic` expects a step made by `jc.data_parallel`; got {type(step).__name__}."
        )
    if isinstance(step.axis_name, tuple):
        raise ValueError(
            f"`Elastic` trains over one axis, along which workers may leave; the step has "
            f"{step.axis_name!r}."
        )
    if step.donate_argnums:
        raise ValueError(
            "`Elastic` goes back to the state before a step that others did not finish, so the "
            f"step must not donate it; got donate_argnums={step.donate_argnums}."
        )


def check_numbers(fewest: Any, most: Any, timeout: Any, startup: Any, every: Any) -> None:
    """Refuse numbers out of range.

    Raises:
      ValueError: one is; it is named.
    """
    whole = {"min_workers": fewest, "every": every} | (
        {} if most is None else {"max_workers": most}
    )
    for name, value in whole.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`Elastic` expects `{name}` to be an integer above 0; got {value!r}.")
    if most is not None and most < fewest:
        raise ValueError(f"`max_workers` ({most}) is below `min_workers` ({fewest}).")
    seconds = {"startup_seconds": startup} | (
        {} if timeout is None else {"timeout_seconds": timeout}
    )
    for name, value in seconds.items():
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise ValueError(
                f"`Elastic` expects `{name}` to be a number of seconds above 0; got {value!r}."
            )
