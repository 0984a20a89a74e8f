"""The automatic choice: what the cost model calls fastest, and what it beat."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import mapped

import jaxcoll as jc
from jaxcoll._plan.algorithms import stages
from jaxcoll._plan.cost.model import HALF_DUPLEX, Cost, Prices
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Link
from jaxcoll._plan.packs.automatic import (
    MODESTY,
    RULES,
    WORTH,
    Way,
    algorithms_for,
    fastest,
    in_words,
    priced,
    rules_for,
)
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import UNPACKED, BytesPerPack, NumPacks, plan_packs
from jaxcoll._plan.planner import make_plan
from jaxcoll._plan.world import World
from jaxcoll.bench.workloads import TREES

F32 = np.dtype(np.float32)
GLOO = World("cpu", (4,), processes=4)
TWO_HOSTS = World("cpu", (2, 2), processes=4, hosts=2, inner=1)


def plan_of(shapes, world=GLOO, terms=None, **options):
    leaves = [Leaf(f"[{i}]", tuple(s), F32, F32, world.sizes) for i, s in enumerate(shapes)]
    given = jc.CommunicationOptions(**options)
    return make_plan(jc.ReduceOp.MEAN, leaves, given, world, terms=terms)


@pytest.mark.parametrize("tree", sorted(TREES))
@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
@pytest.mark.parametrize("keeps_memory", [False, True])
def test_nothing_that_was_compared_is_predicted_to_be_much_faster(tree, replicas, keeps_memory):
    world = World("cpu", (replicas,), processes=replicas)
    plan = plan_of(TREES[tree]().values(), world, preset(world, keeps_memory=keeps_memory))
    assert sum(p.size for p in plan.packs) == sum(leaf.size for leaf in plan.leaves)
    if tree in ("resnet50", "gpt2-small", "one-big"):  # with big leaves: no more than themselves
        assert plan.temporary_bytes <= plan.nbytes
    best = plan.alternatives[0]
    if plan.temporary_bytes <= plan.nbytes:
        assert plan.predicted.seconds <= MODESTY * best.seconds
    else:
        assert plan.predicted.seconds == pytest.approx(best.seconds)


def test_two_exchanges_do_not_win_against_one_pack_that_is_too_large_to_be_worth_one():
    terms = preset(GLOO, keeps_memory=True)
    leaves = [(367_593,), (260_523,), (251_694,), (564,)]
    plan = plan_of(leaves, terms=terms)
    assert [(pack.algorithm, len(pack.segments)) for pack in plan.packs] == [("native", 4)]
    # Either half of it alone is worth an exchange.
    for half in (leaves[:1], leaves[1:]):
        assert plan_of(half, terms=terms).packs[0].algorithm == "halving_doubling"


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_where_the_compiler_combines_nothing_is_packed(platform):
    plan = plan_of(TREES["200x1KiB"]().values(), World(platform, (8,), 1))
    assert len(plan.packs) == 200
    assert plan.algorithm == "native"
    assert plan.temporary_bytes == 0
    assert "the compiler combines all-reduces itself" in plan.reasons[0]


def test_many_small_leaves_between_processes_share_a_pack():
    plan = plan_of(TREES["200x1KiB"]().values())
    assert len(plan.packs) == 1
    assert "against" in plan.reasons[0]
    assert "every leaf alone" in plan.reasons[0]
    assert plan.terms.source in plan.reasons[0]


def test_big_leaves_are_not_copied_and_little_memory_is_taken():
    plan = plan_of(TREES["gpt2-small"]().values())
    assert plan.temporary_bytes < plan.nbytes / 2
    assert any(p.is_leaf(plan.leaves) for p in plan.packs)


@pytest.mark.parametrize(("elements", "packs"), [(1 << 19, 1), ((1 << 19) + 1, 2)])
def test_memory_counts_beyond_eight_mebibytes_of_packs(elements, packs):
    leaves = [Leaf(name, (elements,), F32, F32, (4,)) for name in "ab"]
    ways = [
        Way(rule, plan_packs(leaves, rule), Cost(seconds), seconds)
        for rule, seconds in ((BytesPerPack(1 << 30), 1.0), (UNPACKED, 1.2))
    ]
    assert len(fastest(ways, leaves).packs) == packs


def test_a_pack_is_exchanged_only_where_that_is_worth_its_kernels():
    world = World("cpu", (4,), processes=4)
    prices = Prices(preset(world), (4,))
    for nbytes in (1 << 10, 1 << 20, 64 << 20):
        leaf = Leaf("x", (nbytes // 4,), F32, F32, (4,))
        ((_, (pack,), cost, price),) = priced([leaf], [UNPACKED], algorithms_for(world), prices)
        ((_, _, own, _),) = priced([leaf], [UNPACKED], ["native"], prices)
        if pack.algorithm == "native":
            assert cost == own
            assert price == own.seconds
        else:
            assert cost.seconds < WORTH * own.seconds
            assert price == pytest.approx(cost.seconds / WORTH)
    assert pack.algorithm == "native"


@pytest.mark.parametrize(
    ("world", "exchanges"),
    [
        *((world, ()) for world in (
            World("cpu", (2, 4), processes=2), World("gpu", (4,), processes=4), World("cpu", (8,)),
            World("cpu", (4,), processes=4, partly_mapped=True),
        )),
        # Without hosts along the outer axes; those of one process each are one level.
        *((dataclasses.replace(TWO_HOSTS, **changes), ()) for changes in (
            {"hosts": 1, "inner": 0}, {"inner": 0}, {"partly_mapped": True}, {"platform": "gpu"},
        )),
        (World("cpu", (4,), processes=4, hosts=4), ("halving_doubling",)),
        # What fits the number of replicas.
        (GLOO, ("halving_doubling",)),
        (World("cpu", (6,), processes=6), ("shuffle",)),
    ],
    ids=str,
)  # fmt: skip
def test_exchanges_of_our_own_stand_in_between_cpu_processes_on_one_axis_or_two_levels(
    world, exchanges
):
    assert algorithms_for(world) == ("native", *exchanges)


def test_a_leaf_that_must_keep_its_shape_has_the_compilers_own():
    leaf = Leaf("x", (64,), F32, F32, (4,), solid=True)
    plan = make_plan(jc.ReduceOp.SUM, [leaf], jc.CommunicationOptions(), GLOO)
    assert [pack.algorithm for pack in plan.packs] == ["native"]


def test_asked_packs_still_get_the_algorithm_that_suits_their_size():
    plan = plan_of([(1 << 8,), (1 << 24,)], bytes_per_pack=1 << 10)
    assert [pack.algorithm for pack in plan.packs] == ["halving_doubling", "native"]
    assert plan.algorithm == "halving_doubling and native"
    assert "exchanges of our own" in str(plan)


def test_rules_in_words():
    assert [in_words(rule) for rule in RULES[:2]] == [
        "every leaf alone",
        "leaves over 256 KiB alone, others in packs of at most 2 MiB",
    ]
    assert in_words(RULES[-1]) == "one pack of each type"
    assert in_words(BytesPerPack(1 << 20)) == "packs of at most 1 MiB"
    assert "NumPacks" in in_words(NumPacks(2))
    assert rules_for(World("tpu", (8,))) == (UNPACKED,)


def test_the_plan_carries_what_it_predicts_and_from_what():
    plan = plan_of(TREES["resnet50"]().values())
    data = plan.to_dict()
    assert data["predicted_seconds"] == plan.predicted.seconds
    assert data["predicted_from"] == plan.terms.source
    assert data["alternatives"] == [dataclasses.asdict(way) for way in plan.alternatives]
    assert {"packing", "packs", "seconds"} == set(data["alternatives"][0])
    assert f"from {plan.terms.source}" in str(plan)


def test_an_empty_tree_and_one_replica_cost_nothing():
    assert plan_of([]).predicted.seconds == 0
    alone = plan_of([(8,)], World("cpu", (1,)))
    assert alone.packs == ()
    assert alone.predicted.seconds == 0


def test_what_is_stated_as_temporary_is_what_the_compiler_allots():
    tree = [jax.ShapeDtypeStruct((1000,), F32)] * 20
    options = jc.CommunicationOptions(bytes_per_pack=1 << 20)
    reduce = functools.partial(jc.all_reduce, "sum", axis_name="data", options=options)
    program = mapped(lambda t: reduce(jax.tree.map(lambda x: x * x[0], t)), mesh=8)
    rows = [jax.ShapeDtypeStruct((8000,), F32)] * 20
    memory = program.lower(rows).compile().memory_analysis()
    plan = jc.plan(tree, axis_size=8, options=options)
    assert plan.temporary_bytes == 2 * 20 * 4000
    assert memory.temp_size_in_bytes == pytest.approx(plan.temporary_bytes, rel=0.55)


def algorithms_of(shapes, world):
    packs = plan_of(shapes, world, preset(world, cores=1)).packs
    return {pack.nbytes: pack.algorithm for pack in packs}


def test_what_crosses_hosts_is_summed_within_them_first():
    found = algorithms_of([(256,), (1 << 22,), (1 << 24,)], TWO_HOSTS)
    assert found == {
        1 << 10: "halving_doubling/halving_doubling",
        1 << 24: "halving_doubling/native",
        1 << 26: "halving_doubling/native",
    }


@pytest.mark.parametrize("compression", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("cores", [1, 8])
def test_codes_travel_between_hosts_only(compression, cores):
    options = jc.CommunicationOptions(compression=compression)
    leaf = Leaf("", (1 << 20,), F32, F32, TWO_HOSTS.sizes, format=str(options.compression))
    terms = preset(TWO_HOSTS, cores=cores)
    plan = make_plan(jc.ReduceOp.SUM, [leaf], options, TWO_HOSTS, terms=terms)
    assert plan.algorithm == "halving_doubling/shuffle"
    assert [stage.format for stage in plan.stages(plan.packs[0])] == ["", leaf.format]


def test_a_plan_of_two_levels_says_so():
    words = "two levels: summed within each of the 2 hosts first"
    assert any(reason.startswith(words) for reason in plan_of([(1 << 22,)], TWO_HOSTS).reasons)
    asked = plan_of([(1 << 22,)], TWO_HOSTS, algorithm="native")
    assert not any("two levels" in reason for reason in asked.reasons)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (3, 2), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("cores", [1, 8])
def test_two_levels_of_few_hosts_are_predicted_faster_on_any_network_but_the_fastest(sizes, cores):
    hosts, inner = sizes[0], len(sizes) - 1
    n = int(np.prod(sizes))
    world = World("cpu", sizes, processes=n, hosts=hosts, inner=inner)
    within = "halving_doubling/" if sizes[-1].bit_count() == 1 else "shuffle/"
    assert algorithms_for(world)[1] == within * inner + "native"
    for network in ("ethernet-1", "ethernet-10"):
        prices = Prices(preset(world, cores=cores, network=network), sizes)
        flat, *two = (prices.of(stages(a, 0, sizes), 1 << 26) for a in algorithms_for(world))
        assert min(x.seconds for x in two) < flat.seconds


def test_pairs_send_less_between_hosts_than_a_shuffle_and_a_ring_waits_for_the_link():
    terms = preset(TWO_HOSTS)
    prices = Prices(dataclasses.replace(terms, between=Link(0.0, 1.0), within=Link(0.0, 0.0)), (4,))
    sent = {
        name: prices.of(stages(name, 0, (4,)), 4).bandwidth / HALF_DUPLEX
        for name in ("halving_doubling", "shuffle", "ring")
    }
    assert sent == {"halving_doubling": 2.0, "shuffle": 4.0, "ring": 6.0}
