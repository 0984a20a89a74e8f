"""Local updates in `Elastic`: a worker trains by itself, and meets the others at the end of a round."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from cases import assert_trees_equal
from diloco_simulation import PARAMS, local_step, rows

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("dtypes_may_mix")

INNER = optax.sgd(1e-2, momentum=0.9)


@functools.cache
def train_of():
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return jc.diloco(local_step(INNER), every=5, outer=nesterov)


def start_of(train):
    return train.init(PARAMS, INNER.init(PARAMS))


def batches(at, rank, world):
    return rows(at, 8)


def loop(train, state, begin, end):
    for at in range(begin, end):
        state, _ = train(state, batches(at, 0, 1))
    return state


@pytest.mark.slow
def test_checkpoint_begins_at_shared_parameters(tmp_path):
    train, path, reported = train_of(), tmp_path / "last.npz", []
    report = lambda finished, losses: reported.append((finished, np.shape(losses)))
    first = jc.Elastic(train, start_of(train), checkpoint=path, every=7, report=report)
    state = first.run(batches, 10)
    assert reported == [(n, (8,)) for n in range(1, 11)]
    want = loop(train, start_of(train), 0, 10)
    assert_trees_equal(state, want)
    assert (first.finished, first.workers, first.changes) == (10, (0,), [])
    one = jax.tree.map(lambda x: np.repeat(x[:1], 8, 0), want.replicas[1])
    began = train.restart(want)
    began = dataclasses.replace(began, replicas=(began.replicas[0], one))
    again = jc.Elastic(train, start_of(train), checkpoint=path)
    assert_trees_equal(again.run(batches, 15), loop(train, began, 10, 15))


def test_interrupted_round_repeats_no_step(memberships):
    train, begun, interrupts = train_of(), [], [7, 9]

    def interrupted(at, rank, world):
        begun.append(at)
        if at in interrupts:  # in a round, and before its exchange
            memberships[0].request_regroup("somebody died")
        return batches(at, rank, world)

    trainer = jc.Elastic(train, start_of(train))
    state = trainer.run(interrupted, 10)
    assert begun == list(range(10))
    assert [change.step for change in trainer.changes] == [5, 5]
    assert_trees_equal(state, loop(train, start_of(train), 0, 10))


def test_unfit_rounds_are_refused():
    train = train_of()
    with pytest.raises(ValueError, match="expects the state that `init` returned; got dict"):
        jc.Elastic(train, PARAMS)
    with pytest.raises(ValueError, match="must be a multiple of the 5 steps between two exchanges"):
        jc.Elastic(train, start_of(train)).run(batches, 12)
