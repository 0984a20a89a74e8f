"""all_gather and broadcast inside a program: joined to the bit, and differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    RUNNERS,
    assert_trees_equal,
    grid,
    lowered,
    mapped,
    per_replica,
    refused,
    rows,
    run,
)

import jaxcoll as jc

P = jax.sharding.PartitionSpec

OPTIONS = {
    "auto": jc.CommunicationOptions(),
    "packed": jc.CommunicationOptions(bytes_per_pack=40),
    "ring": jc.CommunicationOptions(implementation="ring"),
    "halving-packed": jc.CommunicationOptions(algorithm="halving_doubling", bytes_per_pack=40),
    "shuffle": jc.CommunicationOptions(algorithm="shuffle", shards=2),
}
EVERY = pytest.mark.parametrize("runner", RUNNERS)


def everything(n):
    return {
        "matrix": rows(n, 2, 3),
        "odd": [rows(n, 7, 1), None, rows(n, 5, 1, dtype=np.int32)],
        "empty": rows(n, 0, 4),
        "half": rows(n, 1, 11, dtype=jnp.bfloat16),
        "flags": rows(n, 3, 2) > 0,
    }


@pytest.mark.tensorflow("G20")
@pytest.mark.parametrize(("runner", "n"), [*((r, 3) for r in RUNNERS), ("checked", 5)])
def test_gather_is_concatenation(runner, n):
    tree = everything(n)
    names = OPTIONS if runner in ("checked", "pmap") else ["auto"]

    def f(v):
        gather = lambda name, axis: jc.all_gather(v, "data", axis=axis, options=OPTIONS[name])
        return {name: [gather(name, axis) for axis in (-1, 0)] for name in names}

    for outs in run(runner, f, n, tree).values():
        for axis, out in zip((-1, 0), outs, strict=True):
            want = jax.tree.map(lambda x, a=axis: np.concatenate(list(np.asarray(x)), a), tree)
            for i in range(n):
                assert_trees_equal(jax.tree.map(lambda x, i=i: x[i], out), want)


@pytest.mark.tensorflow("K12", "K13")
@EVERY
def test_gather_cotangent_is_own_slice(runner):
    """Of one array, and of one leaf of several; another c on each replica. Tangents are gathered."""
    n = 5
    names = OPTIONS if runner in ("checked", "pmap") else ["auto", "packed"]

    def grads(x, other, c):
        def loss(v, name):
            gather = lambda tree: jc.all_gather(tree, "data", axis=-1, options=OPTIONS[name])
            first, second = gather([v, other])
            return jnp.sum(gather(v) * c) + jnp.sum(first * c) + jnp.sum(second)

        tangent = jax.jvp(lambda v: jc.all_gather(v, "data"), (x,), (other[:, :3],))[1]
        return [jax.grad(loss)(x, name) for name in names], tangent + 0 * c[0, 0]

    weights, other = rows(n, 2, 3 * n), rows(n, 2, 4)
    total = 2 * np.asarray(weights).sum(0)
    found, tangent = per_replica(runner, grads, n, rows(n, 2, 3), other, weights)
    np.testing.assert_array_equal(tangent[1], other[..., :3].reshape(-1, 3))
    for got in found:
        for i in range(n):
            np.testing.assert_array_equal(got[i], total[:, 3 * i : 3 * i + 3])


def test_options_shape_the_gather():
    tree = [rows(4, 2), rows(4, 3), rows(4, 5)]

    def count(word, **asked):
        options = jc.CommunicationOptions(**asked)
        f = lambda v: jc.all_gather(v, "data", options=options)
        return lowered(f, 4, tree).as_text().count(f'"stablehlo.{word}"')

    assert count("all_gather") == 3
    assert count("all_gather", bytes_per_pack=1000) == 1
    assert count("all_gather", implementation="ring") == 0
    assert count("collective_permute", implementation="ring") == 3 * 3
    assert count("collective_permute", implementation="ring", bytes_per_pack=1000) == 3


def test_levels_send_only_their_own():
    options, over = jc.CommunicationOptions(algorithm="ring/ring"), ("node", "data")
    f = jax.shard_map(lambda x: jc.all_gather(x, over, options=options),
                      mesh=grid(2, 4), in_specs=P(over), out_specs=P())  # fmt: skip
    (body,) = (eqn.params["jaxpr"] for eqn in jax.make_jaxpr(f)(np.zeros(48, "f")).eqns)
    sent = [e for e in body.eqns if e.primitive.name == "ppermute"]
    assert [(e.params["axis_name"], e.invars[0].aval.size) for e in sent] == [
        (("node",), 6), *[(("data",), 12)] * 3,
    ]  # fmt: skip


def test_invariant_values_are_repeated():
    gathered = mapped(lambda x: jc.all_gather(x, "data"), P(), mesh=3)(jnp.arange(2.0))
    assert gathered.tolist() == [0, 1, 0, 1, 0, 1]
    # One value behind three slices: its derivative is that of all of them together.
    f = lambda x, c: jax.grad(lambda v: jnp.sum(jc.all_gather(v, "data") * c))(x)
    found = mapped(f, P(), mesh=3)(jnp.zeros(2), jnp.arange(6.0))
    assert found.tolist() == [0 + 2 + 4, 1 + 3 + 5]


@pytest.mark.tensorflow("G16")
def test_missing_dimension_is_refused():
    tree = {"a": rows(2, 3, 4), "b": rows(2, 3)}
    for value, axis, message in (
        (tree, 1, r"`all_gather`: leaf \['b'\] has shape \(3,\) and so no axis 1; expected one from -1 to 0"),
        (tree, -3, r"leaf \['a'\] has shape \(3, 4\) and so no axis -3; expected one from -2 to 1"),
        *((tree, odd, f"expected `axis` to be an integer; got {odd}") for odd in (0.0, True, None)),
        (rows(2), 0, r"the value is a scalar, which has no axis 0; .*`x\[None\]`"),
    ):  # fmt: skip
        refused(message, lambda v, axis=axis: jc.all_gather(v, "data", axis=axis), value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: jc.all_gather({"k": "x"}, "data"), ValueError,
         r"cannot gather leaf \['k'\]: expected an array, got str"),
        (lambda x: jc.all_gather({"k": np.array([None])}, "data"), ValueError,
         "expected an array, got an array of object"),
        (lambda x: jc.all_gather({"k": jc.IndexedSlices(x[:, None], jnp.arange(3), (3, 1))}, "data"),
         NotImplementedError, r"leaf \['k'\] is an IndexedSlices. To gather the rows"),
        (lambda x: jc.all_gather(x, "nope"), NameError,
         "`all_gather` over axis 'nope': no such axis here"),
        (lambda x: jc.all_gather(x, "data", options=3), ValueError,
         "`options` must be a CommunicationOptions"),
        *((lambda x, source=source: jc.broadcast(x, "data", source=source), ValueError,
           f"expects `source` to be an integer from 0 to 1, .* along 'data'; got {source}")
          for source in (2, -1, 1.0, True, None)),
    ],
)  # fmt: skip
def test_ungatherable_values_are_refused(call, error, words):
    refused(words, call, rows(2, 3), error=error)


# broadcast


@pytest.mark.tensorflow("G10", "G11")
@pytest.mark.parametrize(
    ("runner", "name"), [*((r, "auto") for r in RUNNERS), ("checked", "ring"), ("pmap", "packed")]
)
def test_broadcast_sends_the_source(runner, name):
    """What is not a number elsewhere does not spread, and the derivative goes to the source."""
    n, source = 5, 3
    tree = {**everything(n), "scalar": rows(n), "bad": np.full((n, 2), np.nan, "f")}
    tree["bad"][source], tree["bad"][1] = [2, 3], np.inf
    c = np.arange(n, dtype="f")

    def f(v, c):
        send = lambda v: jc.broadcast(v, "data", source=source, options=OPTIONS[name])
        back = jax.grad(lambda x: jnp.sum(send(x) * c))(v["matrix"])
        rank = jax.lax.axis_index("data")
        return send(v), jc.psum(jnp.where(jnp.arange(n) == rank, back[0, 0], 0), "data")

    out, back = run(runner, f, n, tree, c)
    want = jax.tree.map(lambda x: x[source], tree)
    for i in range(n):
        assert_trees_equal(jax.tree.map(lambda x, i=i: x[i], out), want)
        assert back[i].tolist() == [0, 0, 0, c.sum(), 0]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@EVERY
def test_prng_keys_travel(runner, impl):
    """In trees, along either dimension; what a key gives is drawn to show what came."""
    n = 3

    def f(seeds):
        keys = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(seeds)
        tree = {"keys": keys[None], "seeds": seeds}
        gathered = jc.all_gather(tree, "data", axis=-1)["keys"]
        along = jc.all_gather(keys[None], "data", axis=0)
        sent = jc.broadcast({**tree, "one": keys[0]}, "data", source=1)
        assert sent["one"].dtype == gathered.dtype == keys.dtype
        return [jax.random.key_data(k) for k in (gathered, along, sent["keys"], sent["one"])]

    seeds = np.arange(2 * n).reshape(n, 2)
    every = jax.random.key_data(jax.vmap(lambda s: jax.random.key(s, impl=impl))(seeds.ravel()))
    words = every.shape[-1]
    for each in zip(*run(runner, f, n, seeds), strict=True):
        wants = every[None], every.reshape(n, 2, words), every[None, 2:4], every[2]
        for got, want in zip(each, wants, strict=True):
            np.testing.assert_array_equal(got, want)
