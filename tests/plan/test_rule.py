"""The rule: packs and algorithms follow from options, sizes and the world, and from nothing else."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import mapped
from hypothesis import given
from hypothesis import strategies as st

import jaxcoll as jc
from jaxcoll._plan.choose import (
    BETWEEN_HOSTS,
    EXCHANGED,
    PACKED,
    choose,
    make_plan,
    packing_for,
)
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import UNPACKED, BytesPerPack
from jaxcoll._plan.world import World
from jaxcoll._report.shown_plan import Plan
from jaxcoll.distribute._routes import GroupSmall, NumPacks

F32 = np.dtype(np.float32)
GLOO = World("cpu", (4,), processes=4)
TWO_HOSTS = World("cpu", (2, 2), processes=4, hosts=2, inner=1)
NOTHING = jc.CommunicationOptions()
FEW = 4 * EXCHANGED  # bytes that exchanges sum over GLOO


def plan_of(sizes, world=GLOO, **options):
    leaves = [Leaf(f"[{i}]", (n,), F32, F32, world.sizes) for i, n in enumerate(sizes)]
    return Plan.of(make_plan(jc.ReduceOp.MEAN, leaves, jc.CommunicationOptions(**options), world))


@given(
    st.lists(st.integers(0, 1 << 22), max_size=30),
    st.sampled_from([GLOO, TWO_HOSTS, World("gpu", (8,)), World("cpu", (2, 4), processes=2)]),
)
def test_large_leaves_are_not_copied(sizes, world):
    plan = plan_of(sizes, world)
    assert sum(pack.size for pack in plan.packs) == sum(sizes)
    for pack in plan.packs:
        if pack.nbytes > PACKED.limit or not world.over_gloo:
            assert pack.is_leaf(plan.leaves)
        assert pack.algorithm == choose(NOTHING, world).algorithm_for(pack)
    assert plan.temporary_bytes <= 2 * sum(4 * n for n in sizes if 4 * n <= PACKED.alone)


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_combining_compilers_get_no_packs(platform):
    plan = plan_of([256] * 200, World(platform, (8,), 1))
    assert (len(plan.packs), plan.algorithm, plan.temporary_bytes) == (200, "native", 0)
    assert "the compiler combines all-reduces itself" in plan.reasons[0]


def test_small_leaves_share_a_pack():
    plan = plan_of([256] * 200)
    assert len(plan.packs) == 1
    assert plan.reasons[0].startswith("packs: leaves over 4 MiB alone, others in packs of at most")


@pytest.mark.parametrize(
    ("world", "large", "small", "limit"),
    [
        *((world, "native", "native", 0) for world in (
            World("cpu", (2, 4), processes=2), World("gpu", (4,), processes=4), World("cpu", (8,)),
            World("cpu", (8,), processes=2), dataclasses.replace(GLOO, partly_mapped=True),
            # Two axes without hosts along the outer one are one level.
            *(dataclasses.replace(TWO_HOSTS, **changes) for changes in (
                {"hosts": 1, "inner": 0}, {"inner": 0}, {"partly_mapped": True}, {"platform": "gpu"},
            )),
        )),
        (GLOO, "native", "halving_doubling", FEW),
        (World("cpu", (6,), processes=6), "native", "shuffle", 6 * EXCHANGED),
        (World("cpu", (64,), processes=64), "native", "halving_doubling", 8 * EXCHANGED),
        (World("cpu", (4,), processes=4, hosts=4), "native", "halving_doubling", FEW // BETWEEN_HOSTS),
        (TWO_HOSTS, "halving_doubling/native", "halving_doubling/halving_doubling", FEW // BETWEEN_HOSTS),
        (World("cpu", (3, 2, 3), processes=18, hosts=3, inner=2), "shuffle/halving_doubling/native",
         "shuffle/halving_doubling/shuffle", EXCHANGED),
        (World("cpu", (2, 8), processes=2, hosts=2, inner=1), "shuffle/native", "shuffle/halving_doubling",
         2 * EXCHANGED // BETWEEN_HOSTS),
    ],
    ids=str,
)  # fmt: skip
def test_size_decides_the_algorithm(world, large, small, limit):
    choice = choose(NOTHING, world)
    assert (choice.algorithm, choice.small, choice.limit) == (large, small, limit)


def test_packs_are_exchanged_by_size():
    plan = plan_of([FEW // 4, FEW // 4 + 1], bytes_per_pack=1 << 10)
    assert [pack.algorithm for pack in plan.packs] == ["halving_doubling", "native"]
    assert plan.algorithm == "halving_doubling and native"
    assert "packs of at most 2 MiB: by jaxcoll's own exchanges" in str(plan)


@pytest.mark.parametrize(
    "asked",
    [{"algorithm": "native"}, {"implementation": "ring"}, {"reproducible": True}, {"shards": 2}],
    ids=str,
)
def test_requests_are_not_overruled(asked):
    choice = choose(jc.CommunicationOptions(**asked), GLOO)
    assert choice.limit == 0
    assert choice.algorithm == {"ring": "ring", True: "halving_doubling"}.get(
        next(iter(asked.values())), "native"
    )
    assert packing_for(jc.CommunicationOptions(bytes_per_pack=5), GLOO) == BytesPerPack(5)


def test_plan_names_its_levels():
    words = "two levels: summed within each of the 2 hosts first"
    assert any(reason.startswith(words) for reason in plan_of([1 << 22], TWO_HOSTS).reasons)
    asked = plan_of([1 << 22], TWO_HOSTS, algorithm="native")
    assert not any("two levels" in reason for reason in asked.reasons)


def test_rules_in_words():
    rules = [UNPACKED, BytesPerPack(1 << 20), BytesPerPack(7), NumPacks(2), GroupSmall(1 << 10, 3)]
    assert [str(rule) for rule in rules] == [
        "every leaf alone", "at most 1 MiB", "at most 7 bytes", "2 of near-equal bytes",
        "neighbours of at most 1 KiB, up to 3 together",
    ]  # fmt: skip


def test_nothing_is_sent_in_vain():
    assert plan_of([]).packs == plan_of([8], World("cpu", (1,))).packs == ()


def test_stated_memory_is_allotted():
    tree = [jax.ShapeDtypeStruct((1000,), F32)] * 20
    options = jc.CommunicationOptions(bytes_per_pack=1 << 20)
    reduce = functools.partial(jc.all_reduce, "sum", axis_name="data", options=options)
    program = mapped(lambda t: reduce(jax.tree.map(lambda x: x * x[0], t)), mesh=8)
    rows = [jax.ShapeDtypeStruct((8000,), F32)] * 20
    memory = program.lower(rows).compile().memory_analysis()
    plan = jc.plan(tree, axis_size=8, options=options)
    assert plan.temporary_bytes == 2 * 20 * 4000
    assert memory.temp_size_in_bytes == pytest.approx(plan.temporary_bytes, rel=0.55)
