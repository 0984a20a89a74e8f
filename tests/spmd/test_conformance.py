"""One suite for every algorithm, under every way to map a program over replicas."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BRIEF, OPTIONS, assert_trees_equal, lowered, noise, rows, run, tree

import jaxcoll as jc

EVERY = pytest.mark.parametrize(("name", "runner", "n"), BRIEF)
MATRIX = (3, 5)


@functools.cache
def found(name, runner, n):
    """What one program of this kind gives, for all the laws below: compiling it is what takes time."""
    x, y = rows(n, 9, seed=1), rows(n, 9, seed=2)
    value = {"tree": tree(n), "noise": noise(n, 37), "rows": rows(n, *MATRIX)}

    def f(value, x, y):
        reduce = lambda v, op="sum": jc.all_reduce(op, v, "data", options=OPTIONS[name])
        return {
            "sum": reduce(value["tree"]),
            "mean": reduce(value["tree"], "mean"),
            "noise": reduce({"x": value["noise"]})["x"],
            "each row": jax.vmap(reduce)(value["rows"]),
            "linear": (reduce(2 * x + y), 2 * reduce(x) + reduce(y)),
        }

    return value, jax.tree.map(np.asarray, run(runner, f, n, value, x, y))


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


@EVERY
def test_a_whole_tree_equals_the_reference_exactly_where_sums_are_exact(name, runner, n):
    value, got = found(name, runner, n)
    for op in ("sum", "mean"):
        equals_the_reference(got[op], value["tree"], op, n)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("n", [1, 4, 6, 7])
def test_so_does_it_over_other_numbers_of_replicas(name, n):
    value = tree(n)
    f = lambda x: jc.all_reduce("sum", x, "data", options=OPTIONS[name])
    equals_the_reference(run("checked", f, n, value), value, "sum", n)


@EVERY
def test_float32_sums_stay_within_n_eps_of_the_magnitudes(name, runner, n):
    value, got = found(name, runner, n)
    x = np.asarray(value["noise"], np.float64)
    bound = n * np.finfo(np.float32).eps * np.abs(x).sum(0)
    assert np.all(np.abs(got["noise"].astype(np.float64) - x.sum(0)) <= bound)


@EVERY
def test_every_replica_ends_with_the_same_bits(name, runner, n):
    _, got = found(name, runner, n)
    for leaf in jax.tree.leaves(got):
        bits = [row.tobytes() for row in leaf]
        assert len(bits) == n
        assert len(set(bits)) == 1


@EVERY
def test_reduction_is_linear(name, runner, n):
    _, got = found(name, runner, n)
    assert_trees_equal(*got["linear"])


@EVERY
def test_nested_vmap_reduces_each_row_by_itself(name, runner, n):
    value, got = found(name, runner, n)
    np.testing.assert_array_equal(got["each row"][0], np.asarray(value["rows"]).sum(0))


@pytest.mark.parametrize(
    ("name", "runner", "n"),
    [("auto", "unchecked", 2), ("auto", "checked", 2), ("ring", "checked", 2),
     ("halving_doubling", "checked", 3), ("one-owner", "checked", 2)],
)  # fmt: skip
def test_works_without_jit(name, runner, n):
    f = lambda x: jc.all_reduce("mean", x, "data", options=OPTIONS[name])
    got = run(runner, f, n, {"a": rows(n, 4)}, jit=False)
    np.testing.assert_allclose(got["a"][0], np.asarray(rows(n, 4)).mean(0), rtol=1e-6)


def test_only_the_compilers_own_crosses_a_vmap_and_devices_at_once():
    options = jc.CommunicationOptions(algorithm="ring")
    paired = jc.CommunicationOptions(algorithm="ring/ring")

    def f(v, options=options):
        reduce = lambda r: jc.all_reduce("sum", r, ("data", "rows"), options=options)
        return jax.vmap(reduce, axis_name="rows")(v)

    for runner, mapped in (("unchecked", "rows"), ("vmap", "data")):
        words = rf"'ring' over axes .* maps one of them \('{mapped}'\)\. Ask for 'ring/ring'"
        with pytest.raises(ValueError, match=words):
            run(runner, f, 4, rows(4, 3, 5))
        got = run(runner, lambda v: f(v, paired), 4, rows(4, 3, 5))
        want = np.asarray(rows(4, 3, 5)).sum((0, 1))
        np.testing.assert_array_equal(got[0], np.broadcast_to(want, (3, 5)))


def test_an_axis_of_an_inner_vmap_can_be_reduced_too_where_jax_can():
    x = rows(4, 3, 5)

    def f(v):
        return jax.vmap(lambda r: jc.all_reduce("sum", r, ("data", "rows")), axis_name="rows")(v)

    for runner in ("unchecked", "pmap", "vmap"):
        got = run(runner, f, 4, x)[0]
        np.testing.assert_array_equal(got, np.broadcast_to(np.asarray(x).sum((0, 1)), (3, 5)))
    with pytest.raises(ValueError, match="over axis 'rows': JAX cannot communicate over the axis"):
        run("checked", f, 4, x)


@pytest.mark.parametrize(
    ("shape", "checked"),
    [((8, 1), True), ((1, 1), True), ((2, 3), True), ((2, 3), False)],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_tuple_of_axes_is_one_axis(shape, options, checked):
    n = shape[0] * shape[1]
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]).reshape(shape), ("node", "data"))
    x = {"a": rows(n, 5), "b": rows(n, 3)}
    f = jax.shard_map(
        lambda v: jc.all_reduce("sum", v, ("node", "data"), options=options),
        mesh=mesh, in_specs=spec(("node", "data")), out_specs=spec(), check_vma=checked,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(f)(x)["a"][0], np.asarray(x["a"]).sum(0))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_replica_emits_no_collective(options):
    f = lambda x: jc.all_reduce("mean", x, "data", options=options)
    program = lowered(f, 1, {"a": rows(1, 4), "b": rows(1)})
    for text in (program.as_text(), program.compile().as_text()):
        assert not re.search(r"stablehlo\.(all|coll)|all-reduce\(|collective-permute\(", text)


def test_the_requested_program_has_one_collective_a_pack():
    value = {k: rows(8, 10) for k in "abcd"}
    for nbytes, count in ((0, 4), (40, 4), (80, 2), (1000, 1)):
        options = jc.CommunicationOptions(bytes_per_pack=nbytes)
        program = lowered(lambda x, o=options: jc.all_reduce("sum", x, "data", options=o), 8, value)
        assert program.as_text().count('"stablehlo.all_reduce"') == count
        assert program.compile().as_text().count(" all-reduce(") == 1, "XLA combines them on CPU"


def test_the_ring_is_a_ring_in_the_compiled_program():
    options = jc.CommunicationOptions(implementation="ring")
    program = lowered(lambda x: jc.all_reduce("sum", x, "data", options=options), 8, rows(8, 16))
    compiled = program.compile().as_text()
    assert compiled.count(" collective-permute(") == 2 * 7
    assert "all-reduce" not in compiled
    assert "all-gather" not in compiled


def test_a_tree_without_leaves_is_itself():
    assert run("vmap", lambda x: (jc.all_reduce("sum", {"a": None, "b": ()}, "data"), x), 2,
               rows(2))[0] == {"a": None, "b": ()}  # fmt: skip
    program = lowered(lambda x: (jc.all_reduce("sum", {}, "data"), jc.all_reduce("sum", x, "data"))[1],
                      2, rows(2, 0))  # fmt: skip
    assert "stablehlo.all_reduce" not in program.as_text()
