"""Laws of every cross-device op and every strategy call, each asserted once over all of them."""

import functools
import itertools
import operator
import re
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_once import at_once
from cases import (
    CompileCounter,
    assert_trees_equal,
    check,
    devices,
    each_row,
    noise,
    of_replicas,
    on,
    tree,
)

import jaxcoll as jc
from jaxcoll import CommunicationOptions, PerReplica

WORKERS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 1, 6: 3, 7: 7, 8: 2}
"""Of so many devices, how many workers: of one, two, three, four or five devices each."""


def to_one(*args):
    return lambda n: jc.ReductionToOneDevice(*args)


def all_reduce(*args):
    return lambda n: jc.AllReduceCrossDeviceOps(*args)


def collective(**settings):
    return lambda n: jc.CollectiveAllReduce(devices(n), n, CommunicationOptions(**settings))


def workers(*algorithms, **more):
    """Each algorithm in two shards, for arrays up to 100 bytes but for the last."""

    def make(n):
        count = WORKERS[n]
        limits = [*[100] * (len(algorithms) - 1), -1]
        spec = [(a, min(2, count), x) for a, x in zip(algorithms, limits, strict=True)]
        names = [f"/job:worker/replica:0/task:{i}" for i in range(count)]
        return jc.MultiWorkerAllReduce(names, n // count, spec, **more)

    return make


KINDS = {
    "one": to_one(),
    "one-cpu0": to_one("/device:CPU:0"),
    "one-add_n": to_one(None, functools.partial(functools.reduce, operator.add)),
    "nccl": lambda n: jc.NcclAllReduce(),
    "nccl-packs0": lambda n: jc.NcclAllReduce(num_packs=0),
    "nccl-packs3": lambda n: jc.NcclAllReduce(num_packs=3),
    "hierarchical-packs8": lambda n: jc.HierarchicalCopyAllReduce(num_packs=8),
    "hierarchical-small": all_reduce("hierarchical_copy", 0, 100, 10),
    "collective": collective(),
    "collective-ring": collective(implementation="ring"),
    "collective-nccl": collective(implementation="NCCL"),
    "collective-packed": collective(bytes_per_pack=8),
    "workers": workers("pscpu/pscpu"),
    "workers-pack": workers("pscpu/pscpu", num_packs=1),
    "workers-aggregation": workers("pscpu/pscpu", agg_small_grads_max_bytes=100),
    "workers-specs": workers("pscpu/pscpu", "xring"),
}
ALGORITHMS = {
    **{alg: all_reduce(alg, 2) for alg in ("NCCL", "native", "ring", "xring", "rechd", "pscpu",
                                           "shuffle", "hierarchical_copy")},
    **{f"workers {alg}": workers(alg) for alg in ("nccl", "xring", "pscpu", "psgpu", "nccl/xring",
                                                  "nccl/rechd", "nccl/pscpu")},
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_B1_B2_B4_B5_B7_C1_C2_C4_F1_F2_F4_F5_F10_F11_F34_to_three_kinds_of_destinations(make, n):
    ops = make(n)
    x, y = of_replicas(n, float), of_replicas(n, lambda d: d + 1.0)
    total = n * (n - 1) / 2
    places = [on(devices(n)), on(devices(1)), "/device:CPU:0"]
    for to in places:
        check(ops.reduce("mean", x, to), total / n, to)
        check(ops.reduce(jc.ReduceOp.SUM, x, to), total, to)
        check(ops.reduce("Sum", y, to), total + n, to)
    # Every pair of places for two devices; for other numbers each place before another and after.
    pairs = (
        itertools.product(places, places)
        if n == 2
        else zip(places, places[1:] + places[:1], strict=True)
    )
    for first, second in pairs:
        results = ops.batch_reduce("sum", [(x, first), (y, second)])
        assert type(results) is list
        check(results[0], total, first)
        check(results[1], total + n, second)


@pytest.mark.parametrize(
    ("kind", "n"),
    [*((kind, 2) for kind in KINDS), *((kind, n) for kind in ("one", "nccl") for n in (1, 5))],
)
def test_B8_broadcast(kind, n):
    ops = KINDS[kind](n)
    for one in (1.0, np.float32(1), jnp.ones(())):
        for to in (on(devices(n)), on(devices(1)), "/device:CPU:0"):
            check(ops.broadcast(one, to), 1.0, to)
            assert not any(x.weak_type for x in jax.tree.leaves(ops.broadcast(one, to)))


def replicas_of(name):
    """How an algorithm sums over other numbers of replicas is spmd/test_conformance.py's."""
    if name == "workers nccl/pscpu":  # also of one worker, and of workers with one device
        return (5, 6, 7, 8)
    return (6,) if name.startswith("workers") or name in ALGORITHMS else (5,)


@pytest.mark.parametrize(
    ("make", "n"),
    [
        pytest.param(make, n, id=f"{name}-{n}")
        for name, make in {**KINDS, **ALGORITHMS}.items()
        for n in replicas_of(name)
    ],
)
def test_D14_D16_L38_L40_results_equal_the_float64_reference_in_order_and_structure(make, n):
    ops, x = make(n), jax.tree.map(np.asarray, {"noise": noise(n, 5, 3), **tree(n)})
    op, share = ("sum", 1) if n % 2 else ("mean", n)
    parts = (
        (x, x["odd"])
        if make in KINDS.values()
        else ({k: x[k] for k in ("noise", "int")}, x["half"])
    )
    values = [each_row(n, part) for part in parts]
    results = ops.batch_reduce(op, [(v, v) for v in values])
    for part, result in zip(parts, results, strict=True):
        assert jax.tree.structure(result.tree) == jax.tree.structure(part)
        for leaf, want in zip(jax.tree.leaves(result.tree), jax.tree.leaves(part), strict=True):
            bits = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
            assert len(bits) == 1, "every replica has the same bits"
            exact = np.asarray(want, np.float64)
            integer = want.dtype == np.int32
            assert leaf.dtype == (np.float32 if integer and op == "mean" else want.dtype)
            eps = 0.0 if leaf.dtype == np.int32 else float(jnp.finfo(leaf.dtype).eps)
            error = np.abs(np.asarray(leaf, np.float64) - exact.sum(0) / share)
            assert np.all(error <= n * eps * np.abs(exact).sum(0) / share)


# What options ask for is in the program


RING, NATIVE = (CommunicationOptions(implementation=i) for i in ("ring", "nccl"))
TIERED = CommunicationOptions(algorithm="nccl/xring")
COUNTS = {
    "native": ("nccl", None, {"all-reduce": 1}),
    "no packs of one's own": ("nccl", CommunicationOptions(bytes_per_pack=0), {"all-reduce": 1}),
    "ring": ("nccl", RING, {"collective-permute": 6}),
    "ring in three packs of 12 + 16, 20 and 24 bytes":
        ("nccl", RING.replace(bytes_per_pack=40), {"collective-permute": 18}),
    "the object's": (all_reduce("xring"), None, {"collective-permute": 6}),
    "over the object's": (all_reduce("xring"), NATIVE, {"all-reduce": 1}),
    "two levels":
        ("hierarchical-packs8", TIERED.replace(bytes_per_pack=99),
         {"reduce-scatter": 1, "collective-permute": 2, "all-gather": 1}),
    "of a group": ("collective-ring", NATIVE.replace(bytes_per_pack=99), {"all-reduce": 1}),
    "two levels over a specification of two shards":
        (workers("nccl"), TIERED.replace(bytes_per_pack=99),
         {"reduce-scatter": 2, "collective-permute": 4, "all-gather": 2}),
    "one level over a specification of two shards":
        (workers("nccl"), RING.replace(bytes_per_pack=99), {"collective-permute": 12}),
}  # fmt: skip


@pytest.mark.parametrize(("make", "options", "want"), COUNTS.values(), ids=COUNTS)
def test_the_options_of_a_call_are_in_its_program(programs, make, options, want):
    value = PerReplica([[np.full((k + 3,), k, "f") for k in range(4)]] * 4)
    result = KINDS.get(make, make)(4).reduce("sum", value, value, options)
    assert [x.tolist() for x in result[3]] == [[4.0 * k] * (k + 3) for k in range(4)]
    assert programs.count() == want


@pytest.mark.parametrize(
    ("options", "want"),
    [
        (None, {"all-gather": 3}),
        (CommunicationOptions(bytes_per_pack=1000), {"all-gather": 1}),
        (CommunicationOptions(implementation="ring"), {"collective-permute": 9}),
    ],
)
@pytest.mark.parametrize("of", ["call", "object"])
def test_the_options_of_a_gather_are_in_its_program(programs, of, options, want):
    value = PerReplica([[np.ones(k, "f") for k in (3, 4, 5)]] * 4)
    if of == "call":
        jc.NcclAllReduce().gather(value, value, 0, options)
    else:
        jc.CollectiveAllReduce(devices(4), 4, options).gather(value, value, 0)
    assert programs.count() == want


# Deadlines


SHORT, PATIENT = (CommunicationOptions(timeout_seconds=s) for s in (0.05, 60))


@pytest.fixture
def release():
    """Ends the call that keeps everything after it waiting: it was given up, and still runs."""
    ended = threading.Event()

    def wait(x):
        assert ended.wait(60)
        return x

    def stuck(xs):
        return jax.pure_callback(wait, jax.typeof(xs[0]), xs[0])

    with pytest.raises(jc.DeadlineExceededError, match=r"did not finish within 0.05 s"):
        jc.ReductionToOneDevice(None, stuck).reduce("sum", PerReplica([1.0, 2.0]), "cpu:7", SHORT)
    yield ended.set
    ended.set()


def check_bounded(calls, release, **short):
    """Each call by the start of its error, while nothing can run; then each that can."""
    for name, call in calls:
        with pytest.raises(
            jc.DeadlineExceededError, match=f"{re.escape(name)} did not finish within 0.05 s"
        ):
            call(**short)
    release()
    for _, call in calls:
        jax.block_until_ready(jax.tree.leaves(call(options=PATIENT)))


def calls_of(ops):
    """Every call of an op that waits, and how its errors begin."""
    kind = type(ops).__name__
    value = PerReplica([np.ones(2, "f")] * 8)
    sparse = PerReplica([jc.IndexedSlices([1.0], [0], (5,))] * 8)
    pairs = [(value, value), (value, "cpu:0"), (1.0, "cpu:0")]
    return [
        (f"`{kind}.reduce` (SUM of 1 value)", partial(ops.reduce, "sum", value, value)),
        (f"`{kind}.reduce` (SUM of 1 value)", partial(ops.reduce, "sum", sparse, sparse)),
        (f"`{kind}.batch_reduce` (MEAN of 2 values)", partial(ops.batch_reduce, "mean", pairs[:2])),
        (f"`{kind}.gather`", partial(ops.gather, value, value, 0)),
        (f"`{kind}.gather`", partial(ops.gather, value, "cpu:0", 0)),
    ]


@pytest.mark.parametrize("kind", ["one", "nccl", "hierarchical-packs8", "workers", "collective"])
def test_F25_F26_F28_the_deadline_of_a_call_bounds_it_and_the_next_call_works(kind, release):
    calls = calls_of(KINDS[kind](8))
    check_bounded(calls, release, options=SHORT)
    with CompileCounter() as compiled:
        for _, call in calls:
            assert_trees_equal(call(options=PATIENT), call())
    assert compiled.count == 0, "a deadline is no part of a program"


def test_the_deadline_of_an_object_bounds_each_call_that_has_none_of_its_own(release):
    check_bounded(calls_of(jc.CollectiveAllReduce(devices(8), 8, SHORT)), release)


@pytest.mark.parametrize("where", ["strategy", "call"])
def test_a_strategys_calls_are_bounded_by_its_own_deadline_or_the_calls(where, release):
    """Reductions, gathers, updates and runs alike."""
    s = jc.MultiWorkerMirroredStrategy(communication_options=SHORT if where == "strategy" else None)
    value = PerReplica.from_function(lambda i: np.ones(2, "f"))
    ops = "`CollectiveAllReduce"
    calls = [
        (f"{ops}.batch_reduce` (SUM of 1 value)", partial(s.reduce, "sum", value, None)),
        (f"{ops}.reduce` (SUM of 1 value)", partial(s.reduce, "mean", value, 0)),
        (f"{ops}.gather`", partial(s.gather, value, 0)),
        (f"{ops}.reduce` (SUM of 1 value)", partial(s.extended.reduce_to, "sum", value, value)),
        (
            f"{ops}.batch_reduce` (SUM of 1 value)",
            partial(s.extended.batch_reduce_to, "sum", [(value, value)]),
        ),
        ("`MultiWorkerMirroredStrategy.run` of `ones`", partial(s.run, ones)),
    ]
    if where == "strategy":
        with pytest.raises(jc.DeadlineExceededError, match=r"extended.update` did not finish"):
            s.extended.update(value, lambda v: v + 1)
    check_bounded(calls, release, **({} if where == "strategy" else {"options": SHORT}))


def ones():
    return jnp.ones(())


def test_a_deadline_given_to_a_reduction_inside_bounds_the_run(release):
    def step():
        return jc.get_replica_context().all_reduce("sum", 1.0, options=SHORT)

    with pytest.raises(
        jc.DeadlineExceededError,
        match="`MirroredStrategy.run` of `step` did not finish within 0.05",
    ):
        jc.MirroredStrategy().run(step)
    release()


def test_F23_threads_that_launch_in_crossing_order_do_not_interleave():
    ops = [jc.CollectiveAllReduce(devices(2), 2) for _ in range(2)]
    values = [[PerReplica([k, k]) for _ in range(2)] for k in (1.0, 2.0)]
    start, got = threading.Barrier(2), {}

    def launch(who):
        for _ in range(20):
            start.wait(60)
            batch = [(v, v) for v in values[who]]
            got[who] = [x[1].item() for x in ops[who].batch_reduce("sum", batch)]

    threads = [threading.Thread(target=launch, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert got == {0: [2.0, 2.0], 1: [4.0, 4.0]}


def called_back(call):
    """A function of one replica whose program calls `call` on the host."""
    return lambda x: jax.pure_callback(lambda x: (call(), x)[1], jax.ShapeDtypeStruct((), "f"), x)


def test_calls_of_several_threads_overlap_under_a_deadline_too():
    met = threading.Barrier(2, timeout=15)
    run = called_back(met.wait)
    bounded = CommunicationOptions(timeout_seconds=60)
    strategies = [jc.MirroredStrategy([f"cpu:{k}"]) for k in range(2)]
    found = at_once(
        *[lambda s=s: s.run(run, (2.0,), options=bounded)[0].item() for s in strategies]
    )
    assert found == [2.0, 2.0]


@pytest.mark.parametrize("inner", [None, 30])
def test_a_program_whose_call_is_bounded_may_make_calls_in_a_callback(inner):
    strategy, found = jc.MirroredStrategy(["cpu:0"]), []
    other, value = (
        jc.MirroredStrategy(["cpu:1", "cpu:2"]),
        PerReplica([1.0, 2.0], devices=devices(3)[1:]),
    )
    options = CommunicationOptions(timeout_seconds=inner)
    call = called_back(
        lambda: found.append(other.reduce("sum", value, None, options=options).item())
    )
    bounded = CommunicationOptions(timeout_seconds=60)
    assert strategy.run(call, (2.0,), options=bounded)[0].item() == 2.0
    assert found == [3.0]


def test_G47_many_reductions_of_a_group_of_one():
    ops, value = jc.CollectiveAllReduce(devices(1), 1), PerReplica([[1.0]])
    for _ in range(1000):
        result = ops.reduce("sum", value, value)
    assert [x.item() for x in result] == [1.0]
