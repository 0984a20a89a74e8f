"""A jitted program whose calls, once its arguments are in place, cost little more than JAX's own.

JAX looks up the types of all arguments in every call. Once a call had all of its arguments in
place, the next one with the same tree and shardings is therefore handed, as it is, to the jitted
function. For types of which the program was never traced, that raises `UnlikeError` before anything
ran; then the arguments are checked, placed and traced.
"""

from __future__ import annotations

import contextvars
import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax

from jaxcoll._collectives.same import Claims
from jaxcoll._compat.running import is_tracing
from jaxcoll._runtime.call import InnerDeadlines, describe_kind
from jaxcoll._runtime.dispatch import has_queue
from jaxcoll._step.placed_arguments import memory_key

MISSED = object()
"""The result of a quick call whose arguments must be looked at; nothing was run."""

# The program of the quick call that this thread makes: it may be traced for nothing new
_quick_program: contextvars.ContextVar[Any] = contextvars.ContextVar("jaxcoll_quick", default=None)


class UnlikeError(Exception):
    """A quick call got arguments of types that the program was not traced for."""


class JittedProgram:
    """A program that is compiled once for each shape of its arguments.

    Args:
      program: the function to jit.
      inner: the deadlines of reductions inside, from its traces.
      claims: values that `jc.same` claims are equal, and what a comparing program reports.
      **options: of `jax.jit`.

    Attributes:
      jitted: the function to call with placed arguments.
    """

    def __init__(
        self, program: Callable[..., Any], inner: InnerDeadlines, claims: Claims, **options: Any
    ) -> None:
        @functools.wraps(program)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if _quick_program.get() is self:
                raise UnlikeError
            return program(*args, **kwargs)

        self.inner, self.claims = inner, claims
        self._traced: set[Hashable] = set()  # kinds of arguments
        self._donates = bool(options.get("donate_argnums"))
        self._jit = functools.partial(jax.jit, traced, **options)
        self.jitted = self._jit()

    def add_options(self, **options: Any) -> None:
        """Jit the program with more options; it keeps its traces."""
        self.jitted = self._jit(**options)

    def trace_once(self, *args: Any, **kwargs: Any) -> bool:
        """Trace the program once for such arguments, for its deadlines and claims.

        JAX keeps the trace. Return whether the arguments are of a new kind.
        """
        kind = describe_kind((args, kwargs))
        if is_new := kind not in self._traced:
            self.jitted.trace(*args, **kwargs)
            self._traced.add(kind)  # afterwards: a trace may fail
        return is_new

    def quick_call(
        self, arguments: tuple[Any, ...], placed: tuple[Any, ...]
    ) -> Callable[[tuple[Any, ...]], Any] | None:
        """Make a function that calls the program with such arguments, or returns `MISSED`.

        It is for calls within this process without a deadline, and None if placing these arguments
        moved any.
        """
        leaves, tree = jax.tree.flatten(arguments)
        others, placed_tree = jax.tree.flatten(placed)
        # An argument that had to be placed would have to be placed in a quick call, too.
        if len(leaves) != len(others) or not all(map(operator.is_, leaves, others)):
            return None
        shardings = [x.sharding for x in leaves]
        on_one_device = leaves and len(shardings[0].device_set) == 1
        return functools.partial(
            self._call_quickly,
            tree,
            shardings,
            None if placed_tree == tree else placed_tree.unflatten,
            memory_key if on_one_device else id,
        )

    def _call_quickly(
        self,
        tree: Any,
        shardings: list[Any],
        unflatten: Callable[[Any], Any] | None,
        key: Callable[[Any], int],
        arguments: tuple[Any, ...],
    ) -> Any:
        # A deadline would need another thread, and claims are compared for each new shape.
        if self.inner.shortest or self.claims.found or has_queue() or is_tracing():
            return MISSED
        leaves, given = jax.tree.flatten(arguments)
        if given != tree or _find_shardings(leaves) != shardings:
            return MISSED
        if self._donates and len({*map(key, leaves)}) < len(leaves):
            return MISSED  # donated twice, it would end the process
        token = _quick_program.set(self)
        try:
            return self.jitted(*(unflatten(leaves) if unflatten else arguments))
        except UnlikeError:
            return MISSED
        except RuntimeError as error:
            if "Array has been deleted" in str(error):  # before anything ran
                return MISSED  # a closer look says more
            raise
        finally:
            _quick_program.reset(token)


def allow_traces() -> None:
    """Let this thread trace any program, even in a host callback of one that is called quickly.

    On one device the caller's own thread may run the callback.
    """
    _quick_program.set(None)


def _find_shardings(leaves: list[Any]) -> list[Any] | None:
    """List the shardings of arrays; JAX never places others, which may end the process."""
    try:
        return [x.sharding for x in leaves]
    except (AttributeError, TypeError):  # not arrays
        return None
