"""Finds the batch among a step's arguments, by position, by name or from the signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxcoll._plan.checks import kind_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Slot = int | str
"""An argument of a call: the position it was passed at, or the keyword."""


class Call(NamedTuple):
    """The arguments of one call of a step."""

    # Positional arguments, including those that were passed by keyword
    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # all others
    batch: tuple[Slot, ...]  # the arguments that are split, in order

    def at(self, slot: Slot) -> Any:
        """Return one of the arguments."""
        return self.kwargs[slot] if isinstance(slot, str) else self.args[slot]

    def map(self, split: Callable[[Any], Any], whole: Callable[[Any], Any]) -> Call:
        """Return the call with `split` applied to each batch and `whole` to all other arguments."""
        args = tuple((split if i in self.batch else whole)(x) for i, x in enumerate(self.args))
        named = self.kwargs.items()
        kwargs = {name: (split if name in self.batch else whole)(x) for name, x in named}
        return Call(args, kwargs, self.batch)

    def missing_message(self, place: Slot, setting: str) -> str:
        """Return the message for a setting that names an argument which this call lacks."""
        return (
            f"`data_parallel`: argument {place!r} is named in `{setting}`, but the step was called "
            f"with {len(self.args)} positional arguments"
            + (f" and {', '.join(map(repr, self.kwargs))}." if self.kwargs else ".")
        )


def slots(argument: str, value: Any) -> tuple[Slot, ...]:
    """Return the positions or names in a value of `batch_argnums` or `donate_argnums`."""
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not all(isinstance(p, int | str) and not isinstance(p, bool) for p in several):
        expected = "a position or a name of an argument, or a sequence of these"
        raise ValueError(f"`{argument}` must be {expected}; got {value!r}.")
    return tuple(several)


_UNNAMED = """\
`data_parallel`: which arguments of {step} are the batch, to be split over the replicas by rows? \
For a step with two parameters it is the second; otherwise name them:
    jc.data_parallel({name}, batch_argnums={example})
All others are whole on every replica."""


def _lacks(setting: str, place: str, names: Iterable[str]) -> str:
    return (
        f"`data_parallel`: argument {place!r} is named in `{setting}`, but the step has "
        f"{', '.join(map(repr, names)) or 'none'}"
    )


class Signature:
    """Finds the batch among a call's arguments: those in `batch`, or the last of one or two.

    Parameters with a default do not count.
    """

    def __init__(self, step: Callable[..., Any], batch: tuple[Slot, ...] | None) -> None:
        self._step = step
        self._batch = batch
        self._batch_by_count: dict[int, tuple[Slot, ...]] = {}

    def __str__(self) -> str:
        name = getattr(self._step, "__name__", type(self._step).__name__)
        try:
            batch = repr(self._chosen)
        except ValueError:  # the batch is not named; a call will raise this
            batch = "None"
        return f"{name}{self._signature or '(...)'}, batch_argnums={batch}"

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self._step)
        except (TypeError, ValueError):  # functions in C may have none
            return None

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """Names of the parameters that may be passed by position."""
        parameters = self._signature.parameters.values() if self._signature else ()
        return tuple(p.name for p in parameters if p.kind in _POSITIONAL)

    @functools.cached_property
    def _chosen(self) -> tuple[Slot, ...]:
        if self._batch is not None:
            return self._batch
        parameters = [*self._signature.parameters.values()] if self._signature else []
        needed = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
        if len(needed) in (1, 2) and all(p.kind != p.VAR_POSITIONAL for p in needed):
            return (needed[-1].name,)
        name = getattr(self._step, "__name__", "")
        name = name if name.isidentifier() else "step"
        named = [p.name for p in needed if p.kind != p.VAR_POSITIONAL]
        example = repr(named[-1]) if named else "(1,)"
        raise ValueError(_UNNAMED.format(step=self._named, name=name, example=example))

    @property
    def _named(self) -> str:
        return f"{getattr(self._step, '__name__', 'step')}{self._signature or '(...)'}"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the arguments in the order of the signature, and the batch among them."""
        if not kwargs and len(args) in self._batch_by_count:
            return Call(args, kwargs, self._batch_by_count[len(args)])
        by_name = bool(kwargs)
        if self._signature is not None:
            args, kwargs = self._bound(self._signature, args, kwargs)
        call = Call(args, kwargs, ())
        slots: list[Slot] = [*range(len(args)), *(n for n in self._names if n in kwargs)]
        batch = dict.fromkeys(self._slot(place, slots, call) for place in self._chosen)
        call = call._replace(batch=tuple(batch))
        if not by_name:
            self._batch_by_count[len(args)] = call.batch
        return call

    def _bound(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            passed = ", ".join([*map(kind_of, args), *(f"{n}=" for n in kwargs)])
            raise TypeError(
                f"`data_parallel`: {error}: the step is {self._named}, but was called with "
                f"({passed})."
            ) from None
        return bound.args, bound.kwargs

    def _slot(self, place: Slot, slots: list[Slot], call: Call) -> Slot:
        args, kwargs = call.args, call.kwargs
        if isinstance(place, str):
            named = self._signature.parameters if self._signature else {}
            if named and place not in {*named, *kwargs}:
                raise ValueError(_lacks("batch_argnums", place, named) + ".")
            at = self._names.index(place) if place in self._names else len(args)
            if place in kwargs or at < len(args):
                return place if place in kwargs else at
        elif place < 0 and -len(slots) <= place:
            return slots[place]
        elif 0 <= place < len(args):
            return place
        elif len(args) <= place < len(self._names) and self._names[place] in kwargs:
            return self._names[place]
        raise ValueError(call.missing_message(place, "batch_argnums"))

    def positions(self, places: Sequence[Slot]) -> tuple[int, ...]:
        """Return the positions of parameters, given positions and names.

        Raises:
          ValueError: a name is none of a parameter that can be passed by position.
        """
        for place in places:
            if isinstance(place, str) and place not in self._names:
                raise ValueError(_lacks("donate_argnums", place, self._names) + " by position.")
        return tuple(self._names.index(p) if isinstance(p, str) else p for p in places)

    def name(self, slot: Slot) -> str:
        """Return the name of an argument in messages: its parameter's name, if that is known."""
        if isinstance(slot, str):
            return slot
        return self._names[slot] if slot < len(self._names) else f"args[{slot}]"
