"""One suite for every algorithm, under every way to map a program over replicas."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BRIEF,
    OPTIONS,
    RUNNERS,
    THOROUGH,
    assert_trees_equal,
    lowered,
    noise,
    rows,
    run,
    tree,
)

import jaxcoll as jc


def reduced(op, options, runner, n, value):
    return run(runner, lambda x: jc.all_reduce(op, x, "data", options=options), n, value)


@pytest.mark.parametrize(
    ("op", "name", "runner", "n"),
    [("sum", *case) for case in THOROUGH] + [("mean", *case) for case in BRIEF],
)
def test_a_whole_tree_equals_the_reference_exactly_where_sums_are_exact(op, name, runner, n):
    value = tree(n)

    def reference(x):
        total = np.asarray(x).astype(np.float64).sum(0)
        dtype = np.float32 if op == "mean" and x.dtype == jnp.int32 else x.dtype
        return np.broadcast_to(total / n if op == "mean" else total, x.shape).astype(dtype)

    got = reduced(op, OPTIONS[name], runner, n, value)
    want = jax.tree.map(reference, value)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(
            np.asarray(g, "f8"), w.astype("f8"), rtol=2e-3 * (g.dtype == np.float16) + 2e-7
        )


@pytest.mark.parametrize(("name", "runner", "n"), BRIEF)
def test_float32_sums_stay_within_n_eps_of_the_magnitudes(name, runner, n):
    x = noise(n, 37)
    got = np.asarray(reduced("sum", OPTIONS[name], runner, n, {"x": x})["x"], np.float64)
    exact = np.asarray(x, np.float64).sum(0)
    bound = n * np.finfo(np.float32).eps * np.abs(np.asarray(x, np.float64)).sum(0)
    assert np.all(np.abs(got - exact) <= bound)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_replica_ends_with_the_same_bits(options, runner):
    def f(x):
        return jc.all_reduce("sum", x, "data", options=options)

    if runner == "checked":
        spec = jax.sharding.PartitionSpec
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:7]), ("data",))
        out = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec("data"), out_specs=spec()))(
            noise(7, 13)
        )
        bits = [np.asarray(s.data).tobytes() for s in out.addressable_shards]
    else:
        bits = [np.asarray(row).tobytes() for row in run(runner, f, 7, noise(7, 13))]
    assert len(bits) == 7
    assert len(set(bits)) == 1


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reduction_is_linear(options, runner):
    x, y = rows(4, 9, seed=1), rows(4, 9, seed=2)
    f = lambda v: reduced("sum", options, runner, 4, v)
    assert_trees_equal(f(2 * x + y), 2 * f(x) + f(y))


@pytest.mark.parametrize(
    ("name", "runner"), [*((name, "checked") for name in OPTIONS), ("auto", "unchecked")]
)
def test_works_without_jit(name, runner):
    value = {"a": rows(3, 4), "b": rows(3)}
    f = lambda x: jc.all_reduce("mean", x, "data", options=OPTIONS[name])
    got = run(runner, f, 3, value, jit=False)
    np.testing.assert_allclose(got["a"][0], np.asarray(value["a"]).mean(0), rtol=1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_nested_vmap_reduces_each_row_by_itself(options, runner):
    x = rows(4, 3, 5)
    f = jax.vmap(lambda v: jc.all_reduce("sum", v, "data", options=options))
    np.testing.assert_array_equal(run(runner, f, 4, x)[0], np.asarray(x).sum(0))


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
    [*((shape, True) for shape in [(2, 4), (8, 1), (1, 8), (1, 1), (2, 3)]), ((2, 3), False)],
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
