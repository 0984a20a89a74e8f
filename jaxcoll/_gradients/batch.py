"""The batch of a call: the one rule of every function that splits a batch by rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._collectives.same import Claims
from jaxcoll._collectives.scope import entered, scope_here
from jaxcoll._collectives.shards import is_shards
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.packs.leaves import flatten_with_paths

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Slot = int | str
"""An argument of a call: the position it was passed at, or the keyword."""

_UNNAMED = """\
`{caller}`: which arguments of {function} are the batch, to be split by rows? Unless they are \
named, it is the only parameter, or the second of two; parameters with a default, `*args` and \
`**kwargs` count, too, if they get arrays. Name them, as in
    {line}
All others are whole {where}."""

_BROADCAST = """\
`{caller}`: {one} has {rows} rows and {other} has {others}. The whole arrays do not fit each \
other, but their shares, {share} and {another}, broadcast; with more rows this fails, {error} Pass \
equally many rows of both. If you mean one row for each share, index it: `{one}[0]`."""

_HALF_NAMED = """\
`{caller}`: {other} has {others} rows, like the whole batch, but is not named as a part of it. A \
share of {one}, {share}, broadcasts against all of it, {another}; with more rows this fails, \
{error} Name both in `batch_argnums`. If every share means all rows of {other}, index `{one}[0]`."""


class Call(NamedTuple):
    """The arguments of one call of a step."""

    # Positional arguments, including those that were passed by keyword
    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # all others
    batch: tuple[Slot, ...]  # the arguments that are split, in order

    def get(self, slot: Slot) -> Any:
        return self.kwargs[slot] if isinstance(slot, str) else self.args[slot]

    def map(self, split: Callable[[Any], Any], whole: Callable[[Any], Any]) -> Call:
        """Apply `split` to each batch and `whole` to all other arguments."""
        args = tuple((split if i in self.batch else whole)(x) for i, x in enumerate(self.args))
        named = self.kwargs.items()
        kwargs = {name: (split if name in self.batch else whole)(x) for name, x in named}
        return Call(args, kwargs, self.batch)

    def replace_batch(self, batch: Sequence[Any]) -> Call:
        """Put other values in the place of the arguments that are split, in order."""
        new = dict(zip(self.batch, batch, strict=True))
        args = tuple(new.get(i, x) for i, x in enumerate(self.args))
        kwargs = {name: new.get(name, x) for name, x in self.kwargs.items()}
        return Call(args, kwargs, self.batch)


def slots(argument: str, value: Any) -> tuple[Slot, ...]:
    """Check and list the positions or names in a `batch_argnums` or `donate_argnums`."""
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not all(isinstance(p, int | str) and not isinstance(p, bool) for p in several):
        expected = "a position or a name of an argument, or a sequence of these"
        raise ValueError(f"`{argument}` must be {expected}; got {value!r}.")
    return tuple(several)


class Signature:
    """Finds the batch among the arguments of a call.

    It is what `batch` names; or else the only parameter, or the second of two, if a call passes
    nothing for other parameters that could be split. A parameter that a call leaves at its default
    cannot be the batch, nor can numbers, but an array could.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        batch: tuple[Slot, ...] | None,
        caller: str = "data_parallel",
        line: str = "jc.data_parallel({name}, batch_argnums={batch})",  # to paste, in a message
        where: str = "on every replica",  # the other arguments are whole there
    ) -> None:
        self._function, self._batch = function, batch
        self._caller, self._line, self._where = caller, line, where
        self._batch_by_count: dict[int, tuple[Slot, ...]] = {}
        self._signature = None
        with contextlib.suppress(TypeError, ValueError):  # functions in C may have none
            self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values() if self._signature else ()
        # The parameters that may be passed by position, and those that every call passes
        self._names = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
        passed = (p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC)
        self._needed = tuple(p.name for p in passed)

    def __str__(self) -> str:
        batch = self._batch
        if batch is None and len(self._needed) in (1, 2):
            batch = (self._needed[-1],)
        return f"{self._named}, batch_argnums={batch}"

    @property
    def _named(self) -> str:
        inner = self._function
        while isinstance(inner, functools.partial):
            inner = inner.func
        name = getattr(inner, "__name__", type(inner).__name__)
        return f"{name}{self._signature or '(...)'}"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Put the arguments in the order of the signature, and find the batch among them."""
        if not kwargs and len(args) in self._batch_by_count:
            return Call(args, kwargs, self._batch_by_count[len(args)])
        passed, others = None if kwargs else len(args), {}
        if self._signature is not None:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                given = ", ".join([*map(describe_type, args), *(f"{n}=" for n in kwargs)])
                raise TypeError(
                    f"`{self._caller}`: {error}: the function is {self._named}, but was called "
                    f"with ({given})."
                ) from None
            args, kwargs = bound.args, bound.kwargs
            others = {n: x for n, x in bound.arguments.items() if n not in self._needed}
        call = Call(args, kwargs, ())
        if self._batch is None and (len(self._needed) not in (1, 2) or _has_rows(others)):
            raise ValueError(self._explain_unnamed(call))
        places = self._needed[-1:] if self._batch is None else self._batch
        batch = dict.fromkeys(self._slot(place, call) for place in places)
        call = call._replace(batch=tuple(batch))
        # Arguments with defaults are judged by their values, so in each call.
        if passed is not None and (self._batch is not None or not others):
            self._batch_by_count[passed] = call.batch
        return call

    def are_in_order(self, positional: int, kwargs: dict[str, Any]) -> bool:
        """Arguments by keyword follow the positional ones as their parameters do."""
        return self._names[positional:][: len(kwargs)] == (*kwargs,)

    def _explain_unnamed(self, call: Call) -> str:
        """Ask for the batch's names, with the line that probably gives them."""
        slots: list[Slot] = [*range(len(call.args)), *call.kwargs]
        rows = {slot: {np.shape(x)[:1] for x in jax.tree.leaves(call.get(slot))} for slot in slots}
        known: dict[Slot, Slot] = dict(enumerate(self._names))
        second = [s for s in slots if self._needed[1:] == (known.get(s, s),)]
        *_, last = [s for s in (*slots, *second) if rows[s] - {()}] or slots or [1]
        # Arrays of a batch usually have equally many rows, and those of parameters do not.
        alike = [s for s in slots[1:] if len(rows[s]) == 1 and rows[s] == rows[last]]
        places = [known.get(s, s) for s in alike or [last]]
        batch = repr(tuple(places) if len(places) > 1 else places[0])
        name = getattr(self._function, "__name__", "")
        line = self._line.format(name=name if name.isidentifier() else "step", batch=batch)
        return _UNNAMED.format(
            caller=self._caller, function=self._named, line=line, where=self._where
        )

    def _slot(self, place: Slot, call: Call) -> Slot:
        args, kwargs = call.args, call.kwargs
        slots: list[Slot] = [*range(len(args)), *(n for n in self._names if n in kwargs)]
        if isinstance(place, str):
            named = self._signature.parameters if self._signature else {}
            if named and place not in {*named, *kwargs}:
                raise ValueError(self._explain_lack("batch_argnums", place, named) + ".")
            position = self._names.index(place) if place in self._names else len(args)
            if place in kwargs or position < len(args):
                return place if place in kwargs else position
        elif place < 0 and -len(slots) <= place:
            return slots[place]
        elif 0 <= place < len(args):
            return place
        elif len(args) <= place < len(self._names) and self._names[place] in kwargs:
            return self._names[place]
        raise ValueError(self.explain_missing(call, place, "batch_argnums"))

    def positions(self, places: Sequence[Slot]) -> tuple[int, ...]:
        """Find the positions of parameters, given positions and names.

        Raises:
          ValueError: a name is none of a parameter that can be passed by position.
        """
        for place in places:
            if isinstance(place, str) and place not in self._names:
                lack = self._explain_lack("donate_argnums", place, self._names)
                raise ValueError(f"{lack} by position.")
        return tuple(self._names.index(p) if isinstance(p, str) else p for p in places)

    def explain_missing(self, call: Call, place: Slot, setting: str) -> str:
        more = f" and {', '.join(map(repr, call.kwargs))}" if call.kwargs else ""
        return (
            f"`{self._caller}`: argument {place!r} is named in `{setting}`, but the function was "
            f"called with {len(call.args)} positional arguments{more}."
        )

    def _explain_lack(self, setting: str, place: str, names: Iterable[str]) -> str:
        return (
            f"`{self._caller}`: argument {place!r} is named in `{setting}`, but the function has "
            f"{', '.join(map(repr, names)) or 'none'}"
        )

    def name(self, slot: Slot) -> str:
        """Name an argument in messages: by its parameter, if that is known."""
        if isinstance(slot, str):
            return slot
        return self._names[slot] if slot < len(self._names) else f"args[{slot}]"


def _has_rows(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_shards)
    return any(np.ndim(x) for x in leaves if not is_shards(x))


def check_shares(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    call: Call,  # of one share, while it is traced
    shares: int,
    name_of: Callable[[Slot], str],
    caller: str,
) -> None:
    """Refuse a function that broadcasts leaves of its share which as whole arrays do not fit.

    Leaves with different numbers of rows may belong together in any way: nodes, and a row for each
    graph. So the function is traced with more rows, which fails if it broadcast a single one. That
    also fails where it takes a constant number of rows, or a constant number for each row of
    another leaf; so it is enough if all leaves may have more rows, or only those with few.

    Raises:
      ValueError: the function broadcasts them.
    """
    names: dict[tuple[int, ...], str] = {}
    for slot in call.batch:
        for path, x in flatten_with_paths(call.get(slot))[0]:
            names.setdefault(np.shape(x), name_of(slot) + path)
    pairs = [p for p in itertools.permutations(names, 2) if _may_broadcast(*p, shares)]
    unnamed = _find_unnamed(call, {few[0] * shares for few in names if few}, name_of)
    pairs += [(few, many) for few in names for many in unnamed if few[:1] == (1,) != many[:1]]
    if not pairs or shares == 1:
        return
    sizes = {size for x in jax.tree.leaves(call) for size in np.shape(x)}
    # No dimension has this size, so none fits by chance, as an even multiple of rows may.
    times = next(n for n in itertools.count(3, 2) if n not in sizes)
    quiet = dataclasses.replace(scope_here(), record=lambda plan: None, claims=Claims())

    def error_with_more(shapes: Iterable[tuple[int, ...]]) -> Exception | None:
        def more(x: Any) -> Any:
            return jnp.concatenate([x] * times) if np.shape(x) in shapes else x

        bigger = call.map(functools.partial(jax.tree.map, more), lambda tree: tree)
        leaves, treedef = jax.tree.flatten((bigger.args, bigger.kwargs))

        # Arrays are arguments of the trace, so that objects that hold them belong to it.
        def run_flat(*arrays: Any) -> None:
            rest = iter(arrays)
            run(*treedef.unflatten([next(rest) if isinstance(x, jax.Array) else x for x in leaves]))

        try:
            with entered(quiet):
                jax.eval_shape(run_flat, *[x for x in leaves if isinstance(x, jax.Array)])
        except Exception as error:
            return error

    # All leaves grow together, as rows that belong to each other do; or only those with few.
    errors = [error_with_more(names), error_with_more({few for few, _ in pairs})]
    if None in errors:
        return
    (few, many), error = pairs[0], errors[1]
    fields = dict(zip(("one", "rows", "share"), (names[few], few[0] * shares, few), strict=True))
    fields |= {"error": f"{str(error).splitlines()[0].rstrip('.')}.", "caller": caller}
    if many in names:
        fields |= {"other": names[many], "others": many[0] * shares, "another": many}
        raise ValueError(_BROADCAST.format(**fields)) from error
    fields |= {"other": unnamed[many], "others": many[0], "another": many}
    raise ValueError(_HALF_NAMED.format(**fields)) from error


def _find_unnamed(
    call: Call, rows: set[int], name_of: Callable[[Slot], str]
) -> dict[tuple[int, ...], str]:
    """Find the shapes of arguments that are probably a part of the batch, and were not named.

    All their arrays have the whole batch's rows. The first argument is the parameters; what has
    their shapes may be the state of an optimizer.
    """
    slots: list[Slot] = [*range(1, len(call.args)), *call.kwargs]
    trees = {
        slot: flatten_with_paths(call.get(slot))[0] for slot in slots if slot not in call.batch
    }
    params = {np.shape(x) for x in jax.tree.leaves(call.args[:1])}
    return {
        np.shape(x): name_of(slot) + path
        for slot, leaves in trees.items()
        if len({np.shape(x)[:1] for _, x in leaves}) == 1
        for path, x in leaves
        if np.shape(x) not in params and rows.intersection(np.shape(x)[:1])
    }


def _may_broadcast(few: tuple[int, ...], many: tuple[int, ...], shares: int) -> bool:
    """True if shares of these shapes may broadcast, but the whole arrays would not."""
    whole, others = ((shape[0] * shares, *shape[1:]) for shape in (few, many))
    # A single row broadcasts, perhaps after a product or a sum over columns.
    fit = few[0] == 1 or (_fit(few, many) and not _fit(whole, others))
    return few[0] < many[0] and fit


def _fit(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))
