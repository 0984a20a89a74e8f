"""Parameters in shards: gathered in the forward pass, their gradients reduce-scattered in the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPTIONS, RUNNERS, P, grid, mapped, mesh_of, per_replica, plans_of, split
from cases import close as nearly
from jax import lax

import jaxcoll as jc
from jaxcoll import _compat

RNG = np.random.default_rng(0)
LAYERS, WIDTH = 3, 24
close = functools.partial(nearly, shapes=True, rtol=1e-4)


def normal(*shape):
    return (RNG.standard_normal(shape) / 4).astype("f")


PARAMS = {
    "ends": {"w": normal(5, WIDTH), "scale": np.float32(2)},
    "layers": {"w": normal(LAYERS, WIDTH, WIDTH), "v": normal(LAYERS, 7, WIDTH)},
    "b": normal(LAYERS, WIDTH),
}
X, MASK = normal(24, 5), (RNG.random(24) < 0.6).astype("f")


def layer(h, p):
    cut = p["cut"]
    return jnp.tanh(h @ cut["w"] + p["b"][None]) + h @ cut["v"].T @ cut["v"], None


def gathered(layer, h, stack, options=None):
    """A scan that gathers each layer in its turn."""

    def step(h, p):
        return layer(h, {**p, "cut": jc.all_gather(p["cut"], "data", options=options)})

    return lax.scan(jax.checkpoint(step), h, stack)


def ahead(layer, h, stack, options=None):
    return jc.scan_layers(layer, h, stack, "data", options=options)


def mean(errors, mask):
    return jnp.mean(errors)


def total(errors, mask):
    return jnp.sum(errors)


def weighted(errors, mask):
    return jc.WeightedLoss(jnp.sum(errors * mask), jnp.sum(mask))


def loss_of(kind, scan, gather=lambda tree: tree):
    """Of a number for each row: what all layers, run through by a scan, make of it."""

    def loss(params, x, mask):
        ends, stack = gather(params["ends"]), {"cut": params["layers"], "b": params["b"]}
        h, _ = scan(layer, x @ ends["w"] * ends["scale"], stack)
        return kind(jnp.sum(h**2, -1), mask)

    return loss


def gathering(kind=mean, scan=gathered, options=None):
    """The same loss of parameters in shards."""
    gather = functools.partial(jc.all_gather, axis_name="data", options=options)
    return loss_of(kind, functools.partial(scan, options=options), gather)


@functools.cache
def on_one_device(kind):
    def number(params):
        found = loss_of(kind, lax.scan)(params, X, MASK)
        return found.total / found.weight if isinstance(found, jc.WeightedLoss) else found

    return jax.jit(jax.value_and_grad(number))(PARAMS)


def in_shards(n=8, mesh=None):
    mesh = mesh or mesh_of(n)
    ends = jc.shard(PARAMS["ends"], "data", mesh=mesh)
    return {
        **PARAMS,
        "ends": ends,
        "layers": jc.shard(PARAMS["layers"], "data", stacked=True, mesh=mesh),
    }


def is_right(value, grads, kind=mean):
    want, want_grads = on_one_device(kind)
    np.testing.assert_allclose(value, np.full(np.shape(value), want), rtol=1e-5)
    close({k: jc.unshard(x) if k != "b" else x for k, x in grads.items()}, want_grads)


def in_rows(n, tree):
    """Each replica's part of every Shards, one after another, as a runner takes them."""

    def rows(part):
        *stack, size, lanes = part.shape
        return jnp.moveaxis(part.reshape(*stack, n, size // n, lanes), len(stack), 0)

    return jax.tree.map(rows, tree)


def out_of_rows(shards):
    """The inverse."""

    def whole(rows):
        n, *stack, size, lanes = rows.shape
        return np.moveaxis(np.asarray(rows), 0, -3).reshape(*stack, n * size, lanes)

    return jax.tree.map(whole, shards)


CASES = {
    "vmap": [(mean, gathered, "auto"), (weighted, ahead, "auto")],
    "pmap": [(total, gathered, "halving_doubling"), (mean, ahead, "auto")],
    "checked": [(weighted, gathered, "auto"), (total, ahead, "ring")],
    "unchecked": [(mean, gathered, "shuffle"), (weighted, ahead, "packed")],
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_gradients_keep_their_shards(runner):
    n, whole = 3, in_shards(3)
    cut = {k: whole[k] for k in ("ends", "layers")}

    def steps(cut, x, mask):
        results = []
        for kind, scan, name in CASES[runner]:
            options, op = OPTIONS[name], "sum" if kind is total else "mean"
            loss = gathering(kind, scan, options)
            take = jc.value_and_grad(loss, "data", reduce_op=op, options=options)
            results.append(take({**cut, "b": PARAMS["b"]}, x, mask))
        return results

    results = per_replica(runner, steps, n, in_rows(n, cut), *split(n, (X, MASK)))
    for (kind, _, _), (value, grads) in zip(CASES[runner], results, strict=True):
        assert jax.tree.structure(grads) == jax.tree.structure(whole)
        grads = {k: x[0] if k == "b" else out_of_rows(x) for k, x in grads.items()}
        is_right(value, grads, kind)


@pytest.mark.parametrize("scan", [gathered, ahead])
def test_microbatches_add_in_shards(scan):
    """Each piece's gradients are reduce-scattered: whole ones would have no room."""
    ring, kinds = OPTIONS["ring"], (mean, weighted)

    def steps(*args):
        more = {"batch_argnums": (1, 2), "options": ring}
        losses = [gathering(kind, scan, ring) for kind in kinds]
        return [jc.accumulate(loss, "data", 3, **more)(*args) for loss in losses]

    step = jc.data_parallel(steps, mesh=mesh_of(4), batch_argnums=(1, 2))
    for kind, results in zip(kinds, step(in_shards(4), X, MASK), strict=True):
        is_right(*results, kind)


@pytest.mark.parametrize("scan", [gathered, ahead])
def test_hybrid_shards_are_right(scan):
    """Hybrid sharding: the gradients of the copies are reduced, and nothing else is."""
    mesh, both = grid(2, 4), ("node", "data")
    over = lambda *args, options: jc.scan_layers(*args, both) if scan is ahead else scan(*args)
    step = jc.value_and_grad(gathering(scan=over), both)
    step = jc.data_parallel(step, mesh=mesh, axis_name=both, batch_argnums=(1, 2))
    is_right(*step(in_shards(mesh=mesh), X, MASK))


def test_traffic_is_gathers_and_scatters():
    step = jc.data_parallel(jc.value_and_grad(gathering(), "data"), batch_argnums=(1, 2))
    shards = in_shards()
    value, grads = step(shards, X, MASK)
    is_right(value, grads)
    assert grads["layers"].parts[0].sharding.spec == P(None, "data")
    # Of the ends the backward pass needs nothing again; of layers it does.
    ends, layers = (shards[name].layout.nbytes for name in ("ends", "layers"))
    expected = 7 * (2 * ends + LAYERS * 3 * layers) + 2 * 7 * PARAMS["b"].nbytes // 8
    report = jc.inspect(step, shards, X, MASK)
    loss_alone = 2 * 7 * 4  # of which all replicas have the mean; 7/8 of it rounds up
    assert expected <= report.wire_bytes <= expected + loss_alone
    kinds = [plan.collective for plan in plans_of(step, shards, X, MASK)]
    assert kinds == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter", "all_reduce"]


def test_plain_grad_follows_types():
    """In a checked program the gathered tree is the same everywhere, and its derivative too."""
    loss = gathering()

    def step(shards, x, mask):
        assert not _compat.varying_axes(jc.all_gather(shards["ends"], "data")["w"])
        mine = jax.grad(lambda s: lax.pmean(loss(s, x, mask), "data"))(shards)
        return mine, jax.grad(lambda s: loss(s, x, mask))(shards)

    rows, of = P("data"), {"ends": P("data"), "layers": P(None, "data"), "b": P()}
    of_mean, of_sum = mapped(step, (of, rows, rows), (of, of))(in_shards(4), X, MASK)
    is_right(on_one_device(mean)[0], of_mean)
    is_right(on_one_device(mean)[0], jax.tree.map(lambda x: x / 4, of_sum))


def test_cast_before_gather_travels():
    def loss(shards, x, mask):
        half = jax.tree.map(lambda part: part.astype(jnp.bfloat16), shards["ends"])
        tree = jc.all_gather(half, "data")
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree)} == {"bfloat16"}
        return jnp.mean((x.astype(jnp.bfloat16) @ tree["w"]).astype("f") ** 2)

    step = jc.data_parallel(jc.value_and_grad(loss, "data"), batch_argnums=(1, 2))
    shards = in_shards()
    _, grads = step(shards, X, MASK)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
    want = jax.grad(lambda w: jnp.mean((X @ w) ** 2))(PARAMS["ends"]["w"])
    got = jc.unshard(grads)["ends"]["w"]
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02 * np.abs(want).max())
    requested = step.lower(shards, X, MASK).as_text()
    gathers = [line for line in requested.splitlines() if "stablehlo.all_gather" in line]
    assert gathers
    assert all("xbf16>" in line for line in gathers)
    assert plans_of(step, shards, X, MASK)[0].packs[0].dtype.name == "bfloat16"


REDUCTIONS = {
    "all_reduce": functools.partial(jc.all_reduce, "mean"),
    "reduce_scatter": functools.partial(jc.reduce_scatter, "mean"),
    "broadcast": jc.broadcast,
    "sync_in_backward": jc.sync_in_backward,
    "lax": lax.pmean,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_sharded_gradients_are_reduced_once(name):
    def step(shards, x, mask):
        _, grads = jc.value_and_grad(gathering(), "data")(shards, x, mask)
        return REDUCTIONS[name](grads, axis_name="data")

    wrapped = jc.data_parallel(step, batch_argnums=(1, 2))
    match = (
        r"`lax.psum` over 'data' .*: these are shards of a sum that is already reduced"
        if name == "lax"
        else rf"`{name}`: leaf \['ends'\] is `Shards` along 'data': each .* reduced already"
    )
    with pytest.raises(ValueError, match=match):
        wrapped(in_shards(), X, MASK)


def test_wrong_shard_uses_are_refused():
    shards, mine = in_shards(), functools.partial(jc.data_parallel, batch_argnums=1)
    scattered = jc.value_and_grad(gathering(), "data", scatter=True)
    for message, step, args in (
        (r"Shards of 3 stacked layers, too large to gather at once",
         mine(lambda s, x: jc.all_gather(s["layers"], "data")), (shards, X)),
        (r"`Shards` and arrays, and the arrays would become n",
         mine(lambda s, x: jc.all_gather((s["ends"], x), "data")), (shards, X)),
        (r"scatter=True: .* `Shards` along 'data'. The gradient of Shards is Shards without",
         jc.data_parallel(scattered, batch_argnums=(1, 2)), (shards, X, MASK)),
        (r"Shards of 8 replicas along 'data' do not fit the mesh \(data=4\)",
         jc.data_parallel(lambda s, x: x.sum(), mesh=mesh_of(4)), (shards, X)),
        (r"s holds `Shards`, but is taken for the batch, to be",
         jc.data_parallel(lambda x, s: x.sum(), batch_argnums=(0, 1)), (X, shards)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            step(*args)


def test_depend_on_keeps_bits():
    x = jnp.array([[1.0, -0.0], [jnp.nan, jnp.inf]])
    others = [jnp.full((3,), jnp.nan), jnp.array([7]), jnp.array(1j), jnp.zeros((0, 2))]
    f = jax.jit(lambda x, others: _compat.depend_on(x, others))
    for given in (x, x.astype(jnp.bfloat16), jnp.arange(3)):
        assert np.asarray(f(given, others)).tobytes() == np.asarray(given).tobytes()
    for other in others[:3]:
        compiled = f.lower(x, [other]).compile()
        assert "select" in compiled.as_text(), "XLA computes the choice"
    np.testing.assert_array_equal(jax.grad(lambda x: f(3 * x, [x]).sum())(x), np.full((2, 2), 3))
    np.testing.assert_array_equal(jax.vmap(lambda x: f(x, [x]))(x), x)
    together = jax.jit(lambda *xs: _compat.depend_on_all(xs, [x]))
    for got, want in zip(together(jnp.zeros(0), *others), [jnp.zeros(0), *others], strict=True):
        np.testing.assert_array_equal(got, want)
