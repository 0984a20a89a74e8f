"""Compiled programs, cached by the shapes and shardings of their arguments."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcoll._compat import settings
from jaxcoll._dispatch.call import Call
from jaxcoll._plan.collective_plan import CollectivePlan


@dataclasses.dataclass
class Program:
    """A compiled program."""

    compiled: jax.stages.Compiled  # what is called
    name: str  # for messages
    lines: str = ""  # its fingerprint, `packed`
    mark: str = ""  # a digest of it, which processes compare
    # Its function's first, so that processes compare the arguments of its first run, too
    is_first: bool = False


Compile = Callable[[jax.stages.Lowered, str, Sequence[Any], str], Program]
"""`(lowered, name, leaves, settings)`: a program that other processes run, too."""

_LAST = "last"
_programs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Executables of each jitted program; under `_LAST` the last key and its program."""

plans: dict[str, CollectivePlan] = {}
"""The plans that were traced last, by name, so that messages can name the leaves of a pack."""


def remember(plan: CollectivePlan) -> None:
    """Keep a plan that is being traced, for messages."""
    plans.pop(plan.name, None)
    plans[plan.name] = plan
    if len(plans) > 256:
        del plans[next(iter(plans))]


def compiled_for(call: Call, shared: Compile | None = None) -> Program:
    """Return the program of a call, compiled once for arguments like these.

    What other processes run, too, is compiled by `shared`.

    Cost, when it is compiled: about a third of a microsecond per array.
    """
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    key = (
        settings.configuration(),  # under other settings of JAX it is another program
        tree,
        shared is None,
        call.settings,  # processes compare them, whoever called the program before
        *[x.aval for x in leaves],
        *[x.sharding for x in leaves],
    )
    programs = _programs.setdefault(call.program, {})
    # A loop calls with what the last call returned, whose types are the same objects: to compare
    # these takes a fraction of the time that their hashes take.
    last, program = programs.get(_LAST, (None, None))
    if last != key:
        program = programs.get(key)
    if program is None:
        lowered = call.program.lower(*call.args, **call.kwargs)
        name = getattr(call.program, "__name__", "program")
        if shared is None:
            program = Program(lowered.compile(), name_of(name, leaves))
        else:
            program = shared(lowered, name, leaves, call.settings_text())
            program.is_first = not programs  # others are given state that the first returned
        programs[key] = program
    programs[_LAST] = key, program
    return program


def type_of(x: Any) -> str:
    """The element type and the shape of an array, for messages: "float32[2,3]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def name_of(function: str, leaves: Sequence[Any]) -> str:
    """The function and the first arrays, in short."""
    arrays = [*map(type_of, leaves[:3])]
    more = f" and {len(leaves) - 3} more" * (len(leaves) > 3)
    return f"`{function}` of {', '.join(arrays)}{more}"
