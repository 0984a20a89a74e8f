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
    of = lambda x: x * scale(lax.axis_size("data"))
    return lambda g: jax.tree.map(of, jc.all_reduce(reduce_op, g, "data"))


compare = jc.assert_same_as_one_device


def wrong(words, *args, error=AssertionError, **settings):
    """The comparison finds something, and says it in these words."""
    with pytest.raises(error, match=words) as caught:
        compare(*args, **settings)
    return str(caught.value)


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
    compare(trained(loss, tx), params, state, batch)
    off = trained(loss, tx, lambda grads, n: {**grads, "w": grads["w"] * n})
    wrong(r"\['w'\]: .* 8\.0 times as large", off, params, state, batch)


def test_donation_and_wide_floats():
    step = jc.data_parallel(updated(by("mean")), donate_argnums=0)
    compare(step, jax.tree.map(jnp.asarray, PARAMS), BATCH, mesh=mesh_of(4))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (PARAMS, BATCH))
        compare(jc.data_parallel(updated(by("mean"))), *wide)
        off = jc.data_parallel(updated(by("mean", lambda n: 1 + 1e-7 * n)))
        wrong("differs, but not by a power", off, *wide)


def test_wrong_factors_are_named():
    for reduced, factor, meaning, rate in (
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 0.1),
        (by("sum"), "8.0", "summed where a mean is expected, or a sum is reduced again", 1e-4),
        (by("mean", lambda n: 1 / n), "0.125", "divided by the number of replicas once", 0.1),
        (by("sum", lambda n: n), "64.0", "8 squared: summed twice", 1e-4),
        (by("mean", lambda n: 1 / n**2), "0.0156", "1/8 squared", 1e-4),
    ):
        words = rf"in 2 of 3 outputs(?s:.)*output \[0\]\['b'\]: is {factor} times as large"
        message = wrong(words, jc.data_parallel(updated(reduced, rate)), PARAMS, BATCH)
        assert "output [0]['w']: its change by other rows is" in message
        assert message.count(meaning) == 2


def rows_of(p, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"] + p["b"][None]) - batch["y"]) ** 2, -1)


def means_of_means(p, batch):
    """A mean over tokens of which replicas have unequal numbers."""
    weight = (batch["y"] > 0).astype("f")
    return jnp.sum(weight * (batch["x"] @ p["w"]) ** 2) / jnp.sum(weight)


def dropped(key):
    keep = lambda x: x * jax.random.bernoulli(key(), 0.5, x.shape).astype("f")
    return lambda p, b: loss(p, {**b, "x": keep(b["x"])})


def noisy(key, g):
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), g)


own_seed = lambda: jax.random.fold_in(jax.random.key(1), lax.axis_index("data"))
each = lambda f, g: jax.tree.map(f, g)
half = lambda x: jax.random.permutation(jax.random.key(3), x)[: len(x) // 2]
WRONG_LOSSES = {  # of which the mean over replicas is not that of all rows
    "unequal tokens": means_of_means,
    "own statistics": lambda p, b: rows_of(p, {**b, "x": b["x"] / jnp.std(b["x"], 0)[None]}).mean(),
    "standard deviation": lambda p, b: jnp.std(rows_of(p, b)),
    "hardest": lambda p, b: lax.top_k(rows_of(p, b), 2)[0].mean(),
    "in a softmax": lambda p, b: jax.nn.logsumexp(rows_of(p, b)),
    "negatives": lambda p, b: -jnp.diag(jax.nn.log_softmax(b["x"] @ p["w"] @ b["y"].T)).mean(),
    "mixed rows": lambda p, b: rows_of(p, each(lambda x: (x + x[::-1]) / 2, b)).mean(),
    "half of the rows": lambda p, b: rows_of(p, each(half, b)).mean(),
    "first row": lambda p, b: rows_of(p, b)[0],
    "dropout by place": dropped(lambda: jax.random.key(0)),
    "dropout by replica": dropped(own_seed),
}
WRONG_GRADIENTS = {  # made of those of one replica, and the mean of its loss
    "sum": lambda g, v: jc.psum(g),
    "of one": lambda g, v: jc.broadcast(g, "data"),
    "divided twice": lambda g, v: each(lambda x: x / lax.axis_size("data"), jc.pmean(g)),
    "rate for more devices": lambda g, v: each(lambda x: x * lax.axis_size("data") ** 0.5, jc.pmean(g)),
    "clipped before": lambda g, v: jc.pmean(each(lambda x: x / optax.tree.norm(g), g)),
    "signs": lambda g, v: jc.pmean(each(jnp.sign, g)),
    "own noise": lambda g, v: jc.pmean(noisy(own_seed(), g)),
    "noise counted n times": lambda g, v: jc.psum(
        noisy(jax.random.key(0), each(lambda x: x / lax.axis_size("data"), g))),
    "squares": lambda g, v: jc.pmean(each(jnp.square, g)),
    "weighted": lambda g, v: jc.pmean(each(lambda x: x * (1.0 + lax.axis_index("data")), g)),
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
    message = wrong("(?s)deterministic=True.*own random key", step, params, params, 1, BATCH)
    listed = set(re.findall(r"output \[0\]\['(.*?)'\]", message))
    assert listed == {
        *(f"loss, {k}" for k in WRONG_LOSSES),
        *(f"gradient, {k}" for k in WRONG_GRADIENTS),
    }
    assert "output [1]" not in message
    by_order = set(re.findall(r"\['loss, (.*?)'\].*: changes on one device too", message))
    assert {"first row", "dropout by place", "half of the rows"} <= by_order
    assert "unequal tokens" not in by_order


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

    @jc.data_parallel(batch_argnums="batch")
    def step(params, trained, batch):
        grads, after = jc.grad(loss)(params, batch), {}
        for name, (params, state) in trained.items():
            updates, state = OPTIMIZERS[name].update(grads, state, params)
            after[name] = optax.apply_updates(params, updates), state
        return after

    with jax.enable_x64(wide):
        kind = "d" if wide else "f"
        params, batch = jax.tree.map(lambda x: jnp.asarray(x, kind), (params, batch))
        trained = {name: (params, OPTIMIZERS[name].init(params)) for name in [*OPTIMIZERS][some]}
        for _ in range(steps):
            trained = step(params, trained, batch)
        compare(step, params, trained, batch)


def test_changes_by_rows_decide():
    """Statistics may hide an error from any comparison with the whole; rounding is no change."""
    ones, x, none = np.ones(5, "f"), BATCH["x"], "the output: changes with other rows no more than"
    rest = lambda x: jc.pmean((x - jc.pmean(x.mean())).mean())
    for words, step, rows in (
        (r"differs, but not by|8\.0 times as large", lambda w, x: 1.0 + 1e-4 * jc.pmean(x.var(0)), x),
        (r"differs, but not by|8\.0 times as large", lambda w, x: 1e3 * w + 1e-3 * jc.psum(x.mean(0)), x),
        (none, lambda w, x: w - jc.pmean(x[0]), np.ones((16, 5), "f")),
        (none, lambda w, x: w - 1e-9 * jc.psum(x.mean(0)), x),
        (none, lambda w, x: rest(x), x),
    ):  # fmt: skip
        wrong(words, jc.data_parallel(step), ones, rows)
    compare(jc.data_parallel(lambda w, x: (w + jc.pmean(x.mean()), rest(x))), np.float32(1), x)


def test_keys_for_rows_are_compared():
    keys = jax.random.split(jax.random.key(0), 16)

    def step(w, x, keys, scale):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (5,)))(keys).astype("f")
        rows = x * keep * float(lax.axis_size("data") ** scale)
        return rows, w - 0.1 * jc.all_reduce("mean", (x * keep).mean(0), "data")

    right, off = (
        jc.data_parallel(
            functools.partial(step, scale=scale),
            batch_argnums=(1, 2), varying_outputs=("concatenate", "error"),
        )
        for scale in (0, 1)
    )  # fmt: skip
    args = PARAMS["w"][:, 0], BATCH["x"], keys
    compare(right, *args)
    wrong(r"in 1 of 2 outputs:\n  output \[0\]: .*8.0 times", off, *args)


def test_functions_of_a_mesh_name_their_batch():
    def mapped(params, x, y, *, mesh, op):
        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "check_vma": False}
        step = lambda p, x, y: updated(by(op))(p, {"x": x, "y": y})
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs))(params, x, y)

    mean, total = (functools.partial(mapped, op=op) for op in ("mean", "sum"))
    args = PARAMS, BATCH["x"], BATCH["y"]
    compare(mean, *args, batch_argnums=("x", 2))
    wrong("8.0 times as large", total, *args, batch_argnums=(1, 2))
    wrong("which arguments of .* are the batch", mean, *args, error=ValueError)
    made = lambda mesh: jc.data_parallel(updated(by("sum")), mesh=mesh)
    wrong("8.0 times as large", made, PARAMS, BATCH)


def test_unlike_outputs_are_explained():
    for words, step, options in (
        (r"has shape \(8,\), but \(1,\) on one device", lambda p, b: b["x"].sum()[None], {"varying_outputs": "concatenate"}),
        ("returns 8 outputs, .*; on one it returns 1 output", lambda p, b: [p["w"]] * lax.axis_size("data"), {}),
        ("infinite or NaN", lambda p, b: p["w"] / jnp.maximum(2 - lax.axis_size("data"), 0), {}),
        ("infinite or NaN", lambda p, b: p["w"] * jnp.nan, {}),  # which would equal anything
    ):  # fmt: skip
        wrong(words, jc.data_parallel(step, **options), PARAMS, BATCH)


def test_tolerance_and_ignored_outputs():
    def step(key, n, x):
        off = 1 + 1e-3 * lax.axis_size("data")
        mean = jc.all_reduce("mean", x.mean(0), "data")
        return {"key": jax.random.split(key), "n": n + 1, "rows": len(x), "mean": mean * off}

    args = jc.data_parallel(step, batch_argnums=2), jax.random.key(0), 3, BATCH["x"]
    wrong(r"in 2 of 4 .*\n.*\['mean'\]: differs, .*\n.*\['rows'\]: is 0.125", *args)
    wrong("in 1 of 3 outputs", *args, ignore="['rows']")
    compare(*args, ignore=("['rows']",), tolerance=0.1)
    compare(*args, ignore=("['rows']", "['mean']"))
    wrong("no output's path begins or ends with 'other'", *args, ignore="other", error=ValueError)


def test_error_feedback_is_compared():
    w, x = np.ones((8, 64), "f"), np.random.default_rng(0).normal(size=(16, 8)).astype("f")
    int8, loss = jc.CommunicationOptions(compression="int8"), lambda w, x: ((x @ w) ** 2).mean()
    args, settings = (w, jc.compression.residual(w), x), {"ignore": "[1]", "tolerance": 0.1}

    def step(w, residual, x, op):
        gradient = jc.grad(loss, reduce_op=op, feedback=True, options=int8)
        return gradient(w, x, residual=residual)

    mean, total = (
        jc.data_parallel(functools.partial(step, op=op), batch_argnums="x")
        for op in ("mean", "sum")
    )
    compare(mean, *args, **settings)
    wrong("8.0 times as large", total, *args, **settings)


def test_incomparable_steps_are_refused():
    step = jc.data_parallel(updated(by("mean")))
    for words, args, settings in (
        ("expects a `jc.data_parallel` step, or a function with a", (lambda x: x, 1.0), {}),
        ("compares one device with several", (step, PARAMS, BATCH), {"mesh": mesh_of(1)}),
        ("names its own batch", (step, PARAMS, BATCH), {"batch_argnums": 1}),
    ):
        wrong(words, *args, error=ValueError, **settings)
