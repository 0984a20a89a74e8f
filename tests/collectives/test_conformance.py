"""One suite for every algorithm, under every way to map a program over replicas."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    OPTIONS,
    RUNNERS,
    close,
    grid,
    lowered,
    mapped,
    noise,
    per_replica,
    rows,
    run,
    tree,
)

import jaxcoll as jc

BRIEF = ("auto", "ring", "halving_doubling", "shuffle")
OTHERS = ("packed", "ring-in-2", "one-owner")
# The first is the lightest: the fast run has no other.
EVERY = pytest.mark.parametrize(
    ("runner", "n", "names"),
    [("vmap", 3, BRIEF[:1]), ("vmap", 3, BRIEF[1:]), ("pmap", 3, BRIEF), ("unchecked", 3, BRIEF),
     ("checked", 5, OTHERS), ("checked", 8, BRIEF)],
    ids=["vmap", "vmap-ours", "pmap", "unchecked", "5", "8"],
)  # fmt: skip
P = jax.sharding.PartitionSpec


@functools.cache
def found(runner, n, names):
    """Results of every kind of options in one program, for all the laws: compiling takes the time."""
    value = {
        "tree": tree(n),
        "noise": noise(n, 37),
        "large": np.full((n, 5), 60000, np.float16),
    }
    matrix = rows(n, 3, 5)

    def f(value, matrix):
        def by(options):
            reduce = lambda v, op="sum": jc.all_reduce(op, v, "data", options=options)
            mean = reduce({k: value[k] for k in ("tree", "large")}, "mean")
            return {"sum": reduce(value), "mean": mean, "each row": jax.vmap(reduce)(matrix)}

        return {name: by(OPTIONS[name]) for name in names}

    return value, matrix, run(runner, f, n, value, matrix).items()


def equals_the_reference(got, value, op, n):
    def reference(x):
        total = np.asarray(x).astype(np.float64).sum(0)
        dtype = np.float32 if op == "mean" and x.dtype == jnp.int32 else x.dtype
        return np.broadcast_to(total / n if op == "mean" else total, x.shape).astype(dtype)

    want = jax.tree.map(reference, value)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(
            np.asarray(g, "f8"), w.astype("f8"), rtol=2e-3 * (g.dtype == np.float16) + 2e-7
        )


@pytest.mark.tensorflow("G1", "G2", "G5", "G8", "G19", "G26", "G32")
@EVERY
def test_tree_equals_reference(runner, n, names):
    value, _, each = found(runner, n, names)
    for _, got in each:
        for op in ("sum", "mean"):
            equals_the_reference(got[op]["tree"], value["tree"], op, n)


@pytest.mark.tensorflow("L3")
@EVERY
def test_float16_mean_does_not_overflow(runner, n, names):
    """A SUM that does not fit is infinite, everywhere."""
    for _, got in found(runner, n, names)[2]:
        np.testing.assert_allclose(got["mean"]["large"].astype("f"), 60000, rtol=1e-3)
        assert np.all(np.isinf(got["sum"]["large"]))


@EVERY
def test_replicas_have_equal_accurate_bits(runner, n, names):
    """And a `vmap` inside reduces each row by itself."""
    value, matrix, each = found(runner, n, names)
    x = value["noise"].astype(np.float64)
    bound = n * np.finfo(np.float32).eps * np.abs(x).sum(0)
    for name, got in each:
        assert np.all(np.abs(got["sum"]["noise"].astype("f8") - x.sum(0)) <= bound), name
        np.testing.assert_array_equal(got["each row"][0], matrix.sum(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(got):
            assert len(leaf) == n
            assert len({row.tobytes() for row in leaf}) == 1, (name, path)


@pytest.mark.parametrize(("name", "runner"), [("auto", "unchecked"), ("one-owner", "checked")])
def test_works_without_jit(name, runner):
    f = lambda x: jc.all_reduce("mean", x, "data", options=OPTIONS[name])
    got = run(runner, f, 2, {"a": rows(2, 4)}, jit=False)
    np.testing.assert_allclose(got["a"][0], rows(2, 4).mean(0), rtol=1e-6)


def test_vmapped_axes_need_the_native():
    """An axis of an inner `vmap` can be reduced too where JAX can."""
    x = rows(4, 3, 5)

    def summed(algorithm=None):
        options = jc.CommunicationOptions(algorithm=algorithm)
        reduce = lambda r: jc.all_reduce("sum", r, ("data", "rows"), options=options)
        return jax.vmap(reduce, axis_name="rows")

    for runner, own in (("unchecked", "rows"), ("vmap", "data")):
        words = rf"'ring' over axes .* maps one of them \('{own}'\)\. Ask for 'ring/ring'"
        with pytest.raises(ValueError, match=words):
            run(runner, summed("ring"), 4, x)
    for runner, algorithms in (("unchecked", (None, "ring/ring")), ("vmap", ("ring/ring",)), ("pmap", (None,))):  # fmt: skip
        for got in run(runner, lambda v, a=algorithms: [summed(k)(v) for k in a], 4, x):
            np.testing.assert_array_equal(got[0], np.broadcast_to(x.sum((0, 1)), (3, 5)))
    with pytest.raises(ValueError, match="over axis 'rows': JAX cannot communicate over the axis"):
        run("checked", summed(), 4, x)


@pytest.mark.tensorflow("G23", "G28")
def test_groups_are_axes():
    def f(v):
        both = (OPTIONS["auto"], OPTIONS["ring"])
        return [
            [jc.all_reduce("sum", v, axis, options=o) for o in both] for axis in ("data", "node")
        ]

    outs = [[P("node")] * 2, [P("data")] * 2]
    found = mapped(f, P(("node", "data")), outs, grid(2, 3))(np.arange(6.0))
    for got, want in zip(found, ([3, 12], [3, 5, 7]), strict=True):
        assert [x.tolist() for x in got] == [want] * 2


@pytest.mark.tensorflow("F22", "G7")
@pytest.mark.parametrize("runner", RUNNERS)
def test_reductions_inside_control_flow(runner):
    def f(x):
        found = []
        for options in (OPTIONS["auto"], OPTIONS["ring"]):
            take = lambda v, o=options: jc.all_reduce("sum", v, "data", options=o)
            same = jax.lax.axis_size("data") > 2  # known to all, so that all take one branch

            def body(state, take=take):
                i, total = state
                return i + 5, total + take(jnp.where(i < 5, 10.0, 5.0) + 0 * x)

            found.append(jax.lax.cond(same, take, lambda v, take=take: take(v) * 2, x))
            start = 0, jnp.zeros(1)
            found.append(jax.lax.while_loop(lambda s: s[0] < 10, body, start)[1])
        return found

    assert [x[0].item() for x in run(runner, f, 4, jnp.ones((4, 1)))] == [4.0, 60.0] * 2


def test_one_replica_emits_no_collective():
    """Nor does it refuse an algorithm for the order of its sums."""
    more = [{}, {"algorithm": "ring"}, {"implementation": "nccl"}]
    asked = [*OPTIONS.values(), *(jc.CommunicationOptions(reproducible=True, **o) for o in more)]

    def f(x):
        rows = jc.IndexedSlices(x["a"][:, None], jnp.arange(4), (9, 1))
        loss = lambda w, x: jnp.sum(jc.sync_in_backward(w, "data") * x)
        return (
            [jc.all_reduce("mean", x, "data", options=o) for o in asked],
            [jc.all_reduce("mean", rows, "data"), jc.all_gather(x["a"], "data")],
            jc.value_and_grad(loss, "data")(jnp.ones(4), x["a"]),
        )

    x = {"a": rows(1, 4), "b": rows(1)}
    program = lowered(f, 1, x)
    collectives = r"stablehlo\.(all|coll)|all-(reduce|gather)\(|collective-permute\("
    for text in (program.as_text(), program.compile().as_text()):
        assert not re.search(collectives, text)
    means, (sparse, gathered), (value, grad) = run("checked", f, 1, x)
    for each in (*(mean["a"] for mean in means), sparse.values[..., 0], gathered, grad):
        np.testing.assert_array_equal(each, x["a"])
    assert value[0] == x["a"].sum()


def test_empty_tree_is_itself():
    f = lambda x: [jc.all_reduce("sum", v, "data") for v in ({"a": None, "b": ()}, x)]
    assert run("vmap", f, 2, rows(2, 0))[0] == {"a": None, "b": ()}
    assert "stablehlo.all_reduce" not in lowered(f, 2, rows(2, 0)).as_text()


# Derivatives

# Each kind of options, and each runner with the compiler's algorithm and with one of ours.
CASES = [("vmap", 3, BRIEF[:1]), ("vmap", 3, BRIEF[1:2]), ("checked", 5, (*BRIEF[2:], *OTHERS))]
CASES += [(runner, 3, ("auto", "ring")) for runner in ("pmap", "unchecked")]
CASES += [(runner, 1, ("auto",)) for runner in RUNNERS]
DERIVATIVES = pytest.mark.parametrize(("runner", "n", "names"), CASES)


def vectors(n):
    """Small integers, whose sums are exact."""
    return {"a": rows(n, 5, seed=1), "b": (rows(n, seed=1), rows(n, 2, 3))}


@functools.cache
def derivatives_of(runner, n, names):
    """Every derivative of each kind of reduction, in one program."""

    def derivatives(x, ct, options):
        reduce = lambda v, op: jc.all_reduce(op, v, "data", options=options)

        def back(op):
            dot = lambda v: sum(map(jnp.vdot, jax.tree.leaves(reduce(v, op)), jax.tree.leaves(ct)))
            return jax.grad(dot)(x)

        tangent = jax.jvp(lambda v: reduce(v, "mean"), (x,), (ct,))[1]
        cube = lambda v: reduce(v, "sum") ** 3 / 3 + 0 * v
        return {
            "sum": back("sum"),
            "mean": back("mean"),
            # Invariant: `per_replica` wants something that varies.
            "tangent": jax.tree.map(lambda t, x: t + 0 * x, tangent, x),
            "second": jax.grad(lambda v: jax.grad(cube)(v) + 0 * v)(x["b"][0]),
        }

    f = lambda x, ct: [derivatives(x, ct, OPTIONS[name]) for name in names]
    return per_replica(runner, f, n, jax.tree.map(np.ones_like, vectors(n)), vectors(n))


@pytest.mark.tensorflow("G49", "H13", "H14")
@DERIVATIVES
def test_cotangents_are_reduced_alike(runner, n, names):
    """Each replica has cotangents of its own. Forward mode reduces tangents.

    The second derivative: d/dx_i of Σ_j s³/3 is n·s², s the sum of n ones; once more over all
    replicas: n·n·2s.
    """
    total = jax.tree.map(lambda v: np.broadcast_to(v.sum(0), v.shape), vectors(n))
    mean = jax.tree.map(lambda v: v / np.float32(n), total)
    for each in derivatives_of(runner, n, names):
        close(each["sum"], total, rtol=0, atol=0)
        for kind in ("mean", "tangent"):
            close(each[kind], mean, rtol=1e-6, atol=0)
        np.testing.assert_allclose(each["second"], [2.0 * n**3] * n, rtol=1e-6)
