"""What each of two processes runs: the same mistakes through every entry. Prints a line for each."""

import sys
import warnings

import jaxcoll as jc

jc.initialize()

import jax  # noqa: E402
import numpy as np  # noqa: E402

RANK = jax.process_index()
SAME, OWN = np.arange(4, dtype="f"), np.arange(4, dtype="f") + RANK


def step(factor):
    def step(w, x):
        return w + jc.pmean(x.mean()) * factor, jc.pmean(x.mean())

    return jc.data_parallel(step)


def call(factor, rows):
    step(factor)(np.float32(0), rows)


def elastic(factor, rows):
    jc.Elastic(step(factor), np.float32(0)).run(lambda step, worker, workers: rows, 2)


def diloco(factor, rows):
    make = jc.diloco(lambda w, s, x: (w - factor * x.mean(), s, x.mean()), every=1)
    make(make.init(np.arange(3, dtype="f"), ()), rows)


def elastic_diloco(factor, rows):
    make = jc.diloco(lambda w, s, x: (w - factor * x.mean(), s, x.mean()), every=1)
    jc.Elastic(make, make.init(np.arange(3, dtype="f"), ())).run(
        lambda at, worker, workers: rows, 2
    )


def one_fails():
    def look(x):
        if RANK:
            raise ValueError("no such row")
        return x

    def step(w, x):
        x = jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return w + jc.pmean(x.mean()), jc.pmean(x.mean())

    # With a file, members also agree on who writes it; a worker that leaves must not wait for that.
    train = jc.Elastic(jc.data_parallel(step), np.float32(0), checkpoint=sys.argv[1])
    train.run(lambda step, worker, workers: OWN, 2)
    assert train.workers == (0,)
    print("changes:", "; ".join(change.why for change in train.changes), flush=True)


def attempt(name, function):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            function()
            outcome = "ran"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".replace("\n", "; ")
    kinds = {type(w.message).__name__ for w in seen if "Rows" in type(w.message).__name__}
    print(f"{name}: {' '.join(kinds)} {outcome}", flush=True)


for entry in (call, elastic, diloco, elastic_diloco):
    name = entry.__name__
    attempt(f"{name} own", lambda entry=entry: entry(1.0, OWN))
    attempt(f"{name} same", lambda entry=entry: entry(1.0, SAME))
for entry in (call, elastic):
    attempt(f"{entry.__name__} program", lambda entry=entry: entry(1.0 + RANK, OWN))
# Last, because worker 1 does not come back.
attempt("elastic failure", one_fails)
