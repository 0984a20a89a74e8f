"""However a step reduces, data_parallel gives one device's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, grid, mesh_of
from jax import lax
from jax.sharding import AxisType

import jaxcoll as jc

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 5)).astype("f")
Y = RNG.standard_normal((16, 2)).astype("f")
PARAMS = {"b": np.zeros(2, "f"), "w": RNG.standard_normal((5, 2)).astype("f")}
BATCH = {"x": X, "y": Y}

MESHES = {
    "none": (None, "data"),
    "line": (mesh_of(8), "data"),
    "four of eight": (mesh_of(4, kind=AxisType.Explicit), "data"),
    "two levels": (grid(2, 4, kind=AxisType.Explicit), ("node", "data")),
    "beside a model axis": (
        jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2), "data"),
    "one device": (mesh_of(1), "data"),
}  # fmt: skip


def loss(p, batch):
    """Of one replica's share."""
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) + p["b"][None] - batch["y"]) ** 2)


def scanned(p, batch):
    """A loss that scans from a constant."""

    def row(total, xy):
        return total + jnp.mean((jnp.tanh(xy[0] @ p["w"]) + p["b"] - xy[1]) ** 2), None

    return lax.scan(row, 0.0, (batch["x"], batch["y"]))[0] / batch["x"].shape[0]


def remat(p, batch):
    return jax.checkpoint(loss)(p, batch)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, x), lambda x, ct: (ct * jnp.ones_like(x) * 2.0,))


def custom(p, batch):
    return loss(p, batch) + jnp.mean(doubled(batch["x"] @ p["w"]))


def accumulated(p, batch, axis, f):
    pieces = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    zeros = jax.tree.map(jnp.zeros_like, p)
    add = lambda total, piece: (jax.tree.map(jnp.add, total, jax.grad(f)(p, piece)), None)
    total, _ = lax.scan(add, zeros, pieces)
    return lax.pmean(jax.tree.map(lambda g: g / 2, total), axis)


def by_psum(p, batch, axis, f):
    total = lax.psum(jax.grad(f)(p, batch), axis)
    return jax.tree.map(lambda g: g / lax.psum(1, axis), total)


def by_size(p, batch, axis, f):
    total = lax.psum(jax.grad(f)(p, batch), axis)
    axes = axis if isinstance(axis, tuple) else (axis,)
    n = np.float32(np.prod([lax.axis_size(a) for a in axes]))
    return jax.tree.map(lambda g: g / n, total)


def counted(p, batch, axis, f):
    """The sum of all losses, divided by how many rows there are."""
    rows = batch["x"].shape[0]
    count = lax.psum(jnp.float32(rows), axis)
    total = lax.psum(jax.grad(lambda p: rows * f(p, batch))(p), axis)
    return jax.tree.map(lambda g: g / count, total)


def per_example(p, batch, axis, f):
    one = lambda row: jax.grad(f)(p, jax.tree.map(lambda x: x[None], row))
    grads = jax.tree.map(lambda g: g.mean(0), jax.vmap(one)(batch))
    return lax.pmean(grads, axis)


def by_vjp(p, batch, axis, f):
    value, back = jax.vjp(lambda p: f(p, batch), p)
    return lax.pmean(back(jnp.ones_like(value))[0], axis)


STYLES = {
    "pmap": lambda p, b, a, f: lax.pmean(jax.grad(f)(p, b), a),
    "pmap, jitted": lambda p, b, a, f: lax.pmean(jax.jit(jax.grad(f))(p, b), a),
    "pmap, twice": lambda p, b, a, f: lax.pmean(lax.pmean(jax.grad(f)(p, b), a), a),
    "pmap, of the mean": lambda p, b, a, f: lax.pmean(
        jax.grad(lambda p: lax.pmean(f(p, b), a))(p), a
    ),
    "of jc.mean_loss": lambda p, b, a, f: jax.grad(jc.mean_loss(f, a))(p, b),
    "varied": lambda p, b, a, f: lax.pmean(
        jax.grad(f)(jax.tree.map(lambda x: lax.pcast(x, a, to="varying"), p), b), a
    ),
    "jc.grad": lambda p, b, a, f: jc.grad(f, a)(p, b),
    "jc.all_reduce": lambda p, b, a, f: jc.all_reduce("mean", jax.grad(f)(p, b)),
    "jc.pmean": lambda p, b, a, f: jc.pmean(jax.grad(f)(p, b), a),
    "psum / psum(1)": by_psum,
    "psum / axis_size": by_size,
    "counted": counted,
    "accumulated": accumulated,
    "per example": per_example,
    "vjp": by_vjp,
    "jacrev": lambda p, b, a, f: lax.pmean(jax.jacrev(f)(p, b), a),
}


def step_of(style, axis, f):
    def step(params, batch):
        value, grads = f(params, batch), STYLES[style](params, batch, axis, f)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), lax.pmean(value, axis)

    return step


assert_close = functools.partial(close, rtol=2e-5)


@functools.cache
def one_device(f):
    value, grads = jax.jit(jax.value_and_grad(f))(PARAMS, BATCH)
    return jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads), value


@pytest.mark.parametrize(
    ("style", "mesh"),
    [
        *((style, "line") for style in STYLES),
        *(
            (style, mesh)
            for style in (
                "pmap",
                "of jc.mean_loss",
                "jc.grad",
                "psum / psum(1)",
                "psum / axis_size",
            )
            for mesh in ("two levels", "one device", "beside a model axis")
        ),
    ],
)
def test_however_a_step_reduces_n_devices_equal_one(style, mesh):
    losses = [loss, remat, custom, scanned] if mesh == "line" else [loss]
    mesh, axis = MESHES[mesh]

    def step(params, batch):
        return [step_of(style, axis, f)(params, batch) for f in losses]

    got = jc.data_parallel(step, mesh=mesh, axis_name=axis)(PARAMS, BATCH)
    assert_close(got, [one_device(f) for f in losses])
    assert all(x.is_fully_replicated for x in jax.tree.leaves(got))


@pytest.mark.parametrize("mesh", ["none", "four of eight", "line", "two levels"])
def test_whatever_the_options_and_the_mesh_n_devices_equal_one(mesh):
    mesh, axis = MESHES[mesh]
    for asked in ({}, {"bytes_per_pack": 48}, {"implementation": "ring"}):
        options = jc.CommunicationOptions(**asked)
        step = step_of("jc.grad", axis, loss)
        got = jc.data_parallel(step, mesh=mesh, axis_name=axis, options=options)(PARAMS, BATCH)
        assert_close(got, one_device(loss))
        assert all(x.is_fully_replicated for x in jax.tree.leaves(got))


def test_a_sum_in_a_loop_is_judged_by_what_it_is_after_every_turn():
    def turns(first):
        def turn(total, row):
            return jc.all_reduce("sum", total, "data") / 8 + row, None

        return lambda x: lax.pmean(lax.scan(turn, first(x), x[:, 0])[0], "data")

    # The carry is the same at first, and a replica's own from the second turn on.
    sums = jc.data_parallel(turns(lambda x: jnp.float32(0)))(X)
    rows = X[:, 0].reshape(8, 2)
    np.testing.assert_allclose(sums, rows.sum() / 8, rtol=1e-5)
