"""Reductions that are made to overlap: the same values, in another order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, lowered, rows, run

import jaxcoll as jc

OVERLAP = jc.CommunicationOptions(overlap=True, bytes_per_pack=64)
PARAMS = {f"w{i}": np.full((4, 4), 0.1 * i + 0.1, np.float32) for i in range(4)} | {
    f"b{i}": np.ones((1, 4), np.float32) for i in range(4)
}


def loss(params, x):
    for i in range(4):
        x = jnp.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
    return jc.WeightedLoss(jnp.sum(x), jnp.float32(x.shape[0])), {"x": x, "name": "text"}


@pytest.mark.parametrize("runner", RUNNERS)
def test_overlapping_changes_no_value(runner):
    def step(options, x):
        gradient = jc.value_and_grad(loss, "data", has_aux=True, options=options)
        (value, aux), grads = gradient(PARAMS, x)
        assert aux["name"] == "text"
        return value, grads

    got, want = run(runner, lambda x: (step(OVERLAP, x), step(None, x)), 4, rows(4, 2, 4))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_packs_are_chained_in_the_order_they_are_ready():
    def step(x):
        return jc.grad(loss, "data", has_aux=True, options=OVERLAP)(PARAMS, x)[0]

    text = lowered(step, 4, rows(4, 2, 4)).as_text()
    assert text.count("optimization_barrier") == text.count("stablehlo.all_reduce") - 1 > 3


def test_a_bare_reduction_goes_from_last_to_first_and_says_so():
    def step(x):
        return jc.all_reduce("mean", {"a": x, "b": x, "c": x}, "data", options=OVERLAP)

    plan = jc.plan({k: rows(1, 16)[0] for k in "abc"}, axis_size=4, options=OVERLAP)
    assert [plan.leaves[p.segments[0].leaf].path for p in plan.packs] == ["['c']", "['b']", "['a']"]
    assert any("not known here when each is ready" in reason for reason in plan.reasons)
    out = run("checked", step, 4, rows(4, 16))
    np.testing.assert_allclose(out["a"][0], np.mean(rows(4, 16), 0))


def test_the_gradient_of_an_overlapping_reduction_is_that_of_any():
    def second(options, x):
        total = jc.value_and_grad(lambda w, x: jnp.sum(w * w * x), "data", options=options)
        return jax.grad(lambda w: jnp.sum(total(w, x)[1]))(jnp.ones((4,)))

    small = OVERLAP.replace(bytes_per_pack=4)
    np.testing.assert_allclose(
        *run("pmap", lambda x: (second(small, x), second(None, x)), 4, rows(4, 4))
    )
