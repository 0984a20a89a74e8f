"""Parses `all_reduce_spec`, which gives `MultiWorkerAllReduce` an algorithm for each array size."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxcoll._plan.algorithms import TENSORFLOW, canonical
from jaxcoll._plan.checks import is_integer

EXPECTED = (
    'a name such as "nccl/xring", a tuple (name, shards, limit in bytes) of which the last two '
    "may be left out, or a list of such tuples"
)


class SpecTuple(NamedTuple):
    """One line of a specification."""

    algorithm: str  # a canonical name
    shards: int = 1  # how many parts each array is cut in, or how many owners a shuffle has
    limit: int = -1  # bytes up to which an array is for this line; -1: any


def parse_spec(spec: Any) -> tuple[SpecTuple, ...]:
    """A specification in any of its forms, as lines with rising limits, the last without one.

    Args:
      spec: a name; a tuple or named tuple of a name, a number of shards (default 1) and a limit
        in bytes (default -1, none); or a list of such tuples.

    Returns:
      One line a tuple, in order.

    Raises:
      ValueError: it is something else; a name, number or limit is invalid; the limits do not rise,
        or do not end in -1.

    Examples:
      >>> for line in parse_spec([("nccl", 2, 1024), ("pscpu/pscpu",)]): print(*line)
      native 2 1024
      shuffle/shuffle 1 -1
    """
    if isinstance(spec, str):
        spec = (spec,)
    given = [spec] if isinstance(spec, tuple) else spec
    if not isinstance(given, list) or not given:
        raise ValueError(f"`all_reduce_spec` must be {EXPECTED}; got {spec!r}.")
    lines = tuple(_line(item, spec) for item in given)
    limits = [line.limit for line in lines]
    if limits[-1] != -1 or -1 in limits[:-1]:
        raise ValueError(
            "the limits of `all_reduce_spec` must end in -1, which stands for any size, and have "
            f"it nowhere else; got {limits} in {spec!r}."
        )
    if sorted(set(limits[:-1])) != limits[:-1]:
        raise ValueError(
            f"the limits of `all_reduce_spec` must increase from tuple to tuple; got {limits} in "
            f"{spec!r}."
        )
    return lines


def _line(item: Any, spec: Any) -> SpecTuple:
    if not isinstance(item, tuple) or not 1 <= len(item) <= 3 or not isinstance(item[0], str):
        raise ValueError(
            f"`all_reduce_spec` must be {EXPECTED}; got {item!r}"
            + ("." if item is spec else f" in {spec!r}.")
        )
    name: str = item[0]
    shards, limit = (*item[1:], *(1, -1)[len(item) - 1 :])
    try:
        algorithm = canonical(name)
    except ValueError:
        algorithm = ""
    if not algorithm or algorithm.count("/") > 1:
        raise ValueError(
            f"`all_reduce_spec` names the algorithm {name!r}; expected one of "
            f"{', '.join(TENSORFLOW)}, or two of them as 'within a worker/between workers'."
        )
    if not is_integer(shards) or shards < 1:
        raise ValueError(
            f"the shards of `all_reduce_spec` must be a positive integer; got {shards!r} in "
            f"{item!r}."
        )
    if not is_integer(limit) or (limit < 0 and limit != -1):
        raise ValueError(
            "the limits of `all_reduce_spec` must be numbers of bytes, or -1 for any size; got "
            f"{limit!r} in {item!r}."
        )
    return SpecTuple(algorithm, int(shards), int(limit))
