"""Bytes and steps, counted in the compiled program, are the fewest there are and as planned."""

import itertools
import math

import numpy as np
import pytest
from cases import compiled_and_planned

SIZE = 10007
FLAT = ("ring", "halving_doubling", "shuffle")
PAIRS = [f"{a}/{b}" for a, b in itertools.product(("native", *FLAT), ("native", *FLAT))]
MESHES = ((2, 4), (4, 2), (1, 8), (8, 1))


def sent_by_the_busiest(collectives, n):
    """Wire bytes of the device that sends most, each device counted by itself."""
    sent = dict.fromkeys(range(n), 0)
    for c in collectives:
        for device in range(n):
            match c.kind:
                case "collective-permute":
                    sent[device] += c.nbytes * sum(device == source for source, _ in c.groups)
                case "all-to-all":
                    sent[device] += c.nbytes * (c.group_size - 1) // c.group_size
                case _:
                    sent[device] += c.wire_bytes
    return max(sent.values())


def sends_the_fewest(shape, algorithm):
    n = math.prod(shape)
    _, collectives, plan = compiled_and_planned(shape, np.zeros(SIZE, "f"), algorithm=algorithm)
    sent = sent_by_the_busiest(collectives, n)
    assert sent <= 1.01 * 2 * (n - 1) / n * 4 * SIZE
    assert sent == plan.wire_bytes
    assert len(collectives) == plan.steps
    return plan


@pytest.mark.parametrize(
    ("algorithm", "n"),
    [
        *(("halving_doubling", n) for n in range(2, 9)),
        *itertools.product(("ring", "shuffle"), (2, 7, 8)),
    ],
)
def test_no_algorithm_sends_more_than_it_has_to(algorithm, n):
    plan = sends_the_fewest((n,), algorithm)
    if algorithm == "halving_doubling":
        assert plan.steps == 2 * math.ceil(math.log2(n)), "the fewest"


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        *((pair, (2, 3)) for pair in PAIRS),
        *(("rechd/rechd", shape) for shape in MESHES),
        ("nccl/xring", (3, 2)),
    ],
)
def test_neither_does_a_composition_of_two(algorithm, shape):
    sends_the_fewest(shape, algorithm)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_plan_knows_what_few_owners_cost(shards):
    _, collectives, plan = compiled_and_planned(
        (6,), np.zeros(37, "f"), algorithm="pscpu", shards=shards
    )
    assert sent_by_the_busiest(collectives, 6) == plan.wire_bytes
    assert plan.wire_bytes == (shards - 1 + 5) * -(-37 // shards) * 4
    assert len(collectives) == plan.steps == 10


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "shuffle"])
def test_a_tree_is_counted_pack_by_pack(algorithm):
    tree = {"a": np.zeros((3, 5), "f"), "b": np.zeros(1, "f"), "c": np.zeros(7, np.int32)}
    _, collectives, plan = compiled_and_planned((5,), tree, algorithm=algorithm, bytes_per_pack=60)
    assert len(plan.packs) == 3
    assert sent_by_the_busiest(collectives, 5) == plan.wire_bytes
    assert len(collectives) == plan.steps


@pytest.mark.parametrize("algorithm", ["native", "ring", "halving_doubling"])
def test_shards_travel_side_by_side(algorithm):
    value = np.zeros(30, "f")
    _, collectives, plan = compiled_and_planned((3,), value, algorithm=algorithm, shards=4)
    assert [pack.size for pack in plan.packs] == [8, 8, 7, 7]
    if algorithm == "native":  # which XLA combines
        assert [len(c.operands) for c in collectives] == [4]
    else:
        assert len(collectives) == plan.steps
    assert sent_by_the_busiest(collectives, 3) == plan.wire_bytes
