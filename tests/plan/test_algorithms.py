"""Names of algorithms, the stages they are made of, and what those cost."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxcoll as jc
from jaxcoll import CommunicationOptions as Options
from jaxcoll._plan.algorithms import (
    DESCRIPTIONS,
    stages,
    steps,
    wire_bytes,
)
from jaxcoll._plan.choose import choose, make_plan
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.world import World
from jaxcoll._report.shown_plan import Plan

names = st.sampled_from(sorted(DESCRIPTIONS))
sizes = st.integers(1, 9)


@given(names, sizes, st.integers(0, 1000))
def test_flat_algorithms_send_the_least(name, n, size):
    plan = stages(name, 0, (n,))
    padded = 2 * (n - 1) * -(-size // n)
    assert wire_bytes(plan, size, 1) == (padded if name != "native" else 2 * (size - size // n))
    assert wire_bytes(plan, size * n, 1) == 2 * (n - 1) * size
    least = 2 * (n - 1).bit_length()
    assert steps(plan, in_halves=True) >= (least if name in ("ring", "halving_doubling") else 0)
    assert steps(plan, in_halves=True) - steps(plan) in (0, 1)


@given(names, names, sizes, sizes, st.integers(0, 50))
def test_compositions_send_the_least(inner, outer, k, g, shard):
    plan = stages(f"{inner}/{outer}", 0, (k, g))
    assert wire_bytes(plan, shard * k * g, 1) == 2 * (k * g - 1) * shard
    assert [s.axes for s in plan] == [axes for axes, n in (((1,), g), ((0,), k)) if n > 1]
    assert steps(plan) <= steps(stages(f"{inner}/{outer}", 0, (10, 10)))


@given(sizes, sizes, st.integers(0, 1000))
def test_few_owners_send_more(n, owners, size):
    owners = min(owners, n)
    plan = stages("shuffle", owners, (n,))
    assert wire_bytes(plan, size, 1) == (owners + n - 2) * -(-size // owners) * (n > 1)


def test_too_many_shards_are_refused():
    with pytest.raises(
        ValueError, match="`shards` is 3, but .* runs over 2 replicas.* at most 2, o"
    ):
        choose(Options(algorithm="nccl/pscpu", shards=3), World("cpu", (2, 8)))
    with pytest.raises(ValueError, match="runs over 1 replica, and each shard needs its own owner"):
        jc.plan(jnp.zeros(4), axis_size=1, options=Options(algorithm="pscpu", shards=2))
    assert choose(Options(algorithm="pscpu/nccl", shards=3), World("cpu", (2, 8))).parts == 3


def test_gloo_is_spared_reduce_scatter():
    options = Options(algorithm="nccl/nccl")
    here, there = World("cpu", (2, 4)), World("cpu", (2, 4), processes=2)
    assert choose(options, here).algorithm == "native/native"
    assert choose(options, World("gpu", (2, 4), processes=2)).algorithm == "native/native"
    assert choose(options, there).algorithm == "shuffle/native"
    for sizes, within in (((2, 4), "halving_doubling"), ((2, 3), "shuffle")):
        world = World("cpu", sizes, processes=sizes[0] * sizes[1])
        assert choose(options, world).algorithm == f"{within}/native"
    leaf = Leaf("", (9,), np.dtype("f"), np.dtype("f"), (2, 4))
    plan = Plan.of(make_plan(jc.ReduceOp.SUM, [leaf], options, there))
    assert "Gloo's own reduce-scatter sends more than necessary" in plan.reasons[1]


def test_plan_says_request_and_cost():
    options = Options(algorithm="nccl/rechd", shards=2)
    plan = jc.plan(np.zeros(640, "f"), axis_size=(4, 8), options=options)
    assert plan.algorithm == "native/halving_doubling"
    assert plan.steps == 2 * (2 + 3)
    assert plan.wire_bytes == 2 * 31 * 20 * 4
    text = str(plan)
    assert "over 4 × 8 × cpu, one process: 2 arrays, 10 steps, 4,960 wire bytes a device" in text
    assert "the compiler's own collectives, then, from group to group, halving and doubling" in text
    assert "each pack is cut into 2, reduced side by side, as requested" in text
    data = json.loads(plan.to_json())
    assert (data["axis_sizes"], data["steps"]) == ([4, 8], 10)
    owners = jc.plan(np.zeros(64, "f"), axis_size=4, options=Options(algorithm="pscpu", shards=2))
    assert "2 for each pack, each with an owner, as requested" in str(owners)
    assert (len(owners.packs), owners.owners) == (1, 2)
