"""A deadline that is given inside a program bounds the call of it, or is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CompileCounter, run

import jaxcoll as jc

LATE, SOON = (jc.CommunicationOptions(timeout_seconds=seconds) for seconds in (300, 200))
STRATEGY = jc.MirroredStrategy(["cpu:0", "cpu:1"])


def loss(w, x):
    return jnp.mean(w * x)


# Every entry inside a program, as a function of options, an axis and a row.
ENTRIES = {
    "all_reduce": lambda o, a, x: jc.all_reduce("sum", x, a, options=o),
    "all_gather": lambda o, a, x: jc.all_gather(x, a, options=o),
    "reduce_scatter": lambda o, a, x: jc.all_gather(jc.reduce_scatter("sum", x, a, options=o), a),
    "gather of shards": lambda o, a, x: jc.all_gather(jc.reduce_scatter("sum", x, a), a, options=o),
    "broadcast": lambda o, a, x: jc.broadcast(x, a, options=o),
    "grad": lambda o, a, x: jc.grad(loss, a, options=o)(jnp.float32(2), x),
    "value_and_grad": lambda o, a, x: jc.value_and_grad(loss, a, options=o)(jnp.float32(2), x)[1],
    "sync_in_backward": lambda o, a, x: jax.grad(
        lambda w: loss(jc.sync_in_backward(w, a, reduce_op="sum", options=o), x)
    )(jnp.float32(2)),
    "accumulate": lambda o, a, x: jc.accumulate(loss, a, 2, options=o)(jnp.float32(2), x)[1],
    "reduce_metrics": lambda o, a, x: jc.reduce_metrics(jc.Total(x.sum()), a, options=o),
    "global_norm": lambda o, a, x: jc.global_norm(x, a, options=o),
    "all_finite": lambda o, a, x: jc.all_finite(x, a, options=o),
}
ROWS = np.ones((4, 4), "f")


@pytest.fixture
def waits(monkeypatch):
    """The deadline of each call."""
    found = []

    def run(call):
        result = call.program(*call.args, **call.kwargs)
        found.append(call.timeout_seconds)
        return result

    monkeypatch.setattr("jaxcoll.distribute._replica_program.run", run)
    monkeypatch.setattr("jaxcoll._step.step.run", run)
    return found


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_inner_deadline_bounds_strategies(waits, entry):
    for own, want in ((None, 300.0), (0, 300.0), (200, 200.0), (400, 300.0)):
        options = own if own is None else jc.CommunicationOptions(timeout_seconds=own)
        value = jc.PerReplica(list(ROWS[:2]))
        STRATEGY.run(lambda x: entry(LATE, "replica", x), (value,), options=options)
        assert waits.pop() == want


def test_inner_deadline_bounds_steps(waits):
    entry = lambda x: ENTRIES["value_and_grad"](LATE, "data", x)
    for own, want in ((None, 300.0), (SOON, 200.0)):
        step = jc.data_parallel(entry, options=own, varying_outputs="concatenate")
        for _ in range(2):
            step(ROWS.repeat(2, 0).reshape(-1))
            assert waits.pop() == want


@pytest.mark.parametrize(
    ("runner", "name"),
    [*(("checked", name) for name in ENTRIES),
     *((runner, "all_reduce") for runner in ("vmap", "pmap", "unchecked"))],
)  # fmt: skip
def test_deadline_without_wait_is_refused(runner, name):
    with pytest.raises(ValueError, match="`timeout_seconds` 300 was given inside a program that j"):
        run(runner, lambda x: ENTRIES[name](LATE, "data", x), 2, ROWS[:2])


def test_zero_is_no_deadline():
    for none in (0, None):
        entry = ENTRIES["all_reduce"]
        options = jc.CommunicationOptions(timeout_seconds=none)
        out = run("pmap", functools.partial(entry, options, "data"), 2, ROWS[:2])
        assert out.tolist() == [[2.0] * 4] * 2


def test_shortest_deadline_counts(waits):
    traces = []

    def step(x):
        traces.append(x.shape)
        context = jc.get_replica_context()
        total = context.all_reduce("sum", x, SOON if x.size > 2 else None)
        return context.all_gather(total, 0, options=LATE) if x.size > 3 else total

    for size, want in ((1, None), (1, None), (3, 200.0), (4, 200.0), (1, 200.0)):
        with CompileCounter() as compiled:
            STRATEGY.run(step, (jc.PerReplica([np.ones(size, "f")] * 2),))
        assert (waits.pop() if waits else None) == want, "a call like the last is JAX's own"
    assert traces == [(1,), (3,), (4,)]
    assert compiled.count <= 1


def test_inner_jit_bounds_the_call(waits):
    inner = jax.jit(lambda x: jc.get_replica_context().all_reduce("sum", x, LATE))
    for size in (1, 2):
        STRATEGY.run(lambda x: inner(x[:1]), (jc.PerReplica([np.ones(size, "f")] * 2),))
        assert waits.pop() == 300.0
