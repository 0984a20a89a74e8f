"""The gradient of what differs between replicas is never mixed with those of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def in_scan(params, x):
    f = lambda total, row: (jax.tree.map(jnp.add, total, jc.grad(loss, AXIS)(params, row)), None)
    return lax.scan(f, jax.tree.map(jnp.zeros_like, params), x[:, None])[0]


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


ENTRIES = {
    "value_and_grad": jc.value_and_grad(loss, AXIS),
    "accumulate": jc.accumulate(loss, AXIS, 2),
    "scatter": lambda p, x: jc.all_gather(jc.grad(loss, AXIS, scatter=True)(p, x), AXIS),
    "second position": lambda p, x: jc.grad(lambda x, p: loss(p, x), AXIS, argnums=1)(x, p),
    "several": lambda p, x: jc.grad(lambda a, p: a * loss(p, x), AXIS, argnums=(0, 1))(2.0, p),
    "jit": lambda p, x: jax.jit(jc.grad(loss, AXIS))(p, x),
    "scan": in_scan,
    "cond": lambda p, x: lax.cond(p["w"].sum() >= 0, jc.grad(loss, AXIS), lambda p, x: p, p, x),
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
