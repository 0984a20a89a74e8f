"""`reproducible=True`: the same bits for every packing, order, placement and algorithm."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RUNNERS, P, each_row, mapped, noise, per_replica, refused, rows, run
from hypothesis import given
from hypothesis import strategies as st

import jaxcoll as jc
from jaxcoll._plan.algorithms import DESCRIPTIONS, stages, sums_in_tree_order
from jaxcoll._plan.choose import choose
from jaxcoll._plan.world import World

SHAPES = {"a": (301,), "b": (), "c": (32, 8)}
ASKED = {
    "auto": {},
    "one-pack": {"bytes_per_pack": 1 << 20},
    "small-packs": {"bytes_per_pack": 300},
    "shuffle": {"algorithm": "shuffle"},
    "shuffled-pack": {"algorithm": "shuffle", "bytes_per_pack": 1 << 20},
    "in-three": {"shards": 3, "algorithm": "halving_doubling"},
}


def reproducible(**asked):
    return jc.CommunicationOptions(reproducible=True, **asked)


def pairs_of(terms):
    """The fixed tree, in NumPy, over the next power of two with missing leaves passed over."""
    terms = [*terms, *[None] * ((1 << (len(terms) - 1).bit_length()) - len(terms))]
    while len(terms) > 1:
        terms = [a if b is None else a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def factors(n, dtype, seed=0):
    """Two trees; the products of their leaves are summed, which is where compilers fuse."""
    leaves = {k: noise(n, *shape, seed=seed + i) for i, (k, shape) in enumerate(SHAPES.items())}
    if dtype == "float16":  # keep the products within its range
        leaves = jax.tree.map(lambda x: np.clip(x, -100, 100), leaves)
    others = {k: np.tanh(noise(n, *shape, seed=seed + 9)) for k, shape in SHAPES.items()}
    return jax.tree.map(lambda x: x.astype(dtype), (leaves, others))


def wanted(left, right):
    """The sums of the products: each product rounded, and each sum of the tree."""
    return jax.tree.map(lambda x, y: pairs_of(list(x * y)), left, right)


def differing(got, want):
    """How many elements of each leaf have other bits."""
    view = lambda x: np.atleast_1d(np.asarray(x)).view(f"u{np.asarray(x).dtype.itemsize}")
    return {k: int((view(got[k]) != view(want[k])).sum()) for k in want}


@pytest.mark.parametrize(
    ("runner", "n", "asked", "narrow", "as_users_do"),
    [
        ("checked", 5, ["shuffled-pack"], [], False),
        ("checked", 6, ["auto"], ["auto"], False),
        ("checked", 3, [*ASKED][:5], [], False),
        ("checked", 8, ["auto", "one-pack", "shuffled-pack"], ["auto", "shuffle"], True),
        *((runner, 8, ["shuffled-pack", "in-three"], [], runner == "unchecked")
          for runner in RUNNERS if runner != "checked"),
    ],
    ids=str,
)  # fmt: skip
def test_every_element_follows_one_tree(request, runner, n, asked, narrow, as_users_do):
    """Each reduction in the program is of products of its own, so that any may be fused with it."""
    if as_users_do:  # what is fused; the order of the sums can be seen without
        request.getfixturevalue("optimized")
    kinds = [("float32", s) for s in asked]
    kinds += [(dtype, s) for dtype in ("bfloat16", "float16") for s in narrow]
    products = {kind: factors(n, kind[0], seed=10 * k) for k, kind in enumerate(kinds)}

    def f(*pairs):
        return [
            jc.all_reduce(
                "sum", jax.tree.map(jnp.multiply, *pair), "data", options=reproducible(**ASKED[s])
            )
            for (_, s), pair in zip(kinds, pairs, strict=True)
        ]

    for kind, got in zip(kinds, run(runner, f, n, *products.values()), strict=True):
        got = jax.tree.map(lambda x: x[0], got)
        assert not any(differing(got, wanted(*products[kind])).values()), kind


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("n", [6, 8])
def test_mean_keeps_bits_in_sums(n):
    """A multiplication by 1/6 and an addition after it may otherwise become one rounding."""
    x, other = noise(n, 301), noise(n, 301, seed=1)[0]

    def f(alone, unpacked, packed):
        def mean(v, **asked):
            tree = {"a": v, "b": v[:7]}
            return jc.all_reduce("mean", tree, "data", options=reproducible(**asked))["a"]

        sums = [mean(v, bytes_per_pack=k) + other for v, k in ((unpacked, 0), (packed, 1 << 20))]
        return mean(alone), sums

    alone, sums = run("checked", f, n, x, x, x)
    for got in sums:
        assert not any(differing({"": got[0]}, {"": alone[0] + other}).values())


AXES = [
    ({"data": 2, "node": 4}, ["", "shuffle", "shuffle/shuffle", "halving_doubling/shuffle"]),
    ({"c": 2, "a": 2, "b": 2}, ["", "shuffle"]),
    ({"node": 3, "data": 2}, ["", "shuffle", "shuffle/shuffle", "halving_doubling/shuffle"]),
]


@pytest.mark.parametrize(("sizes", "algorithms"), AXES)
def test_axes_count_as_named(sizes, algorithms):
    """The mesh has them in another order."""
    names = tuple(sizes)
    shape = [sizes[a] for a in sorted(sizes)]
    mesh = jax.make_mesh(
        shape, sorted(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(shape)
    )
    x = noise(math.prod(shape), 101)
    asked = [reproducible(algorithm=a or None) for a in algorithms]
    f = lambda v: [jc.all_reduce("sum", v[0], names, options=o) for o in asked]
    for got in mapped(f, P(names), mesh=mesh)(x):
        assert not any(differing({"": got}, {"": pairs_of(list(x))}).values())


@given(st.lists(st.sampled_from(sorted(DESCRIPTIONS)), min_size=1, max_size=3), st.tuples(*[st.integers(1, 5)] * 3))  # fmt: skip
def test_reproducible_names_follow_the_tree(names, over):
    """Add names of replicas instead of numbers: trees within and between groups, and the flat one."""
    plan = stages("/".join(names), 0, over)
    if not sums_in_tree_order(plan):
        return
    ranks = np.arange(math.prod(over)).reshape(over).astype(str).tolist()

    def joined(terms):
        """As `pairs_of`, in words."""
        while len(terms) > 1:
            odd = terms[len(terms) // 2 * 2 :]
            terms = [f"({a}+{b})" for a, b in zip(terms[::2], terms[1::2], strict=False)] + odd
        return terms[0]

    flat = np.array(ranks, dtype=object)
    for stage in plan:
        others = [a for a in range(3) if a not in stage.axes]
        grouped = flat.transpose([*others, *stage.axes])
        kept = grouped.shape[: len(others)]
        summed = [joined(list(row)) for row in grouped.reshape(-1, stage.replicas)]
        flat = np.expand_dims(np.array(summed, dtype=object).reshape(kept), stage.axes)
    assert flat.item() == joined(np.array(ranks, dtype=object).reshape(-1).tolist())


@pytest.mark.parametrize(
    ("runner", "asked"),
    [("unchecked", "shuffle"), ("vmap", "one-pack"), ("pmap", "shuffled-pack")],
)
def test_cotangent_follows_the_same_tree(request, runner, asked):
    """A checked `shard_map` sums it itself, before jaxcoll sees it."""
    if runner == "unchecked":
        request.getfixturevalue("optimized")
    options, n = reproducible(**ASKED[asked]), 8
    left, right = factors(n, "float32")

    def f(pair):
        reduce = lambda v: jc.all_reduce("sum", v, "data", options=options)
        _, back = jax.vjp(reduce, pair[0])
        return back(jax.tree.map(jnp.multiply, *pair))[0]

    got = jax.tree.map(lambda x: x[0], per_replica(runner, f, n, (left, right)))
    assert not any(differing(got, wanted(left, right)).values())


def test_gather_and_derivative_stay_exact():
    x, ct = noise(8, 5), noise(8, 40)
    options = reproducible()

    def f(v, c):
        gathered, back = jax.vjp(lambda u: jc.all_gather(u, "data", options=options), v)
        return gathered, back(c)[0]

    gathered, back = per_replica("unchecked", f, 8, x, ct)
    np.testing.assert_array_equal(gathered[0], x.reshape(-1))
    want = pairs_of(list(ct)).reshape(8, 5)
    assert not any(differing({"": back}, {"": want}).values())


def test_one_device_follows_the_tree():
    x = noise(6, 33)
    got = jc.distribute.ReductionToOneDevice().reduce(
        "sum", each_row(6, x), "cpu:0", options=reproducible()
    )
    assert not any(differing({"": got}, {"": pairs_of(list(x))}).values())


@pytest.mark.parametrize(
    ("asked", "named", "n"),
    [
        ({"algorithm": "native"}, "native'", 8),
        ({"implementation": "nccl"}, "native'", 8),
        ({"implementation": "ring"}, "ring'", 8),
        ({"algorithm": "rechd"}, "halving_doubling'", 6),
        ({"algorithm": "pscpu", "shards": 2}, "shuffle' with 2 owners", 6),
    ],
)
def test_other_orders_are_refused(asked, named, n):
    others = "'halving_doubling' or 'shuffle'" if n == 8 else "'shuffle'"
    words = f"`reproducible` asks for one order of summation, and '{named} has none over {n} repl"
    words = f"{words}.* or ask for {others}( with `shards` unset)?\\."
    f = lambda x: jc.all_reduce("sum", x, "data", options=reproducible(**asked))
    refused(words, f, rows(n, 3))


def test_misaligned_hierarchies_are_refused():
    for inner, outer in itertools.product(("shuffle", "halving_doubling"), repeat=2):
        options = reproducible(algorithm=f"{inner}/{outer}")
        choose(options, World(sizes=(2, 4)))
        with pytest.raises(ValueError, match=r"has none over 4 × 3 .* 'inner/outer' of these over"):
            choose(options, World(sizes=(4, 3)))
    for name in ("native/shuffle", "shuffle/native"):  # the former is exchanged over Gloo
        with pytest.raises(ValueError, match=f"'{name}' has none over 2 × 4 replicas"):
            choose(reproducible(algorithm=name), World(sizes=(2, 4), processes=2))


def test_shaped_leaf_is_refused():
    auto = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)
    f = lambda x: jc.all_reduce("sum", {"w": x}, "data", options=reproducible())
    x = jax.device_put(jnp.zeros((2, 8)), jax.NamedSharding(mesh, P(None, "model")))
    words = r"`reproducible` cannot hold for leaf \['w'\]: it is sharded over"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=words):
        mapped(f, mesh=mesh, axis_names={"data"}).lower(x)
