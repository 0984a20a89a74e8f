"""Micro-batches equal the whole batch, and are reduced once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, close, grid, lowered, on_replicas, run

import jaxcoll as jc

P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(3)
X = RNG.standard_normal((64, 5)).astype("f")
Y = RNG.standard_normal((64, 3)).astype("f")
# Uneven: one micro-batch of all padding, one replica with hardly a token.
REAL = (RNG.random(64) < 0.6).astype("f")
REAL[8:24] = 0
PARAMS = {"w": RNG.standard_normal((5, 3)).astype("f"), "b": np.zeros(3, "f")}


def errors(p, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"] + p["b"][None]) - batch["y"]) ** 2, axis=1)


def mean_loss(p, batch):
    return jnp.mean(errors(p, batch))


def sum_loss(p, batch):
    return jnp.sum(errors(p, batch))


def weighted_loss(p, batch):
    return jc.WeightedLoss(jnp.sum(batch["real"] * errors(p, batch)), jnp.sum(batch["real"]))


def scanned_loss(p, batch):
    row = lambda total, row: (total + mean_loss(p, jax.tree.map(lambda x: x[None], row)), None)
    return jax.lax.scan(row, 0.0, batch)[0] / batch["x"].shape[0]


def checkpointed_loss(p, batch):
    return jax.checkpoint(mean_loss)(p, batch)


BATCH = {"x": X, "y": Y, "real": REAL}


@functools.cache
def whole(loss):
    """What one device has of everything."""

    def value(p):
        found = loss(p, BATCH)
        return found.total / found.weight if isinstance(found, jc.WeightedLoss) else found

    return jax.jit(jax.value_and_grad(value))(PARAMS)


LOSSES = [mean_loss, sum_loss, weighted_loss, scanned_loss, checkpointed_loss]


@pytest.mark.parametrize("runner", RUNNERS)
def test_K32_micro_batches_equal_the_whole_batch(runner):
    """Every loss, several batch arguments, keywords and argnums; one program for each way to map."""

    # Its loop starts from a constant, which JAX's types refuse.
    losses = [x for x in LOSSES if runner != "checked" or x is not scanned_loss]

    def product(x, s, p, y, *, scale):
        return scale * s * mean_loss(p, {"x": x, "y": y})

    def f(b):
        found = []
        for loss in losses:
            step = jc.accumulate(loss, "data", 4, reduce_op="sum" if loss is sum_loss else "mean")
            found.append(step(PARAMS, b))
        step = jc.accumulate(product, "data", 2, batch_argnums=(0, 3), argnums=(2, 1))
        return found, step(b["x"], 2.0, PARAMS, b["y"], scale=3.0)

    found, of_product = on_replicas(runner, f, 4, BATCH)
    for got, loss in zip(found, losses, strict=True):
        close(got, whole(loss), rtol=3e-5)
    alone = jax.jit(jax.value_and_grad(product, argnums=(2, 1)))
    close(of_product, alone(X, 2.0, PARAMS, Y, scale=3.0))


def test_any_number_that_divides():
    steps = [jc.accumulate(weighted_loss, "data", pieces) for pieces in (1, 2, 16)]
    for got in on_replicas("checked", lambda b: [step(PARAMS, b) for step in steps], 4, BATCH):
        close(got, whole(weighted_loss))


def test_over_two_axes_and_in_data_parallel_with_another_axis_of_copies():
    mesh, both = grid(2, 4), ("node", "data")
    step = jc.data_parallel(jc.accumulate(mean_loss, both, 4), mesh=mesh, axis_name=both)
    close(step(PARAMS, BATCH), whole(mean_loss))
    copies = jc.data_parallel(jc.accumulate(mean_loss, "data", 4), mesh=mesh)
    close(copies(PARAMS, BATCH), whole(mean_loss))


@pytest.mark.parametrize("runner", RUNNERS)
def test_metrics_become_one_number_and_other_aux_is_stacked(runner):
    def loss(p, batch):
        metrics = {
            "error": jc.WeightedMean(
                jnp.sum(batch["real"] * errors(p, batch)), batch["real"].sum()
            ),
            "tokens": jc.Total(batch["real"].sum().astype(int)),
            "pieces": jc.Total(1),
        }
        return mean_loss(p, batch), (metrics, "no array", batch["x"][0, 0], 1.0)

    def both(batch):
        (value, (metrics, text, firsts, ones)), grads = jc.accumulate(
            loss, "data", 4, has_aux=True
        )(PARAMS, batch)
        assert (text, firsts.shape, ones.shape) == ("no array", (4,), (4,))
        return value, metrics, grads, jc.all_reduce("sum", firsts, "data")

    value, metrics, grads, firsts = on_replicas(runner, both, 4, BATCH)
    close((value, grads), whole(mean_loss))
    close(metrics["error"], whole(weighted_loss)[0])
    assert int(metrics["tokens"]) == REAL.sum()
    assert int(metrics["pieces"]) == 16
    assert metrics["tokens"].dtype == jnp.int32
    np.testing.assert_allclose(firsts, X[:, 0].reshape(4, 4, 4)[:, :, 0].sum(0), rtol=1e-5)


def test_narrow_gradients_are_added_in_float32_and_travel_in_their_own_type():
    """256 + seven ones: a sum in bfloat16 stays at 256."""
    rows = np.array([256.0] + 7 * [1.0], "f")
    step = jc.accumulate(lambda w, x: jnp.sum(w * x), "data", 8, reduce_op="sum")
    param = jnp.ones((), jnp.bfloat16)

    def f(x):
        return step(param, x.astype(jnp.bfloat16))

    _, grad = on_replicas("checked", f, 1, rows)
    assert (grad.dtype, float(grad)) == (jnp.bfloat16, 264.0)
    text = lowered(f, 2, np.stack([rows, rows])).as_text()
    assert "tensor<bf16>" in text.split("stablehlo.all_reduce", 1)[1]


def test_other_random_numbers_in_every_piece():
    loss = lambda w, x, keys: jnp.mean(w * x * jax.random.uniform(keys[0]))

    def f(x, seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        return jc.accumulate(loss, "data", 4, batch_argnums=(1, 2))(1.0, x, keys)[0]

    ones, seeds = np.ones((2, 8), "f"), np.arange(2)
    drawn = [
        jax.random.uniform(key)
        for seed in seeds
        for key in jax.random.split(jax.random.key(seed), 4)
    ]
    np.testing.assert_allclose(run("checked", f, 2, ones, seeds)[0], np.mean(drawn), rtol=1e-6)


def test_eight_micro_batches_send_an_eighth():
    """Read from the compiled programs: one reduction after the loop, and one in every turn."""
    once = jc.data_parallel(jc.accumulate(mean_loss, "data", 8))

    def each(p, batch):
        pieces = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        zero = (0.0, jax.tree.map(jnp.zeros_like, p))
        turn = lambda total, piece: (
            jax.tree.map(jnp.add, total, jc.value_and_grad(mean_loss, "data")(p, piece)),
            None,
        )
        return jax.tree.map(lambda x: x / 8, jax.lax.scan(turn, zero, pieces)[0])

    report = jc.assert_collectives(jc.inspect(once, PARAMS, BATCH), none_in_loops=True, max_count=1)
    every_turn = jc.inspect(jc.data_parallel(each), PARAMS, BATCH)
    assert every_turn.wire_bytes == 8 * report.wire_bytes > 0
    close(jc.data_parallel(each)(PARAMS, BATCH), once(PARAMS, BATCH))


@pytest.mark.parametrize(
    ("asked", "args", "message"),
    [
        ({}, (1.0, np.ones((6, 2), "f")), r"args\[1\] has 6 rows.*\(6 = 4 × 1 \+ 2\)"),
        ({}, (1.0, {"x": np.ones(8, "f"), "t": 2.0}), r"args\[1\]\['t'\] is a scalar"),
        ({"batch_argnums": 2}, (1.0, np.ones(8, "f")), "argument 2 is named in `batch_argnums`"),
        ({"argnums": (0, 1)}, (1.0, np.ones(8, "f")), "argument 1 is in `argnums` and in"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(asked, args, message):
    step = jc.accumulate(lambda w, x: jnp.mean(w * x), "data", 4, **asked)
    with pytest.raises(ValueError, match=message):
        run("vmap", lambda _: step(*args), 2, jnp.ones(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda n=n: jc.accumulate(mean_loss, "data", n),
           "`num_microbatches` to be an integer above 0; got") for n in (0, -1, True, 2.0)),
        *((lambda n=n: jc.accumulate(mean_loss, "data", 2, batch_argnums=n),
           "`batch_argnums` to be a position or several; got") for n in ((), "1", None)),
        *((lambda n=n: jc.grad(mean_loss, "data", argnums=n),
           "`jc.grad` expects `argnums` to be a position or several") for n in ((), "p", 1.0, None)),
        (lambda: jc.value_and_grad("p", "data"),
         "`jc.value_and_grad` expects a function, the loss, and returns one"),
    ],
)  # fmt: skip
def test_what_is_no_number_position_or_loss_is_refused_when_it_is_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_program_holds_the_loss_once():
    """Tracing it for its types leaves nothing behind."""
    text = lowered(
        lambda b: jc.accumulate(mean_loss, "data", 4)(PARAMS, b),
        *(1, jax.tree.map(lambda x: x[None], BATCH)),
    ).as_text()
    assert text.count("stablehlo.tanh") == 1
