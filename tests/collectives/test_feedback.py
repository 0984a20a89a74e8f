"""What a wire format rounds away is sent the next time: nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import P, close, gaussian, grid, mapped, mesh_of, per_replica, refused, vmapped

import jaxcoll as jc

FORMATS = ("bf16", "int8", "int4")
OPTIONS = {name: jc.CommunicationOptions(compression=name) for name in FORMATS}
INT4 = OPTIONS["int4"]
N, STEPS = 4, 2


def tree(n, seed=0):
    return {
        "w": gaussian(n, 90, 200, seed=seed),
        "v": gaussian(n, 300, seed=seed),
        "half": gaussian(n, 40, 15, seed=seed).astype("f2"),
        "brain": gaussian(n, 40, 15, seed=seed + 9).astype(jnp.bfloat16),
        "b": gaussian(n, 5),
    }


def flat(residual):
    """Of each leaf what every replica owes, stacked: an array of shape (n, size)."""
    n = residual.layout.replicas
    parts = [np.asarray(x, "f8").reshape(n, -1) for x in residual.parts]
    leaves = [residual.layout.leaves[p.segments[0].leaf] for p in residual.layout.packs]
    return {
        x.path: part[:, : x.size].reshape(n, *x.shape)
        for x, part in zip(leaves, parts, strict=True)
    }


def reduced(g, residual=None, op="sum", options=OPTIONS["int8"]):
    """The reduction of a tree, and the next residual."""
    residual = jc.compression.residual(g, "data") if residual is None else residual
    return jc.all_reduce(op, g, "data", residual=residual, options=options)


@pytest.mark.parametrize(
    ("runner", "names", "op"),
    [
        ("vmap", FORMATS, "mean"), ("pmap", ["int8"], "sum"), ("checked", ["int4"], "mean"),
        ("unchecked", ["bf16"], "sum"),
    ],
)  # fmt: skip
def test_nothing_is_lost(runner, names, op):
    """What arrived in all steps and what is owed after the last are what was given.

    So codes are made once: unoptimized, those made again for the residual differ where a number
    lies between two. The rounding to a narrow type is owed, too.
    """
    grads = [tree(N, seed) for seed in range(STEPS)]

    def f(*grads):
        found = {}
        for name in names:
            residual, arrived = None, []
            for g in grads:
                total, residual = reduced(g, residual, op, OPTIONS[name])
                arrived.append(total)
            found[name] = arrived, residual
        rank = jax.lax.axis_index("data")
        vary = lambda x: x + (0 * rank).astype(x.dtype)
        return {k: (jax.tree.map(vary, a), owed) for k, (a, owed) in found.items()}

    for name, (arrived, residual) in per_replica(runner, f, N, *grads).items():
        owed = flat(residual)
        for leaf in grads[0].keys() - ({"half"} if name == "bf16" else set()):  # float16 is exact
            assert arrived[0][leaf].dtype == grads[0][leaf].dtype
            sent = sum(np.asarray(a[leaf][0], "f8") for a in arrived) * (N if op == "mean" else 1)
            given = sum(g[leaf].astype("f8").sum(0) for g in grads)
            left = owed[f"[{leaf!r}]"].sum(0)
            assert np.linalg.norm(sent + left - given) <= 1e-6 * np.linalg.norm(given)
            assert (np.abs(left).max() == 0) == (leaf == "b")


@pytest.mark.parametrize(("name", "block", "top"), [("int8", 256, 127), ("int4", 64, 7)])
def test_residual_is_bounded_by_steps(name, block, top):
    g = gaussian(N, 1 << 12)
    _, residual = vmapped(lambda g: reduced(g, options=OPTIONS[name]), g)
    owed = abs(flat(residual)[""]).reshape(N, -1, block)
    largest = abs(g).reshape(N, -1, block).max(-1)
    half = 1.01 * largest / (2 * top)  # a scale is rounded up to a bfloat16
    summed = abs(g.sum(0)).reshape(-1, block).max(-1) + half.sum(0)
    assert (owed.max(-1) <= half + 1.01 * summed / (2 * top)).all()


def test_a_hierarchy_loses_nothing_either():
    g = gaussian(8, 3000)
    mesh, axes = grid(2, 4), ("node", "data")
    options = jc.CommunicationOptions(algorithm="native/shuffle", compression="int4")

    def f(g, residual):
        return jc.all_reduce("sum", g[0], axes, residual=residual, options=options)

    residual = jc.compression.residual(g[0], axes, mesh=mesh)
    spec = P(axes)
    total, residual = mapped(f, spec, (P(), spec), mesh)(g, residual)
    want = g.astype("f8").sum(0)
    left = jc.unshard(residual)
    assert 0.01 < np.linalg.norm(total - want) / np.linalg.norm(want) < 0.16, "rounded twice"
    assert np.linalg.norm(total + left - want) <= 1e-6 * np.linalg.norm(want)


def test_nonfinite_step_keeps_the_residual():
    def f(g, h):
        _, before = reduced(g)
        return before, [reduced(h, before)[1] for h in h]

    bad = [np.nan, np.inf, 3e38, 1.695e38]
    g, h = gaussian(2, 600), gaussian(2, len(bad), 600, seed=1)
    h[..., 7] = bad
    before, after = vmapped(f, g, h)
    assert before.parts[0].any()
    assert np.isfinite(before.parts[0]).all()
    for each in after:
        np.testing.assert_array_equal(before.parts[0], each.parts[0])


def loss(w, x):
    return jnp.mean((x @ w["w"]) ** 2) + w["b"].sum()


def parameters():
    return {"w": gaussian(40, 30), "b": np.ones(3, "f")}


def owing(g):
    """A residual in which every replica owes something, and what it is."""
    each = jax.lax.axis_index("data").astype("f") + 1.0
    return jax.tree.map(lambda x: x + each, jc.compression.residual(g, "data"))


def test_nonfinite_metric_keeps_no_gradient():
    def f(g):
        w = {"w": g, "b": g[:5]}  # the bias travels exactly, and shares a pack with the metric
        loss = lambda w: (jnp.sum(w["w"] * g) + jnp.sum(w["b"]), jc.Total(jnp.nan * g[0]))
        step = jc.grad(
            loss, "data", reduce_op="sum", has_aux=True, feedback=True, options=OPTIONS["int8"]
        )
        grads, aux, after = step(w, residual=owing(w))
        return grads, aux, after

    g = gaussian(2, 600)
    grads, aux, after = vmapped(f, g)
    assert np.isnan(aux).all()
    owed, want = 1 + 2, g.astype("f8").sum(0)
    np.testing.assert_array_equal(grads["b"][0], 2 + owed)
    left = np.asarray(after.parts[1], "f8").reshape(2, -1)[:, :600].sum(0)
    np.testing.assert_allclose(grads["w"][0] + left, want + owed, rtol=1e-5, atol=1e-5)
    assert not np.asarray(after.parts[0]).reshape(2, -1)[:, :5].any()


def test_bad_weight_keeps_the_residual():
    """Of nothing, of no number, and one that makes a finite sum infinite."""

    def f(g, half):
        found = []
        for x, scale, weight in ((g, 0.0, 0.0), (g, np.nan, np.nan), (half, 1e3, 1e-3)):
            start = owing(x)
            loss = lambda w, x=x, a=scale, b=weight: jc.WeightedLoss(a * jnp.sum(w * x), b)
            step = jc.grad(loss, "data", feedback=True, options=OPTIONS["int8"])
            grads, after = step(x, residual=start)
            found.append((grads, start.parts[0], after.parts[0]))
        return found

    g = gaussian(2, 600)
    for grads, before, after in vmapped(f, g, g.astype(np.float16)):
        assert np.isinf(grads).any() or not np.isfinite(grads).any()
        np.testing.assert_array_equal(before, after)


def test_nonfinite_complex_keeps_the_residual():
    f = lambda c: reduced({"c": c, "w": jnp.arange(600.0) / 7})
    sums, residual = vmapped(f, np.array([1j, np.nan], np.complex64))
    assert np.isnan(sums["c"]).all()
    assert not any(part.any() for part in residual.parts)


def test_single_replica_pays_its_residual():
    def f(g):
        total, after = reduced(g, owing(g), "mean")
        again, _ = reduced(g, after, "mean")
        return total, again, after.parts[0]

    g = gaussian(1, 600)
    total, again, after = vmapped(f, g)
    np.testing.assert_array_equal(total, g + 1)
    np.testing.assert_array_equal(again, g)
    assert not after.any()


def test_gradients_carry_a_residual():
    mesh, w, x = mesh_of(N), parameters(), gaussian(8 * N, 40)
    calls = jc.value_and_grad, jc.grad, functools.partial(jc.accumulate, num_microbatches=2)
    takes = [call(loss, "data", options=INT4, feedback=True) for call in calls]

    def step(w, residual, x):
        return [take(w, x, residual=residual) for take in takes], jc.grad(loss, "data")(w, x)

    residual = jc.compression.residual(w, mesh=mesh)
    assert residual.parts[0].sharding.spec == P(("data",))
    step = jc.data_parallel(step, mesh=mesh, batch_argnums="x")
    found, exact = step(w, residual, x)
    for *_, grads, after in found:
        left = jc.unshard(after)
        sent = jax.tree.map(lambda g, rest: g + rest / N, grads, left)
        close(sent, exact, rtol=1e-4, atol=1e-5)
        assert np.abs(left["w"]).max() > 0


def test_shards_beside_residuals_travel_exactly():
    mesh, w, x = mesh_of(N), parameters(), gaussian(8 * N, 40)
    exactly = jc.CommunicationOptions(compression=None)

    def both(p, x, options=exactly):
        return loss(p["whole"], x) + loss(jc.all_gather(p["cut"], options=options), x)

    def step(p, residual, x, loss=both):
        return jc.grad(loss, feedback=True, options=INT4)(p, x, residual=residual)

    p = {"whole": w, "cut": jc.shard(w, "data", mesh=mesh)}
    residual = jc.compression.residual(p, mesh=mesh)
    grads, after = jc.data_parallel(step, mesh=mesh, batch_argnums="x")(p, residual, x)
    exact, left = jax.grad(loss)(w, x), jc.unshard(after)
    assert left["cut"] is None
    close(jax.tree.map(lambda g, rest: g + rest / N, grads["whole"], left["whole"]), exact, rtol=1e-4, atol=1e-5)  # fmt: skip
    close(jc.unshard(grads["cut"]), exact, rtol=1e-4, atol=1e-5)
    inherits = functools.partial(step, loss=functools.partial(both, options=None))
    with pytest.raises(ValueError, match="or pass `compression=None` in the options of this call"):
        jc.data_parallel(inherits, mesh=mesh, batch_argnums="x")(p, residual, x)


def test_optax_chain_carries_a_residual():
    mesh, w, x = mesh_of(N), parameters(), gaussian(8 * N, 40)
    link = jc.all_reduce_updates("data", options=INT4, feedback=True, mesh=mesh)
    tx = optax.chain(link, optax.sgd(1.0))

    def step(w, state, x):
        return tx.update(jax.grad(loss)(w, x), state)

    updates, state = jc.data_parallel(step, mesh=mesh, batch_argnums="x")(w, tx.init(w), x)
    exact, left = jax.grad(loss)(w, x), jc.unshard(state[0])
    np.testing.assert_allclose(-updates["w"] + left["w"] / N, exact["w"], rtol=1e-4, atol=1e-5)


def test_replicated_leaf_has_no_residual():
    mesh, axes, g = grid(2, 2), ("node", "data"), gaussian(2, 600)

    def f(g, r):
        return jc.all_reduce("sum", g, axes, residual=r, invariant="replicated")

    with pytest.raises(ValueError, match="already the same on every replica along one of the axes"):
        mapped(f, (P("node"), P(axes)), mesh=mesh)(
            g, jc.compression.residual(g[:1], axes, mesh=mesh)
        )


def test_misplaced_feedback_is_refused():
    w, x = parameters(), gaussian(2, 4, 40)
    of = lambda tree: jc.compression.residual(tree, "data")
    synced = lambda w, x: loss(jc.sync_in_backward(w, "data"), x)
    options = {"options": OPTIONS["int8"], "feedback": True}
    plain, twice = (jc.value_and_grad(f, "data", **options) for f in (loss, synced))
    refused("expects the keyword argument `residual`", lambda x: plain(w, x), x)
    refused("was reduced by `jc.sync_in_backward`", lambda x: twice(w, x, residual=of(w)), x)
    refused("nothing to gather", lambda x: jc.all_gather(of(x), "data"), x)
    with pytest.raises(ValueError, match="scatter=True gradients travel exactly"):
        jc.value_and_grad(loss, "data", scatter=True, feedback=True)
    with pytest.raises(ValueError, match="the mesh has no such axis"):
        jc.compression.residual(w, "model", mesh=mesh_of(2))


def test_shapes_suffice_for_a_residual():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parameters())
    found = jc.compression.residual(shapes, mesh=mesh_of(2))
    assert [x.shape for x in found.parts] == [(2, 128), (20, 128)]
    abstract = jax.sharding.AbstractMesh((2,), ("data",))
    assert isinstance(jc.compression.residual(shapes, mesh=abstract).parts[0], jax.ShapeDtypeStruct)
