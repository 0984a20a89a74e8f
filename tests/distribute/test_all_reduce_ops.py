"""The cross-device ops that all-reduce: what their programs do, and their arguments.

That their results are numpy's is test_reductions.py's.
"""

import re
from collections import Counter

import jax
import numpy as np
import pytest
from cases import devices, of_replicas
from distribute.test_reductions import KINDS, all_reduce, workers

from jaxcoll import CommunicationOptions, MultiWorkerAllReduce, PerReplica
from jaxcoll._hlo.hlo import read_hlo
from jaxcoll._plan.world import World
from jaxcoll.distribute import (
    AllReduceCrossDeviceOps,
    CollectiveAllReduce,
    HierarchicalCopyAllReduce,
    Mirrored,
    NcclAllReduce,
    ReductionToOneDevice,
)
from jaxcoll.distribute import _all_reduce_ops as all_reduce_ops
from jaxcoll.distribute._routes import parse_routes

NAMES = [f"/job:worker/replica:0/task:{i}" for i in range(2)]


@pytest.fixture
def collectives(monkeypatch):
    """Those of the last program, as it was handed to the compiler, after a call of an op."""
    texts, make = [], all_reduce_ops.make_program

    def spy(*args):
        program = make(*args)

        def run(*values):
            texts.append(program.lower(*values).as_text(dialect="hlo"))
            return program(*values)

        run.trace = program.trace
        return run

    monkeypatch.setattr(all_reduce_ops, "make_program", spy)

    def call(ops, n, sizes, options=None, dtype="f"):
        """Reduce arrays of these sizes, of replica i full of i; they come back in their order."""
        value = of_replicas(n, lambda i: [np.full((k,), i, dtype) for k in sizes])
        result = ops.reduce("sum", value, value, options)
        assert [x.tolist() for x in result[n - 1]] == [[n * (n - 1) / 2] * k for k in sizes]
        return read_hlo(texts[-1]).collectives

    return call


def counts(found):
    return Counter(each.kind for each in found)


def sizes(found):
    return [each.operands[0].size for each in found]


RING, NATIVE = (CommunicationOptions(implementation=i) for i in ("ring", "nccl"))
TIERED = CommunicationOptions(algorithm="nccl/xring")
HALVES = {"reduce-scatter": 1, "all-reduce": 1, "all-gather": 1}
COUNTS = {  # an op, its replicas, the options of a call, and the collectives
    "native": ("nccl", 4, None, {"all-reduce": 1}),
    "no packs of one's own": ("nccl", 4, CommunicationOptions(bytes_per_pack=0), {"all-reduce": 1}),
    "ring": ("nccl", 4, RING, {"collective-permute": 6}),
    "ring in three packs": ("nccl", 4, RING.replace(bytes_per_pack=40), {"collective-permute": 18}),
    "the object's": (all_reduce("xring"), 4, None, {"collective-permute": 6}),
    "over the object's": (all_reduce("xring"), 4, NATIVE, {"all-reduce": 1}),
    "two levels": ("hierarchical-packs8", 4, TIERED.replace(bytes_per_pack=99),
                   {"reduce-scatter": 1, "collective-permute": 2, "all-gather": 1}),
    "of a group": ("collective-ring", 4, NATIVE.replace(bytes_per_pack=99), {"all-reduce": 1}),
    "two levels over two shards": (workers("nccl"), 4, TIERED.replace(bytes_per_pack=99),
                                   {"reduce-scatter": 2, "collective-permute": 4, "all-gather": 2}),
    "one level over two shards": (workers("nccl"), 4, RING.replace(bytes_per_pack=99),
                                  {"collective-permute": 12}),
    **{f"halves of {n}": ("hierarchical-packs8", n, CommunicationOptions(bytes_per_pack=99),
                          HALVES if n in (4, 6) else {"all-reduce": 1}) for n in (2, 3, 4, 6, 7)},
}  # fmt: skip


@pytest.mark.parametrize(("make", "n", "options", "want"), COUNTS.values(), ids=COUNTS)
def test_options_shape_the_program(collectives, make, n, options, want):
    found = collectives(KINDS.get(make, make)(n), n, [3, 4, 5, 6], options)
    assert counts(found) == want
    if want is HALVES and n == 6:
        assert {tuple(map(tuple, each.groups)) for each in found} == {
            ((0, 1, 2), (3, 4, 5)),
            ((0, 3), (1, 4), (2, 5)),
        }


@pytest.mark.parametrize(
    "alg",
    ["nccl", "xring", "pscpu", "psgpu", "nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu"],
)
def test_specification_shapes_the_program(collectives, alg):
    inside, _, between = alg.rpartition("/")
    shards = {"pscpu": 2 if inside else 8, "psgpu": 8}.get(between, 1)
    found = collectives(MultiWorkerAllReduce(NAMES, 4, (alg, shards)), 8, [16])
    number = counts(found)
    assert bool(number["collective-permute"]) == (between in ("xring", "rechd")), number
    assert bool(number["all-to-all"]) == (between in ("pscpu", "psgpu")), number
    assert bool(number["reduce-scatter"]) == (inside == "nccl"), number
    assert bool(number["all-reduce"]) == (alg == "nccl"), number
    groups = {tuple(map(tuple, each.groups)) for each in found}
    assert (((0, 1, 2, 3), (4, 5, 6, 7)) in groups) == bool(inside)


@pytest.mark.tensorflow("L20", "L22", "L23", "L76", "L77")
def test_packs_are_those_asked_for(collectives):
    """TensorFlow's list is reversed, its limit a floor; eager calls ignore it."""
    nccl, packs = AllReduceCrossDeviceOps, CommunicationOptions(bytes_per_pack=20)
    for ops, given, want in (
        (nccl("nccl", 0, 40, 10), [2, 2, 100, 2, 2, 2], [4, 100, 6]),
        *((nccl("nccl", 0, *off), [2, 2, 100], [2, 2, 100]) for off in ((), (0, 10), (40, 0))),
        (nccl("nccl", 1, 40, 10), [2, 2, 100], [104]),
    ):
        assert sizes(collectives(ops, 2, given)) == want
    found = collectives(nccl("nccl", 0, 40, 10), 2, [20, 20, 21], dtype="f2")
    assert sizes(found) == [40, 21], "40 bytes are small"
    for ops in (
        NcclAllReduce(),
        nccl("nccl", 0, 99, 10),
        *(CollectiveAllReduce(devices(2), 2, CommunicationOptions(bytes_per_pack=b)) for b in (0, 99)),
    ):  # fmt: skip
        assert sizes(collectives(ops, 2, [2, 3, 9], packs)) == [5, 9]


@pytest.mark.tensorflow("L71")
def test_sizes_take_their_routes(collectives):
    """Limits are bytes and inclusive: 16 float32 are 64 bytes. Packs are of one route's arrays."""
    spec = [("nccl", 1, 16), ("xring", 1, 64), ("pscpu", 4, -1)]
    found = counts(collectives(MultiWorkerAllReduce(NAMES, 2, spec), 4, [64, 16, 17, 4, 64, 4]))
    assert (found["all-reduce"], found["collective-permute"]) == (2, 6), "a ring for the one of 16"
    for more, permutes in (
        ({"num_packs": 1}, 6),
        ({"agg_small_grads_max_bytes": 40, "agg_small_grads_max_group": 2}, 3 * 6),
    ):
        ops = MultiWorkerAllReduce(NAMES, 2, [("xring", 1, 40), ("nccl", 1, -1)], **more)
        found = counts(collectives(ops, 4, [2, 2, 100, 2, 2, 2]))
        assert found == {"collective-permute": permutes, "all-reduce": 1}


# Arguments


def parsed(spec):
    routes = parse_routes(spec, None, World(sizes=(2, 4)))
    return [(route.options.algorithm, route.options.shards, route.limit) for route in routes]


@pytest.mark.tensorflow("L74")
def test_spec_forms_are_equal():
    for spec in ("xring", "XRING", ("xring",), [("xring",)], ("xring", np.int64(1), -1)):
        assert parsed(spec) == [("ring", 1, -1)]
    both = [("nccl", 2, 1024), ("ring/halving_doubling", 2, -1)]
    assert parsed(both) == [("native", 2, 1024), ("ring/halving_doubling", 2, -1)]


@pytest.mark.tensorflow("L73", "L74")
def test_malformed_specs_are_refused():
    for spec, message in (
        *((spec, "must be a name such as .*, or a list of such tuples; got ")
          for spec in ((), ("xring", 1, -1, 0), ["xring"], {}, [], 3, (1, "xring"), [("nccl",), 3])),
        *((spec, "has .*, for 2 workers of 4 devices: `algorithm` must be None or one of native")
          for spec in ("", "nccl/", ("max", 1, -1))),
        ("nccl/xring/xring", "one part for each axis from inner to outer"),
        *((("nccl", shards), "for 2 workers of 4 devices: `shards` must be a non-negative integer")
          for shards in (-1, 1.0, True)),
        (("pscpu/pscpu", 3), "`shards` is 3, but the shuffle of 'shuffle/shuffle' runs over 2 replicas"),
        *(([("nccl", 1, first), ("xring", 1, 4), ("nccl", 1, last)], "that increase .* and end in -1")
          for first, last in ((8, -1), (4, -1), (-1, -1), (2, 8), (-2, -1), (1.5, -1), (True, -1))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="all_reduce_spec.*" + message):
            parsed(spec)


@pytest.mark.tensorflow("G13", "G14", "G34", "L56")
def test_groups_may_be_any_devices(collectives):
    """In any order, of a value or of its group; but no others."""
    own = [jax.devices()[i] for i in (5, 0, 3, 2)]
    value = PerReplica.from_function(
        lambda i: np.arange(4.0) + i, devices=[own[i] for i in (1, 3, 2, 0)]
    )
    teams = [["cpu:5", own[1]], ("/device:CPU:3", "cpu:2")]
    for ops in (MultiWorkerAllReduce(teams, 2, "nccl/xring"), CollectiveAllReduce(own, 4)):
        got = ops.reduce("sum", value, value)
        assert got.devices == value.devices
        assert [x.tolist() for x in got] == [[6.0, 10.0, 14.0, 18.0]] * 4
        copies = Mirrored.from_function(lambda i: 2.0, devices=own)
        assert [x.item() for x in ops.reduce("sum", copies, copies)] == [8.0] * 4
        other = PerReplica([1.0, 2.0])
        message = (f"`{type(ops).__name__}` reduces over its own 4 devices, cpu:5, cpu:0, cpu:3, "
                   "cpu:2; got a value over cpu:0, cpu:1")  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ops.batch_reduce("sum", [(value, value), (other, other)])


REFUSED = {
    AllReduceCrossDeviceOps: [
        *(((bad,), f"`all_reduce_alg` must be one of hierarchical_copy, nccl, .*; got {re.escape(repr(bad))}")
          for bad in ("max", "", None, 3, "nccl/xring", ["nccl"])),
        *((("nccl", *[0] * place, bad), rf"`{name}` must be a non-negative integer .*\(0: no (packing|grouping)\); got {bad!r}")
          for place, name in enumerate(["num_packs", "agg_small_grads_max_bytes", "agg_small_grads_max_group"])
          for bad in (-1, 1.5, 2.0, True, "1", None)),
    ],
    NcclAllReduce: [((-1,), "`num_packs` must be a non-negative integer")],
    HierarchicalCopyAllReduce: [((True,), "`num_packs` must be a non-negative integer")],
    CollectiveAllReduce: [
        (([], 0), "`CollectiveAllReduce` got no devices"),
        ((["cpu:0", "cpu:0"], 2), "got a device twice: cpu:0"),
        ((["cpu:9"], 1), "got 'cpu:9', but there is no such device"),
        (([0], 1), "expects devices, as in `jax.devices\\(\\)`; got 0"),
        *(((["cpu:0", "cpu:1"][:k], size), f"`group_size` must be a positive multiple of the number of devices, {k}, .* got {size}")
          for k, size in ((2, 3), (1, 0), (1, 1.0), (1, True))),
        ((["cpu:0", "cpu:1"], 4), "`group_size` 4 needs 2 workers of 2 devices; there is 1, with 8 devices in total, 8 of them here"),
        ((["cpu:0"], 1, "ring"), "`options` must be a CommunicationOptions, as in .*, or None; got 'ring'"),
    ],
    MultiWorkerAllReduce: [
        *((arguments, "`worker_devices` must be a list with one name, or one list of devices, for each")
          for arguments in (([], 1), ("/job:worker/task:0", 1), ([""], 1), (["a", ["cpu:0"]], 1), (jax.devices()[:2], 1))),
        ((["a", "b", "a"], 1), "got a worker twice: a"),
        ((["a", "b", "c"], 3), "needs 9 devices for 3 workers of 3 each; there are 8: cpu:0, .* To simulate more"),
        ((["a", "b"], -1), "`num_gpus_per_worker` must be a non-negative integer .*; got -1"),
        (([["cpu:0"], ["cpu:1", "cpu:2"]], 1), "`num_gpus_per_worker` devices, which is 1; worker 1 has 2"),
        (([["cpu:0"], ["cpu:0"]], 1), "got a device twice: cpu:0"),
        ((["a", "b"], 2, ("pscpu", 5)), "runs over 4 replicas, and each shard needs its own owner"),
        ((["a", "b"], 1, "nccl", -1), "`num_packs` must be a non-negative integer"),
    ],
    ReductionToOneDevice: [
        ((3,), "`reduce_to_device` must be a device, a device string or N"),
        (("cpu:9",), "`reduce_to_device` got 'cpu:9', but there is no such device"),
        ((None, "sum"), "`accumulation_fn` must be a function from a list of arrays"),
    ],
}  # fmt: skip


@pytest.mark.tensorflow("G50", "L73", "L82", "L83")
@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_are_checked(kind):
    for arguments, message in REFUSED[kind]:
        with pytest.raises(ValueError, match=message):
            kind(*arguments)


def test_ops_show_their_arguments():
    for ops, shown in (
        (NcclAllReduce(np.int64(2)), "NcclAllReduce(num_packs=2)"),
        (HierarchicalCopyAllReduce(8), "HierarchicalCopyAllReduce(num_packs=8)"),
        (AllReduceCrossDeviceOps("ring", 0), "AllReduceCrossDeviceOps(all_reduce_alg='ring', "
         "num_packs=0, agg_small_grads_max_bytes=0, agg_small_grads_max_group=10)"),
        (CollectiveAllReduce(devices(2), 2, CommunicationOptions(bytes_per_pack=1)),
         "CollectiveAllReduce(devices=['cpu:0', 'cpu:1'], group_size=2, "
         "options=CommunicationOptions(bytes_per_pack=1))"),
        (MultiWorkerAllReduce(NAMES, 1, "nccl"), "MultiWorkerAllReduce(worker_devices=[['cpu:0'], "
         "['cpu:1']], num_gpus_per_worker=1, all_reduce_spec='nccl', num_packs=0, "
         "agg_small_grads_max_bytes=0, agg_small_grads_max_group=10)"),
        (ReductionToOneDevice("cpu:1"), "ReductionToOneDevice(reduce_to_device='cpu:1', accumulation_fn=None)"),
    ):  # fmt: skip
        assert repr(ops) == shown
        assert issubclass(type(ops), AllReduceCrossDeviceOps) != shown.startswith("Reduction")
