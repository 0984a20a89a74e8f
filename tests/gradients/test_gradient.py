"""N devices equal one device: value_and_grad, grad and accumulate, for every kind of mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPTIONS, RUNNERS, close, grid, lowered, on_replicas, rows, run, split

import jaxcoll as jc

RNG = np.random.default_rng(3)
# Uneven: microbatches and, of eight replicas, two of all padding.
REAL = (RNG.random(64) < 0.6).astype("f")
REAL[8:24] = 0
BATCH = {
    "x": RNG.standard_normal((64, 5)).astype("f"),
    "y": RNG.standard_normal((64, 3)).astype("f"),
    "real": REAL,
}
PARAMS = {"w": RNG.standard_normal((5, 3)).astype("f"), "b": np.zeros(3, "f")}
OVERLAP = jc.CommunicationOptions(overlap=True, bytes_per_pack=16)


def predict(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def errors(p, batch):
    return jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2, axis=1)


def mean_loss(p, batch):
    return jnp.mean(errors(p, batch))


def sum_loss(p, batch):
    return jnp.sum(errors(p, batch))


def weighted_loss(p, batch):
    return jc.WeightedLoss(jnp.sum(batch["real"] * errors(p, batch)), jnp.sum(batch["real"]))


def one_row(batch, i):
    return jax.tree.map(lambda x: x[i][None], batch)


def scanned_loss(p, batch):
    """A loop whose carry starts from a constant: the plain way to write it on one device."""
    turn = lambda total, row: (total + mean_loss(p, jax.tree.map(lambda x: x[None], row)), None)
    return jax.lax.scan(turn, 0.0, batch)[0] / len(batch["x"])


def while_loss(p, batch):
    body = lambda i, total: total + mean_loss(p, one_row(batch, i))
    return jax.lax.fori_loop(0, len(batch["x"]), body, jnp.zeros(())) / len(batch["x"])


def branching_loss(p, batch):
    chosen = lambda: mean_loss(p, batch)
    return jax.lax.cond(batch["x"][0, 0] > -100, chosen, lambda: jnp.zeros(()))


def checkpointed_loss(p, batch):
    return jax.checkpoint(mean_loss)(p, batch)


def jitted_loss(p, batch):
    return jax.jit(mean_loss)(p, batch)


def scaled_loss(s, p, batch):
    return s * mean_loss(p, batch)


def product(x, s, p, y, *, scale):
    return scale * scaled_loss(s, p, {"x": x, "y": y})


@functools.cache
def whole(loss):
    """Value and gradient that one device has of everything."""

    def value(p):
        number = loss(p, BATCH)
        return number.total / number.weight if isinstance(number, jc.WeightedLoss) else number

    return jax.jit(jax.value_and_grad(value))(PARAMS)


def results_on(runner, n):
    """Results of every kind of loss and call, in one program for each way to map."""
    # Of the first two the loops start from constants, which JAX's types refuse. Reverse mode cannot
    # pass a fori_loop with a traced bound; a static one is a scan.
    plain = [jitted_loss, checkpointed_loss]
    untyped = [] if runner == "checked" else [scanned_loss, branching_loss]
    loops = [while_loss] if runner in ("pmap", "unchecked") else []

    def f(batch):
        call = lambda loss, *args, **how: jc.value_and_grad(loss, "data", **how)(*args)
        pieces = lambda loss, k=4, **how: jc.accumulate(loss, "data", k, **how)

        def in_shards(loss, **how):
            value, shards = call(loss, PARAMS, batch, scatter=True, **how)
            return value, jc.all_gather(shards, "data")

        with_aux = lambda p, batch: (mean_loss(p, batch), batch["x"][0, 0])
        (value, aux), grads = call(with_aux, PARAMS, batch, has_aux=True)
        again, aux_again = jc.grad(with_aux, "data", has_aux=True)(PARAMS, batch)
        cut = pieces(product, 2, batch_argnums=(0, 3), argnums=(2, 1))
        results = {
            "means": {
                **{f.__name__: call(f, PARAMS, batch) for f in plain + untyped + loops},
                # The batch enters through the closure: autodiff must still not sum by itself.
                "captured": call(lambda p: mean_loss(p, batch), PARAMS),
                "overlapping": call(mean_loss, PARAMS, batch, options=OVERLAP),
                "in shards": in_shards(mean_loss),
                "in pieces": pieces(mean_loss)(PARAMS, batch),
                **{f"{f.__name__}, in pieces": pieces(f)(PARAMS, batch) for f in untyped[:1]},
                "in one piece": pieces(checkpointed_loss, 1)(PARAMS, batch),
            },
            "sums": [
                call(sum_loss, PARAMS, batch, reduce_op="SUM"),
                in_shards(sum_loss, reduce_op="sum"),
                pieces(sum_loss, reduce_op="sum")(PARAMS, batch),
            ],
            "weighted": [
                call(weighted_loss, PARAMS, batch),
                in_shards(weighted_loss),
                *(pieces(weighted_loss, k)(PARAMS, batch) for k in (1, 4, 8)),
            ],
            "aux": ((value, grads), again, jc.all_reduce("sum", [aux - aux_again, aux], "data")),
            "argnums": [
                call(scaled_loss, 2.0, PARAMS, batch, argnums=k) for k in (1, -2, (0, 1), (1, 0))
            ],
            "product": cut(batch["x"], 2.0, PARAMS, batch["y"], scale=3.0),
        }
        if runner != "vmap":
            ones = jax.tree.map(jnp.ones_like, PARAMS)
            g = lambda p: jc.grad(mean_loss, "data")(p, batch)
            results["hessian"] = jax.jvp(g, (PARAMS,), (ones,))[1]
        return results

    return on_replicas(runner, f, n, BATCH)


@pytest.mark.tensorflow("K32")
@pytest.mark.parametrize(("runner", "n"), [*((r, 8) for r in RUNNERS), ("checked", 1)])
def test_gradients_equal_one_device(runner, n):
    """Of the whole share at once and in pieces; a weighted mean is exact for uneven shares.

    Gradients may be left in shards; what is auxiliary stays each replica's own.
    """
    got = results_on(runner, n)
    for name, each in got["means"].items():
        close(each, whole(mean_loss), rtol=3e-5, err_msg=name)
    for each in got["sums"]:
        close(each, whole(sum_loss), rtol=1e-4, atol=1e-4)
    for each in got["weighted"]:
        close(each, whole(weighted_loss), rtol=3e-5)
    found, again, (zero, firsts) = got["aux"]
    close(found, whole(mean_loss))
    close(again, found[1])
    np.testing.assert_allclose([zero, firsts], [0, BATCH["x"][:: 64 // n, 0].sum()], rtol=1e-6)
    value, grads = jax.jit(jax.value_and_grad(scaled_loss, argnums=(0, 1)))(2.0, PARAMS, BATCH)
    wants = (value, grads[1]), (value, grads[1]), (value, grads), (value, grads[::-1])
    close(tuple(got["argnums"]), wants)
    close(got["product"], (3 * value, jax.tree.map(lambda g: 3 * g, grads[::-1])))
    if runner != "vmap":
        ones = jax.tree.map(np.ones_like, PARAMS)
        grad = lambda p: jax.grad(mean_loss)(p, BATCH)
        want = jax.jit(lambda v: jax.jvp(grad, (PARAMS,), (v,))[1])
        close(got["hessian"], want(ones), rtol=1e-4, atol=1e-5)


def test_two_axes_and_copies():
    mesh, both = grid(2, 4), ("node", "data")
    step = jc.data_parallel(jc.accumulate(mean_loss, both, 4), mesh=mesh, axis_name=both)
    close(step(PARAMS, BATCH), whole(mean_loss))
    copies = jc.data_parallel(jc.accumulate(mean_loss, "data", 4), mesh=mesh)
    close(copies(PARAMS, BATCH), whole(mean_loss))


@pytest.mark.parametrize(
    ("call", "name", "count"),
    [(jc.value_and_grad, "auto", 3), (jc.grad, "auto", 2), (jc.value_and_grad, "packed", 2),
     (jc.value_and_grad, "ring", 0)],
)  # fmt: skip
def test_autodiff_adds_no_reduction(call, name, count):
    """One requested all-reduce a leaf: loss, bias, weight. None that autodiff put there."""
    f = call(mean_loss, "data", options=OPTIONS[name])
    text = lowered(lambda batch: f(PARAMS, batch), 4, split(4, BATCH)).as_text()
    assert text.count('"stablehlo.all_reduce"') == count
    assert ("collective_permute" in text) == (name == "ring")


@pytest.mark.parametrize("runner", ["pmap", "unchecked", "checked"])
def test_averaged_loss_has_means_gradient(runner):
    averaged = lambda *args: jax.lax.pmean(mean_loss(*args), "data")
    f = lambda batch: jc.value_and_grad(averaged, "data")(PARAMS, batch)
    if runner == "checked":  # where types show that it is reduced
        with pytest.raises(jc.errors.AlreadyReducedError, match=r"the loss is already the same"):
            on_replicas(runner, f, 8, BATCH)
    else:
        close(on_replicas(runner, f, 8, BATCH), whole(mean_loss))


@pytest.mark.parametrize("runner", RUNNERS)
def test_loss_may_reduce_statistics(runner):
    """Batch normalisation over all replicas; with a constant carry too, where types allow it."""
    names = (None, "ring", "halving_doubling") if runner == "checked" else (None, "ring")
    asked = [jc.CommunicationOptions(algorithm=a) for a in names]

    def loss(p, batch, options, scanned):
        h = predict(p, batch["x"])
        mean = jc.all_reduce("mean", jnp.mean(h, axis=0, keepdims=True), "data", options=options)
        errors = (h - mean - batch["y"]) ** 2
        if not scanned:
            return jnp.mean(errors)
        turn = lambda c, e: (c + jnp.mean(e), None)
        return jax.lax.scan(turn, 0.0, errors)[0] / len(errors)

    def grads(batch):
        call = jc.value_and_grad(loss, "data")
        kinds = [(o, False) for o in asked] + [(asked[0], True)] * (runner != "checked")
        return [call(PARAMS, batch, *kind) for kind in kinds]

    def normed(p):
        h = predict(p, BATCH["x"])
        return jnp.mean((h - jnp.mean(h, axis=0, keepdims=True) - BATCH["y"]) ** 2)

    want = jax.jit(jax.value_and_grad(normed))(PARAMS)
    for each in on_replicas(runner, grads, 4, BATCH):
        close(each, want)


# In pieces


@pytest.mark.parametrize("runner", RUNNERS)
def test_accumulated_aux_is_stacked(runner):
    def loss(p, batch):
        error = jnp.sum(batch["real"] * errors(p, batch))
        metrics = {
            "error": jc.WeightedMean(error, batch["real"].sum()),
            "tokens": jc.Total(batch["real"].sum().astype(int)),
            "pieces": jc.Total(1),
        }
        return mean_loss(p, batch), (metrics, "no array", batch["x"][0, 0], 1.0)

    def both(batch):
        step = jc.accumulate(loss, "data", 4, has_aux=True)
        (value, (metrics, text, firsts, ones)), grads = step(PARAMS, batch)
        assert (text, firsts.shape, ones.shape) == ("no array", (4,), (4,))
        return value, metrics, grads, jc.all_reduce("sum", firsts, "data")

    value, metrics, grads, firsts = on_replicas(runner, both, 4, BATCH)
    close((value, grads), whole(mean_loss))
    close(metrics["error"], whole(weighted_loss)[0])
    assert int(metrics["tokens"]) == REAL.sum()
    assert int(metrics["pieces"]) == 16
    assert metrics["tokens"].dtype == jnp.int32
    np.testing.assert_allclose(firsts, BATCH["x"][:, 0].reshape(4, 4, 4)[:, :, 0].sum(0), rtol=1e-5)


def test_narrow_gradients_add_in_float32():
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


def test_microbatches_draw_different_numbers():
    loss = lambda w, x, keys: jnp.mean(w * x * jax.random.uniform(keys[0]))

    def f(x, seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        return jc.accumulate(loss, "data", 4, batch_argnums=(1, 2))(1.0, x, keys)[0]

    ones, seeds = np.ones((2, 8), "f"), np.arange(2)
    keys = (key for seed in seeds for key in jax.random.split(jax.random.key(seed), 4))
    drawn = [*map(jax.random.uniform, keys)]
    np.testing.assert_allclose(run("checked", f, 2, ones, seeds)[0], np.mean(drawn), rtol=1e-6)


def test_microbatches_send_once():
    """Read from the compiled programs: one reduction after the loop, and one in every turn."""
    once = jc.data_parallel(jc.accumulate(mean_loss, "data", 8))

    def each(p, batch):
        pieces = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        zero = (0.0, jax.tree.map(jnp.zeros_like, p))
        step = jc.value_and_grad(mean_loss, "data")
        turn = lambda total, piece: (jax.tree.map(jnp.add, total, step(p, piece)), None)
        return jax.tree.map(lambda x: x / 8, jax.lax.scan(turn, zero, pieces)[0])

    report = jc.assert_collectives(jc.inspect(once, PARAMS, BATCH), none_in_loops=True, max_count=1)
    every_turn = jc.inspect(jc.data_parallel(each), PARAMS, BATCH)
    assert every_turn.wire_bytes == 8 * report.wire_bytes > 0
    close(jc.data_parallel(each)(PARAMS, BATCH), once(PARAMS, BATCH))


def test_accumulate_traces_the_loss_once():
    """Tracing it for its types leaves nothing behind."""
    step = jc.accumulate(mean_loss, "data", 4)
    text = lowered(lambda batch: step(PARAMS, batch), 1, split(1, BATCH)).as_text()
    assert text.count("stablehlo.tanh") == 1


# Reductions that are made to overlap


def test_packs_chain_in_ready_order():
    step = lambda batch: jc.value_and_grad(mean_loss, "data", options=OVERLAP)(PARAMS, batch)
    text = lowered(step, 4, split(4, BATCH)).as_text()
    assert text.count("optimization_barrier") == text.count("stablehlo.all_reduce") - 1 > 3


def test_bare_reduction_begins_last():
    def step(x):
        return jc.all_reduce("mean", {"a": x, "b": x, "c": x}, "data", options=OVERLAP)

    plan = jc.plan({k: rows(1, 16)[0] for k in "abc"}, axis_size=4, options=OVERLAP)
    assert [plan.leaves[p.segments[0].leaf].path for p in plan.packs] == ["['c']", "['b']", "['a']"]
    assert any("not known here when each is ready" in reason for reason in plan.reasons)
    out = run("checked", step, 4, rows(4, 16))
    np.testing.assert_allclose(out["a"][0], np.mean(rows(4, 16), 0))


def test_overlap_keeps_the_derivative():
    def second(options, x):
        total = jc.value_and_grad(lambda w, x: jnp.sum(w * w * x), "data", options=options)
        return jax.grad(lambda w: jnp.sum(total(w, x)[1]))(jnp.ones((4,)))

    both = lambda x: (second(OVERLAP.replace(bytes_per_pack=4), x), second(None, x))
    np.testing.assert_allclose(*run("pmap", both, 4, rows(4, 4)))
