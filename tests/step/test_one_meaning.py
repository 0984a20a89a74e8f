"""A step means what `pmap` means: what is right in it, what is refused by its line, what only warns."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import close, grid, mapped, plans_of
from jax import lax

import jaxcoll as jc
from jaxcoll._step.step import DataParallel

P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 5)).astype("f")
W = RNG.standard_normal(5).astype("f")
HERE = r"test_one_meaning.py:\d+"


def loss(w, x):
    """Of one replica's share."""
    return jnp.mean(jnp.tanh(x @ w) ** 2)


WANT = np.asarray(jax.grad(loss)(W, X))


def refused(step, words, *args, error=ValueError, **settings):
    with pytest.raises(error, match=words):
        jc.data_parallel(step, **settings).trace(*args or (W, X))


def typed(w, x):
    return jax.grad(lambda w: lax.pmean(loss(w, x), "data"))(w)


def near(got, want=WANT):
    close(got, want, rtol=1e-4)


def test_averaged_loss_is_refused():
    line = typed.__code__.co_firstlineno + 1
    refused(typed, rf"the output of the step differs .*gradient taken at \S+{__file__[-20:]}:{line}: .*"
            r"`lax.pmean\(grads, 'data'\)`.*`jc.value_and_grad` .*`jc.mean_loss\(loss\)`.*check_vma=True")  # fmt: skip
    refused(jax.grad(loss), r"or mark it|mark it: `jc.same")
    near(jc.data_parallel(lambda w, x: lax.pmean(typed(w, x), "data"))(W, X))
    near(jc.data_parallel(typed, check_vma=True)(W, X))


def test_log_density_takes_mean_loss():
    density = lambda w, x: -jnp.sum((x @ w) ** 2) / 100

    def kernel(density, w):  # such as Hamiltonian Monte Carlo in a library
        def leap(state, _):
            w, momentum = state
            momentum = momentum + 0.1 * jax.grad(density)(w)
            return (w + 0.1 * momentum, momentum), None

        return lax.scan(leap, (w, jnp.ones(5)), None, 3)[0]

    summed = lambda w, x: kernel(lambda w: lax.psum(density(w, x), "data"), w)
    refused(summed, rf"gradient taken at .*{HERE}: .* log-density, write "
            r"`lax.axis_size\('data'\) \* jc.mean_loss\(share\)\(x\)` in the sum's place")  # fmt: skip
    total = lambda x: lambda w: lax.axis_size("data") * jc.mean_loss(density)(w, x)
    step = jc.data_parallel(lambda w, x: kernel(total(x), w))
    near(step(W, X), kernel(lambda w: density(w, X), W))


def test_scope_names_mean_nothing():
    named = jax.named_scope("transpose_all_reduce")
    near(jc.data_parallel(named(mean_gradient))(W, X))
    near(jc.data_parallel(lambda w, x: jc.grad(named(loss))(w, x))(W, X))
    with pytest.warns(jc.errors.RepeatedSumWarning):
        jc.data_parallel(named(lambda w, x: lax.psum(jc.grad(loss)(w, x), "data"))).trace(W, X)


def mean_gradient(w, x):
    return lax.pmean(jax.grad(loss)(w, x), "data")


def optimized(g, w, tx):
    with jax.numpy_dtype_promotion("standard"):
        return tx.update(g, tx.init(w), w)[0]


REPEATED = {  # of the gradient's mean g, the parameters w, and the rows x
    "after an update": lambda g, w, x: lax.psum(optimized(g, w, optax.sgd(0.1)), "data"),
    "after a clip": lambda g, w, x: lax.psum(
        optimized(g, w, optax.clip_by_global_norm(0.1)), "data"),
    "times a factor": lambda g, w, x: lax.psum(0.1 * g, "data"),
    "chosen": lambda g, w, x: lax.psum(jnp.where(jnp.isfinite(g), g, 0), "data"),
    "with weight decay": lambda g, w, x: lax.psum(g + 1e-4 * w, "data"),
    "by ours": lambda g, w, x: jc.psum(jc.grad(loss)(w, x)),
    "packed with what varies": lambda g, w, x: jc.all_reduce("sum", {"g": g, "x": x.sum()}),
    "in a scan": lambda g, w, x: lax.scan(lambda c, _: (c + lax.psum(g, "data"), None), w, x)[0],
    "in a norm": lambda g, w, x: jc.global_norm(g, "data"),
    "in another program": lambda g, w, x: jax.jit(lambda g: lax.psum((g, 1), "data"))(g),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_sum_names_both_lines(name):
    step = jc.data_parallel(lambda w, x: REPEATED[name](mean_gradient(w, x), w, x))
    with pytest.warns(jc.errors.RepeatedSumWarning, match=rf"sum over 'data' \(.*{HERE}\) of float32.* is 8 "
                      rf"times a value .*from (the reduction at .*{HERE}|a reduced value)") as heard:  # fmt: skip
        step.trace(W, X)
    assert heard[0].filename == __file__


def test_repeated_sum_is_returned():
    """Also one that is repeated along one of its axes only."""
    step = lambda w, x: lax.psum(lax.pmean(loss(w, x), "node"), ("node", "data"))
    with pytest.warns(jc.errors.RepeatedSumWarning, match="over 'node' .* is 2 times"):
        got = jc.data_parallel(step, mesh=grid(2, 4), axis_name=("node", "data"))(W, X)
    near(got, 8 * loss(W, X))


def updated(g, w, **how):
    optimizer = jc.sharded_optimizer(optax.sgd(1.0), "data", reduce_op="sum")
    return optimizer.update(g, optimizer.init(w), w, **how)[0]


AGAIN = {  # of a gradient that is the mean already, and the parameters
    "all_reduce": lambda g, w: jc.all_reduce("sum", g, "data"),
    "psum": lambda g, w: jc.psum(g, "data"),
    "reduce_scatter": lambda g, w: jc.all_gather(jc.reduce_scatter("sum", {"g": g, "own": w * lax.axis_index("data")}, "data")),
    "lax.psum_scatter": lambda g, w: lax.all_gather(
        lax.psum_scatter(jnp.tile(g, 8), "data", tiled=True), "data", tiled=True),
    "a sharded optimizer": updated,
    "a metric": lambda g, w: jc.reduce_metrics(jc.Total(g.sum()), "data"),
    "a norm": lambda g, w: jc.global_norm(g, "data"),
}  # fmt: skip
ONCE = {
    "a mean in shards": lambda g, w: jc.all_gather(jc.reduce_scatter("mean", g, "data")),
    "divided shards": lambda g, w: jc.all_gather(
        jax.tree.map(lambda x: x / 8, jc.reduce_scatter("sum", g, "data"))),
    "own gradients": lambda g, w: jc.all_gather(jc.reduce_scatter("sum", w * lax.axis_index("data"), "data")),
    "said to be reduced": lambda g, w: updated(g, w, reduced=True),
    "a weighted loss": lambda g, w: jc.all_gather(jc.grad(lambda w: jc.WeightedLoss(loss(w, X), 1.0), "data", scatter=True)(w)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*AGAIN, *ONCE])
@pytest.mark.usefixtures("types_may_mix")
def test_every_repeated_sum_is_heard(name):
    repeats, heard = {**AGAIN, **ONCE}[name], pytest.warns(jc.errors.RepeatedSumWarning)
    with heard if name in AGAIN else contextlib.nullcontext():
        jc.data_parallel(lambda w, x: repeats(mean_gradient(w, x), w)).trace(W, X)
    if name in AGAIN and name not in ("lax.psum_scatter", "a norm"):
        step = lambda w, x: repeats(jc.grad(loss)(w, x), w)
        refused(step, None, error=jc.errors.AlreadyReducedError, check_vma=True)


def test_loop_carries_are_judged_late():
    def total(x):
        """Sum a carry that is the same at first, and a replica's own from the second turn on."""
        turn = lambda total, row: (jc.all_reduce("sum", total, "data") / 8 + row, None)
        return lax.pmean(lax.scan(turn, jnp.float32(0), x[:, 0])[0], "data")

    np.testing.assert_allclose(jc.data_parallel(total)(X), X[:, 0].sum() / 8, rtol=1e-5)


def test_means_of_means_are_silent():
    def step(w, x):
        g = mean_gradient(w, x)
        synced = lambda w, x: loss(w, x - lax.pmean(x.mean(0), "data")[None])
        own = lax.cond(x[0, 0] > 0, lambda: g, lambda: 2 * g)
        return {
            "count": lax.psum(1, "data") + lax.psum(jnp.ones(()), "data") + jc.psum(1),
            "parameters": lax.psum(w, "data") / lax.psum(jnp.ones(()), "data"),
            "means": [lax.pmean(g, "data"), jc.pmean(g), lax.psum(g, "data") / 8,
                      lax.psum(g, "data") * (1 / 8), lax.psum(g, "data") / lax.axis_size("data")],
            "share": lax.psum(g * x.sum(), "data") / lax.psum(x.sum(), "data"),
            "statistics": jc.grad(synced)(w, x),
            "chosen": lax.psum(own, "data"),
        }  # fmt: skip

    want = {"count": 24, "parameters": W, "means": [WANT] * 5, "share": WANT}
    want["statistics"] = jax.grad(loss)(W, X - X.mean(0))
    near(
        jc.data_parallel(step)(W, X),
        want | {"chosen": np.where(X[::2, 0] > 0, 1.0, 2.0).sum() * WANT},
    )


EXCHANGES = {
    "pmean": lambda w, x: lax.pmean(w, "data"),
    "ppermute": lambda w, x: lax.ppermute(w, "data", [(k, (k + 1) % 8) for k in range(8)]),
    "all_gather": lambda w, x: lax.all_gather(w, "data")[0],
    "a pack": lambda w, x: jc.all_reduce("mean", [w, x[0]])[0],
    "jc.grad": jc.grad(loss),
    "sync_in_backward": lambda w, x: jax.grad(lambda w: loss(jc.sync_in_backward(w), x))(w),
}
PLACES = {  # where a function of w stands, chosen by a number
    "branch": lambda f, w, by: lax.cond(by > 0, f, lambda w: 2 * w, w),
    "loop": lambda f, w, by: lax.while_loop(
        lambda c: (c[0] < 1) & (by > -9), lambda c: (c[0] + 1, f(c[1])), (0, w))[1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "exchange"),
    [*(("branch", name) for name in EXCHANGES), ("loop", "pmean"), ("loop", "jc.grad")],
)
def test_chosen_exchange_is_refused(place, exchange):
    """It would hang, or over processes mix what does not belong together."""
    f = EXCHANGES[exchange]
    step = lambda w, x, by: PLACES[place](lambda w: f(w, x), w, by(x))
    words = rf"`\w+` over 'data' \(.*{HERE}\) is in a {place} .*{HERE}.*lax.pmax.*jc.same"
    words += "|must be the same on every replica"  # what a loop has changed before
    refused(lambda w, x: lax.pmean(step(w, x, jnp.sum), "data"), words)
    alone = jc.data_parallel(lambda w, x: lax.pmean(f(w, x), "data"))(W, X)
    for by in (lambda x: lax.pmax(x.sum(), "data"), lambda x: jc.same(jnp.float32(1))):
        near(jc.data_parallel(lambda w, x, by=by: lax.pmean(step(w, x, by), "data"))(W, X), alone)


def test_choosing_losses_have_mean_gradients():
    own = lambda w, x: lax.cond(x[0, 0] > 0, lambda: w, lambda: 3 * w).sum() * jnp.mean(x)
    for f in (own, jax.checkpoint(own), lambda w, x: lax.cond(x[0, 0] > 0, loss, own, w, x)):
        want = np.mean([jax.grad(f)(W, x) for x in X.reshape(8, 2, 5)], axis=0)
        near(jc.data_parallel(jc.grad(f))(W, X), want)


@pytest.mark.usefixtures("types_may_mix")
def test_what_differs_is_no_parameter():
    """What a replica has chosen, or its rows, whose gradient `jax.grad` takes."""
    for taken in (
        jc.sharded_optimizer(optax.adam(0.1), "data").init,
        lambda w: jc.grad(loss)(w, X),
    ):
        step = lambda w, x, f=taken: f(lax.cond(x[0, 0] > 0, lambda: w, lambda: 3 * w))
        refused(step, "must be the same on every replica")
    for of in (jc.grad(loss, argnums=1), jc.value_and_grad(loss, argnums=(0, -1))):
        refused(of, r"over 'data': leaf x must be the same .*take its gradient with `jax.grad`")
    rows = lambda w, x: jax.grad(loss, argnums=1)(w, x) / 8
    got = jc.data_parallel(rows, varying_outputs="concatenate")(W, X)
    near(got, jax.grad(loss, argnums=1)(W, X))


def mean_of(w, x, y):
    return jc.pmean((x @ w - y).mean())


STEPS = {
    "w, x, y": lambda w, x, y: mean_of(w, x, y),
    "params, inputs, targets": lambda params, inputs, targets: mean_of(params, inputs, targets),
    "w, batch, key": lambda w, batch, key: mean_of(w, *batch),
    "w": lambda *w: mean_of(*w),
}


@pytest.mark.parametrize("names", STEPS)
def test_several_batches_offer_a_line(names):
    step, y = STEPS[names], X.sum(1)
    with pytest.raises(
        ValueError, match=rf"which arguments of \S+\(\*?{names}\) are the batch"
    ) as e:
        jc.data_parallel(step)(W, X, y)
    (line,) = re.findall(r"^    (jc.data_parallel\(.*\))$", str(e.value), re.M)
    assert isinstance(eval(line, {"jc": jc, "step": step}), DataParallel)
    args = (W, (X, y), jax.random.key(0)) if "batch" in names else (W, X, y)
    for batch in ("batch", 1, -2) if "batch" in names else ((1, 2), (-2, -1)):
        near(jc.data_parallel(step, batch_argnums=batch)(*args), (X @ W - y).mean())


def test_arguments_are_named_by_position():
    def step(w, count, x, *, y=None):
        return w + 0 * jc.pmean(x.mean()), count + 1

    named = jc.data_parallel(step, batch_argnums=("x", "y"), donate_argnums=("w", 1))
    assert named.donate_argnums == (0, 1)
    w, count = (jax.device_put(a, jax.NamedSharding(named.mesh, P())) for a in (W, jnp.int32(0)))
    named(w, count, X, y=X)
    assert w.is_deleted()
    with pytest.raises(ValueError, match="'v' is named in `donate_argnums`, .*'w', 'count', 'x'"):
        jc.data_parallel(step, batch_argnums="x", donate_argnums="v")(W, 0, X)


def test_one_row_is_rows():
    """As of local training, or of an expert each."""
    step = lambda w, x: (w[0] - jax.grad(loss)(w[0], x))[None]
    settings = {"batch_argnums": (0, 1), "varying_outputs": "concatenate"}
    got = jc.data_parallel(step, **settings)(np.tile(W, (8, 1)), X)
    near(got, np.stack([W - jax.grad(loss)(W, x) for x in X.reshape(8, 2, 5)]))


def test_axis_need_not_be_named():
    def step(w, x):
        value, grads = jc.value_and_grad(loss)(w, x)
        parts = jc.reduce_scatter("mean", jax.grad(loss)(w, x))
        others = jc.pmean(jax.grad(loss)(w, x)), jc.all_gather(parts)
        return grads, *others, jc.all_reduce("mean", value), jc.broadcast(w), jc.psum(1)

    want = WANT, WANT, WANT, loss(W, X), W, 8
    for mesh, axes in ((None, "data"), (grid(2, 4), ("node", "data"))):
        near(jc.data_parallel(step, mesh=mesh, axis_name=axes)(W, X), want)
    strategy = jc.MirroredStrategy()
    (rows,) = strategy.experimental_distribute_dataset([X])
    found = strategy.run(lambda x: step(W, x), (rows,))
    near([strategy.experimental_local_results(x)[0] for x in found], list(want))
    for entry in (jc.pmean, lambda x: jc.all_reduce("mean", x), jc.same, jc.grad(jnp.sum)):
        with pytest.raises(
            ValueError, match=r"needs an `axis_name` here.*only inside `jc.data_par"
        ):
            mapped(entry, P("data"), P("data"), 8, check_vma=False).trace(X)


def test_psum_and_pmean_match_lax():
    tree = lambda x: {"x": x, "more": [1, 2.5, True, None, x.astype(int)], "none": ()}
    ring = jc.CommunicationOptions(implementation="ring")
    for ours, theirs, three in ((jc.psum, lax.psum, 24), (jc.pmean, lax.pmean, 3)):

        def both(w, x, ours=ours, theirs=theirs):
            plain = ours(tree(x[0]), "data"), theirs(tree(x[0]), "data")
            return plain, ours(x[0], options=ring), theirs(x[0], "data"), ours(3)

        (got, want), by_ring, of_lax, number = jc.data_parallel(both)(W, X)
        close(got, want, dtypes=True)
        near(by_ring, of_lax)
        assert plans_of(jc.data_parallel(both), W, X)[-1].algorithm == "ring"
        assert number == three
        refused(lambda w, x, f=ours: f("mean", x), "takes the value first and then the axis")
    for f in (jc.all_gather, jc.broadcast, jc.same, jc.reduce_metrics, jc.check_replicas):
        refused(lambda w, x, f=f: f("data", w), f"`jc.{f.__name__}` takes the value first")
    refused(
        lambda w, x: jc.all_reduce(x, "data"), r'first: `jc.all_reduce\("mean", value, "data"\)`'
    )


def of_host(x):
    return jax.pure_callback(lambda a: np.float32(0.5), jax.ShapeDtypeStruct((), np.float32), x)


SAME = {
    "a number of the host": (lambda w, x, same: same(of_host(w[0])), 0.5),
    "of a callback in a branch": (
        lambda w, x, same: same(lax.cond(w[0] > 9, lambda: w[0], lambda: of_host(w[0]))), 0.5),
    "what decides": (
        lambda w, x, same: lax.cond(
            same(of_host(w[0])) > 0, lambda: lax.pmean(x.mean(), "data"), lambda: 0.0), X.mean()),
    "a parameter": (lambda w, x, same: jc.grad(loss)(same(w * of_host(w[0]) * 2), x), WANT),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_equal_values_may_be_marked(name):
    step, want = SAME[name]
    refused(lambda w, x: step(w, x, lambda y: y), "differs between|jc.same")
    marked = jc.data_parallel(lambda w, x: step(w, x, jc.same))
    for _ in range(2):
        near(marked(W, X), want)


def test_wrong_marks_are_found():
    step = jc.data_parallel(lambda x: jc.same({"rate": x.sum()}))
    for rows in (X, X[:8]):
        with pytest.raises(jc.errors.ReplicaDivergenceError, match=rf"\['rate'\] \(.*{HERE}\)"):
            step(rows)
    assert step(np.ones((16, 5), "f")) == {"rate": 10}  # a shape that was compared
    with pytest.raises(jc.errors.ReplicaDivergenceError, match=HERE):
        jc.MirroredStrategy().run(lambda: jc.same(lax.axis_index("replica")))


@pytest.mark.usefixtures("types_may_mix")
def test_line_search_follows_mean_loss():
    tx = optax.lbfgs(memory_size=3)

    def step_by(f):
        def step(w, state, x):
            value, grads = optax.value_and_grad_from_state(f)(w, x, state=state)
            by = {"value": value, "grad": grads, "value_fn": lambda w: f(w, x)}
            updates, state = tx.update(grads, state, w, **by)
            return optax.apply_updates(w, updates), state

        return step

    one, many = (
        jax.jit(step_by(loss)),
        jc.data_parallel(step_by(jc.mean_loss(loss)), batch_argnums="x"),
    )
    with jax.enable_x64(True):
        x, w = X.astype(float), W.astype(float)
        alone, ours = (w, tx.init(w)), (w, tx.init(w))
        for _ in range(4):
            alone, ours = one(*alone, x), many(*ours, x)
        near(ours[0], alone[0])
        # Each replica would search in a direction of its own, and wait for others that do not.
        averaged = step_by(lambda w, x: lax.pmean(loss(w, x), "data"))
        refused(averaged, "replicas decide separately", *ours, x, batch_argnums="x")


def test_mean_loss_has_both_modes():
    def step(w, x):
        f = jc.mean_loss(loss)
        weighted = jc.mean_loss(lambda w, x: jc.WeightedLoss(jnp.sum(x @ w), x.shape[0]))
        slope = jax.jvp(lambda w: f(w, x), (w,), (jnp.ones(5),))
        return slope, jax.value_and_grad(f)(w, x), jax.value_and_grad(weighted)(w, x)

    value = loss(W, X)
    want = (value, WANT.sum()), (value, WANT), ((X @ W).mean(), X.mean(0))
    near(jc.data_parallel(step)(W, X), want)


@pytest.mark.parametrize("check_vma", [False, True])
def test_mean_loss_has_any_order(check_vma):
    bent = lambda w, x: jnp.mean(jnp.sin(x @ w))

    def derivatives(f):
        inner = lambda w, x: f(w - 0.1 * jax.grad(f)(w, x), x)
        return lambda w, x: (jax.grad(inner)(w, x), *(
            a(b(f))(w, x) for a in (jax.jacrev, jax.jacfwd) for b in (jax.jacrev, jax.jacfwd)
        ))  # fmt: skip

    step = jc.data_parallel(derivatives(jc.mean_loss(bent)), check_vma=check_vma)
    near(step(W, X), derivatives(bent)(W, X))


def test_mean_loss_differentiates_synced_values():
    def mixed(f, synced=lambda k: k):
        return lambda w, k, x: jax.grad(lambda k: jnp.sum(jax.grad(f)(w, synced(k), x)))(k)

    bent = lambda w, k, x: jnp.mean(jnp.sin(k * (x @ w)))
    step = jc.data_parallel(mixed(jc.mean_loss(bent), jc.sync_in_backward), batch_argnums=2)
    near(step(W, 0.5, X), mixed(bent)(W, 0.5, X))


def in_a_scan(w, x):
    mean = jc.mean_loss(loss)
    turn = lambda c, _: ((c[0] * 1.0, c[1]), mean(*c))
    return lax.scan(turn, (w, x), None, length=3)[1].mean()


MEANS = {
    "the parameter is captured": lambda w, x: jc.mean_loss(lambda x: loss(w, x))(x),
    "everything is captured": lambda w, x: jc.mean_loss(lambda: loss(w, x))(),
    "by keyword": lambda w, x: jc.mean_loss(loss)(x=x, w=w),
    "jitted": lambda w, x: jax.jit(jc.mean_loss(loss))(w, x),
    "recomputed": lambda w, x: jax.checkpoint(jc.mean_loss(loss))(w, x),
    "recomputed, captured": jax.checkpoint(lambda w, x: jc.mean_loss(lambda: loss(w, x))()),
    "in a scan": in_a_scan,
    "a setting beside": lambda w, x: jc.mean_loss(lambda w, k, x: loss(w, x) if k == "k" else 0)(w, "k", x),
    "a mean of its own": lambda w, x: jc.mean_loss(lambda w: lax.pmean(loss(w, x), "data"))(w),
}  # fmt: skip


@pytest.mark.parametrize("how", MEANS)
def test_captured_parameters_are_differentiated(how):
    """Except in typed steps, where what is captured has its type already."""
    mean = MEANS[how]
    near(jc.data_parallel(jax.value_and_grad(mean))(W, X), (loss(W, X), WANT))
    refused(jax.grad(mean, 1), "the same on every replica")
    typed = jax.value_and_grad(mean)
    if "captured" in how:
        refused(typed, "pass it as an argument", check_vma=True)
        near(jc.data_parallel(mean, check_vma=True)(W, X), loss(W, X))
    elif how == "a mean of its own":
        refused(typed, "already the same", check_vma=True)
    else:
        near(jc.data_parallel(typed, check_vma=True)(W, X), (loss(W, X), WANT))


def test_debugging_modes_work():
    nan = lambda x: lax.pmean(jnp.log(x - 100).mean(), "data")
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jc.data_parallel(nan)(X)


def test_automatic_axis_has_no_name():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(NameError) as caught:
        jc.data_parallel(lambda w, x: lax.psum(w, "model"), mesh=mesh)(W, X)
    assert "name it in `axis_name`, or in your own `jax.shard_map`" in caught.value.__notes__[0]
