"""A weighted mean in every type: counts neither overflow nor are rounded to eight bits.

Like all tests these run under strict promotion of types.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import run

import jaxcoll as jc

N = 4
FLOATS = ["float16", "bfloat16", "float32"]
WEIGHTS = ["int32", "uint32", "int16", "uint8", "float16", "bfloat16", "float32"]
COUNTS = {"uint8": 200, "int16": 30_000}
ENTRIES = {
    "value_and_grad": lambda loss: jc.value_and_grad(loss, "data"),
    "accumulate": lambda loss: jc.accumulate(loss, "data", 2),
    "scatter": lambda loss: (
        lambda w, x: (lambda value, shards: (value, jc.all_gather(shards, "data")))(
            *jc.value_and_grad(loss, "data", scatter=True)(w, x)
        )
    ),
}


def tokens(dtype, weight):
    """The loss of many tokens whose mean is 1.5 w on each replica: its sum just fits a float16."""

    def loss(w, x):
        count = COUNTS.get(weight, 40_000) * len(x) // 2
        total = w * jnp.sum(x).astype(dtype) * jnp.float32(count * 0.75 / len(x)).astype(dtype)
        return jc.WeightedLoss(total.sum(), jnp.float32(count).astype(weight))

    return loss


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_mean_that_fits_is_right_though_its_numerator_and_its_count_do_not_fit(dtype, entry):
    x = jnp.full((N, 2), 2.0)
    w = jnp.asarray([0.875], dtype)

    def f(x):
        return {kind: ENTRIES[entry](tokens(dtype, kind))(w, x) for kind in WEIGHTS}

    for runner in ("checked", "unchecked"):
        for kind, (value, grad) in run(runner, f, N, x).items():
            assert value.dtype == grad.dtype == dtype, kind
            tolerance = {"rtol": 2.0**-7 if dtype == "bfloat16" else 2.0**-9}
            np.testing.assert_allclose(value.astype("f")[0], 1.5 * 0.875, **tolerance)
            np.testing.assert_allclose(grad.astype("f")[0], [1.5], **tolerance)


def test_the_count_is_not_rounded_to_the_type_of_the_loss():
    """Of 257 tokens on each replica; as bfloat16 their count would be 256, or 1032 of all 1028."""
    f = jc.grad(lambda w, x: jc.WeightedLoss(w * 256, 257), "data")
    grad = run("checked", lambda x: f(jnp.bfloat16(1), x), N, jnp.ones(N))
    assert grad[0] == jnp.bfloat16(256 / 257) < 1


def test_a_float16_that_is_clipped_may_have_a_norm_that_is_none():
    """Its norm is 4e6, and a float16 ends at 65504."""
    optimizer = jc.sharded_optimizer(optax.sgd(1.0), "data", max_norm=1.0)
    params = {"w": jnp.zeros(4096, jnp.float16)}

    def step(x):
        grads = {"w": jnp.full(4096, 60_000, jnp.float16) * x.astype(jnp.float16)}
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return updates["w"]

    got = run("checked", step, N, jnp.ones(N))[0]
    np.testing.assert_allclose(got.astype("f"), -1 / 64, rtol=1e-3)


@pytest.mark.parametrize("runner", ["checked", "vmap"])
def test_metrics_of_mixed_types_have_the_wider_one(runner):
    with jax.enable_x64(True):
        pairs = [("float64", "float32"), ("float32", "float64"), ("complex64", "float64")]
        f = lambda x: [
            jc.reduce_metrics(jc.WeightedMean(x.astype(a), x.astype(b)), "data") for a, b in pairs
        ]
        found = run(runner, f, N, jnp.arange(1.0, N + 1, dtype="float32"))
    assert [v.dtype for v in found] == ["float64", "float64", "complex128"]
    assert [np.asarray(v)[0] for v in found] == [1, 1, 1]
