"""Dataclasses come back from JSON as they were, or not at all."""

import dataclasses
import enum
import json
from typing import Literal

import numpy as np
import pytest

from jaxcoll._show import codec


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: float


@dataclasses.dataclass(frozen=True)
class Shape:
    points: tuple[Point, ...]
    dtype: np.dtype
    colour: Colour
    pair: tuple[str, int] | None
    by: Literal["name", "size"]
    closed: bool = dataclasses.field(default=False, metadata=codec.OPTIONAL)


SHAPE = Shape((Point(1, 2.5), Point(3, 4)), np.dtype("int8"), Colour.RED, ("a", 1), "size", True)


def test_what_is_written_reads_as_an_equal_value():
    for value in (SHAPE, dataclasses.replace(SHAPE, pair=None, points=())):
        assert codec.read(Shape, json.loads(json.dumps(codec.plain(value)))) == value


def test_a_list_stands_for_a_dataclass():
    assert codec.read(tuple[Point, ...], [[1, 2.0]]) == (Point(1, 2.0),)


def test_only_a_field_that_came_later_may_be_missing():
    data = codec.plain(SHAPE)
    del data["closed"]
    assert codec.read(Shape, data) == dataclasses.replace(SHAPE, closed=False)
    del data["by"]
    with pytest.raises(ValueError, match="Shape lacks by"):
        codec.read(Shape, data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"area": 1}, "Shape has no area"),
        ({"points": [{"x": 1}]}, "Point lacks y"),
        ({"points": [[1, 2.0, 3]]}, r"expected Point, got '\[1, 2.0, 3\]'"),
        ({"points": [{"x": True, "y": 1}]}, "expected int, got 'True'"),
        ({"points": [{"x": 1.5, "y": 1}]}, "expected int, got '1.5'"),
        ({"points": [{"x": 1, "y": "1"}]}, "expected float, got '1'"),
        ({"points": {}}, r"expected tuple\[.*Point, ...\], got '{}'"),
        ({"points": 5}, r"expected tuple\[.*Point, ...\], got '5'"),
        ({"pair": ["a"]}, r"expected tuple\[str, int\], got"),
        ({"pair": [1, 1]}, "expected str, got '1'"),
        ({"colour": "BLUE"}, "expected Colour, got 'BLUE'"),
        ({"by": "age"}, r"expected typing.Literal\['name', 'size'\], got 'age'"),
        ({"dtype": 7}, "expected dtype, got '7'"),
        ({"dtype": None}, "expected dtype, got 'None'"),
        ({"closed": 1}, "expected bool, got '1'"),
    ],
    ids=str,
)
def test_what_is_of_another_type_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        codec.read(Shape, {**codec.plain(SHAPE), **changes})


def test_what_is_no_table_is_refused_where_one_is_expected():
    assert codec.read(dict[str, float], {"a": 1}) == {"a": 1}
    with pytest.raises(ValueError, match=r"expected dict\[str, float\], got '\[1\]'"):
        codec.read(dict[str, float], [1])
