"""check_replicas: digests of bits, and who differs from whom."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import RUNNERS, P, lowered, mapped, mesh_of, program, run, tree, vmapped
from jax.sharding import NamedSharding

import jaxcoll as jc
from jaxcoll._collectives.check_replicas import digest as _digest

M = 2**32
digest = jax.jit(_digest)


def reference(words):
    """The digest of 32-bit words, in Python's own integers."""
    plain = weighted = 0
    for place, word in enumerate(words):
        h = int(word) ^ ((place * 0x9E3779B9 + 0x7F4A7C15) % M)
        h = (h ^ (h >> 16)) * 0x85EBCA6B % M
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % M
        h ^= h >> 16
        plain, weighted = (plain + h) % M, (weighted + h * (2 * place + 1)) % M
    return [plain, weighted]


@pytest.mark.parametrize("shape", [(), (2, 3, 5), (0, 3)])
def test_digest_equals_its_formula(shape):
    """Of bits and not of values: of a negative zero, and of a NaN with a payload, too."""
    x = np.random.default_rng(0).standard_normal(shape).astype("f")
    words = x.reshape(-1).view(np.uint32)
    words[:3] = [0x80000000, 0x7FC00001, 0x7FC00000][: len(words)]
    assert digest(x).tolist() == reference(words)


DTYPES = ["bool", "int4", "uint4", "int8", "uint16", "int32", "float16", "bfloat16", "float32",
          "float8_e4m3fn", "complex64"]  # fmt: skip


def test_every_element_counts():
    bits = np.arange(12).reshape(3, 4) % 2 == 1
    others = [np.where(np.arange(12).reshape(3, 4) == i, ~bits, bits) for i in range(12)]
    every = jax.jit(lambda xs: [jax.vmap(_digest)(xs.astype(jnp.dtype(d))) for d in DTYPES])
    for dtype, found in zip(DTYPES, every(np.stack([bits, *others])), strict=True):
        assert len({tuple(row) for row in found.tolist()}) == 13, dtype


def held(n, wrong=()):
    """n replicas that hold the same tree, but for replicas that `wrong` names in one leaf."""
    same = jax.tree.map(lambda x: np.stack([x[0]] * n), tree(n))
    for replica in wrong:
        same["odd"][1][0][replica, 1, 2] += 1.0
    return same


def check(value):
    return jc.check_replicas(value, "data")


def differs(words):
    return pytest.raises(jc.errors.ReplicaDivergenceError, match=words)


@pytest.mark.parametrize(
    ("runner", "n"), [*((runner, 3) for runner in RUNNERS), ("checked", 1), ("checked", 8)]
)
def test_differing_replica_is_named(runner, n):
    compare = program(runner, check, n)
    if runner == "unchecked":
        of_one = lambda block: check(jax.tree.map(lambda x: x[0], block))
        compare = mapped(of_one, mesh=n, check_vma=False)
    same = compare(held(n))
    assert not same.differs.any()
    assert same.divergent() == {}
    same.raise_if_differs()
    if n == 1:
        return
    found = compare(held(n, [1]))
    words = (
        rf"1 of 7 leaves differs between {n} replicas.*\n  leaf \['odd'\]\[1\]\[0\]: "
        f"replica 1 differs from the other {n - 1}"
    )
    with differs(words) as caught:
        found.raise_if_differs()
    (groups,) = caught.value.divergent.values()
    assert groups[1] == ("1",)
    assert found.differs.tolist().count(True) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 1, 2, 2], "no majority: replicas 0, 1 agree | replicas 2, 3 agree"),
        ([1, 2, 3, 4], "all 4 hold different values"),
        ([1, 2, 1, 1], "replica 1 differs from the other 3"),
        ([3, 1, 1, 2, 1], "replicas 0, 3 differ from the other 3, with 2 values between them"),
        ([1] * 11 + [2] * 9, "replicas 11, 12, 13, 14, 15, 16, 17, 18, … (9 in all) differ from the other 11"),
    ],
)  # fmt: skip
def test_majority_is_told_from_minority(values, words):
    found = run("vmap", check, len(values), np.array(values, "f"))
    with differs(re.escape(f"the value: {words}")):
        found.raise_if_differs()


def test_long_lists_of_leaves_end():
    found = run("vmap", check, 2, [np.arange(2)] * 21)
    with differs("and 1 leaf more"):
        found.raise_if_differs()


def lying(n=8, wrong=3):
    """An array whose sharding says that it is replicated, and whose copies differ."""
    sharding = NamedSharding(mesh_of(n), P())
    copies = [jax.device_put(np.full(4, float(i == wrong), "f"), d) for i, d in enumerate(mesh_of(n).devices.flat)]  # fmt: skip
    return jax.make_array_from_single_device_arrays((4,), sharding, copies)


def test_copies_of_arrays_are_compared():
    rows = jax.device_put(np.arange(8.0), NamedSharding(mesh_of(8), P("data")))
    twice = jax.device_put(np.arange(8.0), NamedSharding(jax.make_mesh((4, 2), ("a", "b")), P("a")))
    jc.check_replicas({"twice": twice, "w": jax.device_put(rows, NamedSharding(mesh_of(8), P()))}).raise_if_differs()  # fmt: skip
    for n in (8, 4):
        with differs(rf"leaf \['w'\]: cpu:3 differs from the other {n - 1}"):
            jc.check_replicas({"twice": twice, "w": lying(n)}).raise_if_differs()


def halves(wrong):
    """Two copies of each of four rows, of which one device holds another."""
    sharding = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), P("a"))
    held = {d: np.full((1, 3), index[0].start, "f") for d, index in sharding.devices_indices_map((4, 3)).items()}  # fmt: skip
    held[wrong] = held[wrong] + 1
    return jax.make_array_from_single_device_arrays(
        (4, 3), sharding, [jax.device_put(x, d) for d, x in held.items()]
    )


def test_two_copies_have_no_majority():
    found = jc.check_replicas(halves(jax.devices()[2])).divergent()
    assert found == {"": (("cpu:0", "cpu:1", "cpu:4", "cpu:5", "cpu:6", "cpu:7"), ("cpu:2",), ("cpu:3",))}  # fmt: skip


def of_pmap(out_axes=0):
    """What eight replicas hold of a tree in which replica 5 has another bias."""
    tree = {"w": np.ones((8, 2, 3), "f"), "b": np.zeros((8, 3), "f")}
    tree["b"][5, 1] = 1e-30
    return jax.pmap(lambda x: x, axis_name="data", out_axes=out_axes)(tree)


STACKED = {
    "of pmap": lambda: jc.PerReplica.from_global(of_pmap()),
    "of values": lambda: jc.PerReplica([{"w": np.ones(3), "b": np.float32(i == 5)} for i in range(8)]),
    "beside others": lambda: {
        "step": jc.distribute.Mirrored([3] * 8), "rng": jc.PerReplica([jax.random.key(i // 5 % 2) for i in range(8)]),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", STACKED)
def test_rows_per_replica_are_compared(kind):
    found = jc.check_replicas(STACKED[kind]())
    assert len(found.paths) == 2
    (groups,) = found.divergent().values()
    assert [len(group) for group in groups] in ([7, 1], [5, 3])
    assert groups[1][0] == "cpu:5"
    if kind == "of pmap":
        same = jax.pmap(lambda x: jax.lax.pmean(x, "i"), "i")(of_pmap())
        jc.check_replicas(jc.PerReplica.from_global(same)).raise_if_differs()


ROWS = np.arange(8.0, dtype="f")
ALONE = {
    "numpy": (lambda: ROWS, "ndarray of this process"),
    "one device": (lambda: jnp.ones(3), "on cpu:0 only"),
    "batch": (
        lambda: jax.device_put(ROWS, NamedSharding(mesh_of(8), P("data"))),
        r"float32\[8\] in 8 parts, one on each device",
    ),
    "pmap": (lambda: of_pmap()["b"], r"float32\[8, 3\] in 8 parts, one on each device"),
    "pmap, replicas last": (
        lambda: of_pmap(-1)["b"], r"float32\[24, 1\] in 8 parts, one on each device",
    ),
    "pmap, and a jit after it": (
        lambda: jax.jit(jnp.negative)(of_pmap()["b"]), r"float32\[8, 3\] in 8 parts, one on each device",
    ),
    "a key": (lambda: jax.random.key(1), "on cpu:0 only"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALONE)
def test_lone_copies_are_refused(kind):
    make, words = ALONE[kind]
    whole = jax.device_put(ROWS, NamedSharding(mesh_of(8), P()))
    words = (
        rf"(?s)these leaves have only one copy:\n  leaf \['x'\]: {words}\n.*PerReplica.from_global"
    )
    with pytest.raises(ValueError, match=words):
        jc.check_replicas({"whole": whole, "x": make()})
    with pytest.raises(ValueError, match=r"\n  and 2 more\nPass"):
        jc.check_replicas([make()] * 12)


def test_optimizer_shards_are_no_copies():
    optimizer = jc.sharded_optimizer(optax.adam(0.1), "data", assume_elementwise=True)
    state = optimizer.init({"w": ROWS})
    with pytest.raises(ValueError, match=r"(?s)leaf \[0\].mu.*in 8 parts.*Shards"):
        jc.check_replicas(state)
    one = jc.data_parallel(lambda w, x: w + jax.lax.psum(x.sum(), "data"), mesh=mesh_of(1))
    jc.check_replicas(one(ROWS, ROWS)).raise_if_differs()


def test_programs_need_an_axis():
    with pytest.raises(ValueError, match=r"leaf \['w'\] is being traced.*Name the axis"):
        jax.jit(jc.check_replicas)({"w": ROWS})
    with pytest.raises(ValueError, match=r"leaf \['w'\] is being traced.*Name the axis"):
        jc.data_parallel(lambda w, x: jc.check_replicas({"w": w}))(ROWS, ROWS)


def test_one_small_collective_compares_all():
    text = lowered(check, 8, held(8)).as_text()
    assert text.count("stablehlo.all_") == 1
    assert "tensor<1x7x2xui32>" in text


def test_types_are_not_believed():
    def every(step, w):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(check, w))
        return jax.lax.cond(step % 100 == 0, check, lambda w: zeros, w)

    program = jc.data_parallel(
        lambda step, w, x: every(step, {"w": w, "b": w * 0}), batch_argnums=2
    )
    found, later = (program(step, lying(), np.ones(8, "f")) for step in (100, 101))
    assert found.divergent()["['w']"][1] == ("3",)
    assert found.differs.tolist() == [False, True]
    assert not later.divergent()


def test_keys_and_empty_trees():
    keys = jax.random.split(jax.random.key(0), 3)
    same = jax.device_put(keys[0], NamedSharding(mesh_of(8), P()))
    jc.check_replicas({"key": same}).raise_if_differs()
    assert vmapped(check, keys).differs.tolist() == [True]
    assert vmapped(lambda x: check([]), np.ones(2)).divergent() == {}


def test_foreign_leaves_are_refused():
    with pytest.raises(ValueError, match=r"`check_replicas`: leaf \['s'\]: expected an array, got str"):  # fmt: skip
        jc.check_replicas({"s": "text"})
    with pytest.raises(NameError, match="`check_replicas` over axis 'data'"):
        jc.check_replicas(1.0, "data")
