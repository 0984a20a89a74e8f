"""What the cost model expects of a compiled collective."""

import dataclasses

import pytest

from jaxcoll._observe.overlap import predicted
from jaxcoll._observe.parse.collective import KINDS, Collective, Operand
from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.world import World
from jaxcoll._prices.predict import cost_of
from jaxcoll._prices.rates import rates_of

TWO_HOSTS = rates_of(World("gpu", (16,), processes=2, device_kind="NVIDIA H100", hosts=2))
ALL, INNER, OUTER = (
    (tuple(range(16)),),
    (tuple(range(8)), tuple(range(8, 16))),
    tuple((k, k + 8) for k in range(8)),
)


def seconds(kind, groups, size=1 << 24, terms=TWO_HOSTS):
    c = Collective(kind, "c", (Operand("f32", (size,)),), max(map(len, groups)), groups, "main")
    return predicted(c, terms)


@pytest.mark.parametrize(
    ("groups", "sizes", "over"),
    [(ALL, (16,), (16,)), (INNER, (2, 8), (1, 8)), (OUTER, (2, 8), (2, 1))],
    ids=["all", "inner", "outer"],
)
def test_an_all_reduce_costs_what_a_plan_says(groups, sizes, over):
    cost = cost_of(stages("native", 0, over), 4 << 24, sizes, TWO_HOSTS)
    assert seconds("all-reduce", groups) == pytest.approx(cost.seconds + TWO_HOSTS.array)


@pytest.mark.parametrize("kind", KINDS)
def test_law_links_between_hosts_cost_more_and_so_do_more_bytes(kind):
    pairs = {"near": ((0, 1),), "far": ((0, 8),)}
    assert 0 < seconds(kind, pairs["near"]) < seconds(kind, pairs["far"])
    assert seconds(kind, INNER) < seconds(kind, INNER, size=1 << 26)


def test_a_reduce_scatter_and_an_all_gather_of_its_shard_cost_the_same_bytes():
    whole, shard = 1 << 26, 1 << 22
    parts = seconds("reduce-scatter", ALL, whole), seconds("all-gather", ALL, shard)
    added = 15 / 16 * 4 * whole * TWO_HOSTS.reduce  # a gather adds nothing up
    assert parts[0] == pytest.approx(parts[1] + added)


@pytest.mark.parametrize("size", [256, 1 << 26])
def test_the_halves_of_an_all_reduce_cost_as_much_and_one_call_more(size):
    terms = dataclasses.replace(TWO_HOSTS, native=())  # what was measured is of all-reduces alone
    halves = (("reduce-scatter", size), ("all-gather", size // 16))
    found = sum(seconds(kind, ALL, each, terms) for kind, each in halves)
    want = seconds("all-reduce", ALL, size, terms) + terms.call + terms.array
    assert found == pytest.approx(want, rel=1e-9)


def test_a_group_of_one_costs_nothing():
    assert seconds("all-reduce", ((0,), (1,))) == 0.0
