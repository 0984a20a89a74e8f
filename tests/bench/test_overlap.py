"""`jaxcoll bench --overlap`: what of an exchange a step waits for."""

import json

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoll.bench.rank_pool import Team
from jaxcoll.bench.targets import from_checkout
from jaxcoll.bench.workloads import Workload
from jaxcoll.cli.main import main

overlap = from_checkout("--overlap: it is", "overlap")


class Machine(Team):
    """Communication takes 8 ms, of which a step waits for two; one rank is faster."""

    def __init__(self):
        super().__init__([], {"processes": 4})
        self.built = []

    def do(self, method, **arguments):
        if method == "costs":
            return [{"usual": {}}] * 2
        if method == "build":
            self.built.append((arguments["first"], arguments["stop"]))
        if method == "pipelined":
            assert len(arguments["names"]) == len(self.built)
            waits = 0.002 if arguments["compute"] else 0.008
            seconds = arguments["compute"] + waits * arguments["send"]
            return [seconds, seconds / 2]
        return [None, None]


def tree(*sizes):
    return Workload("tree", tuple(jax.ShapeDtypeStruct((n,), "float32") for n in sizes))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_every_leaf_is_in_one_part_and_no_part_is_larger_than_an_even_share_and_a_leaf(
    sizes, count
):
    parts = overlap.parts_of(tree(*sizes), count)
    assert [i for first, stop in parts for i in range(first, stop)] == list(range(len(sizes)))
    assert len(parts) <= count
    assert all(first < stop for first, stop in parts)
    even = sum(sizes) / count
    assert all(sum(sizes[first:stop]) <= even + 2 * max(sizes) for first, stop in parts)


def test_what_is_exposed_is_what_the_step_takes_beside_the_computation():
    machine, words = Machine(), []
    found = overlap.measure(
        tree(*[10] * 8), machine, parts=4, algorithm="auto", rounds=5, progress=words.append
    )
    assert machine.built == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert found.exposed.median == pytest.approx(0.25)
    assert found.communication.median == pytest.approx(0.008)
    assert found.compute.median == pytest.approx(0.008), "as long as the communication"
    assert found.twin.median == 1
    assert len(words) <= 4 + 3 + 5 + 1


@pytest.mark.processes
def test_over_two_processes(capsys):
    assert main(["bench", "--processes", "2", "--tree", "200x1KiB", "--overlap", "3",
                 "--rounds", "2", "--json", "-"]) == 0  # fmt: skip
    out, err = capsys.readouterr()
    (line,) = map(json.loads, out.splitlines())
    assert (line["processes"], line["parts"], line["bytes"]) == (2, 3, 204800)
    assert "exposed" in err
