"""The reduction as a link of an optax chain, on trees of any library."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import close, run

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("dtypes_may_mix")

X = np.random.default_rng(11).standard_normal((8, 4, 5)).astype("f")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "bias"], meta_fields=["size", "act"]
)
@dataclasses.dataclass(frozen=True)
class Linear:
    """As equinox's modules are: leaves among static fields, a function one of them."""

    weight: jax.Array
    bias: jax.Array | None
    size: int
    act: object

    def __call__(self, x):
        return self.act(x @ self.weight + (0 if self.bias is None else self.bias[None]))


@jax.tree_util.register_pytree_with_keys_class
class State:
    """As nnx's states are: a mapping of its own class, with attributes for keys."""

    def __init__(self, **fields):
        self.fields = fields

    def tree_flatten_with_keys(self):
        keys = sorted(self.fields)
        return [(jax.tree_util.GetAttrKey(k), self.fields[k]) for k in keys], tuple(keys)

    @classmethod
    def tree_unflatten(cls, keys, values):
        return cls(**dict(zip(keys, values, strict=True)))


def ones(*shape):
    return jnp.full(shape, 0.3)


MODELS = {
    "linen": lambda: {"params": {"dense": {"kernel": ones(5, 3), "bias": ones(3)}}},
    "equinox": lambda: [Linear(ones(5, 4), ones(4), 4, jnp.tanh), Linear(ones(4, 3), None, 3, jnp.sin)],
    "nnx": lambda: State(first=State(kernel=ones(5, 3)), scale=ones(3)),
}  # fmt: skip


def apply(model, x):
    if isinstance(model, State):
        return (x @ model.fields["first"].fields["kernel"]) * model.fields["scale"][None]
    if isinstance(model, dict):
        return x @ model["params"]["dense"]["kernel"] + model["params"]["dense"]["bias"][None]
    return functools.reduce(lambda h, layer: layer(h), model, x)


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
def test_a_chain_with_the_link_updates_as_one_device_does(runner):
    models = {name: new() for name, new in MODELS.items()}

    def mine(model):
        vary = lambda p: jax.lax.pcast(p, "data", to="varying")
        return jax.tree.map(vary, model) if runner == "checked" else model

    step = of_each(functools.partial(updated, chain(jc.all_reduce_updates("data")), mine=mine))
    got = jax.tree.map(lambda p: p[0], run(runner, functools.partial(step, models), 8, X))
    one = jax.jit(of_each(functools.partial(updated, chain())))
    close(got, one(models, X.reshape(-1, 5)), rtol=1e-4)


def test_accumulation_norm_and_finite_check_take_the_trees_as_they_are():
    models = {name: new() for name, new in MODELS.items()}

    def step(model, x):
        value, grads = jc.accumulate(loss, "data", 2)(model, x)
        return (value, grads, jc.global_norm(grads)), jc.all_finite(grads)

    def one(model, x):
        value, grads = jax.value_and_grad(loss)(model, x)
        return (value, grads, optax.tree.norm(grads)), True

    found = jc.data_parallel(of_each(step))(models, X.reshape(-1, 5))
    close(found, jax.jit(of_each(one))(models, X.reshape(-1, 5)), rtol=1e-4)


def test_gradients_that_types_would_sum_are_a_replicas_own_or_refused_until_they_are_said_to_be():
    model = MODELS["linen"]()

    def step(model, x, **said):
        tx = jc.all_reduce_updates("data", **said)
        return tx.update(jax.grad(loss)(model, x), tx.init(model))[0]

    rows = X.reshape(-1, 5)
    with pytest.raises(jc.AlreadyReducedError, match=r"leaf \['params'\]\['dense'\]\['bias'\]"):
        jc.data_parallel(step, checks=True)(model, rows)
    summed = functools.partial(step, invariant="summed")
    for right in (
        jc.data_parallel(step),
        jc.data_parallel(summed),
        jc.data_parallel(summed, checks=True),
    ):
        jax.tree.map(
            lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4),
            *(right(model, rows), jax.grad(loss)(model, rows)),
        )


def test_the_sum_and_the_options_are_taken():
    options = jc.CommunicationOptions(algorithm="ring")
    tx = jc.all_reduce_updates("data", reduce_op="sum", options=options)
    step = lambda x: tx.update({"a": x}, tx.init(None))[0]["a"]
    assert run("checked", step, 4, np.ones((4, 8), "f"))[0].tolist() == [4.0] * 8
    wrapped = jc.data_parallel(lambda x: step(x.sum()))
    assert {c.kind for c in jc.inspect(wrapped, np.ones(8, "f")).collectives} == {
        "collective-permute"
    }


def test_without_optax_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"needs optax.*pip install 'jaxcoll\[train\]'"):
        jc.all_reduce_updates("data")
