"""Norm and finiteness of whole gradients and of shards, the same on every replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import RUNNERS, grid, mapped, program, run

import jaxcoll as jc

RNG = np.random.default_rng(7)
TREE = {
    "w": RNG.standard_normal((8, 5)).astype("f"),
    "half": RNG.standard_normal((8, 3)).astype(np.float16),
    "none": None,
    "scalar": np.arange(8, dtype="f"),
    "complex": (RNG.standard_normal(8) + 1j * RNG.standard_normal(8)).astype(np.complex64),
}


def of_all(tree):
    return np.sqrt(sum(np.sum(np.abs(x.astype(np.complex128)) ** 2) for x in jax.tree.leaves(tree)))


def test_whole_trees_send_nothing():
    whole = {k: v for k, v in TREE.items() if k in ("w", "scalar")}
    np.testing.assert_allclose(jc.global_norm(TREE), of_all(TREE), rtol=1e-6)
    np.testing.assert_allclose(jc.global_norm(whole), optax.tree.norm(whole), rtol=1e-6)
    step = jc.data_parallel(lambda t, x: (jc.global_norm(t), jc.all_finite(t)))
    jc.assert_collectives(jc.inspect(step, TREE, np.ones(8, "f")), max_count=0)
    assert jc.global_norm({}) == 0
    assert jc.all_finite({"a": None, "n": 3})


@pytest.mark.parametrize("runner", RUNNERS)
def test_norm_covers_all_shards(runner):
    norms = run(runner, lambda t: jc.global_norm(t, "data"), 8, TREE)
    np.testing.assert_allclose(norms, np.full(8, of_all(TREE)), rtol=1e-6)


def test_typed_whole_leaves_count_once():
    """Over two axes: whole, a shard over one axis, a shard over both. One scalar travels."""
    both, spec = ("node", "data"), jax.sharding.PartitionSpec
    specs = {"whole": spec(), "some": spec("data"), "all": spec(both)}
    tree = {k: RNG.standard_normal(16).astype("f") for k in specs}

    def f(tree):
        return jc.global_norm(tree, both), jc.all_finite(tree, both)

    program = mapped(f, (specs,), mesh=grid(2, 4))
    norm, finite = program(tree)
    np.testing.assert_allclose(norm, of_all(tree), rtol=1e-6)
    assert finite
    assert program.lower(tree).as_text().count('"stablehlo.all_reduce"') == 2
    tree["some"][5] = np.inf
    assert not program(tree)[1]


def test_leaves_beside_shards_count_once():
    """Shards over one axis and over both, and an array that all replicas hold."""
    mesh = grid(2, 4)
    both, arrays = ("node", "data"), [RNG.standard_normal(300).astype("f") for _ in range(3)]
    tree = [jc.shard(arrays[0], "data", mesh=mesh), jc.shard(arrays[1], both, mesh=mesh), arrays[2]]

    def step_of(f):
        return jc.data_parallel(f, mesh=mesh, axis_name=both)

    answers = step_of(lambda t, x: (jc.global_norm(t, both), jc.all_finite(t, both)))(
        tree, np.ones(8)
    )
    np.testing.assert_allclose(answers[0], of_all(arrays), rtol=1e-6)
    assert answers[1]
    for function in (jc.global_norm, jc.all_finite):
        for axes in (None, "data"):
            with pytest.raises(ValueError, match="is `Shards` along .*Only this replica's part"):
                step_of(lambda t, x, f=function, a=axes: f(t, a)).lower(tree, np.ones(8))
    with pytest.raises(ValueError, match=r"leaf \[1\] must be the same .* differs between them"):
        step_of(lambda t, x: jc.global_norm([t[0], x], both)).lower(tree, np.ones(8))


@pytest.mark.parametrize("runner", RUNNERS)
def test_bad_element_is_known_everywhere(runner):
    def tree(bad):
        half = np.array([1, 1, bad, 1], np.float16)
        return {"a": np.ones((4, 3), "f"), "b": half, "n": np.ones(4, int)}

    trees = [tree(bad) for bad in (1, np.nan, np.inf, -np.inf)]
    answers = run(runner, lambda ts: [jc.all_finite(t, "data") for t in ts], 4, trees)
    assert [np.unique(each).tolist() for each in answers] == [[True], [False], [False], [False]]


@pytest.mark.parametrize(
    "asked",
    [[("native", "mean")],
     [("native", "sum"), ("ring", "mean"), ("halving_doubling", "mean"), ("shuffle", "mean")]],
    ids=["native", "others"],
)  # fmt: skip
def test_reduction_keeps_nonfinite_elements(asked):
    """So nobody has to ask: inf and NaN come through every algorithm, packing and scaling."""
    kinds = {"f": np.float32, "h": np.float16, "b": jnp.bfloat16}

    def f(t):
        answers = []
        for algorithm, op in asked:
            options = jc.CommunicationOptions(algorithm=algorithm, bytes_per_pack=1 << 20)
            grads = jc.all_reduce(op, t, "data", options=options)
            answers.append([jc.all_finite(grads), jnp.isfinite(jc.global_norm(grads))])
        return jnp.array(answers)

    step = program("pmap", f, 8)
    for leaf, value in ((None, 1), ("f", np.inf), ("h", np.nan), ("h", np.inf), ("b", -np.inf)):
        tree = {k: np.ones((8, 5), kind) for k, kind in kinds.items()}
        if leaf:
            tree[leaf][5, 1] = value
        assert (step(tree) == (leaf is None)).all(), (leaf, value)
