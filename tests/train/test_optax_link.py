"""The reduction as a link of an optax chain, on trees of any library."""

import functools
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import ROWS, WHOLE, close, mapped, run
from flax import nnx

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("types_may_mix")

X = np.random.default_rng(11).standard_normal((8, 4, 5)).astype("f")


KEY = jax.random.key(0)
DENSE = nn.Dense(3)


@functools.cache
def linear():
    return nnx.split(nnx.Linear(5, 3, rngs=nnx.Rngs(0)))


@functools.cache
def models():
    return {
        "linen": DENSE.init(KEY, X[0]),
        "equinox": [eqx.nn.Linear(5, 4, key=KEY), eqx.nn.Linear(4, 3, use_bias=False, key=KEY)],
        "nnx": linear()[1],
    }


def apply(model, x):
    if isinstance(model, nnx.State):
        return nnx.merge(linear()[0], model)(x)
    if isinstance(model, dict):
        return DENSE.apply(model, x)
    layers = lambda row: functools.reduce(lambda h, layer: jnp.tanh(layer(h)), model, row)
    return jax.vmap(layers)(x)


def loss(model, x):
    return jnp.mean(apply(model, x) ** 2)


def chain(*before):
    return optax.chain(*before, optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def of_each(f):
    """What `f` gives for each model, of one program."""
    return lambda models, x: {name: f(model, x) for name, model in models.items()}


def updated(tx, model, x, mine=lambda model: model):
    """The model after one step by the gradient of what is `mine` of it."""
    grads = jax.grad(loss)(mine(model), x)
    return optax.apply_updates(model, tx.update(grads, tx.init(model), model)[0])


@pytest.mark.parametrize("runner", ["pmap", "checked"])
def test_linked_chain_equals_one_device(runner):
    def mine(model):
        vary = lambda p: jax.lax.pcast(p, "data", to="varying")
        return jax.tree.map(vary, model) if runner == "checked" else model

    step = of_each(functools.partial(updated, chain(jc.all_reduce_updates("data")), mine=mine))
    got = jax.tree.map(lambda p: p[0], run(runner, functools.partial(step, models()), 8, X))
    one = jax.jit(of_each(functools.partial(updated, chain())))
    close(got, one(models(), X.reshape(-1, 5)), rtol=1e-4)


def test_summed_gradients_are_refused():
    model, rows = models()["linen"], X.reshape(-1, 5)

    def step(model, x, **settings):
        tx = jc.all_reduce_updates("data", **settings)
        return tx.update(jax.grad(loss)(model, x), tx.init(model))[0]

    checked = functools.partial(mapped, ins=(WHOLE, ROWS))
    with pytest.raises(jc.errors.AlreadyReducedError, match=r"leaf \['params'\]\['bias'\]"):
        checked(step)(model, rows)
    want = jax.grad(loss)(model, rows)
    for right in (jc.data_parallel(step), checked(functools.partial(step, invariant="summed"))):
        close(right(model, rows), want, rtol=1e-4)


def test_sum_and_options_are_used():
    options = jc.CommunicationOptions(algorithm="ring")
    tx = jc.all_reduce_updates("data", reduce_op="sum", options=options)
    step = jc.data_parallel(lambda x: tx.update({"a": x.sum()}, tx.init(None))[0]["a"])
    assert step(np.ones(16, "f")) == 16
    kinds = {c.kind for c in jc.inspect(step, np.ones(8, "f")).collectives}
    assert kinds == {"collective-permute"}


def test_missing_optax_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"needs optax.*pip install 'jaxcoll\[train\]'"):
        jc.all_reduce_updates("data")
