"""assert_same_as_one_device passes what is right, and names what is wrong, or cannot be compared."""

import functools

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
D = 8
FUSED = {"b": np.zeros(3 * D, "f"), "w": RNG.standard_normal((D, 3 * D)).astype("f") / 2}
TOKENS = tuple(RNG.standard_normal((32, 4, D)).astype("f") for _ in range(2))


def loss(p, batch):
    return jnp.mean((batch["x"] @ p["w"] + p["b"][None] - batch["y"]) ** 2)


def in_bfloat16(p, batch):
    p, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (p, batch["x"]))
    return jnp.mean((jnp.tanh(x @ p["w"] + p["b"][None]).astype("f") - batch["y"]) ** 2)


def attention(p, batch):
    """A softmax does not see what is added to all keys: the middle third of `b` has no gradient."""
    q, k, v = jnp.split(batch[0] @ p["w"] + p["b"][None, None], 3, -1)
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k), -1)
    return jnp.mean((jnp.einsum("bts,bsd->btd", weights, v) - batch[1]) ** 2)


def normed(p, batch, mean=lambda x: jc.all_reduce("mean", x, "data")):
    """Nor does a normalization over the whole batch see what is added before it."""
    h = batch[0] @ p["w"] + p["b"][None, None]
    h = h - mean(h.mean((0, 1)))[None, None]
    h = h / jnp.sqrt(mean((h**2).mean((0, 1)))[None, None] + 1e-5)
    return jnp.mean((jnp.tanh(h[..., :D]) - batch[1]) ** 2)


def updated(reduced, rate=0.1, loss=loss):
    """A step that returns new parameters, from gradients reduced in some way."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        params = jax.tree.map(lambda p, g: p - rate * g, params, reduced(grads))
        return params, lax.pmean(value, "data")

    return step


def by(reduce_op, scale=lambda n: 1.0):
    def reduced(g):
        n = lax.axis_size("data")
        return jax.tree.map(lambda x: x * scale(n), jc.all_reduce(reduce_op, g, "data"))

    return reduced


def trained(loss, tx, scale=lambda g, n: g):
    @jax.numpy_dtype_promotion("standard")
    def step(params, state, batch):
        value, grads = jc.value_and_grad(loss, "data")(params, batch)
        grads = scale(grads, lax.axis_size("data"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jc.data_parallel(step, batch_argnums="batch")


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(1e-3), optax.lion(1e-3)])
@pytest.mark.parametrize(
    ("loss", "params", "batch"),
    [(loss, PARAMS, BATCH), (in_bfloat16, PARAMS, BATCH), (attention, FUSED, TOKENS), (normed, FUSED, TOKENS)],
)  # fmt: skip
def test_a_right_step_passes_and_a_factor_in_any_leaf_does_not(loss, params, batch, tx):
    """Also where Adam makes whole steps of gradients that are zero but for rounding."""
    state = tx.init(params)
    jc.assert_same_as_one_device(trained(loss, tx), params, state, batch)
    wrong = trained(loss, tx, lambda grads, n: {**grads, "w": grads["w"] * n})
    with pytest.raises(AssertionError, match=r"\['w'\]: .* 8\.0 times too large"):
        jc.assert_same_as_one_device(wrong, params, state, batch)


def test_donated_arguments_live_on_and_wide_floats_are_compared_as_closely():
    step = jc.data_parallel(updated(by("mean")), donate_argnums=0)
    params = jax.tree.map(jnp.asarray, PARAMS)
    jc.assert_same_as_one_device(step, params, BATCH, mesh=mesh_of(4))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (PARAMS, BATCH))
        jc.assert_same_as_one_device(jc.data_parallel(updated(by("mean"))), *wide)
        off = jc.data_parallel(updated(by("mean", lambda n: 1 + 1e-7 * n)))
        with pytest.raises(AssertionError, match="not the same"):
            jc.assert_same_as_one_device(off, *wide)


@pytest.mark.parametrize(
    ("reduced", "factor", "meaning", "rate"),
    [
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 0.1),
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 1e-4),
        (by("mean", lambda n: 1 / n), "0.125", "divided by the number of replicas once", 0.1),
        (by("sum", lambda n: n), "64.0", "8 squared: summed twice", 1e-4),
        (by("mean", lambda n: 1 / n**2), "0.0156", "one part in 8 squared", 1e-4),
    ],
)
def test_a_wrong_reduction_is_named_by_its_factor(reduced, factor, meaning, rate):
    with pytest.raises(AssertionError) as caught:
        jc.assert_same_as_one_device(jc.data_parallel(updated(reduced, rate)), PARAMS, BATCH)
    message = str(caught.value)
    assert "in 2 of 3 outputs" in message
    assert "output [0]['w']: its change from args[0]['w'] is" in message
    assert f"output [0]['b']: is {factor} times too large" in message
    assert message.count(meaning) == 2


def means_of_means(p, batch):
    """A mean over tokens of which replicas have unequal numbers."""
    weight = (batch["y"] > 0).astype("f")
    return jnp.sum(weight * (batch["x"] @ p["w"]) ** 2) / jnp.sum(weight)


def dropped(p, batch):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return loss(p, {**batch, "x": batch["x"] * keep.astype("f")})


def first_row(p, batch):
    return loss(p, jax.tree.map(lambda x: x[:1], batch))


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (means_of_means, "not the same|8.0 times"),
        (dropped, "moves on one device, too.*\n.*\n.*deterministic=True"),
        (first_row, "moves on one device, too.*\n.*\n.*own random key"),
    ],
)
def test_what_is_of_parts_of_the_batch_or_of_an_order_is_an_error(loss, complaint, op):
    """Also beside outputs that do not move: a frozen leaf, a counter."""

    def step(params, frozen, count, batch):
        return updated(by(op), loss=loss)(params, batch)[0], frozen, count + 1

    with pytest.raises(AssertionError, match=complaint):
        jc.assert_same_as_one_device(
            jc.data_parallel(step, batch_argnums=3), PARAMS, PARAMS, 1, BATCH
        )


def test_statistics_of_each_replica_are_an_error():
    own = functools.partial(normed, mean=lambda x: x)
    with pytest.raises(AssertionError, match=r"\['w'\]: is not the same"):
        jc.assert_same_as_one_device(jc.data_parallel(updated(by("mean"), loss=own)), FUSED, TOKENS)


def test_a_key_for_each_row_can_be_compared_and_rows_that_come_back_are():
    keys = jax.random.split(jax.random.key(0), 16)

    def step(w, x, keys, scale):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (5,)))(keys).astype("f")
        rows = x * keep * float(lax.axis_size("data") ** scale)
        return rows, w - 0.1 * jc.all_reduce("mean", (x * keep).mean(0), "data")

    for scale in (0, 1):
        bound = functools.partial(step, scale=scale)
        run = jc.data_parallel(
            bound, batch_argnums=(1, 2), varying_outputs=("concatenate", "error")
        )
        if not scale:
            jc.assert_same_as_one_device(run, PARAMS["w"][:, 0], BATCH["x"], keys)
            continue
        with pytest.raises(
            AssertionError, match=r"in 1 of 2 outputs:\n  output \[0\]: .*8.0 times"
        ):
            jc.assert_same_as_one_device(run, PARAMS["w"][:, 0], BATCH["x"], keys)


def test_a_leaf_of_rounding_alone_is_equal_and_a_step_of_it_alone_cannot_be_compared():
    def step(w, x):
        mean = jc.all_reduce("mean", x.mean(), "data")
        rest = jc.all_reduce("mean", (x - mean).mean(), "data")
        return w + mean, rest

    jc.assert_same_as_one_device(jc.data_parallel(step), np.float32(1), BATCH["x"])
    with pytest.raises(AssertionError, match="output: moves by rounding alone"):
        jc.assert_same_as_one_device(
            jc.data_parallel(lambda w, x: step(w, x)[1]), np.float32(1), BATCH["x"]
        )


def test_a_function_that_takes_a_mesh_names_its_batch():
    def mapped(params, x, y, *, mesh, op):
        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "check_vma": False}
        step = lambda p, x, y: updated(by(op))(p, {"x": x, "y": y})
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs))(params, x, y)

    right, wrong = (functools.partial(mapped, op=op) for op in ("mean", "sum"))
    args = PARAMS, BATCH["x"], BATCH["y"]
    jc.assert_same_as_one_device(right, *args, batch_argnums=("x", 2))
    with pytest.raises(AssertionError, match="8.0 times too large"):
        jc.assert_same_as_one_device(wrong, *args, batch_argnums=(1, 2))
    with pytest.raises(ValueError, match="which arguments of .* are the batch"):
        jc.assert_same_as_one_device(right, *args)
    made = lambda mesh: jc.data_parallel(updated(by("sum")), mesh=mesh)
    with pytest.raises(AssertionError, match="8.0 times too large"):
        jc.assert_same_as_one_device(made, PARAMS, BATCH)


def test_shapes_structures_and_numbers_that_are_none_say_so():
    def check(complaint, step, **options):
        with pytest.raises(AssertionError, match=complaint):
            jc.assert_same_as_one_device(jc.data_parallel(step, **options), PARAMS, BATCH)

    check(r"has shape \(8,\), and \(1,\) on one device", lambda p, b: b["x"].sum()[None], varying_outputs="concatenate")  # fmt: skip
    check(
        "returns 8 outputs, .* and on one 1 output", lambda p, b: [p["w"]] * lax.axis_size("data")
    )
    check("infinite or no number", lambda p, b: p["w"] / jnp.maximum(2 - lax.axis_size("data"), 0))
    check("infinite or no number", lambda p, b: p["w"] * jnp.nan)  # which would equal anything


def test_a_tolerance_outputs_left_out_whole_numbers_and_keys():
    def step(key, n, x):
        off = 1 + 1e-3 * lax.axis_size("data")
        mean = jc.all_reduce("mean", x.mean(0), "data")
        return {"key": jax.random.split(key), "n": n + 1, "rows": len(x), "mean": mean * off}

    args = jax.random.key(0), 3, BATCH["x"]
    check = functools.partial(
        jc.assert_same_as_one_device, jc.data_parallel(step, batch_argnums=2), *args
    )
    with pytest.raises(AssertionError, match=r"in 2 of 4 .*\n.*\['mean'\]: is not the same, .*\n.*\['rows'\]: is 0.125"):  # fmt: skip
        check()
    with pytest.raises(AssertionError, match="in 1 of 3 outputs"):
        check(ignore="['rows']")
    check(ignore=("['rows']",), tolerance=0.1)
    check(ignore=("['rows']", "['mean']"))
    with pytest.raises(ValueError, match="`ignore` names no output by 'other'"):
        check(ignore="other")


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="expects a `jc.data_parallel` step, or a function with a"):
        jc.assert_same_as_one_device(lambda x: x, 1.0)
    step = jc.data_parallel(updated(by("mean")))
    with pytest.raises(ValueError, match="compares one device with more"):
        jc.assert_same_as_one_device(step, PARAMS, BATCH, mesh=mesh_of(1))
    with pytest.raises(ValueError, match="names its own batch"):
        jc.assert_same_as_one_device(step, PARAMS, BATCH, batch_argnums=1)
