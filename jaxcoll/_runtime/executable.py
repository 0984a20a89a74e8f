"""Compiled programs, cached by the shapes and shardings of their arguments."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcoll._compat import settings
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._runtime.cached_order import compiled_in_order
from jaxcoll._runtime.call import Call


@dataclasses.dataclass
class Program:
    """A compiled program."""

    compiled: Any  # the function to call, a `jax.stages.Compiled`; None: there is nothing to run
    name: str  # for messages
    lines: str = ""  # its fingerprint, by `pack_lines`
    digest: str = ""  # of its fingerprint, compared by processes
    # The first program of its function: processes also compare the arguments of its first run
    is_first: bool = False


Compile = Callable[[jax.stages.Lowered, str, Sequence[Any], str], Program]
"""Compiles a program that several processes run, from `(lowered, name, leaves, settings)`."""

_aval, _sharding = operator.attrgetter("aval"), operator.attrgetter("sharding")
_LAST = "last"
_programs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Executables of each jitted program; `_LAST` has the key and program of the last call."""

plans: dict[str, CollectivePlan] = {}
"""The latest plans that were traced, by name, so that messages can name the leaves of a pack."""


def remember(plan: CollectivePlan) -> None:
    """Keep a plan that is being traced, for messages."""
    plans.pop(plan.name, None)
    plans[plan.name] = plan
    if len(plans) > 256:
        del plans[next(iter(plans))]


def compile_once(call: Call, shared: Compile | None = None) -> Program:
    """Compile the program of a call, or take the one that was compiled for such arguments.

    `shared` compiles it if other processes run it too.

    Cost, once it is compiled: about a third of a microsecond per array.
    """
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    key = (
        settings.configuration(),  # other JAX settings make another program
        tree,
        shared is None,
        call.settings,  # processes compare them even if the program was called before
        *map(_aval, leaves),
        *map(_sharding, leaves),
    )
    programs = _programs.setdefault(call.program, {})
    # A loop passes what the last call returned, with the same type objects: comparing these takes
    # a fraction of the time of hashing them.
    last, program = programs.get(_LAST, (None, None))
    if last != key:
        program = programs.get(key)
    if program is None:
        name = getattr(call.program, "__name__", "program")
        with compiled_in_order(call):
            lowered = call.program.lower(*call.args, **call.kwargs)
            if shared is None:
                program = Program(lowered.compile(), describe_call(name, leaves))
            else:
                program = shared(lowered, name, leaves, call.settings_text())
                program.is_first = not programs  # later ones get state that the first one returned
        programs[key] = program
    programs[_LAST] = key, program
    return program


def describe_array(x: Any) -> str:
    """Describe an array's dtype and shape, as in "float32[2,3]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def describe_call(function: str, leaves: Sequence[Any]) -> str:
    """Describe a call by its function and its first three arrays."""
    arrays = [*map(describe_array, leaves[:3])]
    more = f" and {len(leaves) - 3} more" * (len(leaves) > 3)
    return f"`{function}` of {', '.join(arrays)}{more}"
