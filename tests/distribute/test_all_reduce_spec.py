"""The specification of `MultiWorkerAllReduce`: its forms, and what is refused."""

from typing import NamedTuple

import numpy as np
import pytest

from jaxcoll._distribute.ops.all_reduce_spec import parse_spec

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


FORM = r"`all_reduce_spec` must be a name such as .*, or a list of such tuples; got "


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((), FORM + r"\(\)\."),
        (("xring", 1, -1, 0), FORM + r"\('xring', 1, -1, 0\)\."),
        (["xring"], FORM + r"'xring' in \['xring'\]"),
        ({}, FORM + r"\{\}"),
        ([], FORM + r"\[\]"),
        (None, FORM + "None"),
        (3, FORM + "3"),
        ((1, "xring"), FORM + r"\(1, 'xring'\)"),
        ((("nccl", 1, -1),), FORM + r"\(\('nccl', 1, -1\),\)"),
        ([("nccl", 1, 4), 3], FORM + r"3 in \[\('nccl', 1, 4\), 3\]"),
        ("", "names the algorithm ''; expected one of nccl, xring, rechd, pscpu, psgpu, or two of"),
        ("nccl/", "names the algorithm 'nccl/'; expected one of"),
        ("nccl/xring/xring", "names the algorithm 'nccl/xring/xring'"),
        (("max", 1, -1), "names the algorithm 'max'"),
        (("nccl", 0), r"shards of `all_reduce_spec` must be a positive integer; got 0 in \('nccl', 0\)"),
        (("nccl", -1), "must be a positive integer; got -1"),
        (("nccl", 1.0), "must be a positive integer; got 1.0"),
        (("nccl", True), "must be a positive integer; got True"),
        (("nccl", None, -1), "must be a positive integer; got None"),
        (("nccl", 1, -2), r"must be numbers of bytes, or -1 for any size; got -2 in \('nccl', 1, -2\)"),
        (("nccl", 1, 1.5), "or -1 for any size; got 1.5"),
        (("nccl", 1, "4"), "or -1 for any size; got '4'"),
        (("nccl", 1, True), "or -1 for any size; got True"),
        (("nccl", 1, 1024), r"must end in -1, .*; got \[1024\] in \('nccl', 1, 1024\)"),
        ([("nccl", 1, 4), ("xring", 1, 8)], r"must end in -1, .*; got \[4, 8\]"),
        ([("nccl", 1, -1), ("xring", 1, -1)], r"must end in -1, .* nowhere else; got \[-1, -1\]"),
        ([("nccl", 1, 8), ("xring", 1, 4), ("nccl",)], r"must increase from tuple to tuple; got \[8, 4, -1\]"),
        ([("nccl", 1, 8), ("xring", 1, 8), ("nccl",)], "must increase from tuple to tuple"),
    ],
)  # fmt: skip
def test_L73_L74_what_is_malformed_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_spec(spec)
