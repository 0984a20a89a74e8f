"""Mistakes of new users: each error names the mistake, and shows the line that is meant."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcoll as jc
from jaxcoll._runtime.dispatch import reason_to_warn

W, X = np.ones(3, np.float32), np.ones((8, 3), np.float32)
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


@jc.data_parallel
def step(w, x):
    value, grad = jc.value_and_grad(loss, "data")(w, x)
    return w - 0.1 * grad, value


def mapped(function):
    """A function of a replica's `w` and `x`, called in a `shard_map`."""
    specs = PartitionSpec(), PartitionSpec("data")
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=specs[0]))(W, X)


def shards():
    return jc.shard({"w": np.ones((4, 8), np.float32)}, "data")


def elastic(batches, steps=2):
    return jc.Elastic(step, W).run(batches, steps)


def ran(batch):
    strategy = jc.MirroredStrategy()
    (shared,) = strategy.experimental_distribute_dataset([batch])
    return strategy.run(lambda x: jc.get_replica_context().all_reduce("mean", x.mean()), (shared,))


GATHER = r"Gather it first: `params = jc.all_gather\(shards, 'data'\)`"
BATCHES = r"`jc.batches\(rows, batch_size\)`; a list of batches; `lambda step: batch`"
NO_ROWS = r"has no rows \(its shape is \[0, 3\]\)"
MISTAKES = {
    "shards + 1": (lambda: shards() + 1, TypeError, GATHER),
    "array @ shards": (lambda: X @ shards(), TypeError, GATHER),
    "jnp of shards": (lambda: jnp.sum(shards()), TypeError, GATHER),
    "numpy of shards": (lambda: np.asarray(shards()), TypeError, GATHER),
    "an item of shards": (lambda: shards()["w"], TypeError, GATHER),
    "a shape of shards": (lambda: shards().shape, AttributeError, f"no attribute 'shape'.*{GATHER}"),
    "a step of shards": (
        lambda: jc.data_parallel(lambda p, x: jc.pmean(loss(p["w"], x)))(shards(), X),
        TypeError, GATHER),
    "elastic: an array": (lambda: elastic(X), ValueError, f"{BATCHES}.*got ndarray"),
    "elastic: a pair": (lambda: elastic((X, X)), ValueError, f"{BATCHES}.*got tuple"),
    "elastic: an iterator": (lambda: elastic(iter([X])), ValueError, f"{BATCHES}.*list_iterator"),
    "elastic: two arguments": (lambda: elastic(lambda a, b: X), ValueError, f"{BATCHES}.*of 2 arg"),
    "elastic: no return": (lambda: elastic(lambda step: None), ValueError, "None for step 0"),
    "elastic: odd rows": (lambda: elastic([X[:3]]), ValueError, "batch has 3 rows, .* 8 replicas"),
    "elastic: no rows": (lambda: elastic([X[:0]]), ValueError, NO_ROWS),
    "elastic: half a step": (lambda: elastic([X], 1.5), ValueError, "`steps` must be .* got 1.5"),
    "elastic: a function": (
        lambda: jc.Elastic(loss, W), ValueError,
        r"as in `jc.Elastic\(jc.data_parallel\(step\), state\)`; got function"),
    "options: no such name": (
        lambda: jc.CommunicationOptions(timeout=3), TypeError,
        "no option 'timeout'; did you mean 'timeout_seconds'.* are bytes_per_pack, .* compression"),
    "options: a string": (
        lambda: jc.data_parallel(loss, options="int8"), ValueError,
        r"as in `jc.CommunicationOptions\(timeout_seconds=60\)`"),
    "options: a hyphen": (
        lambda: jc.CommunicationOptions(algorithm="halving-doubling"), ValueError,
        "one of native, ring, halving_doubling, .* got 'halving-doubling'"),
    "step: no rows": (lambda: step(W, X[:0]), ValueError, NO_ROWS),
    "step: a list": (lambda: step(W, X.tolist()), ValueError, r"pass `np.asarray\(x\)`"),
    "strategy: no rows": (lambda: ran(X[:0]), ValueError, NO_ROWS),
    "value_and_grad: no rows": (
        lambda: mapped(lambda w, x: jc.value_and_grad(loss, "data")(w, x[:0])), ValueError, NO_ROWS),
    "accumulate: no rows": (
        lambda: mapped(lambda w, x: jc.accumulate(loss, "data", 2)(w, x[:0])), ValueError, NO_ROWS),
    "mean_loss: no rows": (
        lambda: mapped(lambda w, x: jc.mean_loss(loss, "data")(w, x[:0])), ValueError, NO_ROWS),
    "accumulate: a number for the axis": (
        lambda: mapped(lambda w, x: jc.accumulate(loss, 2)(w, x)), ValueError,
        r'as in `jc.accumulate\(loss, "data", 4\)`'),
    "value_and_grad of a value": (
        lambda: mapped(lambda w, x: jc.value_and_grad(loss(w, x), "data")), ValueError,
        r'`jc.value_and_grad\(loss, "data"\)\(params, batch\)`; got float32\[\]'),
    "all_reduce: no operation": (
        lambda: mapped(lambda w, x: jc.all_reduce(x, "data")), ValueError,
        r'`jc.all_reduce\("mean", value, "data"\)`; got float32\[1, 3\] for it'),
    "batches: a list": (
        lambda: jc.batches([[1, 2], [3, 4], [5, 6]], 2), ValueError,
        r"for a list: `np.asarray\(rows\)`.*got list of int, int, int, int, 2 more"),
    "checkpoint: no path": (
        lambda: jc.save_checkpoint({"w": W}, "last.npz"), ValueError,
        r"as in `jc.save_checkpoint\(path, state\)`; got dict"),
    "launch: a program": (lambda: jc.launch("train.py"), ValueError, r"by `jaxcoll launch`\); got str"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_shows_what_is_meant(mistake):
    attempt, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message) as raised:
        attempt()
    assert not re.search(r"Tracer|ShapeDtypeStruct|jaxlib|_src|\bjaxcoll\._", str(raised.value))


def test_values_are_one_line():
    batches = jc.batches(X, 4, seed=3)
    assert repr(batches) == "Batches(8 rows, 2 batches of 4 an epoch, seed 3; at epoch 0, row 0)"
    assert repr(step) == "DataParallel(step(w, x), batch_argnums=('x',), axis_name='data')"
    assert repr(jc.data_parallel(lambda a, b, c: a)).startswith("DataParallel(<lambda>(a, b, c), ")
    assert repr(shards()) == "Shards(1 leaf, 128 B, 1/8 on each replica along 'data')"
    layers = jc.shard({"w": W[:, None], "b": W}, "data", stacked=True)
    assert repr(layers) == "Shards(3 layers of 2 leaves, 24 B, 1/8 on each replica along 'data')"


def test_warning_names_users_line():
    def summed(w, x):
        return jc.psum(jc.pmean(loss(w, x)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jc.data_parallel(summed)(W, np.ones((16, 3), np.float32))
    assert {warning.filename for warning in caught} == {__file__}


def test_launchers_lone_process_is_warned():
    for environment, warning in (
        ({}, None),
        ({"SLURM_NTASKS": "1", "WORLD_SIZE": "many"}, None),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4 .* Start the program with `srun`"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a"}, r"each trains alone. Call `jc.initi"),
        ({"JAXCOLL_PROCESSES": "2"}, r"Call `jc.initialize\(\)` first in the program"),
    ):
        text = reason_to_warn(environment)
        assert re.search(warning, text) if warning else not text
