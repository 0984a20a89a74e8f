"""assert_same_as_one_device passes what is right, and names what is wrong, or cannot be compared."""

import functools
import re

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


@pytest.mark.parametrize(
    ("loss", "params", "batch", "tx"),
    [(in_bfloat16, PARAMS, BATCH, optax.adam(1e-3)), (attention, FUSED, TOKENS, optax.lion(1e-3)),
     (normed, FUSED, TOKENS, optax.adam(1e-3))],
)  # fmt: skip
def test_right_steps_pass(loss, params, batch, tx):
    """Also where Adam makes whole steps of gradients that are zero but for rounding."""
    state = tx.init(params)
    jc.assert_same_as_one_device(trained(loss, tx), params, state, batch)
    wrong = trained(loss, tx, lambda grads, n: {**grads, "w": grads["w"] * n})
    with pytest.raises(AssertionError, match=r"\['w'\]: .* 8\.0 times as large"):
        jc.assert_same_as_one_device(wrong, params, state, batch)


def test_donation_and_wide_floats():
    step = jc.data_parallel(updated(by("mean")), donate_argnums=0)
    params = jax.tree.map(jnp.asarray, PARAMS)
    jc.assert_same_as_one_device(step, params, BATCH, mesh=mesh_of(4))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (PARAMS, BATCH))
        jc.assert_same_as_one_device(jc.data_parallel(updated(by("mean"))), *wide)
        off = jc.data_parallel(updated(by("mean", lambda n: 1 + 1e-7 * n)))
        with pytest.raises(AssertionError, match="differs, but not by a power"):
            jc.assert_same_as_one_device(off, *wide)


@pytest.mark.parametrize(
    ("reduced", "factor", "meaning", "rate"),
    [
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 0.1),
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 1e-4),
        (by("mean", lambda n: 1 / n), "0.125", "divided by the number of replicas once", 0.1),
        (by("sum", lambda n: n), "64.0", "8 squared: summed twice", 1e-4),
        (by("mean", lambda n: 1 / n**2), "0.0156", "1/8 squared", 1e-4),
    ],
)
def test_wrong_factors_are_named(reduced, factor, meaning, rate):
    with pytest.raises(AssertionError) as caught:
        jc.assert_same_as_one_device(jc.data_parallel(updated(reduced, rate)), PARAMS, BATCH)
    message = str(caught.value)
    assert "in 2 of 3 outputs" in message
    assert "output [0]['w']: its change by other rows is" in message
    assert f"output [0]['b']: is {factor} times as large" in message
    assert message.count(meaning) == 2


def means_of_means(p, batch):
    """A mean over tokens of which replicas have unequal numbers."""
    weight = (batch["y"] > 0).astype("f")
    return jnp.sum(weight * (batch["x"] @ p["w"]) ** 2) / jnp.sum(weight)


def dropped(p, batch):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return loss(p, {**batch, "x": batch["x"] * keep.astype("f")})


def rows_of(p, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"] + p["b"][None]) - batch["y"]) ** 2, -1)


def noise(seed, like):
    return 0.1 * jax.random.normal(seed, like.shape)


def unit(g):
    return jax.tree.map(lambda x: x / optax.tree.norm(g), g)


own_seed = lambda: jax.random.fold_in(jax.random.key(1), lax.axis_index("data"))
half = lambda x: jax.random.permutation(jax.random.key(3), x)[: len(x) // 2]
WRONG_LOSSES = {  # of which the mean over replicas is not that of all rows
    "unequal tokens": means_of_means,
    "own statistics": lambda p, b: rows_of(p, {**b, "x": b["x"] / jnp.std(b["x"], 0)[None]}).mean(),
    "root of a mean": lambda p, b: jnp.sqrt(rows_of(p, b).mean()),
    "standard deviation": lambda p, b: jnp.std(rows_of(p, b)),
    "median": lambda p, b: jnp.median(rows_of(p, b)),
    "largest": lambda p, b: rows_of(p, b).max(),
    "hardest": lambda p, b: lax.top_k(rows_of(p, b), 2)[0].mean(),
    "in a softmax": lambda p, b: jax.nn.logsumexp(rows_of(p, b)),
    "negatives": lambda p, b: -jnp.diag(jax.nn.log_softmax(b["x"] @ p["w"] @ b["y"].T)).mean(),
    "mixed rows": lambda p, b: rows_of(p, jax.tree.map(lambda x: (x + x[::-1]) / 2, b)).mean(),
    "half of the rows": lambda p, b: rows_of(p, jax.tree.map(half, b)).mean(),
    "first row": lambda p, b: rows_of(p, b)[0],
    "dropout by place": dropped,
    "dropout by replica": lambda p, b: loss(
        p, {**b, "x": b["x"] * jax.random.bernoulli(own_seed(), 0.5, b["x"].shape).astype("f")}
    ),
}
WRONG_GRADIENTS = {  # made of those of one replica, and the mean of its loss
    "sum": lambda g, v: jc.psum(g),
    "of one": lambda g, v: jc.broadcast(g, "data"),
    "largest": lambda g, v: lax.pmax(g, "data"),
    "divided twice": lambda g, v: jax.tree.map(lambda x: x / lax.axis_size("data"), jc.pmean(g)),
    "rate for more devices": lambda g, v: jax.tree.map(lambda x: x * lax.axis_size("data") ** 0.5, jc.pmean(g)),
    "clipped before": lambda g, v: jc.pmean(unit(g)),
    "signs": lambda g, v: jc.pmean(jax.tree.map(jnp.sign, g)),
    "own noise": lambda g, v: jc.pmean(jax.tree.map(lambda x: x + noise(own_seed(), x), g)),
    "noise counted n times": lambda g, v: jc.psum(
        jax.tree.map(lambda x: x / lax.axis_size("data") + noise(jax.random.key(0), x), g)
    ),
    "squares": lambda g, v: jc.pmean(jax.tree.map(jnp.square, g)),
    "own norm": lambda g, v: jc.pmean(optax.tree.norm(g)),
    "weighted": lambda g, v: jc.pmean(jax.tree.map(lambda x: x * (1.0 + lax.axis_index("data")), g)),
    "own exponential": lambda g, v: jc.pmean(jnp.exp(v)),
    "replicas": lambda g, v: lax.psum(1, "data") + 0 * jc.pmean(v),
}  # fmt: skip


@pytest.mark.usefixtures("types_may_mix")
def test_every_wrong_value_is_listed():
    def step(p, frozen, count, batch):
        value, grads = jax.value_and_grad(loss)(p, batch)
        wrong = {f"loss, {k}": jc.pmean(jax.grad(f)(p, batch)) for k, f in WRONG_LOSSES.items()}
        wrong |= {f"gradient, {k}": f(grads, value) for k, f in WRONG_GRADIENTS.items()}
        return wrong, {"count": count + 1, "grads": jc.pmean(grads), "frozen": frozen}

    step = jc.data_parallel(step, batch_argnums="batch")
    params = {"b": PARAMS["b"] + 0.5, "w": PARAMS["w"]}
    with pytest.raises(AssertionError) as caught:
        jc.assert_same_as_one_device(step, params, params, 1, BATCH)
    message = str(caught.value)
    listed = set(re.findall(r"output \[0\]\['(.*?)'\]", message))
    assert listed == {f"loss, {k}" for k in WRONG_LOSSES} | {
        f"gradient, {k}" for k in WRONG_GRADIENTS
    }
    assert "output [1]" not in message
    by_order = set(re.findall(r"\['loss, (.*?)'\].*: changes on one device too", message))
    assert {"first row", "dropout by place", "half of the rows"} <= by_order
    assert "unequal tokens" not in by_order
    assert re.search("(?s)deterministic=True.*own random key", message)


OPTIMIZERS = {
    name: getattr(optax, name)(1e-2)
    for name in (
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb "
        "lars lion nadam nadamw novograd optimistic_gradient_descent radam rmsprop rprop sgd "
        "sign_sgd sm3 yogi"
    ).split()
} | {
    "noisy_sgd": optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "nesterov": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "warm-up": optax.adam(optax.linear_schedule(0, 1e-3, 100)),
}


@pytest.mark.parametrize(
    ("loss", "params", "batch", "wide", "steps", "some"),
    [(loss, PARAMS, BATCH, False, 0, slice(0, None, 4)), (loss, PARAMS, BATCH, True, 0, slice(2, None, 4)),
     (in_bfloat16, PARAMS, BATCH, False, 2, slice(0, None, 2)), (normed, FUSED, TOKENS, False, 2, slice(1, None, 2))],
    ids=["float32", "float64", "bfloat16", "batch norm"],
)  # fmt: skip
@pytest.mark.usefixtures("types_may_mix")
def test_optimizers_keep_right_gradients(loss, params, batch, wide, steps, some):
    """Also after some steps: there moments are squares and maxima of what may be rounding alone."""
    optimizers = {name: OPTIMIZERS[name] for name in [*OPTIMIZERS][some]}

    @jc.data_parallel(batch_argnums="batch")
    def step(params, trained, batch):
        grads, after = jc.grad(loss)(params, batch), {}
        for name, (params, state) in trained.items():
            updates, state = OPTIMIZERS[name].update(grads, state, params)
            after[name] = optax.apply_updates(params, updates), state
        return after

    with jax.enable_x64(wide):
        params, batch = jax.tree.map(
            lambda x: jnp.asarray(x, "d" if wide else "f"), (params, batch)
        )
        trained = {name: (params, tx.init(params)) for name, tx in optimizers.items()}
        for _ in range(steps):
            trained = step(params, trained, batch)
        jc.assert_same_as_one_device(step, params, trained, batch)


def test_equal_rows_cannot_be_compared():
    for step, rows in [
        (lambda w, x: w - jc.pmean(x[0]), np.ones((16, 5), "f")),
        (lambda w, x: w - 1e-9 * jc.psum(x.mean(0)), BATCH["x"]),
    ]:
        with pytest.raises(
            AssertionError, match="the output: changes with other rows no more than"
        ):
            jc.assert_same_as_one_device(jc.data_parallel(step), np.ones(5, "f"), rows)


def test_small_changes_are_compared():
    """Statistics whose momentum hides an error from any comparison with the whole."""
    for step in (
        lambda w, x: 1.0 + 1e-4 * jc.pmean(x.var(0)),
        lambda w, x: 1e3 * w + 1e-3 * jc.psum(x.mean(0)),
    ):
        with pytest.raises(AssertionError, match=r"differs, but not by|8\.0 times as large"):
            jc.assert_same_as_one_device(jc.data_parallel(step), np.ones(5, "f"), BATCH["x"])


def test_keys_for_rows_are_compared():
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


def test_leaves_of_rounding_are_equal():
    def step(w, x):
        mean = jc.all_reduce("mean", x.mean(), "data")
        rest = jc.all_reduce("mean", (x - mean).mean(), "data")
        return w + mean, rest

    jc.assert_same_as_one_device(jc.data_parallel(step), np.float32(1), BATCH["x"])
    with pytest.raises(AssertionError, match="output: changes with other rows no more"):
        jc.assert_same_as_one_device(
            jc.data_parallel(lambda w, x: step(w, x)[1]), np.float32(1), BATCH["x"]
        )


def test_functions_of_a_mesh_name_their_batch():
    def mapped(params, x, y, *, mesh, op):
        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "check_vma": False}
        step = lambda p, x, y: updated(by(op))(p, {"x": x, "y": y})
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs))(params, x, y)

    right, wrong = (functools.partial(mapped, op=op) for op in ("mean", "sum"))
    args = PARAMS, BATCH["x"], BATCH["y"]
    jc.assert_same_as_one_device(right, *args, batch_argnums=("x", 2))
    with pytest.raises(AssertionError, match="8.0 times as large"):
        jc.assert_same_as_one_device(wrong, *args, batch_argnums=(1, 2))
    with pytest.raises(ValueError, match="which arguments of .* are the batch"):
        jc.assert_same_as_one_device(right, *args)
    made = lambda mesh: jc.data_parallel(updated(by("sum")), mesh=mesh)
    with pytest.raises(AssertionError, match="8.0 times as large"):
        jc.assert_same_as_one_device(made, PARAMS, BATCH)


def test_unlike_outputs_are_explained():
    def check(complaint, step, **options):
        with pytest.raises(AssertionError, match=complaint):
            jc.assert_same_as_one_device(jc.data_parallel(step, **options), PARAMS, BATCH)

    check(r"has shape \(8,\), but \(1,\) on one device", lambda p, b: b["x"].sum()[None], varying_outputs="concatenate")  # fmt: skip
    check(
        "returns 8 outputs, .*; on one it returns 1 output",
        lambda p, b: [p["w"]] * lax.axis_size("data"),
    )
    check("infinite or NaN", lambda p, b: p["w"] / jnp.maximum(2 - lax.axis_size("data"), 0))
    check("infinite or NaN", lambda p, b: p["w"] * jnp.nan)  # which would equal anything


def test_tolerance_and_ignored_outputs():
    def step(key, n, x):
        off = 1 + 1e-3 * lax.axis_size("data")
        mean = jc.all_reduce("mean", x.mean(0), "data")
        return {"key": jax.random.split(key), "n": n + 1, "rows": len(x), "mean": mean * off}

    args = jax.random.key(0), 3, BATCH["x"]
    check = functools.partial(
        jc.assert_same_as_one_device, jc.data_parallel(step, batch_argnums=2), *args
    )
    with pytest.raises(AssertionError, match=r"in 2 of 4 .*\n.*\['mean'\]: differs, .*\n.*\['rows'\]: is 0.125"):  # fmt: skip
        check()
    with pytest.raises(AssertionError, match="in 1 of 3 outputs"):
        check(ignore="['rows']")
    check(ignore=("['rows']",), tolerance=0.1)
    check(ignore=("['rows']", "['mean']"))
    with pytest.raises(ValueError, match="no output's path begins or ends with 'other'"):
        check(ignore="other")


def test_error_feedback_is_compared():
    w, x = np.ones((8, 64), "f"), np.random.default_rng(0).normal(size=(16, 8)).astype("f")
    int8, loss = jc.CommunicationOptions(compression="int8"), lambda w, x: ((x @ w) ** 2).mean()

    def step(w, residual, x, op="mean"):
        gradient = jc.grad(loss, reduce_op=op, feedback=True, options=int8)
        return gradient(w, x, residual=residual)

    for op in ("mean", "sum"):
        of_op = jc.data_parallel(functools.partial(step, op=op), batch_argnums="x")
        check = functools.partial(jc.assert_same_as_one_device, of_op, ignore="[1]", tolerance=0.1)
        if op == "mean":
            check(w, jc.compression.residual(w), x)
        else:
            with pytest.raises(AssertionError, match="8.0 times as large"):
                check(w, jc.compression.residual(w), x)


def test_incomparable_steps_are_refused():
    with pytest.raises(ValueError, match="expects a `jc.data_parallel` step, or a function with a"):
        jc.assert_same_as_one_device(lambda x: x, 1.0)
    step = jc.data_parallel(updated(by("mean")))
    with pytest.raises(ValueError, match="compares one device with several"):
        jc.assert_same_as_one_device(step, PARAMS, BATCH, mesh=mesh_of(1))
    with pytest.raises(ValueError, match="names its own batch"):
        jc.assert_same_as_one_device(step, PARAMS, BATCH, batch_argnums=1)
