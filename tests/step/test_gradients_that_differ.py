"""The gradient of what differs between replicas is never mixed with those of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close
from jax import lax

import jaxcoll as jc

N, AXIS = 2, "replica"
X = np.random.default_rng(0).normal(size=(N, 6, 3)).astype("f")
W = {"w": np.arange(3, dtype="f"), "b": np.float32(1)}


STRATEGY = jc.MirroredStrategy(jax.devices()[:N])


def own(rows):
    """A PerReplica with one of the rows on each replica."""
    return STRATEGY.experimental_distribute_values_from_function(
        lambda context: jax.tree.map(lambda row: row[context.replica_id_in_sync_group], rows)
    )


def values(tree):
    return jax.tree.leaves(
        tree, is_leaf=lambda x: isinstance(x, jc.PerReplica | jc.distribute.Mirrored)
    )


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
    own = lambda p, row: jax.tree.map(
        lambda w, g: w - g * row[0, 0], p, jc.grad(loss, AXIS)(p, row)
    )
    return lax.scan(lambda p, row: (own(p, row), None), params, x[:, None])[0]["b"]


def in_while(params, x):
    """Replicas take different numbers of turns, so what they carry on is different."""
    more = lambda c: c[0] < x[0, 0]
    turn = lambda c: (c[0] + 1, jc.grad(linear, AXIS)(c[1], jnp.ones((2, 3))))
    return lax.while_loop(more, turn, (0.0, params))[1]


def natural(params, x):
    """Steepest descent by curvature: `cg` runs the loss's second derivative in a solver's program."""
    gradient = jc.grad(loss, AXIS)
    product = lambda v: jax.jvp(lambda p: gradient(p, x), (params,), (v,))[1]
    curvature = lambda v: jax.tree.map(jnp.add, product(v), v)
    return jax.scipy.sparse.linalg.cg(curvature, gradient(params, x), maxiter=2)[0]


def by_ref(params, x):
    """A loop that writes to a `Ref`, from which everything may come."""
    ref = jax.new_ref(jnp.zeros(()))

    def turn(total, row):
        ref[...] += jnp.sum(row)
        return jax.tree.map(jnp.add, total, jc.grad(loss, AXIS)(params, row)), None

    lax.scan(turn, jax.tree.map(jnp.zeros_like, params), x[:, None])
    return jc.all_reduce("sum", ref[...], AXIS)


@jax.jit
def replica(params, x):
    """Named like the axis."""
    return jc.grad(loss, AXIS)(params, x)


ENTRIES = {
    "value_and_grad": jc.value_and_grad(loss, AXIS),
    "accumulate": jc.accumulate(loss, AXIS, 2),
    "scatter": lambda p, x: jc.all_gather(jc.grad(loss, AXIS, scatter=True)(p, x), AXIS),
    "second position": lambda p, x: jc.grad(lambda x, p: loss(p, x), AXIS, argnums=1)(x, p),
    "several": lambda p, x: jc.grad(lambda a, p: a * loss(p, x), AXIS, argnums=(0, 1))(2.0, p),
    "jit with the axis's name": replica,
    "scan": in_scan,
    "cond": lambda p, x: lax.cond(p["w"].sum() >= 0, jc.grad(loss, AXIS), jc.grad(linear, AXIS), p, x),
    "linear solve": natural,
    "references": by_ref,
    "sync_in_backward": lambda p, x: jax.grad(
        lambda p: loss({**p, **jc.sync_in_backward({"b": p["b"]}, AXIS)}, x))(p)["b"],
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_differing_parameter_is_refused(name):
    words = r"`[\w.]+` over .replica.: leaf .*\['b'\] must be the same .*or jaxcoll cannot"
    with pytest.raises(ValueError, match=words):
        STRATEGY.run(ENTRIES[name], ({"w": W["w"], "b": own(np.arange(N, dtype="f"))}, own(X)))
    right = STRATEGY.run(ENTRIES[name], (W, own(X)))
    assert all(isinstance(value, jc.distribute.Mirrored) for value in values(right))


@pytest.mark.parametrize("step", [trained, in_while])
def test_diverging_parameter_is_refused(step):
    with pytest.raises(ValueError, match=r"`jc.grad` over .replica.: leaf p.*\['b'\] must be the"):
        STRATEGY.run(step, (W, own(X)))


def test_proven_parameters_are_taken():
    """As after a broadcast, and after every step of training."""
    descend = lambda p, g: jax.tree.map(lambda w, g: w - 0.1 * g, p, g)

    def step(p, x):
        p = jc.broadcast(p, AXIS)
        for _ in range(2):
            p = descend(p, jc.grad(loss, AXIS)(p, x))
        return p

    got = STRATEGY.run(step, (own(jax.tree.map(lambda w: np.stack([w] * N), W)), own(X)))
    want = W
    for _ in range(2):
        want = descend(want, jax.grad(loss)(want, X.reshape(-1, 3)))
    assert all(isinstance(value, jc.distribute.Mirrored) for value in values(got))
    close(STRATEGY.experimental_local_results(got)[0], want)
