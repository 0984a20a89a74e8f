"""Laws of every cross-device op and every strategy call, each asserted once over all of them."""

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
    on,
)
from distribute.test_reductions import KINDS, all_reduce, workers

import jaxcoll as jc
from jaxcoll import CommunicationOptions, PerReplica


@pytest.mark.tensorflow("B8")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_broadcast_copies_everywhere(n):
    ops = jc.NcclAllReduce()
    for one in (1.0, np.float32(1), jnp.ones(())):
        for to in (on(devices(n)), on(devices(1)), "/device:CPU:0"):
            check(ops.broadcast(one, to), 1.0, to)
            assert not any(x.weak_type for x in jax.tree.leaves(ops.broadcast(one, to)))


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
def test_options_shape_the_program(programs, make, options, want):
    value = PerReplica([[np.full((k + 3,), k, "f") for k in range(4)]] * 4)
    result = KINDS.get(make, make)(4).reduce("sum", value, value, options)
    assert [x.tolist() for x in result[3]] == [[4.0 * k] * (k + 3) for k in range(4)]
    assert programs.count() == want


# Deadlines


SHORT, PATIENT = (CommunicationOptions(timeout_seconds=s) for s in (0.05, 60))


def overdue(call):
    """Expect the deadline of a call to pass, whose name stands before that in the message."""
    words = f"{re.escape(call)}.* did not finish within 0.05 s"
    return pytest.raises(jc.errors.DeadlineExceededError, match=words)


@pytest.fixture
def release():
    """Ends the call that keeps everything after it waiting: it was given up, and still runs."""
    ended = threading.Event()

    def wait(x):
        assert ended.wait(60)
        return x

    def stuck(xs):
        return jax.pure_callback(wait, jax.typeof(xs[0]), xs[0])

    value, ops = PerReplica([1.0, 2.0]), jc.distribute.ReductionToOneDevice(None, stuck)
    with overdue("`"):
        ops.reduce("sum", value, "cpu:7", SHORT)
    yield ended.set
    ended.set()


def check_bounded(calls, release, **short):
    """Make each call, beside the start of its error, while nothing can run; then when all can."""
    for name, call in calls:
        with overdue(name):
            call(**short)
    release()
    for _, call in calls:
        jax.block_until_ready(jax.tree.leaves(call(options=PATIENT)))


def calls_of(ops):
    """Every call of an op that waits, and how its errors begin."""
    kind = type(ops).__name__
    value = PerReplica([np.ones(2, "f")] * 8)
    sparse = PerReplica([jc.IndexedSlices([1.0], [0], (5,))] * 8)
    pairs = [(value, value), (value, "cpu:0")]
    return [
        (f"`{kind}.reduce` (SUM of 1 value)", partial(ops.reduce, "sum", value, value)),
        (f"`{kind}.reduce` (SUM of 1 value)", partial(ops.reduce, "sum", sparse, sparse)),
        (f"`{kind}.batch_reduce` (MEAN of 2 values)", partial(ops.batch_reduce, "mean", pairs)),
    ]


@pytest.mark.tensorflow("G4", "G29", "G31")
@pytest.mark.tensorflow("F25", "F26", "F28")
@pytest.mark.parametrize("kind", ["one", "workers"])
def test_deadline_bounds_a_call(kind, release):
    calls = calls_of(KINDS[kind](8))
    check_bounded(calls, release, options=SHORT)
    with CompileCounter() as compiled:
        for _, call in calls:
            assert_trees_equal(call(options=PATIENT), call())
    assert compiled.count == 0, "a deadline is no part of a program"


def test_objects_deadline_bounds_calls(release):
    check_bounded(calls_of(jc.distribute.CollectiveAllReduce(devices(8), 8, SHORT)), release)


@pytest.mark.parametrize("where", ["strategy", "call"])
def test_strategys_deadline_bounds_calls(where, release):
    """Reductions, gathers, updates and runs alike."""
    s = jc.MultiWorkerMirroredStrategy(communication_options=SHORT if where == "strategy" else None)
    value = PerReplica.from_function(lambda i: np.ones(2, "f"))
    one, several = (f"`CollectiveAllReduce.{m}` (SUM of 1 v" for m in ("reduce", "batch_reduce"))
    to, pairs = s.extended, [(value, value)]
    calls = [
        (one, partial(s.reduce, "sum", value, None)),
        (one, partial(s.reduce, "mean", value, 0)),
        ("`MultiWorkerMirroredStrategy.gather`", partial(s.gather, value, 0)),
        (one, partial(to.reduce_to, "sum", value, value)),
        (several, partial(to.batch_reduce_to, "sum", pairs)),
        ("`MultiWorkerMirroredStrategy.run` of `ones`", partial(s.run, ones)),
    ]
    if where == "strategy":
        with overdue("extended.update`"):
            s.extended.update(value, lambda v: v + 1)
    check_bounded(calls, release, **({} if where == "strategy" else {"options": SHORT}))


def ones():
    return jnp.ones(())


@pytest.mark.tensorflow("F23")
def test_threads_do_not_interleave():
    def launch(who):
        ops, value = jc.distribute.CollectiveAllReduce(devices(2), 2), PerReplica([who] * 2)
        batches = [ops.batch_reduce("sum", [(value, value)] * 2) for _ in range(20)]
        return {x[1].item() for batch in batches for x in batch}

    assert at_once(lambda: launch(1.0), lambda: launch(2.0)) == [{2.0}, {4.0}]


def called_back(call):
    """A function of one replica whose program calls `call` on the host."""
    return lambda x: jax.pure_callback(lambda x: (call(), x)[1], jax.ShapeDtypeStruct((), "f"), x)


def test_threads_overlap_under_deadlines():
    run = called_back(threading.Barrier(2, timeout=15).wait)
    one, other = (jc.MirroredStrategy([name]) for name in ("cpu:0", "cpu:1"))
    calls = [lambda s=s: s.run(run, (2.0,), options=PATIENT)[0].item() for s in (one, other)]
    assert at_once(*calls) == [2.0, 2.0]


@pytest.mark.parametrize("inner", [CommunicationOptions(), PATIENT])
def test_bounded_programs_may_call_back(inner):
    outer, other = jc.MirroredStrategy(["cpu:0"]), jc.MirroredStrategy(["cpu:1", "cpu:2"])
    value, found = PerReplica([1.0, 2.0], devices=other.devices), []
    call = called_back(lambda: found.append(other.reduce("sum", value, None, inner).item()))
    assert outer.run(call, (2.0,), options=PATIENT)[0].item() == 2.0
    assert found == [3.0]
