"""Collects checksum failures of running programs: an error of their call, or a logged warning."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from jaxcoll._errors import ReductionCorruptedError
from jaxcoll._plan.plan import Corruption

_LOG = logging.getLogger("jaxcoll")

_lock = threading.Lock()
_listeners: list[tuple[frozenset[jax.Device], dict[str, Corruption]]] = []
"""For each call that is waited for, its devices, and of each pack the worst that they reported."""

_reports: dict[Any, collections.Counter[int]] = {}


@dataclasses.dataclass(frozen=True)
class Reports:
    """Takes note of what each device of a program reports.

    A report goes to the calls that are waited for over these devices, whatever thread has traced,
    compiled or called the program. Where there are none, to the log, once for all devices of this
    process: the n-th report of each of them is one of the same reduction.
    """

    # Those of the program; none: they are not known, as in a user's own
    devices: frozenset[jax.Device] = frozenset()

    def __call__(self, found: tuple[Corruption, ...], group: Hashable, member: int) -> None:
        """Take note of what one device reports."""
        with _lock:
            heard = [
                worst for devices, worst in _listeners if self.devices and self.devices <= devices
            ]
            for worst in heard:
                for each in found:
                    known = worst.get(each.pack, each)
                    worst[each.pack] = max(known, each, key=lambda one: one.wrong)
            if heard:
                return
            key = (self.devices, group, tuple(each.pack for each in found))
            reports = _reports.setdefault(key, collections.Counter())
            reports[member] += 1
            new = all(n < reports[member] for other, n in reports.items() if other != member)
        if new:
            text = "; ".join(map(str, found))
            _LOG.warning("A reduction was corrupted, and came back as NaN: %s.", text)


def listening(call: Callable[[], Any], what: str, across: Sequence[jax.Device]) -> Any:
    """`call()`, waited for, unless a reduction over some of `across` was corrupted meanwhile."""
    worst: dict[str, Corruption] = {}
    listener = frozenset(across), worst
    with _lock:
        _listeners.append(listener)
    try:
        result = jax.block_until_ready(call())
    finally:
        with _lock:
            _listeners[:] = [each for each in _listeners if each is not listener]
    if found := worst.values():
        packs = "; ".join(map(str, found))
        raise ReductionCorruptedError(
            f"{what} was corrupted: what came back is not the sum of what was put in, in "
            f"{packs}. Its result is dropped. Nothing else is wrong with these processes: "
            "the call can be made again, with arguments that it did not consume. If that happens "
            "again, a link, a memory or a kernel is at fault.",
            packs={each.pack: each.leaves for each in found},
        )
    return result
