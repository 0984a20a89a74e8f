"""The cross-device ops that all-reduce: their arguments, and what their programs do."""

import re

import numpy as np
import pytest
from cases import devices, each_row, noise

import jaxcoll as jc
from jaxcoll.distribute import (
    AllReduceCrossDeviceOps,
    CollectiveAllReduce,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    PerReplica,
)

# Hierarchical copy


@pytest.mark.parametrize(
    ("n", "want"),
    [(2, ["all-reduce"]), (3, ["all-reduce"]), (7, ["all-reduce"]),
     (4, ["reduce-scatter", "all-reduce", "all-gather"]),
     (6, ["reduce-scatter", "all-reduce", "all-gather"])],
)  # fmt: skip
def test_halves_need_even_counts(programs, n, want):
    value = each_row(n, noise(n, 12))
    HierarchicalCopyAllReduce().reduce("sum", value, value)
    assert programs.kinds() == want
    if n == 6:
        assert programs.groups() == {((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5))}


# Algorithms and packing


def sizes(ops, programs, counts, dtype="f"):
    value = PerReplica([[np.full((k,), i, dtype) for k in counts] for i in range(2)])
    result = ops.reduce("sum", value, value)
    assert [x.tolist() for x in result[1]] == [[1.0] * k for k in counts], "in their order"
    return programs.sizes()


@pytest.mark.tensorflow("L76", "L77")
def test_small_arrays_travel_in_groups(programs):
    grouped = AllReduceCrossDeviceOps("nccl", 0, 40, 10)
    assert sizes(grouped, programs, [2, 2, 100, 2, 2, 2]) == [4, 100, 6]
    assert sizes(grouped, programs, [20, 20, 21], "f2") == [40, 21], "40 bytes are small"
    for off in (
        AllReduceCrossDeviceOps("nccl", 0),
        AllReduceCrossDeviceOps("nccl", 0, 0, 10),
        AllReduceCrossDeviceOps("nccl", 0, 40, 0),
    ):
        assert sizes(off, programs, [2, 2, 100]) == [2, 2, 100]


@pytest.mark.tensorflow("L20", "L22", "L23")
def test_call_packing_comes_first(programs):
    """TensorFlow's list is reversed, its limit a floor; eager calls ignore it."""
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
        assert programs.sizes() == [5, 9]


def test_unknown_algorithms_are_refused():
    for bad in (
        "max",
        "",
        None,
        3,
        "nccl/xring",
        "hierarchical",
        ["nccl"],
    ):
        message = f"`all_reduce_alg` must be one of hierarchical_copy, nccl, .*; got {re.escape(repr(bad))}"
        with pytest.raises(ValueError, match=message):
            AllReduceCrossDeviceOps(bad)


@pytest.mark.tensorflow("L82", "L83")
@pytest.mark.parametrize("bad", [-1, 1.5, 2.0, True, "1", None])
@pytest.mark.parametrize(
    "name", ["num_packs", "agg_small_grads_max_bytes", "agg_small_grads_max_group"]
)
def test_packing_numbers_are_checked(bad, name):
    message = (
        rf"`{name}` must be a non-negative integer .*\(0: no (packing|grouping)\); got {bad!r}"
    )
    with pytest.raises(ValueError, match=message):
        AllReduceCrossDeviceOps(**{name: bad})
    for kind in (NcclAllReduce, HierarchicalCopyAllReduce) if name == "num_packs" else ():
        with pytest.raises(ValueError, match=message):
            kind(num_packs=bad)


def test_ops_show_their_arguments():
    assert repr(NcclAllReduce(num_packs=np.int64(2))) == "NcclAllReduce(num_packs=2)"
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


@pytest.mark.tensorflow("G50")
def test_collective_arguments_are_checked():
    for arguments, message in (
        (([], 0), "`CollectiveAllReduce` got no devices"),
        ((["cpu:0", "cpu:0"], 2), "got a device twice: cpu:0"),
        ((["cpu:9"], 1), "got 'cpu:9', but there is no such device"),
        (([0], 1), "expects devices, as in `jax.devices\\(\\)`; got 0"),
        ((["cpu:0", "cpu:1"], 3), "`group_size` must be a positive multiple of the number of devices, 2, .* got 3"),
        ((["cpu:0"], 0), "must be a positive multiple .*; got 0"),
        ((["cpu:0"], 1.0), "must be a positive multiple .*; got 1.0"),
        ((["cpu:0"], True), "must be a positive multiple .*; got True"),
        ((["cpu:0", "cpu:1"], 4), "`group_size` 4 needs 2 workers of 2 devices; there is 1, with 8 devices in total, 8 of them here"),
        ((["cpu:0"], 1, "ring"), "`options` must be a CommunicationOptions, as in .*, or None; got 'ring'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            CollectiveAllReduce(*arguments)


@pytest.mark.tensorflow("G13", "G14", "G34", "L56")
def test_other_devices_are_refused():
    ops = CollectiveAllReduce(devices(3), 3)
    other, own = PerReplica([1.0, 2.0]), PerReplica([1.0, 2.0, 3.0])
    message = "`CollectiveAllReduce` reduces over its own 3 devices, cpu:0, cpu:1, cpu:2; got a value over cpu:0, cpu:1"
    with pytest.raises(ValueError, match=message):
        ops.reduce("sum", other, other)
    with pytest.raises(ValueError, match=message):
        ops.batch_reduce("sum", [(own, own), (other, other)])
    assert ops.reduce("sum", own, own)[2].item() == 6.0
    backwards = own._reorder(own.devices[::-1])
    assert ops.reduce("sum", backwards, own).devices == own.devices
