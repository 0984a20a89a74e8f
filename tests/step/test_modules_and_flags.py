"""Modules of flax and equinox as arguments, and flags that decide how a step computes."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import close
from flax import nnx
from jax import lax

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("types_may_mix")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 3)).astype("f")
BATCH = X, X.sum(1)


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))[:, 0]


def loss(module, batch):
    return jnp.mean((module(batch[0]) - batch[1]) ** 2)


def update(module, optimizer, batch):
    """One step of training as flax's own guide writes it, with one line for the replicas."""
    value, grads = nnx.value_and_grad(loss)(module, batch)
    value, grads = jc.all_reduce("mean", (value, grads), "data")
    optimizer.update(module, grads)
    return value


@pytest.fixture
def own():
    module = Net()
    return module, nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)


def test_lost_update_is_refused(own):
    step = jc.data_parallel(update, batch_argnums="batch")
    with pytest.raises(ValueError, match=r"changes module\.\S+ in place \(and .* = nnx.split"):
        step(*own, BATCH)


def test_used_update_needs_no_return(own):
    """As of a loss after a step that is only tried; nor does what predicts."""

    def tried(module, optimizer, batch):
        update(module, optimizer, batch)
        return jc.pmean(loss(module, batch)), optimizer.step[...]

    module, optimizer = own
    module.eval()
    after, steps = jc.data_parallel(tried, batch_argnums="batch")(module, optimizer, BATCH)
    assert after < loss(module, BATCH)
    assert steps == 1
    predict = jc.data_parallel(lambda m, x: m(x), varying_outputs="concatenate")
    np.testing.assert_allclose(predict(module, X), module(X), rtol=1e-5)


def test_returned_states_are_kept(own):
    """Objects that are returned are in programs/test_programs.py."""

    @jc.data_parallel(batch_argnums="batch")
    def step(module, optimizer, batch):
        update(module, optimizer, batch)
        stats = jc.all_reduce("mean", nnx.state(module, nnx.BatchStat), "data")
        own = nnx.state(module, nnx.Param), stats, nnx.state(module, nnx.RngState)
        return own, nnx.state(optimizer)

    module, optimizer = own
    before = float(module.out.bias[0])
    for _ in range(2):
        new, state = step(module, optimizer, BATCH)
        nnx.update(module, *new)
        nnx.update(optimizer, state)
    assert float(module.out.bias[0]) != before
    assert int(optimizer.step[...]) == int(module.dropout.rngs.count[...]) == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Notes:
    w: object
    last: object


def test_other_changes_need_no_return():
    """Of a dict, and of what is no array."""

    @jc.data_parallel
    def step(state, batch):
        state["seen"] = state["seen"] + 1
        return jc.all_reduce("mean", (batch.pop("x") * state["w"]).mean(), "data")

    @jc.data_parallel
    def noted(notes, batch):
        notes.last = "seen"
        return notes.w * jc.all_reduce("mean", batch.mean(), "data")

    assert step({"seen": 0, "w": 2.0}, {"x": np.ones(8, "f")}) == 2
    assert noted(Notes(2.0, 1.0), np.ones(8, "f")) == 2


def test_foreign_leaves_are_named():
    module = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    step = jc.data_parallel(lambda m, batch: jc.value_and_grad(loss, "data")(m, batch))
    with pytest.raises(ValueError, match=r"m\.activation is not an array .* `eqx.partition"):
        step(module, BATCH)
    inside = jc.data_parallel(lambda batch: jc.value_and_grad(loss, "data")(module, batch))
    with pytest.raises(TypeError, match=r"module\.activation is .*custom_jvp.* `eqx.partition"):
        inside(BATCH)
    with pytest.raises(TypeError, match=r"module\.dropout.* is uint32.* `nnx.split"):
        step(Net(), BATCH)


def test_flags_are_named_and_bound():
    def step(w, batch, train):
        return jc.all_reduce("mean", (w * batch).sum() if train else w, "data")

    wrapped = jc.data_parallel(step, batch_argnums=1)
    for call in (lambda: wrapped(1.0, X, True), lambda: wrapped(1.0, X, train=True)):
        with pytest.raises(jax.errors.TracerBoolConversionError, match="argument train") as found:
            call()
        assert any("functools.partial(step, train=True)" in n for n in found.value.__notes__)
    bound = jc.data_parallel(functools.partial(step, train=True))
    np.testing.assert_allclose(bound(1.0, X), X.sum() / 8, rtol=1e-5)


def test_flags_of_losses_are_pythons():
    def own(w, batch, train=False, mode="sum"):
        return jnp.mean(batch @ w) * (2 if train else 1) * (3 if mode == "mean" else 1)

    w = np.ones(3, "f")
    for of in (jc.value_and_grad(own, "data"), jc.accumulate(own, "data", 2)):
        step = jc.data_parallel(lambda w, batch, f=of: f(w, batch, train=True, mode="mean")[0])
        np.testing.assert_allclose(step(w, X), 6 * X.sum(1).mean(), rtol=1e-5)


class Tied(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.last = self.first

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))[:, 0]


BOTH = r"first\.bias and leaf \S*last\.bias are one variable .* `graph, state = nnx.split"
tied_step = lambda m, batch: jc.pmean(loss(m, batch))
ENTRIES = {
    "a step": lambda m: jc.data_parallel(tied_step)(m, BATCH),
    "a step's program": lambda m: jc.data_parallel(tied_step).lower(m, BATCH),
    "the test of a step": lambda m: jc.assert_same_as_one_device(jc.data_parallel(tied_step), m, BATCH),
    "a strategy": lambda m: jc.MirroredStrategy().run(lambda m: m(X), args=(m,)),
    "Elastic": lambda m: jc.Elastic(jc.data_parallel(lambda s, batch: (s, 0.0)), {"m": m}),
    "DiLoCo": lambda m: jc.diloco(lambda p, s, b: (p, s, 0.0), every=2).init(m, ()),
    "a gradient": lambda m: jc.data_parallel(lambda b: jc.grad(loss)(m, b))(BATCH),
    "a mean loss": lambda m: jc.data_parallel(lambda b: jc.mean_loss(loss)(m, b))(BATCH),
}  # fmt: skip


def test_tied_layers_are_refused():
    for entry in ENTRIES.values():
        with pytest.raises(ValueError, match=BOTH):
            entry(Tied())


def test_tied_state_trains():
    graph, state = nnx.split(Tied())
    of_state = lambda state, batch: loss(nnx.merge(graph, state), batch)
    got = jc.data_parallel(jc.value_and_grad(of_state, "data"))(state, BATCH)
    close(got, jax.value_and_grad(of_state)(state, BATCH), rtol=1e-4)
    array, layer = jnp.ones(3), eqx.nn.Linear(3, 3, key=jax.random.key(0))
    shared = {
        "w": array,
        "target": array,
        "layers": [layer] * 2,
        "net": Net(),
        "state": [state] * 2,
    }
    jc.data_parallel(lambda s, batch: jc.pmean(batch.mean() * s["w"]))(shared, X)


def test_fp8_state_is_not_averaged():
    fp8 = "_overwrite_with_gradient"
    state = {"params": {"w": np.ones(3, "f")}, fp8: {"amax": np.ones(4, "f")}}

    def own(p, batch):
        amax = p[fp8]["amax"]
        history = lax.stop_gradient(jnp.roll(amax, 1).at[0].set(jnp.abs(batch[0]).max()))
        amax = amax * history
        return loss(lambda x: x @ p["params"]["w"], batch) + jnp.sum(amax - lax.stop_gradient(amax))

    for reduce in (jc.grad(own), lambda p, b: jc.pmean(jax.grad(own)(p, b)),
                   lambda p, b: jc.reduce_scatter("mean", jax.grad(own)(p, b))):  # fmt: skip
        with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*fp8 state.*`lax.pmax`"):
            jc.data_parallel(reduce)(state, BATCH)

    def right(p, batch):
        grads = jax.grad(own)(p, batch)
        return {"params": jc.pmean(grads["params"]), fp8: lax.pmax(grads[fp8], "data")}

    close(jc.data_parallel(right)(state, BATCH), jax.grad(own)(state, BATCH), rtol=1e-4)
