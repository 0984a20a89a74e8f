"""Metrics: numbers that say how they are added up, and one collective for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, run

import jaxcoll as jc

X = np.random.default_rng(5).standard_normal((8, 6)).astype("f")


def reduced(runner, f, n, *values):
    return jax.tree.map(lambda x: x[0], run(runner, f, n, *values))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("n", [3, 8])
def test_metrics_equal_one_device(runner, n):
    x, real = X[:n], np.arange(n * 6).reshape(n, 6) % 3

    def f(x, real):
        metrics = {
            "mean": jc.WeightedMean(jnp.sum(real.astype("f") * x), real.sum()),
            "stacked": [jc.WeightedMean(real.astype("f") * x, real), None],
            "half": jc.Total(x.astype(jnp.float16)),
            "tokens": jc.Total(real),
            "over": jc.Total(x > 1),
            "replicas": jc.Total(1),
            "two bits": jc.WeightedMean(*[(0 * x + 3).astype(jnp.uint2)] * 2),
        }
        return jc.reduce_metrics(metrics, "data")

    got = reduced(runner, f, n, x, real)
    np.testing.assert_allclose(got["mean"], np.average(x, weights=real), rtol=1e-5)
    np.testing.assert_allclose(got["stacked"][0], got["mean"], rtol=1e-5)
    np.testing.assert_allclose(got["half"], x.astype(np.float16).astype("f").sum(), rtol=1e-4)
    assert [int(got[k]) for k in ("tokens", "over", "replicas")] == [real.sum(), (x > 1).sum(), n]
    assert [got[k].dtype.name for k in ("half", "tokens")] == ["float32", "int32"]
    assert got["two bits"] == 1


def test_metrics_share_one_collective():
    """Twenty metrics of six types, half of them stacked by a scan: one pack of floats."""

    def step(x):
        def layer(h, _):
            h = jnp.tanh(h)
            mine = {f"m{i}": jc.WeightedMean(h.sum() * i, 6.0) for i in range(5)}
            return h, mine | {f"t{i}": jc.Total((h > 0.1 * i).sum()) for i in range(5)}

        x = x[0]
        _, stacked = jax.lax.scan(layer, x, None, length=7)
        last = {f"m{i}": jc.WeightedMean(x.sum().astype(jnp.bfloat16), 6) for i in range(5)}
        last |= {f"t{i}": jc.Total(x.argmax()) for i in range(5)}
        return jc.reduce_metrics([stacked, last], "data")

    report = jc.inspect(jc.data_parallel(step), X)
    jc.assert_collectives(report, none_in_loops=True, max_count=1, dtypes=["f32"])
    (asked,) = report.requested
    assert (report.count, asked.operands[0].size) == (1, 60)  # an integer is four


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_aux_metrics_travel_with_gradients(op):
    """Held apart by `bytes_per_pack=1 << 20` for each type: one pack is requested, and compiled."""

    def loss(w, x):
        metrics = {"top": jc.WeightedMean(x.max(), 1), "rows": jc.Total(x.shape[0])}
        return jnp.sum(w[None] * x), (metrics, x[0, 0])

    def step(w, x):
        f = jc.value_and_grad(loss, "data", reduce_op=op, has_aux=True)
        (value, (metrics, _)), grad = f(w, x)
        return value, metrics, grad

    options = jc.CommunicationOptions(bytes_per_pack=1 << 20)
    wrapped = jc.data_parallel(step, options=options)
    report = jc.inspect(wrapped, np.ones(6, "f"), X)
    assert (report.count, len(report.requested)) == (1, 1)
    assert ".metrics[\"[0]['top']\"].total" in report.rows[0].leaves
    value, metrics, _ = wrapped(np.ones(6, "f"), X)
    np.testing.assert_allclose(value, X.sum() / (8 if op == "mean" else 1), rtol=1e-5)
    np.testing.assert_allclose(metrics["top"], X.max(axis=1).mean(), rtol=1e-6)
    assert metrics["rows"] == 8


def test_reduced_totals_are_refused():
    total = lambda x: jc.Total(jax.lax.psum(x, "data"))
    with pytest.raises(
        jc.errors.AlreadyReducedError, match="`jc.reduce_metrics`: the total of metric"
    ):
        run("checked", lambda x: jc.reduce_metrics(total(x), "data"), 4, jnp.ones(4))
    f = jc.grad(lambda w, x: (w * x, {"n": total(x)}), "data", has_aux=True)
    with pytest.raises(
        jc.errors.AlreadyReducedError, match=r"`jc.grad`: the total of metric \['n'\]"
    ):
        run("checked", lambda x: f(1.0, x), 4, jnp.ones(4))


WAYS = {
    "reduce_metrics": lambda x: jc.reduce_metrics(jc.Total(x), "data"),
    **{
        op: lambda x, op=op: jc.value_and_grad(
            lambda w: (w, jc.Total(x)), "data", reduce_op=op, has_aux=True
        )(1.0)[0][1]
        for op in ("mean", "sum")
    },
    "weighted": lambda x: jc.value_and_grad(
        lambda w: (jc.WeightedLoss(w, 3.0), jc.Total(x)), "data", has_aux=True
    )(1.0)[0][1],
    "accumulate": lambda x: jc.accumulate(
        lambda w, x: (w, jc.Total(x)), "data", 2, has_aux=True
    )(1.0, x)[0][1],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [3, 8])
def test_integers_are_counted_exactly(way, n):
    """As `jnp.sum` of all rows counts, above the integers of a float32, below 0, and modulo 2^32."""
    given = [
        np.full((n, 4), (1 << 24) + 1, np.int32),
        np.arange(-n * 4, 0, dtype=np.int32).reshape(n, 4) * 12_345_677,
        np.full((n, 4), (1 << 30) + 7, np.uint32),
        np.full((n, 4), 255, np.uint8),
        np.full((n, 4), 30_000, np.int16),
        np.full((n, 4), -128, np.int8),
        np.ones((n, 4), bool),
    ]
    totals = run("vmap", lambda xs: [WAYS[way](x) for x in xs], n, given)
    for total, x in zip(totals, given, strict=True):
        wide = np.int32 if x.itemsize < 4 else x.dtype
        with np.errstate(over="ignore"):
            assert np.asarray(total).tolist() == [x.sum(dtype=wide).item()] * n
        assert total.dtype == wide
