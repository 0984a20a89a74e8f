"""A jitted program whose calls, once its arguments are in place, cost what JAX's own calls cost.

JAX looks up the types of all arguments in every call. Once a call had all of its arguments in
place, the next one is therefore handed, as it is, to a jitted function with these shardings. For
arguments of which the program was never traced, that function raises `UnlikeError` before anything
ran; then they are checked, placed and traced.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcoll._collectives.same import Claims
from jaxcoll._compat.running import is_tracing
from jaxcoll._runtime.call import InnerDeadlines
from jaxcoll._runtime.dispatch import has_queue

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
        self._traced, self._donates = traced, bool(options.get("donate_argnums"))
        self.add_options(**options)

    def add_options(self, **options: Any) -> None:
        """Jit the program with more options; it keeps its traces."""
        self._jit = functools.partial(getattr(self, "_jit", jax.jit), **options)
        self.jitted = self._jit(self._traced)
        # Each with its shardings: JAX remembers in it the types that it was called with
        self._quick: dict[Any, Any] = {}

    def quick_call(self, placed: Sequence[Any]) -> Callable[[tuple[Any, ...]], Any]:
        """Return a function that calls the program with arguments like `placed` ones, or `MISSED`.

        It is for calls within this process without a deadline.
        """
        shardings = tuple(map(_find_shardings, placed))
        leaves, tree = jax.tree.flatten(shardings)
        key = tree, *leaves
        if key not in self._quick:
            self._quick[key] = self._jit(self._traced, in_shardings=shardings)
        return functools.partial(self._call_quickly, self._quick[key])

    def _call_quickly(self, jitted: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        # A deadline would need another thread, and claims are compared for each new shape.
        if self.inner.shortest or self.claims.found or has_queue() or is_tracing():
            return MISSED
        if self._donates and _has_shared(args):  # donated twice, it would end the process
            return MISSED
        token = _quick_program.set(self)
        try:
            return jitted(*args)
        except jax.errors.JaxRuntimeError:  # of a program that ran
            raise
        except (UnlikeError, TypeError, ValueError, RuntimeError):
            return MISSED  # a closer look says what is wrong
        finally:
            _quick_program.reset(token)


def _find_shardings(argument: Any) -> Any:
    """Read the shardings of an argument: one for all of its arrays, or a tree of them."""
    shardings = {x.sharding for x in jax.tree.leaves(argument)}
    if len(shardings) > 1:
        return jax.tree.map(lambda x: x.sharding, argument)
    return next(iter(shardings), None)


def _has_shared(args: tuple[Any, ...]) -> bool:
    leaves = jax.tree.leaves(args)
    return len({*map(id, leaves)}) < len(leaves)
