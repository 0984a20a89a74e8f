"""Invariant or varying: results are proven equal, and nothing is counted twice in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, WHOLE, P, grid, mapped, mesh_of, rows, run
from jax import lax

import jaxcoll as jc

AlreadyReducedError = jc.errors.AlreadyReducedError


def checked(f, *args, in_specs, out_specs=WHOLE, mesh=8):
    return mapped(f, in_specs, out_specs, mesh)(*args)


def pre_summed(p, x):
    """The gradient that autodiff has summed over the replicas on its own."""
    return jax.grad(lambda p: jnp.sum(p * x))(p)


def test_summed_gradient_is_refused():
    def f(p, x):
        return jc.all_reduce("mean", {"layer": [pre_summed(p, x)]}, "data")

    for n in (8, 1):
        words = (
            rf"leaf \['layer'\]\[0\] is already the same on every replica along 'data' \(size {n}\)"
            rf".*count it {n} times.*invariant=\"replicated\".*If it is a gradient.*invariant=\"summed\""
        )
        with pytest.raises(AlreadyReducedError, match=words):
            checked(f, jnp.ones(()), rows(n), mesh=n, in_specs=(P(), P("data")))
    assert issubclass(AlreadyReducedError, ValueError)


@pytest.mark.parametrize(
    ("reduced", "advice"),
    [
        (lambda x, axes: jc.all_reduce("sum", x, axes), "replicated"),
        (lambda x, axes: jc.reduce_scatter("sum", x, axes), "reduced=True.*scatter=True"),
        (lambda x, axes: jc.reduce_metrics(jc.Total(x.sum()), axes), "pcast"),
        (lambda x, axes: jc.grad(lambda w: x.sum(), axes)(jnp.ones(())), "Return the loss"),
    ],
    ids=["all_reduce", "reduce_scatter", "reduce_metrics", "grad"],
)
def test_every_refusal_names_the_axis(reduced, advice):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for split, same in ("ab", "ba"):
        words = rf"already the same on every replica along '{same}'(?: \(size 2\))?, so.*{advice}"
        with pytest.raises(AlreadyReducedError, match=words):
            checked(lambda x: reduced(x, ("a", "b")), rows(2), in_specs=P(split), mesh=mesh)


def test_a_word_says_the_meaning():
    def f(p, x):
        reduce = lambda op, v, kind: jc.all_reduce(op, v, "data", invariant=kind)
        summed = [reduce(op, pre_summed(p, x), "summed") for op in ("sum", "mean")]
        return summed, [reduce(op, p, "replicated") for op in ("sum", "mean")]

    x = rows(8)
    summed, replicated = checked(f, jnp.ones(()) * 3, x, in_specs=(P(), P("data")))
    assert summed == [x.sum(), x.sum() / 8]
    assert replicated == [3 * 8, 3]


def mixed(x):
    """A learning rate and a count that every replica holds, beside what differs."""
    return {"lr": jnp.float32(0.5), "step": jnp.int32(3), "loss": x}


@pytest.mark.parametrize("runner", ["step", *RUNNERS])
def test_mean_of_equals_is_itself(runner):
    """In a checked `shard_map` one word says that they are equal on purpose."""
    settings = {"invariant": "replicated"} if runner == "checked" else {}
    f = lambda x: jc.all_reduce("mean", mixed(x), "data", **settings)
    x = rows(4)
    if runner == "step":
        got = jc.data_parallel(lambda x: f(x[0]), mesh=mesh_of(4))(x)
    else:
        got = jax.tree.map(lambda x: x[0], run(runner, f, 4, x))
    assert jax.tree.map(float, got) == {"lr": 0.5, "step": 3, "loss": x.mean()}


def test_integers_are_called_no_gradient():
    f = lambda x: jc.all_reduce("mean", {"loss": x, "step": jnp.int32(3)}, "data")
    with pytest.raises(AlreadyReducedError, match=r"leaf \['step'\].*\"replicated\"") as caught:
        checked(f, rows(8), in_specs=P("data"))
    assert "gradient" not in str(caught.value)


@pytest.mark.parametrize(
    "how", [{}, {"invariant": "summed"}, {"options": jc.CommunicationOptions(algorithm="ring")}]
)
def test_unreduced_sums_are_made_once(how):
    """JAX's `unreduced`: also of gradients by parameters that are `reduced`, and differentiated."""
    x = rows(4, 3)

    def f(x):
        owed = lax.pcast(x, "data", to="unreduced")
        w = lax.pcast(jnp.ones(()), "data", to="reduced")
        grads = jax.grad(lambda w: jnp.sum(w * x))(w)
        total = lambda x: jc.all_reduce("sum", lax.pcast(x**2, "data", to="unreduced"), "data")
        slope = jax.grad(lambda x: jnp.sum(total(x)))(x)
        reduced = [jc.all_reduce(op, (owed, x, grads), "data", **how) for op in ("sum", "mean")]
        scattered = jc.all_gather(jc.reduce_scatter("sum", owed, "data"), "data")
        return reduced, scattered, lax.pmax(jnp.max(jnp.abs(slope - 2 * x)), "data")

    (total, mean), scattered, off = checked(f, x, in_specs=P("data"), mesh=4)
    want = x.sum(0, keepdims=True)
    for got in (*total[:2], *(4 * each for each in mean[:2]), scattered):
        np.testing.assert_array_equal(got, want)
    assert (total[2], 4 * mean[2], off) == (x.sum(), x.sum(), 0)


@pytest.mark.parametrize(
    ("op", "invariant", "want"),
    [("sum", "summed", 6), ("mean", "summed", 0.75), ("sum", "replicated", 24), ("mean", "replicated", 3)],
)  # fmt: skip
def test_partly_varying_leaf_is_summed(op, invariant, want):
    """Mesh 4 × 2; the leaf holds 2 and 4 along the second axis and is the same along the first."""
    mesh = grid(4, 2)
    f = lambda x: jc.all_reduce(op, x, ("node", "data"), invariant=invariant)
    got = checked(f, jnp.array([2.0, 4.0]), in_specs=P("data"), mesh=mesh)
    assert got.tolist() == [want]
    unsaid = lambda x: jc.all_reduce(op, x, ("node", "data"))
    with pytest.raises(AlreadyReducedError, match=r"along 'node' \(size 4\)"):
        checked(unsaid, jnp.ones(2), in_specs=P("data"), mesh=mesh)


@pytest.mark.parametrize(
    "asked", [{"bytes_per_pack": 1 << 20}, {"overlap": True, "bytes_per_pack": 64}]
)
def test_other_axes_keep_their_variance(asked):
    """Packed beside a leaf that varies over more axes, or sent after it, it must not catch its type."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    options = jc.CommunicationOptions(**asked)
    got = checked(
        lambda a, b: jc.all_reduce("sum", (a, b), "data", options=options),
        rows(4, 3), rows(8, 3), mesh=mesh,
        in_specs=(P("data"), P(("data", "model"))), out_specs=(P(), P("model")),
    )  # fmt: skip
    np.testing.assert_array_equal(got[0][0], rows(4, 3).sum(0))
    np.testing.assert_array_equal(got[1], rows(8, 3).reshape(4, 2, 3).sum(0))
