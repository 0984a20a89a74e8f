"""all_gather and broadcast inside a program: joined to the bit, and differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    RUNNERS,
    grid,
    lowered,
    mapped,
    rows,
    run,
)

import jaxcoll as jc

P = jax.sharding.PartitionSpec

EVERY = pytest.mark.parametrize("runner", RUNNERS)


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


# broadcast


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
