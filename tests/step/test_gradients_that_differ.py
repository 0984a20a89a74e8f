"""The gradient of what differs between replicas is never mixed with those of the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of
from jax import lax

import jaxcoll as jc
from jaxcoll._mesh.scopes import mesh_scope
from jaxcoll._spmd.scope import entered

P = jax.sharding.PartitionSpec

N, AXIS = 2, "replica"
X = np.random.default_rng(0).normal(size=(N, 6, 3)).astype("f")
W = {"w": np.arange(3, dtype="f"), "b": np.float32(1)}


def strategy():
    return jc.MirroredStrategy(jax.devices()[:N])


def own(rows):
    """A PerReplica with one of the rows on each replica."""
    return strategy().experimental_distribute_values_from_function(
        lambda context: jax.tree.map(
            lambda row: jnp.asarray(row[context.replica_id_in_sync_group]), rows
        )
    )


def values(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jc.PerReplica | jc.Mirrored))


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def linear(params, x):
    """Its gradient does not depend on the parameters."""
    return jnp.sum(x @ params["w"]) + params["b"]


def in_scan(params, x):
    f = lambda total, row: (jax.tree.map(jnp.add, total, jc.grad(loss, AXIS)(params, row)), None)
    return lax.scan(f, jax.tree.map(jnp.zeros_like, params), x[:, None])[0]


def trained(params, x):
    """The carry is the same everywhere before the first turn and different after it."""
    f = lambda p, row: (
        jax.tree.map(lambda w, g: w - g * row[0, 0], p, jc.grad(loss, AXIS)(p, row)),
        None,
    )
    return lax.scan(f, params, x[:, None])[0]["b"]


def in_while(params, x):
    """Replicas take different numbers of turns, so what they carry on is different."""
    more = lambda c: c[0] < x[0, 0]
    turn = lambda c: (c[0] + 1, jc.grad(linear, AXIS)(c[1], jnp.ones((2, 3))))
    return lax.while_loop(more, turn, (0.0, params))[1]


def natural(params, x):
    """Steepest descent by curvature: `cg` runs the loss's second derivative in a solver's program."""
    gradient = jc.grad(loss, AXIS)
    curvature = lambda v: jax.tree.map(
        lambda h, v: h + v, jax.jvp(lambda p: gradient(p, x), (params,), (v,))[1], v
    )
    return jax.scipy.sparse.linalg.cg(curvature, gradient(params, x), maxiter=2)[0]


def by_ref(params, x):
    """A loop that writes to a `Ref`, from which everything may come."""
    ref = jax.new_ref(jnp.zeros(()))

    def turn(total, row):
        grads = jc.grad(loss, AXIS)(params, row)
        ref[...] += jnp.sum(row)
        return jax.tree.map(jnp.add, total, grads), None

    lax.scan(turn, jax.tree.map(jnp.zeros_like, params), x[:, None])
    return jc.all_reduce("sum", ref[...], AXIS)


@jax.jit
def replica(params, x):
    """Named like the axis."""
    return jc.grad(loss, AXIS)(params, x)


ENTRIES = {
    "grad": jc.grad(loss, AXIS),
    "value_and_grad": jc.value_and_grad(loss, AXIS),
    "sum": jc.value_and_grad(loss, AXIS, reduce_op="sum"),
    "linear": jc.grad(linear, AXIS),
    "accumulate": jc.accumulate(loss, AXIS, 2),
    "scatter": lambda p, x: jc.all_gather(jc.grad(loss, AXIS, scatter=True)(p, x), AXIS),
    "second position": lambda p, x: jc.grad(lambda x, p: loss(p, x), AXIS, argnums=1)(x, p),
    "several": lambda p, x: jc.grad(lambda a, p: a * loss(p, x), AXIS, argnums=(0, 1))(2.0, p),
    "jit": jax.jit(jc.grad(loss, AXIS)),
    "jit with the axis's name": replica,
    "remat": jax.checkpoint(jc.grad(loss, AXIS)),
    "jvp": lambda p, x: jax.jvp(lambda p: jc.grad(loss, AXIS)(p, x), (p,), (p,))[1],
    "vmap": lambda p, x: jax.vmap(lambda x: jc.grad(loss, AXIS)(p, x[None]))(x),
    "scan": in_scan,
    "cond": lambda p, x: lax.cond(p["b"].sum() >= 0, jc.grad(loss, AXIS), jc.grad(linear, AXIS), p, x),
    "linear solve": natural,
    "references": by_ref,
    "sync_in_backward": lambda p, x: jax.grad(
        lambda p: loss({**p, **jc.sync_in_backward({"b": p["b"]}, AXIS)}, x))(p)["b"],
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_a_parameter_that_differs_between_replicas_is_refused_by_its_path(name):
    entry = ENTRIES[name]
    wrong = {"w": W["w"], "b": own(np.arange(N, dtype="f"))}
    with pytest.raises(ValueError, match=r"leaf .*differs between replicas, or nothing shows"):
        strategy().run(entry, (wrong, own(X)))
    right = strategy().run(entry, (W, own(X)))
    assert all(isinstance(value, jc.Mirrored) for value in values(right))


@pytest.mark.parametrize("step", [trained, in_while])
def test_a_parameter_that_comes_to_differ_in_a_loop_is_refused(step):
    with pytest.raises(
        ValueError, match=r"`jc.grad` over .replica.: leaf args\[0\]\['b'\] differs"
    ):
        strategy().run(step, (W, own(X)))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (jc.grad(loss, AXIS, argnums=1), r"`jc.grad` over .replica.: leaf args\[1\] differs"),
        (jc.value_and_grad(loss, AXIS, argnums=-1), r"`jc.value_and_grad` .* leaf args\[1\] "),
        (jc.accumulate(loss, AXIS, 2), r"`jc.accumulate` .* leaf args\[0\]\['w'\] differs"),
    ],
)
def test_the_message_names_the_call_and_the_leaf(entry, words):
    with pytest.raises(ValueError, match=words):
        strategy().run(entry, ({"w": own(X[:, 0]), "b": np.float32(0)}, own(X)))


def test_what_is_the_same_by_proof_is_no_different():
    """As after a broadcast, and after every step of training."""

    def step(p, x):
        p = jc.broadcast(p, AXIS)
        for _ in range(2):
            p = jax.tree.map(lambda w, g: w - 0.1 * g, p, jc.grad(loss, AXIS)(p, x))
        return p

    mine = jax.tree.map(lambda w: np.stack([w] * N), W)
    got = strategy().run(step, (own(mine), own(X)))
    want = W
    for _ in range(2):
        grads = jax.grad(loss)(want, X.reshape(-1, 3))
        want = jax.tree.map(lambda w, g: w - 0.1 * g, want, grads)
    for a, b in zip(values(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jc.Mirrored)
        np.testing.assert_allclose(strategy().experimental_local_results(a)[0], b, rtol=1e-5)


def test_what_nobody_can_read_is_refused_where_it_is_given_what_differs():
    @jax.custom_batching.custom_vmap
    def unknown(p, x):
        return jc.grad(loss, AXIS)(p, x)

    unknown.def_vmap(lambda *_: None)
    with pytest.raises(ValueError, match="or nothing shows that it does not"):
        strategy().run(unknown, (W, own(X)))
    strategy().run(unknown, (W, X[0]))


def test_the_marks_leave_nothing_in_the_program():
    mesh = mesh_of(N, AXIS)

    def lowered(marked):
        scope = dataclasses.replace(mesh_scope(mesh), marked=marked)

        def step(params, x):
            with entered(scope):
                return jc.accumulate(loss, AXIS, 2)(params, x[0])

        specs = {"in_specs": (P(), P(AXIS)), "out_specs": P(), "check_vma": False}
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs)).lower(W, X).as_text()

    assert lowered(frozenset({AXIS})) == lowered(frozenset())


def test_lax_may_not_sum_again_what_is_reduced_in_a_strategy_either():
    once = {
        "jc.grad": lambda x: jc.grad(loss, AXIS)(W, x),
        "jc.all_reduce": lambda x: jc.all_reduce("mean", x, AXIS),
        "context": lambda x: jc.get_replica_context().all_reduce("sum", x),
    }
    for f in once.values():
        with pytest.raises(jc.AlreadyReducedError, match=r"`lax.psum` over 'replica' \(.*_that_differ"
                           r".py:\d+\) of .*this sum is 2 times too large"):  # fmt: skip
            strategy().run(lambda x, f=f: lax.psum(f(x), AXIS), (own(X),))
    mean = strategy().run(lambda x: lax.pmean(once["jc.all_reduce"](x), AXIS), (own(X),))
    local = strategy().experimental_local_results(mean)[0]
    np.testing.assert_allclose(local, X.mean(0), rtol=1e-5)


@pytest.mark.parametrize("gather", [lax.all_gather, jc.all_gather], ids=["lax", "jc"])
def test_what_is_gathered_before_its_gradient_is_taken_is_no_replicas_own(gather):
    """`lax.all_gather` types its result as if it differed, so the gradient would stay where it is."""
    tiled = {"tiled": True} if gather is lax.all_gather else {}

    def step(part, x, shift):
        full = gather(part, "data", **tiled)
        grad = jc.grad(lambda w, x: jnp.mean((x @ w) ** 2), "data")(full, x)
        mine = lax.dynamic_slice_in_dim(full - grad, lax.axis_index("data"), 1)
        return mine + shift(part, x)

    part, x = np.arange(8, dtype="f"), X.reshape(-1)[:32].reshape(4, 8).repeat(2, 0)
    none = lambda part, x: 0.0
    settings = {"batch_argnums": (0, 1), "varying_outputs": "concatenate"}
    wrapped = lambda shift, **more: jc.data_parallel(
        lambda part, x: step(part, x, shift), **settings, **more
    )
    want = part - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(part)
    np.testing.assert_allclose(wrapped(none)(part, x), want, rtol=1e-4)
    if gather is lax.all_gather:
        own = lambda part, x: jc.grad(lambda p: jnp.sum(p) * jnp.sum(x), "data")(part)
        for shift, more in ((none, {"checks": True}), (own, {})):
            with pytest.raises(ValueError, match=r"`jc.grad` over 'data': leaf args\[0\] was put together "
                               r"by `lax.all_gather`.*`jc.all_gather`"):  # fmt: skip
                wrapped(shift, **more).trace(part, x)


def test_messages_about_sharded_parameters_name_the_gather_that_types_can_follow():
    def step(w, x, gather):
        part = lax.dynamic_slice_in_dim(w, lax.axis_index("data"), 1)
        f = lambda p, x: jnp.mean((x @ gather(p)) ** 2)
        return gather(part - jc.grad(f, "data")(part, x))

    w, x = np.arange(8, dtype="f"), X.reshape(-1)[:32].reshape(4, 8).repeat(2, 0)
    by_lax = lambda v: lax.all_gather(v, "data", tiled=True)
    for checks, words in (
        (None, "gather it with `jc.all_gather`"),
        (False, "so by `jc.all_gather`"),
    ):
        with pytest.raises(ValueError, match=words):
            jc.data_parallel(lambda w, x: step(w, x, by_lax), checks=checks)(w, x)
    got = jc.data_parallel(lambda w, x: step(w, x, lambda v: jc.all_gather(v, "data")))(w, x)
    np.testing.assert_allclose(got, w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), rtol=1e-4)
