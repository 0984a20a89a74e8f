"""The cross-device ops that all-reduce: their arguments, and what their programs do."""

import re

import jax
import numpy as np
import pytest
from cases import assert_trees_equal, calls_made, noise, tree

import jaxcoll as jc
from jaxcoll import (
    AllReduceCrossDeviceOps,
    CollectiveAllReduce,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    PerReplica,
)
from jaxcoll._distribute.ops.all_reduce_program import all_reduce_program
from jaxcoll._observe.parse.hlo import read_hlo


def devices(n):
    return jax.devices()[:n]


def value_of(x, n):
    return PerReplica([jax.tree.map(lambda a, i=i: a[i], x) for i in range(n)])


@pytest.fixture
def programs(monkeypatch):
    """The requested programs of every all-reduce, as HLO text, one for each call."""
    texts = []

    def spy(*args):
        program = all_reduce_program(*args)

        def run(values):
            texts.append(program.lower(values).as_text(dialect="hlo"))
            return program(values)

        return run

    monkeypatch.setattr("jaxcoll._distribute.ops.all_reduce_ops.all_reduce_program", spy)
    return texts


def collectives(text):
    """Name and elements of each collective of a program, in order."""
    found = re.findall(
        r"= \w+\[([\d,]*)\]\S* (all-reduce|reduce-scatter|all-gather|collective-permute)\(", text
    )
    return [(name, int(np.prod([int(k) for k in shape.split(",") if k]))) for shape, name in found]


# Hierarchical copy


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("packs", [0, 1])
def test_L16_L17_no_device_is_lost_for_any_number_of_them(n, packs):
    ops = HierarchicalCopyAllReduce(num_packs=packs)
    value = PerReplica.from_function(lambda i: 10**i, devices=devices(n))
    for result in ops.batch_reduce("sum", [(value, value)] * 3):
        copies = [x.item() for x in result] if n > 1 else [result.item()]
        assert copies == [int("1" * n)] * n


@pytest.mark.parametrize(
    ("n", "want"),
    [(2, ["all-reduce"]), (3, ["all-reduce"]), (7, ["all-reduce"]),
     (4, ["reduce-scatter", "all-reduce", "all-gather"]),
     (6, ["reduce-scatter", "all-reduce", "all-gather"])],
)  # fmt: skip
def test_two_halves_where_there_are_halves(programs, n, want):
    value = value_of(noise(n, 12), n)
    HierarchicalCopyAllReduce().reduce("sum", value, value)
    assert [name for name, _ in collectives(programs[0])] == want
    if n == 6:
        groups = {tuple(map(tuple, c.groups)) for c in read_hlo(programs[0])}
        assert groups == {((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5))}


# Algorithms and packing


@pytest.mark.parametrize(
    "alg",
    ["nccl", "NCCL", "native", "ring", "xring", "rechd", "pscpu", "shuffle", "hierarchical_copy"],
)
@pytest.mark.parametrize("n", [2, 5, 6])
def test_every_algorithm_equals_the_reference(alg, n):
    x = {"noise": noise(n, 5, 3), **tree(n)}
    value = value_of(x, n)
    got = AllReduceCrossDeviceOps(alg, num_packs=2).reduce("mean", value, value)
    want = jc.ReductionToOneDevice().reduce("mean", value, "cpu:0")
    for g, w in zip(jax.tree.leaves(got[n - 1]), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        rtol = 2e-3 if g.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(np.asarray(g, "f8"), np.asarray(w, "f8"), rtol=rtol, atol=1e-2)


def sizes(ops, programs, counts, dtype="f"):
    value = PerReplica([[np.full((k,), i, dtype) for k in counts] for i in range(2)])
    result = ops.reduce("sum", value, value)
    assert [x.tolist() for x in result[1]] == [[1.0] * k for k in counts], "in their order"
    return [elements for _, elements in collectives(programs[-1])]


def test_L76_L77_small_arrays_travel_in_groups(programs):
    grouped = AllReduceCrossDeviceOps("nccl", 0, 40, 10)
    assert sizes(grouped, programs, [2, 2, 100, 2, 2, 2]) == [4, 100, 6]
    assert sizes(grouped, programs, [2, 100, 2]) == [2, 100, 2]
    assert sizes(grouped, programs, [10, 10, 11]) == [20, 11], "40 bytes are small"
    assert sizes(grouped, programs, [20, 20, 21], "f2") == [40, 21]
    threes = AllReduceCrossDeviceOps("nccl", 0, 40, 3)
    assert sizes(threes, programs, [1] * 7) == [3, 3, 1]
    for off in (
        AllReduceCrossDeviceOps("nccl", 0),
        AllReduceCrossDeviceOps("nccl", 0, 0, 10),
        AllReduceCrossDeviceOps("nccl", 0, 40, 0),
    ):
        assert sizes(off, programs, [2, 2, 100]) == [2, 2, 100]


def test_num_packs_comes_first_and_bytes_per_pack_of_a_call_before_all(programs):
    assert sizes(AllReduceCrossDeviceOps("nccl", 1, 40, 10), programs, [2, 2, 100]) == [104]
    value = PerReplica([[np.ones(2, "f"), np.ones(3, "f"), np.ones(9, "f")]] * 2)
    options = jc.CommunicationOptions(bytes_per_pack=20)
    for ops in (
        NcclAllReduce(),
        AllReduceCrossDeviceOps("nccl", 0, 99, 10),
        CollectiveAllReduce(devices(2), 2),
        CollectiveAllReduce(devices(2), 2, jc.CommunicationOptions(bytes_per_pack=99)),
    ):
        ops.reduce("sum", value, value, options)
        assert [n for _, n in collectives(programs[-1])] == [5, 9]


def test_the_algorithm_of_a_call_replaces_the_objects(programs):
    value = value_of(noise(4, 12), 4)
    ops = AllReduceCrossDeviceOps("xring")
    ops.reduce("sum", value, value)
    assert {name for name, _ in collectives(programs[-1])} == {"collective-permute"}
    ops.reduce("sum", value, value, jc.CommunicationOptions(implementation="nccl"))
    assert {name for name, _ in collectives(programs[-1])} == {"all-reduce"}
    ops = HierarchicalCopyAllReduce()
    ops.reduce("sum", value, value, jc.CommunicationOptions(algorithm="nccl/xring"))
    names = [name for name, _ in collectives(programs[-1])]
    assert (names[0], names[-1]) == ("reduce-scatter", "all-gather")
    assert set(names[1:-1]) == {"collective-permute"}


@pytest.mark.parametrize("bad", ["max", "", None, 3, "nccl/xring", "hierarchical", ["nccl"]])
def test_an_algorithm_that_there_is_not_is_refused(bad):
    message = (
        f"`all_reduce_alg` must be one of hierarchical_copy, nccl, .*; got {re.escape(repr(bad))}"
    )
    with pytest.raises(ValueError, match=message):
        AllReduceCrossDeviceOps(bad)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "1", None])
@pytest.mark.parametrize(
    "name", ["num_packs", "agg_small_grads_max_bytes", "agg_small_grads_max_group"]
)
def test_L82_L83_numbers_are_non_negative_integers(bad, name):
    message = (
        rf"`{name}` must be a non-negative integer .*\(0: no (packing|grouping)\); got {bad!r}"
    )
    with pytest.raises(ValueError, match=message):
        AllReduceCrossDeviceOps(**{name: bad})
    if name == "num_packs":
        with pytest.raises(ValueError, match=message):
            HierarchicalCopyAllReduce(num_packs=bad)


def test_they_are_one_family_and_say_what_they_are():
    assert repr(HierarchicalCopyAllReduce(8)) == "HierarchicalCopyAllReduce(num_packs=8)"
    assert repr(AllReduceCrossDeviceOps("ring", 0)) == (
        "AllReduceCrossDeviceOps(all_reduce_alg='ring', num_packs=0, "
        "agg_small_grads_max_bytes=0, agg_small_grads_max_group=10)"
    )
    assert repr(CollectiveAllReduce(devices(2), 2, jc.CommunicationOptions(bytes_per_pack=1))) == (
        "CollectiveAllReduce(devices=['cpu:0', 'cpu:1'], group_size=2, "
        "options=CommunicationOptions(bytes_per_pack=1))"
    )
    for kind in (NcclAllReduce, HierarchicalCopyAllReduce, CollectiveAllReduce,
                 jc.MultiWorkerAllReduce):  # fmt: skip
        assert issubclass(kind, AllReduceCrossDeviceOps)


# CollectiveAllReduce


COLLECTIVE = {
    "auto": jc.CommunicationOptions(),
    "ring": jc.CommunicationOptions(implementation="ring"),
    "nccl": jc.CommunicationOptions(implementation="NCCL"),
    "packed": jc.CommunicationOptions(bytes_per_pack=8),
}


@pytest.mark.parametrize("options", COLLECTIVE.values(), ids=COLLECTIVE)
def test_F1_F2_F4_F5_reduce_dense(options):
    for n, sums in ((1, 1), (2, 3), (4, 10)):
        ops = CollectiveAllReduce(devices(n), group_size=n, options=options)
        value = PerReplica([i + 1.0 for i in range(n)])
        for op, want in (("sum", sums), ("mean", sums / n)):
            got = ops.reduce(op, value, value)
            assert [x.item() for x in (got if n > 1 else [got])] == [want] * n
            assert ops.reduce(op, value, "cpu:5").item() == want


@pytest.mark.parametrize("options", COLLECTIVE.values(), ids=COLLECTIVE)
def test_F10_F11_batch_reduce_dense(options):
    for n, op, want in ((1, "sum", [1, 2]), (2, "sum", [4, 6]), (2, "mean", [2, 3])):
        ops = CollectiveAllReduce([f"cpu:{i}" for i in range(n)], n, options)
        pairs = [PerReplica([1.0, 3.0][:n]), PerReplica([2.0, 4.0][:n])]
        got = ops.batch_reduce(op, [(v, v) for v in pairs])
        assert [(x[n - 1] if n > 1 else x).item() for x in got] == want


def test_F34_reduction_local():
    for implementation in ("ring", "nccl"):
        options = jc.CommunicationOptions(implementation=implementation)
        ops = CollectiveAllReduce(devices(2), 2, options)
        x, y = PerReplica([0.0, 1.0]), PerReplica([1.0, 2.0])
        assert [ops.reduce(op, v, v)[1].item() for v in (x, y) for op in ("mean", "sum")] == [
            0.5, 1, 1.5, 3
        ]  # fmt: skip


def test_L20_L22_L23_packs_close_before_the_limit_in_the_order_of_the_arrays(programs):
    """TensorFlow's list is reversed, its limit a floor; eager calls ignore it."""
    value = PerReplica([[np.ones(k, "f") for k in (1, 2, 3)]] * 2)
    for limit, want in ((1, [1, 2, 3]), (11, [1, 2, 3]), (12, [3, 3]), (24, [6])):
        options = jc.CommunicationOptions(bytes_per_pack=limit)
        CollectiveAllReduce(devices(2), 2, options).reduce("sum", value, value)
        assert [n for _, n in collectives(programs[-1])] == want
    CollectiveAllReduce(devices(2), 2).reduce("sum", value, value)
    assert [n for _, n in collectives(programs[-1])] == [1, 2, 3], "the planner packs none here"


def test_L25_L26_dtypes_may_mix_in_one_pack_of_options():
    options = jc.CommunicationOptions(bytes_per_pack=1000)
    ops = CollectiveAllReduce(devices(2), 2, options)
    value = PerReplica(
        [(np.float32(1), np.int32(1), np.float16(1)), (np.float32(3), np.int32(2), np.float16(2))]
    )
    assert [x.item() for x in ops.reduce("sum", value, value)[0]] == [4, 3, 3]
    mean = ops.reduce("mean", value, value)[0]
    assert [(x.item(), x.dtype.name) for x in mean] == [
        (2, "float32"),
        (1.5, "float32"),
        (1.5, "float16"),
    ]


def test_its_deadline_bounds_every_call(monkeypatch):
    made = calls_made(monkeypatch)
    ops = CollectiveAllReduce(devices(2), 2, jc.CommunicationOptions(timeout_seconds=7))
    value = PerReplica([1.0, 2.0])
    ops.reduce("sum", value, value)
    ops.reduce("sum", value, value, jc.CommunicationOptions(timeout_seconds=2))
    assert [(call.timeout_seconds, call.name) for (call,) in made] == [
        (7.0, "`CollectiveAllReduce.reduce` (SUM of 1 value)"),
        (2.0, "`CollectiveAllReduce.reduce` (SUM of 1 value)"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0), "`CollectiveAllReduce` got no devices"),
        ((["cpu:0", "cpu:0"], 2), "got a device twice: cpu:0"),
        ((["cpu:9"], 1), "got 'cpu:9', but there is no such device"),
        (([0], 1), "expects devices, as in `jax.devices\\(\\)`; got 0"),
        ((["cpu:0", "cpu:1"], 3), "`group_size` must be a positive multiple of the number of devices, 2, .* got 3"),
        ((["cpu:0"], 0), "must be a positive multiple .*; got 0"),
        ((["cpu:0"], 1.0), "must be a positive multiple .*; got 1.0"),
        ((["cpu:0"], True), "must be a positive multiple .*; got True"),
        ((["cpu:0", "cpu:1"], 4), "`group_size` 4 takes 2 workers of 2 devices; there is 1, with 8 devices together, 8 of them here"),
        ((["cpu:0"], 1, "ring"), "`options` must be a CommunicationOptions or None; got 'ring'"),
    ],
)  # fmt: skip
def test_collective_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        CollectiveAllReduce(*arguments)


def test_a_value_on_other_devices_is_refused_and_the_next_call_works():
    ops = CollectiveAllReduce(devices(3), 3)
    other, own = PerReplica([1.0, 2.0]), PerReplica([1.0, 2.0, 3.0])
    message = "`CollectiveAllReduce` reduces over its own 3 devices, cpu:0, cpu:1, cpu:2; got a value over cpu:0, cpu:1"
    with pytest.raises(ValueError, match=message):
        ops.reduce("sum", other, other)
    with pytest.raises(ValueError, match=message):
        ops.batch_reduce("sum", [(own, own), (other, other)])
    assert ops.reduce("sum", own, own)[2].item() == 6.0
    backwards = own.reordered(own.devices[::-1])
    assert ops.reduce("sum", backwards, own).devices == own.devices


def test_results_are_those_of_NcclAllReduce_to_the_bit():
    x = tree(4)
    value = value_of(x, 4)
    want = NcclAllReduce(0).reduce("mean", value, value)
    got = CollectiveAllReduce(devices(4), 4).reduce("mean", value, value)
    assert_trees_equal(got[3], want[3])
