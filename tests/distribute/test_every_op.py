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
from distribute.test_reductions import KINDS

import jaxcoll as jc
from jaxcoll import CommunicationOptions, PerReplica


@pytest.mark.tensorflow("B8")
def test_broadcast_copies_everywhere():
    for one in (1.0, np.float32(1), jnp.ones(())):
        for to in (on(devices(5)), on(devices(1)), "/device:CPU:0"):
            result = jc.NcclAllReduce().broadcast(one, to)
            check(result, 1.0, to)
            assert not any(x.weak_type for x in jax.tree.leaves(result))


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
    kind, value = type(ops).__name__, PerReplica([np.ones(2, "f")] * 8)
    sparse = PerReplica([jc.IndexedSlices([1.0], [0], (5,))] * 8)
    pairs = [(value, value), (value, "cpu:0")]
    return [
        *(
            (f"`{kind}.reduce` (SUM of 1 value)", partial(ops.reduce, "sum", x, x))
            for x in (value, sparse)
        ),
        (f"`{kind}.batch_reduce` (MEAN of 2 values)", partial(ops.batch_reduce, "mean", pairs)),
    ]


@pytest.mark.tensorflow("G4", "G29", "G31")
@pytest.mark.tensorflow("F25", "F26", "F28")
@pytest.mark.parametrize("kind", ["one", "workers", "collective"])
def test_deadline_bounds_a_call(kind, release):
    own = jc.distribute.CollectiveAllReduce(devices(8), 8, SHORT)
    calls = calls_of(own if kind == "collective" else KINDS[kind](8))
    check_bounded(calls, release, **({} if kind == "collective" else {"options": SHORT}))
    with CompileCounter() as compiled:
        for _, call in calls:
            assert_trees_equal(
                call(options=PATIENT), call(options=PATIENT.replace(timeout_seconds=99))
            )
    assert compiled.count == 0, "a deadline is no part of a program"


@pytest.mark.parametrize("where", ["strategy", "call"])
def test_strategys_deadline_bounds_calls(where, release):
    """Reductions, gathers, updates and runs alike."""
    short, options = (SHORT, {}) if where == "strategy" else (None, {"options": SHORT})
    s = jc.MultiWorkerMirroredStrategy(communication_options=short)
    value = PerReplica.from_function(lambda i: np.ones(2, "f"))
    one, several = (f"`CollectiveAllReduce.{m}` (SUM of 1 v" for m in ("reduce", "batch_reduce"))
    if short:
        with overdue("extended.update`"):
            s.extended.update(value, lambda v: v + 1)
    calls = [
        (one, partial(s.reduce, "sum", value, None)),
        (one, partial(s.reduce, "mean", value, 0)),
        ("`MultiWorkerMirroredStrategy.gather`", partial(s.gather, value, 0)),
        (one, partial(s.extended.reduce_to, "sum", value, value)),
        (several, partial(s.extended.batch_reduce_to, "sum", [(value, value)])),
        ("`MultiWorkerMirroredStrategy.run` of `<lambda>`", partial(s.run, lambda: jnp.ones(()))),
    ]
    check_bounded(calls, release, **options)


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


@pytest.mark.parametrize("inner", [CommunicationOptions(), PATIENT])
def test_bounded_programs_may_overlap(inner):
    """Those of threads on different devices, and one that another calls back."""
    run = called_back(threading.Barrier(2, timeout=15).wait)
    one, other = (jc.MirroredStrategy([name]) for name in ("cpu:0", "cpu:1"))
    calls = [lambda s=s: s.run(run, (2.0,), options=PATIENT)[0].item() for s in (one, other)]
    assert at_once(*calls) == [2.0, 2.0]
    pair, found = jc.MirroredStrategy(["cpu:1", "cpu:2"]), []
    value = PerReplica([1.0, 2.0], devices=pair.devices)
    call = called_back(lambda: found.append(pair.reduce("sum", value, None, inner).item()))
    assert one.run(call, (2.0,), options=PATIENT)[0].item() == 2.0
    assert found == [3.0]
