"""Compiled programs, cached by the shapes and shardings of their arguments."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from jaxcoll import _compat
from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.environment import environment
from jaxcoll._dispatch.fingerprint import collectives, fingerprint, mark
from jaxcoll._dispatch.first_values import FirstValues, first_values, uncompared
from jaxcoll._plan.plan import Plan

_PACK = re.compile(r"(\w+_[0-9a-f]{6})/(pack|rows)(\d+)")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program."""

    compiled: jax.stages.Compiled  # what is called
    name: str  # for messages
    lines: tuple[str, ...] = ()  # its fingerprint, which processes compare
    mark: str = ""  # a hash of these lines
    moved: tuple[str, ...] = ()  # its collectives, one line each
    # What this process brings to its first run; None: nothing is compared
    first: FirstValues | None = None

    @property
    def starts_with(self) -> str:
        """The collective at which processes that arrived wait for the others, in a sentence."""
        if not self.moved:
            return f"{self.name} has no collective."
        more = f" of {len(self.moved)}" * (len(self.moved) > 1)
        return f"Collective 1{more} of {self.name} is {self.moved[0]}{_leaves(self.moved[0])}."


_LAST = "last"
_known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Of each jitted program, what it is compiled to; under `_LAST` the last key and its program."""

_plans: dict[str, Plan] = {}
"""The plans that were traced last, by name, so that messages can name the leaves of a pack."""


def remember(plan: Plan) -> None:
    """Keep a plan that is being traced, for messages."""
    _plans.pop(plan.name, None)
    _plans[plan.name] = plan
    if len(_plans) > 256:
        del _plans[next(iter(_plans))]


def _leaves(line: str) -> str:
    """The leaves that a collective carries, in packs or as gathered rows."""
    carried = []
    for name, kind, number in _PACK.findall(line):
        if plan := _plans.get(name):
            k = int(number)
            leaves = plan.carried(k) if kind == "pack" else plan.leaves[k].path or "(the value)"
            carried.append(f"{name}/{kind}{number} has {leaves}")
    return f" ({'; '.join(carried)})" if carried else ""


def compiled_for(call: Call, *, shared: bool) -> Program:
    """The program of a call, compiled once for arguments like these; `shared` by other processes.

    Cost, when it is known: about a third of a microsecond per array.
    """
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    key = (
        _compat.configuration(),  # under other settings of JAX it is another program
        tree,
        shared,
        call.settings,  # processes compare them, whoever called the program before
        *[x.aval for x in leaves],
        *[x.sharding for x in leaves],
    )
    known = _known.setdefault(call.program, {})
    # A loop calls with what the last call returned, whose types are the same objects: to compare
    # these takes a fraction of the time that their hashes take.
    last, found = known.get(_LAST, (None, None))
    if last != key:
        found = known.get(key)
    if found is None:
        lowered = call.program.lower(*call.args, **call.kwargs)
        name = getattr(call.program, "__name__", "program")
        if not shared:
            found = Program(lowered.compile(), _name(name, leaves))
        else:
            # Only a function's first program: later ones are given state that it returned.
            first = None if known else first_values(call.args, call.kwargs, call.rows)
            found = shared_program(lowered, name, leaves, call.settings_text())
            found = dataclasses.replace(found, first=first)
        known[key] = found
    elif uncompared(found):  # a call before this one did not come to it, or was refused
        first = first_values(call.args, call.kwargs, call.rows)
        found = known[key] = dataclasses.replace(found, first=first)
    known[_LAST] = key, found
    return found


def shared_program(
    lowered: jax.stages.Lowered, name: str, leaves: Sequence[Any], settings: str
) -> Program:
    """Compile a program that other processes run, too; they compare `settings` beside its text."""
    compiled = lowered.compile()
    moved = collectives(compiled.as_text() or "")
    here = filter(None, (x.sharding.addressable_devices for x in leaves))
    around = environment(min(next(here, jax.local_devices()), key=lambda d: d.id))
    lines = fingerprint(f"`{name}`", around, settings, _devices(leaves), lowered, moved)
    return Program(compiled, _name(name, leaves), lines, mark(lines), moved)


def _name(function: str, leaves: Sequence[Any], shown: int = 3) -> str:
    """The function and the first arrays, in short."""
    words = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in leaves[:shown]]
    more = f" and {len(leaves) - shown} more" * (len(leaves) > shown)
    return f"`{function}` of {', '.join(words)}{more}"


def _devices(leaves: Sequence[Any]) -> str:
    """The devices in the order in which a program counts them, as the first array lies on them."""
    meshes = (getattr(x.sharding, "mesh", None) for x in leaves)
    found = next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)), None)
    return "" if found is None else " ".join(str(d.id) for d in found.devices.flat)
