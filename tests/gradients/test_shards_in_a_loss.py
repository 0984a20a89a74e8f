"""Parameters in shards: gathered in the forward pass, their gradients reduce-scattered in the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPTIONS, RUNNERS, grid, mapped, mesh_of, per_replica, plans_of, split
from cases import close as nearly
from jax import lax
from jax.sharding import PartitionSpec

import jaxcoll as jc
from jaxcoll import _compat

RNG = np.random.default_rng(0)
LAYERS, WIDTH = 3, 20
close = functools.partial(nearly, shapes=True, rtol=1e-4)


def normal(*shape):
    return (RNG.standard_normal(shape) * 0.3).astype("f")


PARAMS = {
    "embedding": {"w": normal(5, WIDTH), "scale": np.float32(2)},
    "layers": {"w": normal(LAYERS, WIDTH, WIDTH), "b": normal(LAYERS, WIDTH)},
}
X = normal(24, 5)
MASK = (RNG.random(24) < 0.6).astype("f")


def errors(params, x, of_layer=lambda layer: layer):
    """A number for each row: what all layers, run through by a scan, make of it."""
    hidden = x @ params["embedding"]["w"] * params["embedding"]["scale"]

    def layer(hidden, weights):
        weights = of_layer(weights)
        return jnp.tanh(hidden @ weights["w"] + weights["b"][None]), None

    hidden, _ = lax.scan(jax.checkpoint(layer), hidden, params["layers"])
    return jnp.sum(hidden**2, -1)


def mean(errors, mask):
    return jnp.mean(errors)


def total(errors, mask):
    return jnp.sum(errors)


def weighted(errors, mask):
    return jc.WeightedLoss(jnp.sum(errors * mask), jnp.sum(mask))


def in_shards(n=8, mesh=None):
    mesh = mesh or mesh_of(n)
    embedding = jc.shard(PARAMS["embedding"], "data", mesh=mesh)
    return {
        "embedding": embedding,
        "layers": jc.shard(PARAMS["layers"], "data", stacked=True, mesh=mesh),
    }


def gathering(loss, options=None):
    """The same loss of parameters in shards: the embedding at once, each layer in its turn."""
    gather = functools.partial(jc.all_gather, axis_name="data", options=options)

    def of_shards(shards, x, mask):
        params = {**shards, "embedding": gather(shards["embedding"])}
        return loss(errors(params, x, gather), mask)

    return of_shards


@functools.cache
def on_one_device(loss):
    def number(params):
        results = loss(errors(params, X), MASK)
        return results.total / results.weight if isinstance(results, jc.WeightedLoss) else results

    return jax.jit(jax.value_and_grad(number))(PARAMS)


def is_right(value, grads, loss=mean):
    want, want_grads = on_one_device(loss)
    np.testing.assert_allclose(value, np.full(np.shape(value), want), rtol=1e-5)
    close(jc.unshard(grads), want_grads)


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


@pytest.mark.parametrize("runner", RUNNERS)
def test_gradients_keep_their_shards(runner):
    n = 3
    cases = [(mean, "auto"), (weighted, "auto")]
    cases += {"checked": [(total, "ring")], "unchecked": [(mean, "shuffle")],
              "pmap": [(total, "halving_doubling")]}.get(runner, [])  # fmt: skip

    def steps(shards, x, mask):
        results = []
        for loss, name in cases:
            options, op = OPTIONS[name], "sum" if loss is total else "mean"
            f = gathering(loss, options=options)
            take = jc.value_and_grad(f, "data", reduce_op=op, options=options)
            results.append(take(shards, x, mask))
        return results

    shards = in_shards(n)
    results = per_replica(runner, steps, n, in_rows(n, shards), *split(n, (X, MASK)))
    for (loss, _), (value, grads) in zip(cases, results, strict=True):
        assert jax.tree.structure(grads) == jax.tree.structure(shards)
        is_right(value, out_of_rows(grads), loss)


def test_traffic_is_gathers_and_scatters():
    step = jc.data_parallel(jc.value_and_grad(gathering(mean), "data"), batch_argnums=(1, 2))
    shards = in_shards()
    value, grads = step(shards, X, MASK)
    is_right(value, grads)
    assert grads["layers"].parts[0].sharding.spec == PartitionSpec(None, "data")
    # Of an embedding the backward pass needs nothing again; of layers it does.
    sizes = {name: x.layout.nbytes for name, x in shards.items()}
    expected = 7 * (2 * sizes["embedding"] + LAYERS * 3 * sizes["layers"])
    report = jc.inspect(step, shards, X, MASK)
    loss_alone = 2 * 7 * 4  # of which all replicas have the mean; 7/8 of it rounds up
    assert expected <= report.wire_bytes <= expected + loss_alone
    kinds = [plan.collective for plan in plans_of(step, shards, X, MASK)]
    assert kinds == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter", "all_reduce"]


def test_microbatches_add_in_shards():
    """Each piece's gradients are reduce-scattered: whole ones would have no room."""
    ring, losses = OPTIONS["ring"], (mean, weighted)
    more = {"batch_argnums": (1, 2), "options": ring}

    def steps(*args):
        calls = [jc.accumulate(gathering(f, options=ring), "data", 3, **more) for f in losses]
        return [call(*args) for call in calls]

    step = jc.data_parallel(steps, mesh=mesh_of(4), batch_argnums=(1, 2))
    for loss, results in zip(losses, step(in_shards(4), X, MASK), strict=True):
        is_right(*results, loss)


def test_hybrid_shards_are_right():
    """Hybrid sharding: the gradients of the copies are reduced, and nothing else is."""
    mesh, both = grid(2, 4), ("node", "data")
    step = jc.value_and_grad(gathering(mean), both)
    step = jc.data_parallel(step, mesh=mesh, axis_name=both, batch_argnums=(1, 2))
    is_right(*step(in_shards(mesh=mesh), X, MASK))


def test_plain_grad_follows_types():
    """In a checked program the gathered tree is the same everywhere, and its derivative too."""
    loss = gathering(mean)

    def step(shards, x, mask):
        assert not _compat.varying_axes(jc.all_gather(shards["embedding"], "data")["w"])
        mine = jax.grad(lambda s: lax.pmean(loss(s, x, mask), "data"))(shards)
        return mine, jax.grad(lambda s: loss(s, x, mask))(shards)

    rows, of = PartitionSpec("data"), {"embedding": PartitionSpec("data")}
    of["layers"] = PartitionSpec(None, "data")
    of_mean, of_sum = mapped(step, (of, rows, rows), (of, of))(in_shards(4), X, MASK)
    _, want = on_one_device(mean)
    close(jc.unshard(of_mean), want)
    close(jc.unshard(of_sum), jax.tree.map(lambda x: 4 * x, want))


def test_cast_before_gather_travels():
    def loss(shards, x, mask):
        half = jax.tree.map(lambda part: part.astype(jnp.bfloat16), shards["embedding"])
        tree = jc.all_gather(half, "data")
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree)} == {"bfloat16"}
        return jnp.mean((x.astype(jnp.bfloat16) @ tree["w"]).astype("f") ** 2)

    step = jc.data_parallel(jc.value_and_grad(loss, "data"), batch_argnums=(1, 2))
    shards = in_shards()
    _, grads = step(shards, X, MASK)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
    want = jax.grad(lambda w: jnp.mean((X @ w) ** 2))(PARAMS["embedding"]["w"])
    got = jc.unshard(grads)["embedding"]["w"]
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
        _, grads = jc.value_and_grad(gathering(mean), "data")(shards, x, mask)
        return REDUCTIONS[name](grads, axis_name="data")

    wrapped = jc.data_parallel(step, batch_argnums=(1, 2))
    match = (
        r"`lax.psum` over 'data' .*: these are shards of a sum that is already reduced"
        if name == "lax"
        else rf"`{name}`: leaf \['embedding'\] is `Shards` along 'data': each .* reduced already"
    )
    with pytest.raises(ValueError, match=match):
        wrapped(in_shards(), X, MASK)


def test_wrong_shard_uses_are_refused():
    shards, mine = in_shards(), functools.partial(jc.data_parallel, batch_argnums=1)
    scattered = jc.value_and_grad(gathering(mean), "data", scatter=True)
    for message, step, args in (
        (r"Shards of 3 stacked layers, too large to gather at once",
         mine(lambda s, x: jc.all_gather(s, "data")), (shards, X)),
        (r"`Shards` and arrays, and the arrays would become n",
         mine(lambda s, x: jc.all_gather((s["embedding"], x), "data")), (shards, X)),
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
