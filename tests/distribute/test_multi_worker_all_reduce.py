"""MultiWorkerAllReduce: workers of several devices, eight algorithms, an algorithm for each size."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from cases import of_replicas

from jaxcoll._plan.world import World
from jaxcoll.distribute import Mirrored, MultiWorkerAllReduce, PerReplica
from jaxcoll.distribute._routes import parse_routes

EIGHT = (
    "nccl", "xring", "pscpu", "psgpu", "nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu"
)  # fmt: skip


def names(workers):
    return [f"/job:worker/replica:0/task:{i}" for i in range(workers)]


def copies(result):
    return (
        [np.asarray(x).tolist() for x in result]
        if isinstance(result, Mirrored)
        else [result.tolist()]
    )


# Laws


@pytest.mark.parametrize("alg", EIGHT)
def test_specification_shapes_the_program(programs, alg):
    value = of_replicas(8, lambda d: np.full((16,), d, "f"))
    inside, _, between = alg.rpartition("/")
    shards = {"pscpu": 2 if inside else 8, "psgpu": 8}.get(between, 1)
    MultiWorkerAllReduce(names(2), 4, (alg, shards)).reduce("sum", value, value)
    found = programs.count()
    assert bool(found["collective-permute"]) == (between in ("xring", "rechd")), found
    assert bool(found["all-to-all"]) == (between in ("pscpu", "psgpu")), found
    assert bool(found["reduce-scatter"]) == (inside == "nccl"), found
    assert bool(found["all-reduce"]) == (alg == "nccl"), found
    if between == "xring":
        assert found["collective-permute"] == (2 if inside else 14)
    assert (((0, 1, 2, 3), (4, 5, 6, 7)) in programs.groups()) == bool(inside)


@pytest.mark.tensorflow("L71")
def test_sizes_take_their_routes(programs):
    """Limits are bytes and inclusive: 16 float32 are 64 bytes."""
    counts = [64, 16, 17, 4, 64, 4]
    pairs = [of_replicas(4, lambda d, i=i, c=c: np.full((c,), 10 * i + d, "f"))
             for i, c in enumerate(counts)]  # fmt: skip
    spec = [("nccl", 1, 16), ("xring", 1, 64), ("pscpu", 4, -1)]
    ops = MultiWorkerAllReduce(names(2), 2, spec)
    got = ops.batch_reduce("sum", [(v, v) for v in pairs])
    assert [copies(r)[3] for r in got] == [[40.0 * i + 6] * c for i, c in enumerate(counts)]
    found = programs.count()
    assert found["all-reduce"] == 2, "of both arrays of 4"
    assert found["collective-permute"] == 6, "a ring of four devices for the one of 16"
    tree = of_replicas(4, lambda d: {"a": np.full((4,), d, "f"), "b": np.full((16,), d, "f")})
    ops.reduce("sum", tree, tree)
    assert programs.count() == {"all-reduce": 1, "collective-permute": 6}


def test_packing_is_within_the_tuple(programs):
    counts = [2, 2, 100, 2, 2, 2]
    value = of_replicas(4, lambda d: [np.full((c,), d, "f") for c in counts])
    want = [[6.0] * c for c in counts]
    spec = [("xring", 1, 40), ("nccl", 1, -1)]
    for more, permutes in (
        ({"num_packs": 1}, 6),
        ({"agg_small_grads_max_bytes": 40, "agg_small_grads_max_group": 2}, 3 * 6),
    ):
        got = MultiWorkerAllReduce(names(2), 2, spec, **more).reduce("sum", value, value)
        assert [x.tolist() for x in got[3]] == want
        found = programs.count()
        assert (found["collective-permute"], found["all-reduce"]) == (permutes, 1)


# The specification


def parsed(spec):
    return [
        (route.options.algorithm, route.options.shards, route.limit)
        for route in parse_routes(spec, None, World(sizes=(2, 4)))
    ]


class Named(NamedTuple):
    alg: str
    shards: int
    limit: int


@pytest.mark.tensorflow("L74")
def test_spec_forms_are_equal():
    for spec in (
        "xring",
        "XRING",
        ("xring",),
        [("xring",)],
        ("xring", 1),
        ("xring", np.int64(1), -1),
    ):
        assert parsed(spec) == [("ring", 1, -1)]
    named = [Named("nccl", 2, 1024), Named("ring/halving_doubling", 2, -1)]
    assert parsed(named) == [("native", 2, 1024), ("ring/halving_doubling", 2, -1)]
    assert parsed(named[1]) == parsed(named)[1:]


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


# Workers


def test_workers_may_be_any_devices(programs):
    neighbours = repr(MultiWorkerAllReduce(names(2), 4, "nccl"))
    assert "worker_devices=[['cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'], ['cpu:4'" in neighbours
    assert "all_reduce_spec='nccl', num_packs=0, agg_small_grads_max_bytes=0" in neighbours
    workers = [["cpu:5", jax.devices()[0]], ("/device:CPU:3", "cpu:2")]
    ops = MultiWorkerAllReduce(workers, 2, "nccl/xring")
    own = [jax.devices()[i] for i in (0, 2, 3, 5)]
    value = PerReplica.from_function(lambda i: np.arange(4.0) + i, devices=own)
    got = ops.reduce("sum", value, value)
    assert got.devices == value.devices
    assert copies(got) == [[6.0, 10.0, 14.0, 18.0]] * 4
    assert ((0, 1), (2, 3)) in programs.groups()
    with pytest.raises(ValueError, match="`MultiWorkerAllReduce` reduces over its own 4 devices, cpu:5, "
                                         "cpu:0, cpu:3, cpu:2; got a value over cpu:0, cpu:1"):  # fmt: skip
        ops.reduce("sum", *[PerReplica([1.0, 2.0])] * 2)
    assert copies(ops.reduce("mean", value, value))[2] == [1.5, 2.5, 3.5, 4.5]
    mirrored = Mirrored.from_function(lambda i: 2.0, devices=own)
    assert copies(ops.reduce("sum", mirrored, mirrored)) == [8.0] * 4


# Bad input


@pytest.mark.tensorflow("L73")
def test_worker_arguments_are_checked():
    for arguments, message in (
        *((arguments, "`worker_devices` must be a list with one name, or one list of devices, for each")
          for arguments in (([], 1), ("/job:worker/task:0", 1), ([""], 1), (["a", ["cpu:0"]], 1),
                            (jax.devices()[:2], 1))),
        ((["a", "b", "a"], 1), "got a worker twice: a"),
        ((["a", "b", "c"], 3), "needs 9 devices for 3 workers of 3 each; there are 8: cpu:0, .* To simulate more"),
        ((["a", "b"], -1), "`num_gpus_per_worker` must be a non-negative integer .*; got -1"),
        (([["cpu:0"], ["cpu:1", "cpu:2"]], 1), "`num_gpus_per_worker` devices, which is 1; worker 1 has 2"),
        (([["cpu:0"], ["cpu:0"]], 1), "got a device twice: cpu:0"),
        ((["a", "b"], 2, ("pscpu", 5)), "runs over 4 replicas, and each shard needs its own owner"),
        ((["a", "b"], 1, "nccl", -1), "`num_packs` must be a non-negative integer"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            MultiWorkerAllReduce(*arguments)
