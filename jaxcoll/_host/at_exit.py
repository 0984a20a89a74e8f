"""What is done when this process ends, and not when a child that it forked ends."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

from jaxcoll._compat_coordination import leave_coordinator

_calls: list[Callable[[], Any]] = []


def at_exit(call: Callable[[], Any]) -> None:
    """Have Python call this when the process ends."""
    _calls.append(call)
    atexit.register(call)


def not_at_exit(call: Callable[[], Any]) -> None:
    """Have it not called any more."""
    _calls[:] = [other for other in _calls if other != call]
    atexit.unregister(call)


def _leave_to_parent() -> None:
    """A forked child that ends must not speak for its parent, nor remove what that one uses."""
    if not _calls:
        return
    for call in _calls:
        atexit.unregister(call)
    _calls.clear()
    leave_coordinator(to_parent=True)  # JAX would shut it down when the child ends


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
