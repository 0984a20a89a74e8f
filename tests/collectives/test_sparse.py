"""IndexedSlices: the value, and its reduction inside a program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, P, grid, lowered, mapped, plans_of, rows, run

import jaxcoll as jc
from jaxcoll import IndexedSlices

UNUSED = np.iinfo(np.int32).max


def indices(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).integers(0, 6, shape, np.int32)


# The value


@pytest.mark.tensorflow("B9", "B11")
def test_duplicates_stand_for_their_sum():
    first = IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1, 1, 3], (5, 2))
    second = IndexedSlices([[4.0, 6.0], [5.0, 6.0]], [1, 3], (5, 2))
    np.testing.assert_array_equal(first.to_dense(), second.to_dense())
    assert first.to_dense().tolist() == [[0, 0], [4, 6], [0, 0], [5, 6], [0, 0]]


@pytest.mark.tensorflow("E5")
def test_slices_are_one_leaf():
    sparse = IndexedSlices(jnp.ones((2, 3)), jnp.arange(2), (5, 3))
    doubled = jax.jit(lambda x: jax.tree.map(lambda a: a * 2, x))(sparse)
    assert isinstance(doubled, IndexedSlices)
    assert (doubled.values[0, 0], doubled.indices[1], doubled.dense_shape) == (2, 2, (5, 3))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path([sparse])]
    assert paths == ["[0].values", "[0].indices"]
    assert jax.tree.structure(sparse) == jax.tree.structure(doubled)
    assert jax.tree.structure(sparse) != jax.tree.structure(IndexedSlices([1.0], [0]))
    assert repr(jax.tree.map(lambda a: "x", sparse)) == (
        "IndexedSlices(values='x', indices='x', dense_shape=(5, 3))"
    )


def test_to_dense_drops_outside_rows():
    values = jnp.array([1.0, 2.0, 4.0, 8.0])
    f = lambda v: IndexedSlices(v, jnp.array([-1, 2, 3, UNUSED]), (3,)).to_dense()
    assert f(values).tolist() == [0.0, 0.0, 2.0]
    assert jax.grad(lambda v: (f(v) * jnp.arange(3.0)).sum())(values).tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize(
    ("kind", "dtype"), [(np.asarray, "int8"), (np.asarray, "uint8"), (jnp.asarray, "int32")]
)
def test_padding_stands_for_nothing(kind, dtype):
    sparse = IndexedSlices(kind(np.ones((2, 3), "f")), kind(np.array([0, 2], dtype)), (4, 3))
    padded = sparse.padded(5)
    assert padded.values.shape == (5, 3)
    assert (padded.indices.dtype, padded.values.dtype) == (dtype, np.float32)
    assert type(padded.values) is type(sparse.values)
    np.testing.assert_array_equal(padded.to_dense(), sparse.to_dense())
    again = padded.without_padding()
    assert (again.indices.tolist(), again.values.shape) == ([0, 2], (2, 3))
    assert sparse.padded(2) is sparse
    # Of the narrow ones the last index may be a row: zero is added to it.
    added = jnp.zeros((4, 3)).at[padded.indices].add(padded.values)
    np.testing.assert_array_equal(added, sparse.to_dense())


def test_unbounded_rows_are_kept():
    sparse = IndexedSlices([1.0, 2.0, 3.0], [7, -1, 10**6]).padded(9)
    assert sparse.without_padding().indices.tolist() == [7, 10**6]


# Reduction


@pytest.mark.tensorflow("F16", "F17", "F19", "F20", "H19")
@pytest.mark.parametrize(("runner", "n"), [*((runner, 3) for runner in RUNNERS), ("checked", 8)])
def test_sparse_reduction_equals_dense(runner, n):
    """With every row kept, beside dense leaves, and by itself in each element of a `vmap`."""
    v, i, many = rows(n, 4, 3), indices(n, 4), indices(n, 5, 2, seed=1)

    def f(v, i, many):
        slices = IndexedSlices(v, i, (6, 3))
        one, three = (
            IndexedSlices(k * jnp.ones((1, 1)) + 0 * v[:1, :1], jnp.array([k - 1]), (5, 1))
            for k in (1, 3)
        )
        reduce = lambda value, op="sum": jc.all_reduce(op, value, "data")
        by_op = {op: (reduce(slices, op), reduce(slices.to_dense(), op)) for op in ("sum", "mean")}
        mixed = reduce((one, v[0, 0], {"b": three, "a": v[0, 1] * 2}, None))
        differ = reduce([IndexedSlices(v, jnp.arange(4)), IndexedSlices(jnp.ones((4, 3)), i)])
        nothing = reduce([IndexedSlices(v[:0], i[:0]), IndexedSlices(v[:, :0], i)], "mean")
        each = jax.vmap(lambda k: reduce(IndexedSlices(k.astype("f"), k, (6,))).to_dense())(many)
        return by_op, mixed, differ, nothing, each

    by_op, mixed, differ, nothing, each = (
        jax.tree.map(lambda x: x[-1], found) for found in run(runner, f, n, v, i, many)
    )
    for op, (got, want) in by_op.items():
        np.testing.assert_array_equal(got.indices, np.concatenate(i))
        share = n if op == "mean" else 1
        np.testing.assert_allclose(got.values, np.concatenate(v) / share, rtol=1e-6)
        np.testing.assert_allclose(got.to_dense(), want, rtol=1e-6, atol=1e-6)
    one, total, rest, none = mixed
    for got, k in ((one, 1), (rest["b"], 3)):
        assert (got.values.tolist(), got.indices.tolist()) == ([[k]] * n, [k - 1] * n)
        assert got.dense_shape == (5, 1)
    assert (total, rest["a"], none) == (v[:, 0, 0].sum(), 2 * v[:, 0, 1].sum(), None)
    for got, want in zip(differ, (np.tile(np.arange(4), n), np.concatenate(i)), strict=True):
        assert (got.values.shape, got.indices.tolist()) == ((4 * n, 3), want.tolist())
    assert [(x.values.shape, len(x.indices)) for x in nothing] == [((0, 3), 0), ((4 * n, 0), 4 * n)]
    want = np.zeros((5, 6))
    for r, j, k in np.ndindex(many.shape):
        want[j, many[r, j, k]] += many[r, j, k]
    np.testing.assert_array_equal(each, want)


@pytest.mark.parametrize(
    ("shape", "checked"), [((2, 4), True), ((3, 2), False), ((8, 1), True), ((1, 1), True)]
)
def test_axes_order_the_rows(shape, checked):
    n = shape[0] * shape[1]
    both = ("node", "data")
    f = lambda i: jc.all_reduce("sum", IndexedSlices(i.astype(jnp.float32), i), both)
    found = mapped(f, P(both), mesh=grid(*shape), check_vma=checked)(jnp.arange(2 * n))
    assert found.indices.tolist() == list(range(2 * n))


def test_sparse_dtypes_are_dense_ones():
    """And the mean of float16 neither overflows nor loses small numbers."""
    means = {"float16": "float16", "bfloat16": "bfloat16", "int8": "float32", "int32": "float32",
             "complex64": "complex64", "float8_e5m2": "float8_e5m2"}  # fmt: skip
    x = {dtype: jnp.asarray(np.arange(6).reshape(2, 3)).astype(dtype) for dtype in means}
    tiny = np.float16(6e-8) * 3
    half = jnp.asarray(np.array([[60000, tiny, 0]] * 2, np.float16))

    def f(x, half):
        reduce = lambda op, v: jc.all_reduce(op, IndexedSlices(v, jnp.arange(3)), "data").values
        return {k: (reduce("sum", v), reduce("mean", v)) for k, v in x.items()}, reduce(
            "mean", half
        )

    found, mean_of_half = run("checked", f, 2, x, half)
    assert mean_of_half[0, :2].tolist() == [30000.0, np.float16(tiny / 2)]
    for dtype, (total, mean) in found.items():
        assert (total.dtype, mean.dtype) == (dtype, means[dtype])
        np.testing.assert_array_equal(np.asarray(mean[0], "c8").real, [0, 0.5, 1, 1.5, 2, 2.5])


def test_rows_are_never_made_dense():
    value = {"e": IndexedSlices(rows(1, 4, 3)[0], indices(1, 4)[0], (9973, 3)), "w": rows(1, 5)[0]}
    f = lambda v, i, w: jc.all_reduce(
        "sum", {"e": IndexedSlices(v, i, (9973, 3)), "w": w}, "data",
        options=jc.CommunicationOptions(algorithm="ring"),
    )  # fmt: skip
    program = lowered(f, 8, rows(8, 4, 3), indices(8, 4), rows(8, 5))
    text = program.compile().as_text()
    assert "9973" not in text
    assert "all-reduce" not in text
    gathered = re.findall(r"= (\S+) all-gather\(", text)
    assert sorted(t.split("{")[0] for t in gathered) == ["f32[32,3]", "s32[32]"]
    plan = jc.plan(value, axis_size=8, options=jc.CommunicationOptions(algorithm="ring"))
    assert [leaf.path for leaf in plan.gathers] == ["['e']"]
    assert plan.wire_bytes == 7 * (4 * 3 * 4 + 4 * 4) + 2 * 7 * 4
    assert plan.steps == 14 + 2
    assert plan.nbytes == 48 + 16 + 20


def test_plan_shows_the_rows():
    shapes = [
        IndexedSlices(jax.ShapeDtypeStruct((4, 3), jnp.float16), np.arange(4)),
        np.ones(2, "f"),
    ]
    plan = jc.plan(shapes, axis_size=8)
    assert "rows  float16     native       1     40  [0]" in str(plan)
    assert "sparse leaves: rows and indices by the compiler's own all-gather" in str(plan)
    assert plan.to_dict()["gathers"] == [
        {"path": "[0]", "dtype": "float16", "indices": "int32", "rows": 4, "bytes": 40}
    ]
    step = jc.data_parallel(
        lambda v, i, b: jc.all_reduce("mean", [IndexedSlices(v, i), b.sum(0)], "data"),
        batch_argnums=(0, 1, 2),
    )
    (stated,) = plans_of(step, np.ones((32, 3), "f2"), np.ones(32, "i4"), np.ones((8, 2), "f"))
    assert [leaf.gathers for leaf in stated.gathers] == [40]
    assert (stated.packs[0].nbytes, stated.wire_bytes) == (plan.packs[0].nbytes, plan.wire_bytes)
    assert jc.plan(shapes, axis_size=1).wire_bytes == 0


def test_step_may_return_slices():
    step = jc.data_parallel(
        lambda i: jc.all_reduce("mean", IndexedSlices(i * 1.0, i, (16,)), "data")
    )
    with jax.numpy_dtype_promotion("standard"):
        got = step(np.arange(16))
    assert got.to_dense().tolist() == [i / 8 for i in range(16)]


# What a checked shard_map knows to be the same


def invariantly(invariant, op="sum"):
    def f(x):
        same = IndexedSlices(jnp.ones((2, 3)), jnp.arange(2), (4, 3))
        return jc.all_reduce(op, {"x": x, "e": same}, "data", invariant=invariant)["e"]

    return run("checked", f, 4, rows(4, 2))


def test_invariant_rows_need_a_word():
    with pytest.raises(
        jc.errors.AlreadyReducedError, match=r"over 'data' \(size 4\): leaf \['e'\] is alr"
    ):
        invariantly("error")
    for invariant, op, want in (
        ("replicated", "sum", 4), ("replicated", "mean", 1), ("summed", "sum", 1),
        ("summed", "mean", 0.25),
    ):  # fmt: skip
        got = invariantly(invariant, op)
        assert got.values[0].tolist() == [[want] * 3] * 2, "multiplied, not gathered"
