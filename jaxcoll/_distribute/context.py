"""The replica function that is being traced, by which code knows whether it runs inside one."""

from __future__ import annotations

from typing import Any

import jax

# Part of JAX's trace-cache key, so that a function jitted by the user, and traced inside one
# replica function, is traced anew for another strategy and outside.
context_in_trace: Any = jax.make_user_context(default_value=None)


def check_cross_replica(caller: str, instead: str) -> None:
    """Refuse a call from inside a replica function; say what to call `instead`."""
    if context_in_trace.value is not None:
        raise RuntimeError(
            f"`{caller}` was called inside a function that `strategy.run` runs on every replica; "
            f"it works on the values of all of them, between programs. Inside, {instead}."
        )
