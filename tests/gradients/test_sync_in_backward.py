"""A gradient that is reduced where it appears is the gradient, in every mixture and mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, close, grid, lowered, on_replicas, plans_of, split

import jaxcoll as jc

RNG = np.random.default_rng(0)
WIDTH, LAYERS = 4, 6
X = RNG.standard_normal((16, WIDTH)).astype("f")
WEIGHT = np.repeat([1.0, 0.0, 3.0, 1.0], 4).astype("f")
PARAMS = {
    "ends": RNG.standard_normal((WIDTH, WIDTH)).astype("f"),
    "stack": {
        "w": RNG.standard_normal((LAYERS, WIDTH, WIDTH)).astype("f") / 2,
        "b": np.zeros((LAYERS, WIDTH), "f"),
    },
}


def sync(tree, **given):
    return jc.sync_in_backward(tree, "data", **given)


def same(tree):
    return tree


def layer(sync, x, p):
    p = sync(p)
    return jnp.tanh(x @ p["w"] + p["b"][None]), None


def scanned(p, x, sync):
    x, _ = jax.lax.scan(functools.partial(layer, sync), x @ p["ends"], p["stack"])
    return x


def nested(p, x, sync):
    groups = jax.tree.map(lambda a: a.reshape(2, 3, *a.shape[1:]), p["stack"])
    inner = functools.partial(jax.lax.scan, functools.partial(layer, sync))
    return jax.lax.scan(inner, x @ sync(p["ends"]), groups)[0]


def checkpointed(p, x, sync):
    body = jax.checkpoint(functools.partial(layer, sync))
    return jax.lax.scan(body, x @ sync(p["ends"]), p["stack"])[0]


def checkpointed_twice(p, x, sync):
    return jax.checkpoint(lambda p, x: checkpointed(p, x, sync))(p, x)


def used_twice(p, x, sync):
    """Both ends are one matrix, synced once; every layer is run twice, synced both times."""
    ends = sync(p["ends"])
    for _ in range(2):
        x = scanned({**p, "ends": ends}, x, sync)
    return x @ ends.T


def partly(p, x, sync):
    """One of two uses is synced, and one of two leaves; one is for nothing."""
    x = scanned(p, x, lambda layer: {**sync({"w": layer["w"]}), "b": layer["b"]})
    sync({"unused": p["stack"]["b"]})
    return x @ p["ends"].T + x @ sync(p["ends"])


MODELS = {
    f.__name__: f for f in (scanned, nested, checkpointed, checkpointed_twice, used_twice, partly)
}


def mean_loss(model, sync, p, x):
    return jnp.mean(model(p, x, sync) ** 2)


def weighted(model, sync, p, x, weight):
    return jc.WeightedLoss(
        jnp.sum(weight[:, None] * model(p, x, sync) ** 2), jnp.sum(weight) * WIDTH
    )


CASES = [("checked", name) for name in MODELS]
CASES += [
    ("unchecked", "used_twice"),
    ("unchecked", "partly"),
    ("pmap", "nested"),
    ("vmap", "partly"),
]


@functools.cache
def on_one_device(name):
    """Value and gradients of the mean loss, and of the weighted one."""
    model = MODELS[name]

    @jax.jit
    def both(p):
        def weights(p):
            loss = weighted(model, same, p, X, WEIGHT)
            return loss.total / loss.weight

        mean = jax.value_and_grad(functools.partial(mean_loss, model, same))(p, X)
        return mean, jax.value_and_grad(weights)(p)

    return jax.tree.map(np.asarray, both(PARAMS))


def gradient(name):
    return on_one_device(name)[0][1]


@pytest.mark.parametrize(("runner", "name"), CASES)
def test_synced_gradients_equal_one_device(runner, name):
    """Mean, and of what is synced and what is not in one model also sum and weighted mean."""
    loss, of_weights = (functools.partial(f, MODELS[name], sync) for f in (mean_loss, weighted))

    def replica(x, weight):
        results = [jc.value_and_grad(loss, "data")(PARAMS, x)]
        if name == "partly":
            results.append(jc.value_and_grad(of_weights, "data")(PARAMS, x, weight))
            results.append(jc.value_and_grad(loss, "data", reduce_op="sum")(PARAMS, x))
        return results

    mean, weights = on_one_device(name)
    want = [mean, weights, jax.tree.map(lambda g: 4 * g, mean)]
    want = want if name == "partly" else want[:1]
    close(on_replicas(runner, replica, 4, X, WEIGHT), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("runner", RUNNERS)
def test_plain_grad_reduces_synced_leaves(runner):
    """Under a checked `shard_map`, too, where autodiff would have summed by itself."""
    by = lambda op: functools.partial(mean_loss, nested, functools.partial(sync, reduce_op=op))
    f = lambda x: [jax.grad(by(op))(PARAMS, x) for op in ("mean", "SUM")]
    mean, total = on_replicas(runner, f, 4, X)
    close(mean, gradient("nested"), rtol=1e-4)
    close(total, jax.tree.map(lambda g: 4 * g, gradient("nested")), rtol=1e-4)


def test_autodiff_adds_no_sum():
    """One requested all-reduce for each leaf; the gradient has its parameter's type."""

    def replica(x):
        loss = lambda stack: mean_loss(scanned, sync, {**PARAMS, "stack": stack}, x)
        return jax.grad(loss)(jax.tree.map(jnp.asarray, PARAMS["stack"]))

    text = lowered(replica, 4, split(4, X)).as_text()
    assert text.count('"stablehlo.all_reduce"') == 2


def test_reduction_happens_inside_the_loop():
    step = jc.value_and_grad(functools.partial(mean_loss, nested, sync), "data", reduce_op="sum")
    report = jc.inspect(jc.data_parallel(step), PARAMS, X)
    depth = {path: len(row.compiled.loops) for row in report.rows for path in row.leaves}
    assert depth == {".value": 0, "": 0, "['w']": 2, "['b']": 2}
    last = report.plans[-1]
    assert [p.dtype.name for p in last.packs] == ["float32"]
    assert last.nbytes == 4
    reason = "not sent again: 3 leaves that `sync_in_backward` has made the same on every replica: "
    assert reason + ".grads['ends'] … .grads['stack']['w']" in last.reasons
    assert all("when: in the backward pass" in str(plan) for plan in report.plans[:-1])


def test_parameter_dtype_travels():
    """The sum that autodiff makes by itself travels in the type of the computation."""

    def loss(sync, p, x):
        def layer(x, w):
            return jnp.tanh(x @ sync(w).astype(jnp.bfloat16)), None

        x, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), p)
        return jnp.mean(x.astype(jnp.float32))

    def wires(sync):
        grad = jax.grad(functools.partial(loss, sync))
        text = lowered(lambda x: grad(PARAMS["stack"]["w"], x), 4, split(4, X)).as_text()
        chunks = text.split('"stablehlo.all_reduce"')[1:]
        return {chunk.split("stablehlo.add", 1)[1].split("tensor<")[1][:4] for chunk in chunks}

    assert wires(sync) == {"f32>"}
    assert wires(same) == {"bf16"}


@pytest.mark.parametrize("runner", RUNNERS)
def test_higher_derivatives_are_right(runner):
    """The last is (d/dw)² of the mean of (w·x)³ over all replicas, by a gradient of a gradient."""
    p, v = PARAMS["stack"]["w"], np.ones_like(PARAMS["stack"]["w"])

    def loss(sync, w, x):
        params = {"ends": PARAMS["ends"], "stack": {**PARAMS["stack"], "w": w}}
        return mean_loss(scanned, sync, params, x)

    def slope(f, w):
        return jax.jvp(f, (w,), (v,))[1]

    def replica(x):
        f = functools.partial(loss, sync, x=x)
        forward_over_reverse = slope(jc.grad(f, "data"), p)
        reverse_over_forward = jc.grad(lambda w: slope(f, w), "data")(p)
        # `jvp` wants tangents of the parameters' own type: in a checked one invariant.
        mean = jax.lax.pmean if runner == "checked" else functools.partial(jc.all_reduce, "mean")
        cube = jc.grad(lambda w: (sync(w) * x[0, 0]) ** 3, "data")
        twice = jc.grad(lambda w: cube(w) + 0 * x[0, 0], "data")(2.0)
        return forward_over_reverse, reverse_over_forward, mean(slope(f, p), "data"), twice

    @jax.jit
    def one(x):
        f = functools.partial(loss, same, x=x)
        return slope(jax.grad(f), p), slope(f, p)

    want, of_one = one(X)
    wants = want, want, of_one, 6 * 2 * np.mean(X[::4, 0] ** 3)
    close(on_replicas(runner, replica, 4, X), wants, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_eager_and_vmapped_are_right():
    def replica(x):
        rows = lambda p, row: mean_loss(scanned, sync, p, row[None])
        return jc.grad(lambda p: jnp.mean(jax.vmap(rows, (None, 0))(p, x)), "data")(PARAMS)

    close(on_replicas("checked", replica, 2, X, jit=False), gradient("scanned"), rtol=1e-4)


@pytest.mark.slow
def test_other_axis_is_reduced_after():
    mesh = grid(2, 4)
    loss = functools.partial(mean_loss, scanned, sync)
    both = functools.partial(jc.sync_in_backward, axis_name=("node", "data"))

    def step(p, x):
        one = jc.grad(loss, ("node", "data"), reduce_op="sum")(p, x)
        return one, jc.grad(functools.partial(mean_loss, nested, both), ("node", "data"))(p, x)

    axes = ("node", "data")
    program = jc.data_parallel(step, mesh=mesh, axis_name=axes)
    want = jax.tree.map(lambda g: 8 * g, gradient("scanned")), gradient("nested")
    close(program(PARAMS, X), want, rtol=1e-4)
    last = [plan for plan in plans_of(program, PARAMS, X) if ".grads['stack']['w']" in str(plan)]
    assert [leaf.over for leaf in last[0].leaves if "stack" in leaf.path] == [(2, 1)] * 2


def test_plans_say_what_is_sent():
    def plans(loss, gradient=None, program=None, part=lambda p: p):
        step = lambda p, x: jc.grad(loss, "data", options=gradient)(part(p), x)
        return plans_of(jc.data_parallel(step, options=program), PARAMS, X)

    *_, last = plans(functools.partial(mean_loss, partly, sync))
    sent = {last.leaves[s.leaf].path for pack in last.packs for s in pack.segments}
    assert sent == {".grads['ends']", ".grads['stack']['b']"}, "what is not synced, after"
    loss = functools.partial(mean_loss, scanned, sync)
    of_w = lambda w, x: loss({**PARAMS, "stack": {**PARAMS["stack"], "w": w}}, x)
    first, *_ = plans(of_w, part=lambda p: p["stack"]["w"])
    assert [leaf.path for leaf in first.leaves] == ["['w']"], "what is differentiated"
    ring, shuffle = (jc.CommunicationOptions(algorithm=a) for a in ("ring", "shuffle"))
    for options, algorithm in (
        ({}, "native"), ({"gradient": ring}, "ring"), ({"program": ring}, "ring"),
        ({"gradient": ring, "program": shuffle}, "ring"),
    ):  # fmt: skip
        assert [plan.algorithm for plan in plans(loss, **options)] == [algorithm] * 2
