"""Which arguments of a step are the batch: by position, by name, by the step's signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcoll._spmd.shards import is_shards

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BATCHES = {"batch", "batches", "x", "xs", "inputs", "images", "tokens", "data", "examples"}
"""What batches are called."""

FLAGS = """\
`data_parallel`: while a step is traced, all of its arguments are arrays, whose values are not \
known, numbers and flags such as `train=True` as well. Bind what the step decides by before you \
wrap it, `jc.data_parallel(functools.partial(step, train=True))`, one wrapped step for each value; \
or decide in the program, by `jnp.where` or `lax.cond`."""

Slot = int | str
"""An argument of a call: the position it was passed at, or the keyword."""


class Call(NamedTuple):
    """The arguments of one call of a step."""

    # Positional ones; those among them that were passed by keyword stand at their place
    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # the rest
    batch: tuple[Slot, ...]  # which of them are split, in order

    def at(self, slot: Slot) -> Any:
        """One of the arguments."""
        return self.kwargs[slot] if isinstance(slot, str) else self.args[slot]

    def map(self, split: Callable[[Any], Any], whole: Callable[[Any], Any]) -> Call:
        """The same call with `split` of each batch and `whole` of everything else."""
        args = tuple((split if i in self.batch else whole)(x) for i, x in enumerate(self.args))
        named = self.kwargs.items()
        kwargs = {name: (split if name in self.batch else whole)(x) for name, x in named}
        return Call(args, kwargs, self.batch)

    def misses(self, place: Slot) -> str:
        """What is wrong with a setting that names what this call does not have."""
        return (
            f"`data_parallel`: argument {place!r} is named in `batch_argnums` or "
            f"`donate_argnums`, but the step was called with {len(self.args)} positional arguments"
            + (f" and {', '.join(map(repr, self.kwargs))}." if self.kwargs else ".")
        )


def positions(argument: str, value: Any, *, names: bool = False) -> tuple[Slot, ...]:
    """The positions, or names, that `batch_argnums` or `donate_argnums` gives."""
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    kinds = (int, str) if names else (int,)
    if not all(isinstance(p, kinds) and not isinstance(p, bool) for p in several):
        what = "an int or a sequence of ints" + " (or names of arguments)" * names
        raise ValueError(f"`{argument}` must be {what}; got {value!r}.")
    return tuple(several)


class Signature:
    """What of a call is the batch: what `batch` names, or the last positional array or tree."""

    def __init__(self, step: Callable[..., Any], batch: tuple[Slot, ...] | None) -> None:
        self._step = step
        self._batch = batch
        self._usual: dict[Any, tuple[Slot, ...]] = {}

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self._step)
        except (TypeError, ValueError):  # one of C's has none
            return None

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """Of the parameters that may be passed by position."""
        parameters = self._signature.parameters.values() if self._signature else ()
        return tuple(p.name for p in parameters if p.kind in _POSITIONAL)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments in their places."""
        # What holds no array is no batch, and which arguments these are may change with the call.
        empty = tuple(i for i, x in enumerate(args) if not jax.tree.structure(x).num_leaves)
        usual = None if kwargs else self._usual.get((len(args), empty))
        if usual is not None:
            return Call(args, kwargs, usual)
        named, by_position = frozenset(kwargs), len(args)
        if kwargs and self._signature is not None:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        call = Call(args, kwargs, ())
        slots: list[Slot] = [*range(len(args)), *(n for n in self._names if n in kwargs)]
        if self._batch is None:
            # What was passed by keyword and has no rows is not a batch.
            last = max((k for k in range(by_position) if k not in empty), default=0)
            given = range(last + 1 if last else by_position)
            slots = [k for k in slots if k in given or _has_rows(call.at(k))]
        chosen = (-1,) if self._batch is None else self._batch
        call = call._replace(batch=tuple(dict.fromkeys(self._slot(p, slots, call) for p in chosen)))
        if self._batch is None:
            self._check_clear(call)
        if not named:
            self._usual[len(args), empty] = call.batch
        return call

    def _slot(self, place: Slot, slots: list[Slot], call: Call) -> Slot:
        args, kwargs = call.args, call.kwargs
        if isinstance(place, str):
            at = self._names.index(place) if place in self._names else len(args)
            if place in kwargs or at < len(args):
                return place if place in kwargs else at
        elif place < 0 and -len(slots) <= place:
            return slots[place]
        elif 0 <= place < len(args):
            return place
        elif len(args) <= place < len(self._names) and self._names[place] in kwargs:
            return self._names[place]
        raise ValueError(call.misses(place))

    def _check_clear(self, call: Call) -> None:
        """Refuse a call without `batch_argnums` in which another argument looks like the batch."""
        (chosen,) = call.batch
        rows = _rows(call.at(chosen))
        for other in (*range(len(call.args)), *call.kwargs):
            if other == chosen:
                continue
            value = call.at(other)
            among = other != 0 and rows is not None and rows == _rows(value)
            beside = among and not _alike(value, call.args[0] if call.args else None)
            if jax.tree.leaves(value) and (self._name(other) in _BATCHES or beside):
                why = f"has {rows} rows as well" if beside else "is called like a batch"
                raise ValueError(self._unclear(chosen, other, why))

    def check_one_row(self, call: Call, meets: Callable[[tuple[int, ...]], bool]) -> None:
        """Refuse a batch that nobody named, if a share of one row meets more rows elsewhere."""
        # It may be numbers for each class, say, that stand last, and its one row would be taken for
        # what all rows have in common where it broadcasts (`meets`) against another array's shape.
        if self._batch is not None:
            return
        (chosen,) = call.batch
        mine = _rows(call.at(chosen)) or 0
        for other, value in enumerate(call.args):
            if other in (0, chosen) or _alike(value, call.args[0]):
                continue
            shapes = {np.shape(leaf) for leaf in jax.tree.leaves(value)}
            if _rows(value) is None:  # rows of the batch beside numbers, or a state of parameters
                of_parameters = {np.shape(leaf) for leaf in jax.tree.leaves(call.args[0])}
                found = [x for x in shapes - of_parameters if x[:1] == (mine,) and meets(x)]
            else:
                found = [x for x in shapes if x[:1] > (mine,) and meets(x)]
            if found:
                rows = found[0][0]
                why = f"has {rows} rows, against which each replica's one row would broadcast"
                raise ValueError(self._unclear(chosen, other, why))

    def _name(self, slot: Slot) -> str:
        """The name of an argument in the step's signature; "" if that is not known."""
        if isinstance(slot, str):
            return slot
        return self._names[slot] if slot < len(self._names) else ""

    def _unclear(self, chosen: Slot, other: Slot, why: str) -> str:
        mine, others = (
            f"`{slot}`"
            if isinstance(slot, str)
            else f"args[{slot}]" + (f" (`{self._name(slot)}`)" if self._name(slot) else "")
            for slot in (chosen, other)
        )
        both = ", ".join(repr(k) for k in sorted((other, chosen), key=str))
        return (
            f"`data_parallel`: which arguments are the batch is not clear: {mine}, the last "
            f"positional one, would be split, and {others} {why}, but every replica would get the "
            f"whole of it. Pass `batch_argnums`: ({both}) splits both, {chosen!r} and {other!r} "
            "one of them alone."
        )


def bound_step(step: Any, instance: Any, bind: Callable[[Any], Any]) -> Any:
    """A step that is a method, for one instance; or, of a `classmethod`, for one class.

    An instance that is a pytree of arrays is the step's first argument, replicated, as with
    `jax.jit`. Any other is a constant of the program.
    """
    if not jax.tree_util.all_leaves([instance]):
        return functools.partial(step, instance)
    try:
        held = vars(instance)
    except TypeError:  # it has slots, and room for nothing else
        return bind(instance)
    key = f"_data_parallel_{id(step)}"
    found = held.get(key)
    if found is None or found[0] is not instance or found[1] is not step:
        # With the instance beside it, a copy of whose attributes has no step of its own yet; and
        # with the step, whose number another one gets once nobody holds it.
        found = (instance, step, bind(instance))
        if isinstance(instance, type):  # whose attributes can be read as a dict, but not written
            setattr(instance, key, found)
        else:
            held[key] = found
    return found[2]


def _rows(tree: Any) -> int | None:
    """How many rows every leaf of a tree has; None: not all have equally many."""
    if any(map(is_shards, jax.tree.leaves(tree, is_leaf=is_shards))):
        return None
    found = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    only = found.pop() if len(found) == 1 else ()
    return only[0] if only else None


def _has_rows(tree: Any) -> bool:
    return any(np.shape(leaf) for leaf in jax.tree.leaves(tree))


def _alike(one: Any, other: Any) -> bool:
    """Whether one tree may be the other's momentum, say: leaves of the same shapes."""
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (one, other)]
    return shapes[0] == shapes[1]
