"""PowerSGD sends two narrow factors of a matrix, and with its residual loses nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, gaussian, grid, mapped, mesh_of, per_replica, refused, vmapped

import jaxcoll as jc
from jaxcoll._feedback.all_reduce import all_reduce
from jaxcoll._mesh.plan import plan_in
from jaxcoll._observe.parse.hlo import read_hlo
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.world import World
from jaxcoll._spmd.scope import Scope

OPTIONS = jc.CommunicationOptions(compression=jc.PowerSGD(rank=2))
N, STEPS = 4, 2
P = jax.sharding.PartitionSpec


def tree(n, seed=0):
    return {
        "w": gaussian(n, 40, 30, seed=seed),
        "kernel": gaussian(n, 3, 3, 4, 24, seed=seed),
        "square": gaussian(n, 6, 6, seed=seed),
        "b": gaussian(n, 5, seed=seed),
        "count": np.arange(n * 900, dtype=np.int32).reshape(n, 30, 30),
    }


def varied(x):
    return jax.tree.map(lambda x: x + 0 * jax.lax.axis_index("data").astype(x.dtype), x)


def owed(residual, n):
    """Of each leaf what all replicas owe together."""
    shards = residual.owed
    leaves = [shards.layout.leaves[p.segments[0].leaf] for p in shards.layout.packs]
    return {
        x.path[2:-2]: np.asarray(part, "f8").reshape(n, -1)[:, : x.size].sum(0).reshape(x.shape)
        for x, part in zip(leaves, shards.parts, strict=True)
    }


def reduced(op, g, residual=None, options=OPTIONS):
    residual = jc.residual(g, "data", options=options) if residual is None else residual
    return jc.all_reduce(op, g, "data", residual=residual, options=options)


@functools.cache
def after_steps(runner):
    """The gradients of each step, what arrived, and the residual at the end, of every replica."""
    grads = [tree(N, seed) for seed in range(STEPS)]

    def f(*grads):
        residual, arrived = None, []
        for g in grads:
            total, residual = reduced("mean", g, residual)
            arrived.append(total)
        owed = residual.owed
        return varied(arrived), type(residual)(owed, varied(residual.right))

    return grads, *jax.tree.map(np.asarray, per_replica(runner, f, N, *grads))


@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_is_lost_and_all_replicas_have_the_same_bits(runner):
    grads, arrived, residual = after_steps(runner)
    for leaf in jax.tree.leaves((arrived, residual.right)):
        assert len({row.tobytes() for row in leaf}) == 1
    assert sorted(residual.right) == ["['kernel']", "['w']"]
    for leaf, left in owed(residual, N).items():
        sent = sum(N * np.float64(a[leaf][0]) for a in arrived)
        given = sum(g[leaf].astype("f8").sum(0) for g in grads)
        assert np.linalg.norm(sent + left - given) <= 1e-6 * np.linalg.norm(given)
        lost = np.linalg.norm(left) / np.linalg.norm(given)
        assert 0.5 < lost < 1.5 if leaf in ("w", "kernel") else lost == 0


@functools.partial(jax.jit, static_argnums=0)
def sums(options, *steps):
    """The sums of several steps, one after another with one residual, of every replica."""

    def f(*steps):
        residual, found = None, []
        for g in steps:
            total, residual = reduced("sum", g, residual, options)
            found.append(total)
        return found, residual

    return jax.vmap(f, axis_name="data")(*steps)


def error(got, want):
    want = want.astype("f8").sum(0)
    return np.linalg.norm(np.asarray(got[0], "f8") - want) / np.linalg.norm(want)


def outer(n, rows, columns, seed=0, size=1.0):
    """A matrix of rank 1 on each replica."""
    return size * gaussian(n, rows, 1, seed=seed) * gaussian(n, 1, columns, seed=seed + 1)


@pytest.mark.parametrize("size", [1.0, 1e-18, 1e18])
def test_a_sum_of_low_rank_arrives_to_rounding_at_any_size(size):
    g, other = outer(2, 40, 30, size=np.float32(size)), outer(2, 40, 30, seed=5)
    (nothing, first, zero, second), _ = sums(OPTIONS, 0 * g, g, 0 * g, other)
    assert not nothing.any()
    assert error(first, g) <= 1e-5, "as soon as it is not zero"
    assert np.abs(zero).max() <= 1e-5 * np.abs(g).max()
    assert error(second, other) <= 1e-5 * max(size, 1)  # what is owed of the first comes beside


def test_right_factors_follow_the_gradients():
    """Subspace iteration: of the same matrix again the best approximation of that rank comes."""
    u, s, vt = np.linalg.svd(gaussian(40, 30))
    s = np.array([8.0, 4.0, *(0.1 for _ in s[2:])])
    g = ((u[:, :30] * s) @ vt).astype("f")[None]
    g = np.concatenate([g, 0 * g])
    found, _ = sums(OPTIONS, *(g for _ in range(4)))
    best = np.linalg.norm(s[2:])
    # What is owed comes beside: of the last step too, so that it is compared with rank 2 alone.
    first = np.linalg.norm(np.asarray(found[0][0]) - g[0])
    last = np.linalg.norm(np.asarray(found[3][0]) - g[0])
    assert first > 1.1 * best
    assert last < 1.5 * best


@pytest.mark.parametrize("feedback", [True, False])
def test_the_mean_of_many_sums_is_the_sum_with_feedback_alone(feedback):
    g, steps = gaussian(4, 24, 20), 200

    def f(g):
        start = jc.residual(g, "data", options=OPTIONS)

        def turn(carry, _):
            residual, total = carry
            s, residual = reduced("sum", g, residual)
            if not feedback:
                residual = type(residual)(start.owed, residual.right)
            return (residual, total + s), None

        return jax.lax.scan(turn, (start, 0 * g), None, length=steps)[0][1] / steps

    want = g.astype("f8").sum(0)
    error = np.linalg.norm(np.float64(vmapped(f, g)[0]) - want) / np.linalg.norm(want)
    assert error < 0.05 if feedback else error > 0.5


@pytest.mark.parametrize(
    "more",
    [{"algorithm": "ring"}, {"reproducible": True}, {"bytes_per_pack": 400}],
    ids=str,
)
def test_factors_are_sums_like_any_other(more):
    g = {k: x for k, x in tree(N).items() if k in ("w", "kernel", "b")}
    (want,), _ = sums(OPTIONS, g)
    (got,), _ = sums(OPTIONS.replace(**more), g)
    for leaf in g:
        np.testing.assert_allclose(got[leaf], want[leaf], atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_a_step_that_is_not_finite_arrives_so_and_leaves_the_residual_as_it_was(leaf, bad):
    before = {k: gaussian(2, *s) for k, s in {"w": (40, 30), "v": (40, 30), "b": (5,)}.items()}
    step = {k: gaussian(*x.shape, seed=1) for k, x in before.items()}
    step[leaf].reshape(2, -1)[:, 3] = bad
    (_, total), after = sums(OPTIONS, before, step)
    _, once = sums(OPTIONS, before)
    assert not np.isfinite(total[leaf]).all()
    assert np.isfinite(total["v"]).all()
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(once), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_single_replica_sends_and_rounds_nothing():
    g = {"w": gaussian(1, 40, 30)}
    (total,), residual = sums(OPTIONS, g)
    np.testing.assert_array_equal(total["w"], g["w"])
    assert not owed(residual, 1)["w"].any()
    assert jc.plan({"w": g["w"][0]}, axis_size=1, options=OPTIONS).wire_bytes == 0


@pytest.mark.parametrize("runner", ["checked", "vmap"])
def test_rounding_is_the_identity_to_derivatives(runner):
    x, ct = gaussian(3, 20, 20), gaussian(3, 20, 20, seed=1)
    reduce = lambda v: reduced("mean", v)[0]

    def f(x, ct):
        back = jax.grad(lambda v: jnp.vdot(reduce(v), ct))(x)
        return back, jax.jvp(reduce, (x,), (ct,))[1] + 0 * x

    back, forward = per_replica(runner, f, 3, x, ct)
    want = np.broadcast_to(ct.astype("f8").mean(0), x.shape)
    np.testing.assert_allclose(back, want, atol=1e-5)
    np.testing.assert_allclose(forward, want, atol=1e-5)


def test_derivatives_pass_an_axis_of_size_1():
    axes, x = ("node", "data"), gaussian(2, 20, 20)

    def f(x):
        residual = jc.residual(x, axes, options=OPTIONS)
        reduce = lambda v: jc.all_reduce("sum", v, axes, residual=residual, options=OPTIONS)[0]
        return jax.jvp(reduce, (x,), (x,))[1]

    found = mapped(f, P(axes), mesh=grid(1, 2))(x.reshape(40, 20))
    np.testing.assert_allclose(found, x.sum(0), atol=1e-5)


def test_bytes_are_those_of_the_plan_in_the_compiled_program():
    value = jax.tree.map(lambda x: x[0], tree(N))
    step = jc.data_parallel(
        lambda r, x: jc.all_reduce(
            "sum", jax.tree.map(lambda v: v + x[0, 0].astype(v.dtype), value), "data",
            residual=r, options=OPTIONS,
        ),
        mesh=mesh_of(N),
    )  # fmt: skip
    args = jc.residual(value, mesh=mesh_of(N), options=OPTIONS), np.zeros((N, 1), "f")
    plans = step.plans(*args)
    assert [len(p.leaves) for p in plans] == [5, 2]
    assert [p.carried(0) for p in plans] == ["['b']", "['kernel'].right"]
    plan = jc.plan(value, mesh=mesh_of(N), options=OPTIONS, reduce_op="sum")
    sent = sum(c.wire_bytes for c in read_hlo(step.lower(*args).compile().as_text()).collectives)
    assert sent == plan.wire_bytes == sum(p.wire_bytes for p in plans)
    elements = 2 * (40 + 30) + 2 * (36 + 24) + 36 + 5 + 900
    assert plan.nbytes == 4 * elements
    assert "format: powersgd/2 for 2 matrices, as asked" in str(plan)
    assert all("powersgd/2" in str(p) for p in plans)


def test_the_plan_over_gloo_is_what_is_carried_out():
    world, found = World("cpu", (4,), processes=4), []
    value = {"w": jnp.ones((40, 30), jnp.bfloat16), "b": jnp.ones(1000, jnp.bfloat16)}
    scope = Scope(lambda _: world, options=OPTIONS, record=found.append)

    def f(_):
        residual = jc.residual(value, "data", options=OPTIONS)
        return all_reduce(
            ReduceOp.SUM, value, "data",
            residual=residual, of=value, caller="all_reduce", scope=scope,
        )  # fmt: skip

    jax.eval_shape(jax.vmap(f, axis_name="data"), np.zeros(4, "f"))
    plan = plan_in(value, world, OPTIONS, ReduceOp.SUM)
    assert [x.format for p in found for x in p.leaves] == [x.format for x in plan.leaves]
    assert plan.leaves[0].format == "bf16"
    assert plan.wire_bytes == sum(p.wire_bytes for p in found)


def test_one_loop_makes_all_columns_orthonormal():
    """Unrolled, fifty matrices would take the compiler minutes."""
    g = {str(i): np.zeros((2, 40 + i % 3, 30), "f") for i in range(12)}
    lowered = jax.jit(jax.vmap(lambda g: reduced("sum", g)[0], axis_name="data")).lower(g)
    assert lowered.as_text().count("stablehlo.while") == 1


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, "4", None])
def test_a_rank_that_is_none_is_refused(rank):
    with pytest.raises(ValueError, match=r"`rank` of jc.PowerSGD must be a positive integer"):
        jc.PowerSGD(rank=rank)


def test_a_rank_larger_than_pays_sends_all_exactly():
    value = {"w": np.zeros((40, 30), "f"), "b": np.zeros(5, "f")}
    for rank, exactly in ((8, False), (9, True), (100, True)):
        options = jc.CommunicationOptions(compression=jc.PowerSGD(rank))
        plan = jc.plan(value, axis_size=4, options=options)
        assert (plan.nbytes == 4 * 1205) == exactly
        assert (jc.residual(value, mesh=mesh_of(2), options=options).right == {}) == exactly
    assert "0 matrices" in str(plan)


def test_no_feedback_or_none_that_could_be_kept_is_refused():
    g, w, x = gaussian(2, 40, 30), {"w": gaussian(40, 30)}, gaussian(2, 4, 40)
    loss = lambda w, x: jnp.mean((x @ w["w"]) ** 2)
    refused(
        "the value is reduced without one.* Give `jc.all_reduce` a `residual`",
        lambda g: jc.all_reduce("sum", g, "data", options=OPTIONS),
        g,
    )
    refused(
        r"leaf .grads\['w'\] is reduced without one",
        lambda x: jc.grad(loss, "data", options=OPTIONS)(w, x),
        x,
    )
    synced = lambda w, x: loss(jc.sync_in_backward(w, "data"), x)
    step = jc.grad(synced, "data", options=OPTIONS, feedback=True)
    residual = lambda: jc.residual(w, "data", options=OPTIONS)
    refused(
        "without one by `jc.sync_in_backward`, which can keep none",
        lambda x: step(w, x, residual=residual()),
        x,
    )
    refused(
        "travels exactly, and `compression` 'powersgd/2'",
        lambda g: jc.reduce_scatter("sum", g, "data", options=OPTIONS),
        g,
    )
    with pytest.raises(ValueError, match="reduces only int32"):
        jc.plan(np.zeros((40, 30), np.int32), axis_size=2, options=OPTIONS)


def test_what_travels_exactly_needs_no_feedback_and_takes_all_options_of_exact_sums():
    options = OPTIONS.replace(algorithm="ring")
    reduce = lambda g: jc.all_reduce("sum", g, "data")
    step = jc.data_parallel(lambda x: reduce(x.sum(0)), mesh=mesh_of(2), options=options)
    x = gaussian(4, 5)
    np.testing.assert_allclose(step(x), x.sum(0), rtol=1e-5)
    assert "powersgd" not in str(step.plans(x)[0])


def test_a_residual_of_other_options_or_another_world_is_refused():
    g = gaussian(2, 40, 30)
    with_rank = lambda rank: jc.CommunicationOptions(compression=rank and jc.PowerSGD(rank))
    for rank, got in ((None, "has none"), (3, r"has one of shape \(30, 3\)")):
        refused(
            rf"a right factor of shape \(30, 2\) for the value, and {got}",
            lambda g, rank=rank: reduced("sum", g, jc.residual(g, "data", options=with_rank(rank))),
            g,
        )
    other = jc.residual(g[0], mesh=mesh_of(3), options=OPTIONS)
    refused(r"got a residual of 3 replicas over 'data'", lambda g: reduced("sum", g, other), g)
    refused("got int", lambda g: reduced("sum", g, 3), g)
    with pytest.raises(jc.AlreadyReducedError, match="the same on every replica"):
        mapped(lambda g: reduced("sum", g), P(), P("data"), mesh=2)(g[0])


def test_another_format_keeps_the_right_factors():
    """A first step with exact sums, say, while the gradients are large."""
    g = {"w": gaussian(2, 40, 30)}

    def f(g):
        residual = jc.residual(g, "data", options=OPTIONS)
        total, after = jc.all_reduce("sum", g, "data", residual=residual)
        return total, after, residual

    total, after, before = vmapped(f, g)
    np.testing.assert_allclose(total["w"][0], g["w"].sum(0), atol=1e-6)
    np.testing.assert_array_equal(after.right["['w']"], before.right["['w']"])
