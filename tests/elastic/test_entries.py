"""The promises about a call hold for every entry: a step, a strategy, `Elastic` and DiLoCo."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll as jc

ROWS = np.arange(16, dtype="f")
SOON = jc.CommunicationOptions(timeout_seconds=0.1)
TOO_SOON = jc.CommunicationOptions(timeout_seconds=1e-6)


def call(step, options=None):
    return jc.data_parallel(step, options=options)(np.float32(0), ROWS)


def strategy(step, options=None):
    rows = jc.PerReplica([ROWS[:8], ROWS[8:]])
    return jc.MirroredStrategy(["cpu:0", "cpu:1"]).run(step, (np.float32(0), rows), options=options)


def train(step, state, **settings):
    return jc.Elastic(step, state, **settings).run(lambda step, worker, workers: ROWS, 2)


def elastic(step, options=None):
    return train(jc.data_parallel(step, options=options), np.float32(0))


def diloco(local, options=None, loop=lambda step, state: step(state, ROWS)):
    step = jc.diloco(local, every=1, options=options)
    return loop(step, step.init(np.zeros(1 << 20, "f"), ()))


def elastic_diloco(local, options=None):
    return diloco(local, options, train)


STEPS = pytest.mark.parametrize("entry", [call, strategy, elastic])
LOCAL = pytest.mark.parametrize("entry", [diloco, elastic_diloco])


@pytest.fixture(autouse=True)
def _few_attempts(monkeypatch):
    monkeypatch.setattr("jaxcoll._train.elastic.run.MOST_ATTEMPTS", 2)


@STEPS
@pytest.mark.parametrize("inside", [True, False])
def test_deadline_bounds_the_call(entry, inside):
    def wait(x):
        time.sleep(0.5)
        return x

    def step(w, x):
        x = jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        g = jc.all_reduce("mean", x.mean(), options=SOON if inside else None)
        return w + g, g

    with pytest.raises(jc.errors.DeadlineExceededError):
        entry(step, None if inside else SOON)


@LOCAL
def test_deadline_bounds_the_exchange(entry):
    with pytest.raises(jc.errors.DeadlineExceededError):
        entry(lambda w, s, x: (w - x.mean(), s, x.mean()), TOO_SOON)


@STEPS
def test_claimed_equal_values_are_compared(entry):
    def step(w, x):
        g = jc.same(x.mean())
        return w + g, g

    with pytest.raises(jc.errors.ReplicaDivergenceError, match="2 replicas|8 replicas"):
        entry(step)


@STEPS
def test_varying_state_is_refused(entry):
    def step(w, x):
        return w + x.mean(), jc.pmean(x.mean())

    if entry is strategy:  # where it is a value per replica
        assert isinstance(entry(step)[0], jc.PerReplica)
    else:
        with pytest.raises(ValueError, match="differs between replicas|varies"):
            entry(step)


def test_drifting_copies_end_elastic(tmp_path):
    def step(w, x):
        drift = jnp.where(w > 1, jax.lax.axis_index("data").astype("f"), 0)  # none at first
        return w + 1 + jc.same(drift), jc.pmean(x.mean())

    words = r"differ on the devices of worker 0. The first is state: devices 0 \| 1 \| 2"
    path = tmp_path / "last.npz"
    train = jc.Elastic(jc.data_parallel(step), np.float32(0), checkpoint=path, every=2)
    with pytest.raises(jc.errors.ReplicaDivergenceError, match=words) as caught:
        train.run(lambda step, worker, workers: ROWS, 9)
    assert [len(groups) for groups in caught.value.divergent.values()] == [8]
    assert jc.restore_checkpoint(path, np.float32(0))[1] == 2


def test_change_says_what_callback_raised():
    attempts = []

    def look_up(x):
        if len(attempts) == 1:
            raise ValueError("no such row")
        return x

    def step(w, x):
        x = jax.pure_callback(look_up, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return w + jc.pmean(x.mean()), None

    batches = lambda step, worker, workers: attempts.append(step) or ROWS
    train = jc.Elastic(jc.data_parallel(step), np.float32(0))
    train.run(batches, 2)
    assert attempts == [0, 0, 1]
    assert "step 0 failed on worker 0" in train.changes[0].why
    assert "no such row" in train.changes[0].why
