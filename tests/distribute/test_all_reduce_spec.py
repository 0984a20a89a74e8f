"""The specification of `MultiWorkerAllReduce`: its forms, and what is refused."""

from typing import NamedTuple

import numpy as np
import pytest

from jaxcoll._distribute.multi_worker_all_reduce import parse_spec

EIGHT = {
    "nccl": "native", "xring": "ring", "pscpu": "shuffle", "psgpu": "shuffle",
    "nccl/xring": "native/ring", "nccl/rechd": "native/halving_doubling",
    "nccl/pscpu": "native/shuffle", "pscpu/pscpu": "shuffle/shuffle",
}  # fmt: skip


class Named(NamedTuple):
    alg: str
    shards: int
    limit: int


@pytest.mark.parametrize("name", EIGHT)
def test_the_eight_algorithms(name):
    assert parse_spec(name) == ((EIGHT[name], 1, -1),)
    assert parse_spec(name.upper()) == parse_spec(name)


def test_L74_the_forms():
    line = ("ring", 1, -1)
    for spec in ("xring", ("xring",), [("xring",)], ("xring", 1), ("xring", 1, -1)):
        assert parse_spec(spec) == (line,)
    assert parse_spec(("xring", np.int64(3))) == (("ring", 3, -1),)
    named = [Named("nccl", 2, 1024), Named("pscpu/pscpu", 2, -1)]
    assert parse_spec(named) == (("native", 2, 1024), ("shuffle/shuffle", 2, -1))
    assert parse_spec(named[1]) == (("shuffle/shuffle", 2, -1),)
    assert parse_spec("ring/halving_doubling") == (("ring/halving_doubling", 1, -1),)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((spec, "must be a name such as .*, or a list of such tuples; got ")
          for spec in ((), ("xring", 1, -1, 0), ["xring"], {}, [], 3, (1, "xring"), [("nccl",), 3])),
        *((spec, "names the algorithm '.*'; expected one of nccl, xring, rechd, pscpu, psgpu, or two")
          for spec in ("", "nccl/", "nccl/xring/xring", ("max", 1, -1))),
        *((("nccl", *numbers), "expects a positive number of shards, and a limit .*; got .'nccl', ")
          for numbers in ((0,), (1.0,), (True,), (1, -2), (1, 1.5), (1, True))),
        (("nccl", 1, 1024), r"increase from tuple to tuple and end in -1, .*; got \[1024\] in \('nccl'"),
        *(([("nccl", 1, first), ("xring", 1, 4), ("nccl", 1, last)], "increase from .* end in -1")
          for first, last in ((8, -1), (4, -1), (-1, -1), (2, 8))),
    ],
)  # fmt: skip
def test_L73_L74_what_is_malformed_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_spec(spec)
