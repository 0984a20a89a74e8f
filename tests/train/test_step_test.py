"""n_devices_equal_one finds what is wrong with a step, and says by which factor."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcoll as jc

RNG = np.random.default_rng(0)
PARAMS = {"b": np.zeros(2, "f"), "w": RNG.standard_normal((5, 2)).astype("f")}
BATCH = {
    "x": RNG.standard_normal((16, 5)).astype("f"),
    "y": RNG.standard_normal((16, 2)).astype("f"),
}


def loss(p, batch):
    return jnp.mean((batch["x"] @ p["w"] + p["b"][None] - batch["y"]) ** 2)


def updated(reduced, rate=0.1):
    """A step that returns new parameters, from gradients reduced in some way."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, reduced(grads)), lax.pmean(
            value, "data"
        )

    return step


def by(reduce_op):
    return lambda g: jc.all_reduce(reduce_op, g, "data")


def test_a_right_step_passes():
    jc.n_devices_equal_one(jc.data_parallel(updated(by("mean"))), PARAMS, BATCH)
    right = jc.data_parallel(
        lambda p, b: jax.tree.map(lambda p, g: p - 0.1 * g, p, jc.grad(loss, "data")(p, b)),
        donate_argnums=0,
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    jc.n_devices_equal_one(right, params, BATCH)
    jc.n_devices_equal_one(
        right, params, BATCH, mesh=jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    )


def scaled(reduce_op, scale):
    def reduced(g):
        n = lax.axis_size("data")
        return jax.tree.map(lambda x: x * scale(n), by(reduce_op)(g))

    return reduced


@pytest.mark.parametrize(
    ("reduced", "factor", "words", "rate"),
    [
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 0.1),
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 1e-4),
        (scaled("mean", lambda n: 1 / n), "0.125", "divided by the number of replicas once", 0.1),
        (scaled("sum", lambda n: n), "64.0", "8 squared: summed twice", 1e-4),
        (scaled("mean", lambda n: 1 / n**2), "0.0156", "one part in 8 squared", 1e-4),
        (scaled("mean", lambda n: n**-0.5), "0.354", "no power of the 8 devices", 0.1),
    ],
)
def test_a_wrong_reduction_is_named_by_its_factor(reduced, factor, words, rate):
    with pytest.raises(AssertionError) as caught:
        jc.n_devices_equal_one(jc.data_parallel(updated(reduced, rate)), PARAMS, BATCH)
    message = str(caught.value)
    assert "in 2 of 3 outputs" in message
    assert "output [0]['w']: its change from args[0]['w'] is" in message
    assert f"output [0]['b']: is {factor} times too large" in message
    assert message.count(words) == 2


def test_optimizer_state_shows_the_square():
    tx = optax.adam(1e-3)

    @jax.numpy_dtype_promotion("standard")
    def step(params, state, batch):
        grads = jc.all_reduce("sum", jax.grad(loss)(params, batch), "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    wrapped = jc.data_parallel(step, batch_argnums="batch")
    with pytest.raises(AssertionError) as caught:
        jc.n_devices_equal_one(wrapped, PARAMS, tx.init(PARAMS), BATCH)
    message = str(caught.value)
    assert "output [1][0].mu['w']: is 8.0 times too large" in message
    assert "output [1][0].nu['w']: is 64.0 times too large: 8 squared" in message


def test_a_function_that_takes_a_mesh_and_one_that_makes_a_step():
    def right(params, batch, *, mesh):
        return jax.jit(jax.shard_map(updated(by("mean")), mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False))(params, batch)  # fmt: skip

    def wrong(mesh):
        return jc.data_parallel(updated(by("sum")), mesh=mesh)

    jc.n_devices_equal_one(right, PARAMS, BATCH)
    with pytest.raises(AssertionError, match="8.0 times too large"):
        jc.n_devices_equal_one(wrong, PARAMS, BATCH)


def test_what_is_made_of_the_gradient_of_an_averaged_loss_is_found():
    """Under `pmap`'s meaning that is each replica's own, and its sum is n times the gradient."""

    def step(p, batch):
        grads = jax.grad(lambda p: lax.pmean(loss(p, batch), "data"))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, lax.psum(grads, "data"))

    with pytest.raises(AssertionError, match="8.0 times too large"):
        jc.n_devices_equal_one(jc.data_parallel(step), PARAMS, BATCH)


def test_what_differs_by_no_factor_or_in_shape_says_so():
    def noisy(p, b):
        return p["w"] + lax.pmean(jax.random.normal(jax.random.key(lax.axis_index("data")), (5, 2)), "data")  # fmt: skip

    with pytest.raises(
        AssertionError, match="the output: .*not the same, nor by a factor: off by up to"
    ):
        jc.n_devices_equal_one(jc.data_parallel(noisy), PARAMS, BATCH)
    apiece = jc.data_parallel(lambda p, b: b["x"].sum()[None], varying_outputs="concatenate")
    with pytest.raises(AssertionError, match=r"has shape \(8,\), and \(1,\) on one device"):
        jc.n_devices_equal_one(apiece, PARAMS, BATCH)
    grows = jc.data_parallel(lambda p, b: [p["w"]] * lax.axis_size("data"))
    with pytest.raises(AssertionError, match="on 8 devices the step returns PyTreeDef"):
        jc.n_devices_equal_one(grows, PARAMS, BATCH)


def test_a_tolerance_and_whole_numbers_and_keys():
    step = jc.data_parallel(lambda key, n, x: (key, n + 1, x.sum(0) * 0), batch_argnums=2)
    with pytest.raises(ValueError, match="differs between replicas"):
        jc.n_devices_equal_one(step, jax.random.key(0), 3, BATCH["x"])
    step = jc.data_parallel(lambda n, x: (n + 1, jc.all_reduce("sum", x.sum(), "data")))
    jc.n_devices_equal_one(step, 3, BATCH["x"])
    off = jc.data_parallel(lambda x: jc.all_reduce("mean", x.mean(0), "data") * (1 + 1e-3 * lax.axis_size("data")))  # fmt: skip
    with pytest.raises(AssertionError, match="no power of the 8 devices"):
        jc.n_devices_equal_one(off, BATCH["x"])
    jc.n_devices_equal_one(off, BATCH["x"], tolerance=0.1)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="expects a `jc.data_parallel` step, or a function with a"):
        jc.n_devices_equal_one(lambda x: x, 1.0)
    alone = jc.data_parallel(updated(by("mean")), mesh=mesh_of(1))
    with pytest.raises(ValueError, match="compares one device with more"):
        jc.n_devices_equal_one(alone, PARAMS, BATCH)


D = 8
FUSED = {"b": np.zeros(3 * D, "f"), "w": RNG.standard_normal((D, 3 * D)).astype("f") / 2}
TOKENS = tuple(RNG.standard_normal((32, 4, D)).astype("f") for _ in range(2))


def attention(p, batch):
    """A softmax does not see what is added to all keys: the middle third of `b` has no gradient."""
    q, k, v = jnp.split(batch[0] @ p["w"] + p["b"][None, None], 3, -1)
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k), -1)
    return jnp.mean((jnp.einsum("bts,bsd->btd", weights, v) - batch[1]) ** 2)


def normed(p, batch):
    """Nor does a normalization over the whole batch see what is added before it."""
    h = batch[0] @ p["w"] + p["b"][None, None]
    mean = jc.all_reduce("mean", h.mean((0, 1)), "data")[None, None]
    spread = jc.all_reduce("mean", ((h - mean) ** 2).mean((0, 1)), "data")[None, None]
    h = (h - mean) / jnp.sqrt(spread + 1e-5)
    return jnp.mean((jnp.tanh(h[..., :D]) - batch[1]) ** 2)


def trained(loss, tx, scale=lambda g, n: g):
    @jax.numpy_dtype_promotion("standard")
    def step(params, state, batch):
        value, grads = jc.value_and_grad(loss, "data")(params, batch)
        grads = scale(grads, lax.axis_size("data"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jc.data_parallel(step, batch_argnums="batch")


@pytest.mark.parametrize(
    ("loss", "tx"),
    [(attention, optax.adam(1e-3)), (attention, optax.sign_sgd(1e-3)), (normed, optax.adam(1e-3)),
     (normed, optax.sgd(0.1))],
    ids=["attention-adam", "attention-sign", "normed-adam", "normed-sgd"],
)  # fmt: skip
def test_a_gradient_that_is_zero_but_for_rounding_is_no_error(loss, tx):
    jc.n_devices_equal_one(trained(loss, tx), FUSED, tx.init(FUSED), TOKENS)


def queries(grads, n):
    """Of the bias, one third is n times too large; beside it stands one of rounding alone."""
    return {**grads, "b": grads["b"] * jnp.where(jnp.arange(3 * D) < D, n, 1)}


def test_an_error_beside_rounding_is_an_error():
    tx = optax.sgd(0.1)
    with pytest.raises(AssertionError, match=r"in 1 of 3 outputs:\n  output \[0\]\['b'\]"):
        jc.n_devices_equal_one(trained(attention, tx, queries), FUSED, tx.init(FUSED), TOKENS)


def test_a_step_that_goes_by_the_order_of_its_rows_is_no_excuse():
    def step(w, x):
        first = jc.all_reduce("sum", jnp.where(lax.axis_index("data") == 0, x[0], 0 * x[0]), "data")
        return w + first, first, w + jc.all_reduce("sum", x.mean(0) * first, "data")

    with pytest.raises(AssertionError, match=r"in 1 of 3 outputs:\n  output \[2\].*8.0 times"):
        jc.n_devices_equal_one(jc.data_parallel(step), np.zeros(5, "f"), BATCH["x"])


def test_rows_that_come_back_in_their_order_are_compared_as_they_were():
    """What every row gets is the same in every order, so that an error in it is no rounding."""

    def step(w, x):
        return x * w * lax.axis_size("data"), jc.all_reduce("mean", x.mean(0), "data") * w

    wrong = jc.data_parallel(step, varying_outputs=("concatenate", "error"))
    with pytest.raises(AssertionError, match=r"in 1 of 2 outputs:\n  output \[0\]: .*8.0 times"):
        jc.n_devices_equal_one(wrong, np.float32(2), BATCH["x"])


def test_what_is_infinite_on_many_devices_only_is_an_error():
    step = jc.data_parallel(lambda w, x: w / jnp.maximum(2.0 - lax.axis_size("data"), 0.0))
    words = r"the output: is infinite or no number on one side only, in 3 of 3"
    with pytest.raises(AssertionError, match=words):
        jc.n_devices_equal_one(step, np.ones(3, "f"), BATCH["x"])


def test_a_leaf_is_measured_from_the_argument_of_its_own_path():
    """Beside `ema`, nearer to what comes of `w` than `w` itself is, the change looks small."""
    w = np.full(3, 10.0, "f")
    ema = w + np.float32(0.99)

    def step(state, x):
        off = 1e-5 * lax.axis_size("data")
        return {"w": state["w"] + 1 + off, "ema": state["ema"]}

    with pytest.raises(AssertionError, match=r"\['w'\]: its change from args\[0\]\['w'\]"):
        jc.n_devices_equal_one(
            jc.data_parallel(step), {"w": w, "ema": ema}, BATCH["x"], tolerance=1e-5
        )
    renamed = jc.data_parallel(lambda p, old, x: {"layer": [{"w": p["layer"][0]["w"] * (1 + 1e-2 * lax.axis_size("data"))}]}, batch_argnums="x")  # fmt: skip
    with pytest.raises(AssertionError, match=r"change from args\[0\]\['layer'\]\[0\]\['w'\]"):
        jc.n_devices_equal_one(renamed, {"layer": [{"w": w}]}, w * np.float32(1.01), BATCH["x"])
