"""The halves of an all-reduce by themselves: what travels, in which order, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    RUNNERS,
    P,
    assert_trees_equal,
    gaussian,
    grid,
    lowered,
    mapped,
    per_replica,
    plans_of,
    rows,
    run,
)

import jaxcoll as jc
from jaxcoll._collectives.parts import describe_tree
from jaxcoll._plan.packs.shard_layout import lay_out


def both(op, options=None):
    scatter = functools.partial(jc.reduce_scatter, op, axis_name="data", options=options)
    return lambda v: jc.all_gather(scatter(v), "data", options=options)


def test_shards_are_equal_and_lean():
    n, value = 8, {"w": rows(8, 300, 40), "b": rows(8, 77), "h": rows(8, 9, dtype=np.float16)}
    shards = per_replica("checked", lambda v: jc.reduce_scatter("sum", v, "data"), n, value)
    assert isinstance(shards, jc.Shards)
    assert [(p.shape, p.dtype.name) for p in shards.parts] == [
        ((8, 12, 128), "float32"), ((8, 1, 128), "float16")
    ]  # fmt: skip
    assert shards.layout.nbytes == (12 * 4 + 2) * 128
    whole = np.asarray(shards.parts[0]).reshape(-1)
    np.testing.assert_array_equal(whole[:77], np.asarray(value["b"]).sum(0))
    np.testing.assert_array_equal(whole[77 : 77 + 12000], np.asarray(value["w"]).sum(0).reshape(-1))
    assert not whole[77 + 12000 :].any()
    # The layout is a value: made from shapes alone it is the same, and a static argument.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), value)
    again = lay_out(*describe_tree(shapes, {"data": n}, "test"), n)
    assert again == shards.layout
    assert hash(again) == hash(shards.layout)
    assert repr(again) == "ShardLayout(3 leaves in 2 packs, 8 shards each)"


def test_rows_stay_reduce_scatters():
    value = {"w": rows(8, 64, 128), "b": rows(8, 10)}
    options = jc.CommunicationOptions(bytes_per_pack=1000)
    requested = lowered(both("mean", options), 8, value)
    text = requested.as_text()
    assert text.count('"stablehlo.reduce_scatter"') == text.count('"stablehlo.all_gather"') == 2
    assert "(tensor<8x8x128xf32>) -> tensor<1x8x128xf32>" in text  # no flat buffer: see the docs
    assert "all_reduce" not in text
    compiled = requested.compile().as_text()
    assert " reduce-scatter(" in compiled
    assert " all-reduce(" not in compiled


def test_two_axes_keep_replica_order():
    axes, x = ("node", "data"), rows(8, 2000)
    algorithms = ("native/native", "ring/halving_doubling", "shuffle/native")

    def f(v):
        found = []
        for options in (jc.CommunicationOptions(algorithm=a) for a in algorithms):
            shards = jc.reduce_scatter("sum", v[0], axes, options=options)
            found.append((shards.parts[0], jc.all_gather(shards, axes, options=options)))
        return found

    outs = [(P(axes), P())] * len(algorithms)
    for parts, whole in mapped(f, P(axes), outs, grid(2, 4))(x):
        np.testing.assert_array_equal(whole, np.asarray(x).sum(0))
        np.testing.assert_array_equal(np.asarray(parts).reshape(-1)[:2000], np.asarray(x).sum(0))


def test_reproducible_halves_have_equal_bits():
    value = {"a": gaussian(8, 999), "b": rows(8, 5)}
    asked = [{}, {"bytes_per_pack": 64}, {"algorithm": "shuffle"}]
    options = [jc.CommunicationOptions(reproducible=True, **more) for more in asked]

    def f(v):
        want = jc.all_reduce("mean", v, "data", options=options[0])
        return want, [both("mean", o)(v) for o in options]

    want, found = run("checked", f, 8, value)
    for got in found:
        assert_trees_equal(got, want)


def test_plan_costs_half_as_much():
    value = {"w": np.ones((64, 128), "f"), "b": np.ones(10, np.float16)}
    options = jc.CommunicationOptions(algorithm="rechd", bytes_per_pack=1 << 12)
    step = jc.data_parallel(
        lambda t, x: both("mean")(jax.tree.map(lambda y: x.sum().astype(y.dtype) * y, t)),
        options=options,
    )
    scatter, gather = plans_of(step, value, np.ones(8, "f"))
    kinds = ("reduce_scatter", "all_gather")
    asked = [jc.plan(value, axis_size=8, options=options, collective=kind) for kind in kinds]
    for made, plan in zip((scatter, gather), asked, strict=True):
        assert made.packs == plan.packs
        assert made.reasons == plan.reasons
        assert made.name == plan.name
        assert made.wire_bytes == plan.wire_bytes
        assert plan.steps == 2 * 3
    whole = jc.plan({"w": value["w"]}, axis_size=8)
    half = jc.plan({"w": value["w"]}, axis_size=8, collective="reduce_scatter")
    assert whole.wire_bytes == 2 * half.wire_bytes
    assert half.steps == 1
    assert "reduce_scatter MEAN of 1 leaf," in str(half)
    assert "the compiler's own reduce-scatter and all-gather, carried by memory" in str(half)
    assert str(asked[1]).startswith("all_gather of 2 leaves")
    asked = {"topology": "h100:8", "options": options}
    there = [jc.plan(value, collective=kind, **asked) for kind in ("all_reduce", *kinds)]
    whole, scatter_seconds, gather_seconds = (plan.predicted.seconds for plan in there)
    assert 0 < gather_seconds < scatter_seconds < whole
    report = str(jc.inspect(step, value, np.ones(8, "f")))
    assert f"pack 1 of {scatter.name} (['w'])" in report
    assert f"pack 0 of {gather.name} (['b'])" in report


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


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("runner", RUNNERS)
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
