"""One suite for every collective and algorithm, under every way to map a program over replicas."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    OPTIONS,
    RUNNERS,
    P,
    assert_trees_equal,
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
CASES = [
    ("vmap", 3, BRIEF[:1]), ("vmap", 3, BRIEF[1:]), ("pmap", 3, BRIEF), ("unchecked", 3, BRIEF),
    ("checked", 5, OTHERS), ("checked", 8, BRIEF),
]  # fmt: skip
ALONE = [(runner, 1, BRIEF[:1]) for runner in RUNNERS]


def collectives(options):
    """Each collective, and in NumPy what it makes of a leaf of all replicas; all are linear."""
    call = lambda f, *args, **how: lambda v: f(*args, v, axis_name="data", options=options, **how)
    last = lambda v: call(jc.broadcast, source=jax.lax.axis_size("data") - 1)(v)

    def halves(op):
        how = {"axis_name": "data", "options": options.replace(shards=0)}
        return lambda v: jc.all_gather(jc.reduce_scatter(op, v, **how), **how)

    def by_rows(v):
        rows = lambda x: jc.IndexedSlices(x.reshape(-1, 1), jnp.arange(x.size)[::-1], (x.size, 1))
        sums = call(jc.all_reduce, "sum")(jax.tree.map(rows, v))
        dense = lambda x, total: total.to_dense()[::-1].reshape(jnp.shape(x))
        return jax.tree.map(dense, v, sums)

    total = lambda x: x.astype("f8").sum(0).astype(x.dtype)
    mean = lambda x: x.astype("f8").mean(0).astype("f" if x.dtype.kind == "i" else x.dtype)
    return {
        "sum": (call(jc.all_reduce, "sum"), total),
        "mean": (call(jc.all_reduce, "mean"), mean),
        "sum of rows": (by_rows, total),
        "halves of a sum": (halves("sum"), total),
        "halves of a mean": (halves("mean"), mean),
        "broadcast": (last, lambda x: x[-1]),
        "gather": (call(jc.all_gather), np.concatenate),
        "gather last": (call(jc.all_gather, axis=-1), lambda x: np.concatenate([*x], -1)),
    }


def movable(n):
    """What can be gathered: no scalar; and what can be moved, and not be summed."""
    return {
        **{k: v for k, v in tree(n).items() if k != "scalar"},
        "brain": rows(n, 1, 11, dtype=jnp.bfloat16),
        "flags": rows(n, 3, 2) > 0,
        "bad": np.where(np.arange(n)[:, None] == n - 1, rows(n, 2), np.nan),
    }


@functools.cache
def found(runner, n, names):
    """Results of every kind of options in one program, for all the laws: compiling takes the time."""
    summed, moved = {"tree": tree(n), "noise": noise(n, 37)}, movable(n)
    large, matrix = np.full((n, 5), 60000, np.float16), rows(n, 3, 5)

    def f(summed, moved, large, matrix):
        def by(options):
            calls = {k: f for k, (f, _) in collectives(options).items()}
            got = {k: f(summed if "sum" in k or "mean" in k else moved) for k, f in calls.items()}
            more = {k: calls[k](large) for k in ("sum", "mean", "halves of a mean")}
            return got, more, jax.vmap(calls["sum"])(matrix)

        return {name: by(OPTIONS[name]) for name in names}

    return summed, moved, matrix, run(runner, f, n, summed, moved, large, matrix)


EVERY = pytest.mark.parametrize(("runner", "n", "names"), [*CASES, *ALONE[-2:]])


@pytest.mark.tensorflow(
    "G1", "G2", "G5", "G8", "G10", "G11", "G19", "G20", "G26", "G32", "L3"
)  # fmt: skip
@EVERY
def test_collectives_equal_references(runner, n, names):
    """To the bit, but for means and noise. A NaN of a replica that sends nothing does not spread.

    A float16 mean does not overflow; a SUM that does not fit is infinite. All replicas have the
    same bits, and a `vmap` inside reduces each row by itself.
    """
    summed, moved, matrix, each = found(runner, n, names)
    bound = n * np.finfo(np.float32).eps * np.abs(summed["noise"].astype("f8")).sum(0)
    for name, (got, large, each_row) in each.items():
        for kind, (_, reference) in collectives(OPTIONS[name]).items():
            here = jax.tree.map(lambda x: x[0], got[kind])
            want = jax.tree.map(reference, summed if "noise" in here else moved)
            if "noise" in here:
                off = np.abs(here.pop("noise") - want.pop("noise"))
                assert np.all(off <= bound * (1 if "sum" in kind else 2 / n)), (name, kind)
            if "mean" not in kind:
                assert_trees_equal(here, want)
                continue
            assert jax.tree.structure(here) == jax.tree.structure(want)
            for x, y in zip(*map(jax.tree.leaves, (here, want)), strict=True):
                assert (x.dtype, x.shape) == (y.dtype, y.shape)
                rtol = 2e-3 if x.dtype == np.float16 else 2e-7
                np.testing.assert_allclose(x.astype("f8"), y.astype("f8"), rtol=rtol)
        for kind, x in large.items():
            assert np.all(np.isinf(x) if kind == "sum" and n > 1 else np.abs(x / 6e4 - 1) < 1e-3)
        np.testing.assert_array_equal(each_row[0], matrix.sum(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path((got, each_row)):
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


@pytest.mark.tensorflow("G49", "H13", "H14", "K12", "K13", "L44")
@pytest.mark.parametrize(
    ("runner", "n", "names"),
    [*CASES[:2], CASES[4], *ALONE, *((r, 3, BRIEF[:2]) for r in ("pmap", "unchecked"))],
)
def test_derivatives_are_adjoints(runner, n, names):
    """Of linear maps, <f(x), c> = <x, f'(c)>, added up over the replicas; tangents are mapped alike.

    The second derivative: d/dx_i of Σ_j s³/3 is n·s², s the sum of n ones; once more over all
    replicas: n·n·2s.
    """
    x, t = ({"a": rows(n, 5, seed=k), "b": [rows(n, 2, 3, seed=k)]} for k in (1, 2))
    size = lambda y: np.arange(y.size, dtype="f").reshape(y.shape)
    dots = lambda a, b, dot: sum(map(dot, jax.tree.leaves(a), jax.tree.leaves(b)))

    def f(x, t):
        rank = jax.lax.axis_index("data").astype("f")
        vary = functools.partial(jax.tree.map, lambda y: y + 0 * rank)  # `per_replica` wants it
        every = {}
        for name in names:
            for kind, (call, _) in collectives(OPTIONS[name]).items():
                y = jax.eval_shape(call, x)
                tangent = {} if "halves" in kind else jax.jvp(call, (x,), (t,))[1]
                c = jax.tree.map(lambda y: (size(y) * 7 + 3 * rank) % 11 - 5, y)
                back = jax.grad(lambda v, call=call, c=c: dots(call(v), c, jnp.vdot))(x)
                every[name, kind] = vary(tangent), c, vary(back)
            total = functools.partial(jc.all_reduce, "sum", axis_name="data", options=OPTIONS[name])
            cube = lambda v, total=total: total(v) ** 3 / 3 + 0 * v
            twice = jax.grad(lambda v, cube=cube: jax.grad(cube)(v) + 0 * v)(1 + 0 * rank)
            every[name, "twice"] = twice
        return every

    for (name, kind), each in per_replica(runner, f, n, x, t).items():
        if kind == "twice":
            np.testing.assert_allclose(each, [2.0 * n**3] * n, rtol=1e-6)
            continue
        reference = collectives(OPTIONS[name])[kind][1]
        tangent, c, back = each
        for got, given in zip(*map(jax.tree.leaves, (tangent, t)), strict="halves" not in kind):
            np.testing.assert_allclose(got, [reference(given)] * n, rtol=1e-6)
        values = jax.tree.map(lambda x, r=reference: np.stack([r(x)] * n), x)
        sides = dots(values, c, np.vdot), dots(x, back, np.vdot)
        np.testing.assert_allclose(*sides, rtol=1e-5, atol=1e-4, err_msg=f"{name} {kind}")
