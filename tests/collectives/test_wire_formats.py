"""Laws of sums in wire formats: one program for each format and way to map, asked about all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    P,
    assert_trees_equal,
    compiled_and_planned,
    gaussian,
    grid,
    mapped,
    mesh_of,
    per_replica,
    run,
    vmapped,
)

import jaxcoll as jc
from jaxcoll._compat.compiler import has_compiler
from jaxcoll._compression import formats
from jaxcoll._plan.choose import choose
from jaxcoll._plan.world import World
from jaxcoll._report.show_plan import plan_in
from jaxcoll.cli.flags import read_tree

FORMATS = ("bf16", "int8", "int4")
OPTIONS = {name: jc.CommunicationOptions(compression=name) for name in FORMATS}
BLOCK = {"bf16": 1, "int8": 256, "int4": 64}
TOP = {"bf16": 127, "int8": 127, "int4": 7}
ERROR = {"bf16": 0.0026, "int8": 0.0100, "int4": 0.125}
N = 4


def error(got, want):
    return np.linalg.norm(np.float64(got) - want) / np.linalg.norm(np.float64(want))


def integers(n, size, top):
    """One replica's blocks of multiples of 2^k, the largest of each top·2^k; zeros on the others."""
    rng = np.random.default_rng(size)
    x = rng.integers(-top, top + 1, size) * 2.0 ** rng.integers(-9, 9, size // 256).repeat(256)
    x[::64] = top * 2.0 ** np.round(np.log2(np.abs(x.reshape(-1, 256)).max(1) / top)).repeat(4)
    x = np.clip(x, -x[::64].repeat(64), x[::64].repeat(64))
    found = np.zeros((n, size), "f")
    found[-1] = x
    return found


def case(n, name):
    """Leaves of all kinds, over n replicas."""
    return {
        "gaussian": gaussian(n, 40, 256),
        "odd": gaussian(n, 1000, seed=1),
        "half": gaussian(n, 700, seed=2).astype(np.float16),
        "brain": gaussian(n, 512, seed=3).astype(jnp.bfloat16),
        "zeros": np.zeros((n, 600), "f"),
        "integers": integers(n, 2048, TOP[name]),
        "small": gaussian(n, 63, seed=4),
        "scalar": gaussian(n, seed=5),
        "counts": np.arange(n * 300, dtype=np.int32).reshape(n, 300),
        "double": {"empty": np.zeros((n, 0), "f"), "none": None},
    }


# How replicas are mapped is the same for all formats: one of them meets every way.
MAPPED = {
    "unchecked": ("int8",), "vmap": ("int4",), "pmap": ("bf16",), "checked": FORMATS,
}  # fmt: skip
EVERY = pytest.mark.parametrize("runner", MAPPED)


@functools.cache
def found(runner):
    """Of each format what is given and what arrives, of one program for each way to map."""
    values = {name: case(N, name) for name in MAPPED[runner]}

    def f(values):
        arrived = {}
        for name, v in values.items():
            reduce = functools.partial(jc.all_reduce, axis_name="data", options=OPTIONS[name])
            arrived[name] = {"sum": reduce("sum", v), "mean": reduce("mean", v["odd"])}
        return arrived

    arrived = run(runner, f, N, values)
    return [(name, values[name], arrived[name]) for name in values]


@EVERY
def test_sums_round_twice_alike(runner):
    """Numbers that a format can hold arrive exactly, and every sum in its own type."""
    for name, value, got in found(runner):
        for leaf in jax.tree.leaves(got):
            assert len({row.tobytes() for row in leaf}) == 1, name
        wants = {k: np.asarray(x).astype("f8").sum(0) for k, x in value.items() if k != "double"}
        for leaf in ("zeros", "integers", "counts"):
            np.testing.assert_array_equal(got["sum"][leaf][0], wants[leaf])
        for leaf in ("small", "scalar"):
            np.testing.assert_allclose(got["sum"][leaf][0], wants[leaf], rtol=1e-6, atol=1e-6)
        for leaf in ("gaussian", "odd", "half", "brain"):
            assert got["sum"][leaf].dtype == value[leaf].dtype
            assert error(got["sum"][leaf][0], wants[leaf]) < 1.2 * ERROR[name]
        np.testing.assert_allclose(got["mean"], got["sum"]["odd"] / N, rtol=1e-6)


def every(v):
    """The sum in each format."""
    return {k: jc.all_reduce("sum", v, "data", options=o) for k, o in OPTIONS.items()}


def test_error_ignores_replica_count():
    errors = {}
    for n in (2, 32):
        x = gaussian(n, 1 << 14)
        want = x.astype("f8").sum(0)
        for name, got in vmapped(every, x).items():
            errors[name, n] = error(got[0], want)
            assert errors[name, n] < ERROR[name]
    assert all(errors[name, 32] / errors[name, 2] <= 1.02 for name in FORMATS)


@pytest.mark.parametrize(
    ("call", "asked"),
    [("all_reduce", {"compression": "int8"}), ("reduce_scatter", {"algorithm": "shuffle"})],
)
def test_unmapped_values_are_summed(call, asked):
    """A gradient of zeros for an unused parameter, say; JAX's rule for all-to-all is wrong there."""

    def f(_):
        value, options = jnp.full(512, 127.0), jc.CommunicationOptions(**asked)
        return getattr(jc, call)("sum", value, "data", options=options)

    (found,) = jax.tree.leaves(vmapped(f, np.zeros(2)))
    assert (found == 254).all()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_size_is_summed(n):
    """One replica rounds and sends nothing."""
    sizes = (0, 1, 63, 64, 255, 257, 1000)
    value = {str(size): gaussian(n, size) for size in sizes}
    for name, got in run("checked", every, n, value).items():
        if n == 1:
            plan = jc.plan(value, axis_size=1, options=OPTIONS[name])
            assert plan.steps == plan.wire_bytes == 0
            assert_trees_equal(got, value)
            continue
        for size in sizes[1:]:
            want = value[str(size)].astype("f8").sum(0)
            exact = size < max(64, BLOCK[name])
            few = 1 + 5 / size**0.5  # of so few elements the error differs from the mean of all
            assert error(got[str(size)][0], want) < (1e-6 if exact else few * ERROR[name])


def test_nonfinite_stays_in_its_block():
    block = 256  # of all formats
    x = gaussian(N, 8 * block)
    bad = {0: np.nan, 1: np.inf, 2: -np.inf, 3: -np.nan, 4: 3e38}
    for k, number in bad.items():
        x[k % N, k * block + 5] = number
    x[:, 4 * block + 5] = 3e38  # whose sum is too large
    hit = np.arange(5) * block + 5
    for name, got in run("checked", every, N, x).items():
        assert not np.isfinite(got[:, hit]).any()
        blocks = got.reshape(N, -1, BLOCK[name])
        apart = [k for k in range(blocks.shape[1]) if k not in hit // BLOCK[name]]
        assert np.isfinite(blocks[:, apart]).all()
        assert len({row.tobytes() for row in got}) == 1


def test_extreme_numbers_survive():
    x = np.zeros((2, 4, 256), "f")
    x[0, 0] = 2e38 * np.linspace(-1, 1, 256)
    x[0, 1] = 1e-36
    x[0, 2], x[1, 2, 7] = 1.0, 1e30
    x[0, 3] = 1e-30 * np.linspace(-1, 1, 256)
    for name, got in run("checked", every, 2, x).items():
        got = got[0]
        assert error(got[0] / 1e38, x[0, 0] / np.float64(1e38)) < 1.3 * ERROR[name]
        assert abs(got[1]).max() <= 1.1e-36
        assert abs(got[2, 7] / 1e30 - 1) < 0.1
        assert error(got[3] * 1e30, x[0, 3] * np.float64(1e30)) < 1.3 * ERROR[name]


@EVERY
def test_derivatives_ignore_rounding(runner):
    x, ct = gaussian(3, 300), gaussian(3, 300, seed=1)

    def f(x, ct):
        found = []
        for name in MAPPED[runner]:
            reduce = lambda v, o=OPTIONS[name]: jc.all_reduce("sum", v, "data", options=o)
            back = jax.grad(lambda v, reduce=reduce: jnp.vdot(reduce(v), ct))(x)
            found += [back, jax.jvp(reduce, (x,), (ct,))[1] + 0 * x]
        return found

    want = np.broadcast_to(ct.astype("f8").sum(0), (3, 300))
    for got in per_replica(runner, f, 3, x, ct):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(("name", "ratio"), [("bf16", 0.503), ("int8", 0.255), ("int4", 0.135)])
def test_bytes_follow_the_formulas(name, ratio):
    value = {"w": np.zeros((3, 64, 256), "f"), "v": np.zeros(8192, "f"), "b": np.zeros(12, "f")}
    _, collectives, plan = compiled_and_planned((N,), value, compression=name)
    sent = sum(c.wire_bytes for c in collectives)
    assert sent == plan.wire_bytes
    _, _, exact = compiled_and_planned((N,), value)
    assert sent <= ratio * exact.wire_bytes
    coded = [c for c in collectives if c.kind != "all-reduce"]
    assert {c.kind for c in coded} == {"all-to-all", "all-gather"}
    assert {d for c in coded for d in c.dtypes} == {"u16" if name == "bf16" else "u8"}
    assert len(collectives) == plan.steps


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("name", "kind"), [("bf16", "u16"), ("int8", "u8"), ("int4", "u8")])
def test_gpus_keep_codes_only(name, kind):
    if not has_compiler("gpu"):
        pytest.skip("needs the compiler of a GPU plugin")
    value = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32)
    step = jc.data_parallel(lambda x: jc.all_reduce("sum", x, "data", options=OPTIONS[name]))
    report = jc.inspect(step, value, topology="h100:8")
    assert [c.kind for c in report.collectives] == ["all-to-all", "all-gather"]
    assert {d for c in report.collectives for d in c.dtypes} == {kind}
    # Encoding and summing fuse with what reads and writes memory: codes are the only arrays there.
    array = 4 << 20
    assert report.memory_bytes < 2 * array + 0.7 * array


@pytest.mark.parametrize("feedback", [False, True])
def test_int4_levels_are_fitted(feedback):
    codes = np.zeros((2, 34), np.uint8)
    codes[:, :16] = np.arange(16) | np.arange(16)[::-1] << 4
    codes[:, 32:] = [[0x80, 0x3F], [0x80, 0xBF]]  # a scale of 1, and one of a block of integers
    got = np.asarray(jax.jit(jc.compression.Int4().decode, static_argnums=1)(codes, feedback))
    integers = range(-7, 9)  # of every block under feedback
    for row, levels in zip(got, (integers if feedback else formats.LEVELS, integers), strict=True):
        np.testing.assert_array_equal(row[:16], levels)
        np.testing.assert_array_equal(row[32:48], levels[::-1])


def test_hierarchy_codes_between_hosts():
    value = np.zeros((64, 256), "f")
    _, collectives, plan = compiled_and_planned(
        (2, 4), value, algorithm="native/shuffle", compression="int8"
    )
    assert sum(c.wire_bytes for c in collectives) == plan.wire_bytes
    coded = [c for c in collectives if "u8" in c.dtypes]
    assert [c.group_size for c in coded] == [2, 2]
    assert {d for c in collectives if c not in coded for d in c.dtypes} == {"f32"}
    assert "between groups only" in str(plan)


def test_one_host_rounds_nothing():
    x = gaussian(4, 600)
    options = jc.CommunicationOptions(algorithm="shuffle/native", compression="int8")
    axes = ("node", "data")

    def f(v):
        plain = jc.all_reduce("sum", v[0], axes, options=options)
        owed = jc.compression.residual(v[0], axes)
        return plain, *jc.all_reduce("sum", v[0], axes, options=options, residual=owed)

    plain, total, owed = mapped(f, P(axes), (P(), P(), P(axes)), grid(1, 4))(x)
    for got in (plain, total):
        np.testing.assert_allclose(got, x.astype("f8").sum(0), atol=1e-5)
    assert not any(np.any(part) for part in owed.parts)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", FORMATS)
def test_reproducible_codes_ignore_packing(name):
    value = {"a": gaussian(N, 700), "b": gaussian(N, 3000)}
    asked = ((0, "ab"), (1 << 20, "ba"))

    def f(*values):  # one for each, so that nothing is computed once for all
        found = []
        for v, (nbytes, order) in zip(values, asked, strict=True):
            options = OPTIONS[name].replace(reproducible=True, bytes_per_pack=nbytes)
            got = jc.all_reduce("mean", [v[k] for k in order], "data", options=options)
            found.append(dict(zip(order, got, strict=True)))
        return found

    found = run("checked", f, N, value, value)
    assert len({b"".join(got[k][0].tobytes() for k in "ab") for got in found}) == 1


def test_metrics_are_not_rounded():
    def loss(w, x):
        scores = x @ w
        return jnp.mean(scores), jc.Total(x[0, :64])

    step = jc.value_and_grad(loss, "data", has_aux=True, options=OPTIONS["int4"])
    w, x = np.ones((128,), "f"), gaussian(2, 5, 128)
    (value, total), grads = vmapped(functools.partial(step, w), x)
    np.testing.assert_allclose(value[0], x.astype("f8").sum(-1).mean(), rtol=1e-5)
    np.testing.assert_allclose(total[0], x[:, 0, :64].sum(), rtol=1e-5)
    assert 0.001 < error(grads[0], x.astype("f8").mean((0, 1))) < 0.2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"algorithm": "ring"}, "does not go with 'ring': a ring .* adds numbers on the way"),
        ({"implementation": "RING"}, "does not go with 'ring'"),
        ({"algorithm": "rechd"}, "does not go with 'halving_doubling'"),
        ({"shards": 2}, "`shards=2` asks for another number"),
        ({"reproducible": True, "algorithm": "shuffle/shuffle"}, "codes sums of groups"),
        (
            {"reproducible": True, "overlap": True, "bytes_per_pack": 100_000},
            "packs end inside .* Leave `overlap` unset",
        ),
    ],
)
def test_impossible_formats_are_refused(asked, words):
    value = {"a": np.zeros(50_001, "f"), "b": np.zeros(600_000, "f")}
    size = (2, 2) if "/" in str(asked.get("algorithm")) else 4
    options = jc.CommunicationOptions(compression="int8", **asked)
    with pytest.raises(ValueError, match=words):
        jc.plan(value, axis_size=size, options=options)


GLOO, DEVICES, GPUS = World("cpu", (4,), 4), World("cpu", (4,)), World("gpu", (8,), 2)
HOSTS = World("cpu", (2, 2), 4, hosts=2, inner=1)
LARGE = {"w": np.zeros((1000, 3000), "f"), "b": np.zeros(3, "f"), "i": np.zeros(9, np.int32)}
NARROW = {"w": np.zeros((100, 300), jnp.bfloat16), "b": np.zeros(3, jnp.bfloat16)}


def planned(value, world=GLOO, **asked):
    return plan_in(value, world, jc.CommunicationOptions(**asked))


@pytest.mark.parametrize(
    ("value", "world", "asked", "types", "words"),
    [
        (LARGE, GLOO, {"compression": "auto"}, "float32 as bf16", "which is faster over Gloo"),
        (NARROW, GLOO, {}, "float32 as bf16", "because XLA would widen them for Gloo"),
        ({"half": np.zeros(700, "f2"), "w": np.zeros(700, "f")}, GLOO, {"compression": "bf16"},
         "float32 as bf16", ""),
        *((LARGE, world, {"compression": "auto"}, "", "") for world in (
            GPUS, DEVICES, World("cpu", (4,), 2))),  # two devices a process: all would code
        ({"half": np.zeros(3_000_000, "f2")}, GLOO, {"compression": "auto"}, "", ""),
        *((value, GLOO, {**auto, **more}, "", "") for value, auto, more in (
            (LARGE, {}, {}), (LARGE, {"compression": "auto"}, {"shards": 2}),
            ({"w": np.zeros((100, 100), "f")}, {"compression": "auto"}, {}),  # not worth an array
            *((v, auto, more) for v, auto in ((LARGE, {"compression": "auto"}), (NARROW, {}))
              for more in ({"algorithm": "ring"}, {"reproducible": True})))),
    ],
    ids=str,
)  # fmt: skip
def test_gloo_alone_gets_bf16(value, world, asked, types, words):
    plan = planned(value, world, **asked)
    assert {p.shown_type for p in plan.packs if p.format} == {*filter(None, [types])}
    assert words in str(plan)


@pytest.mark.parametrize("name", [None, *FORMATS])
def test_codes_get_packs_of_their_own(name):
    """Few sizes between simulated devices; and what is automatic between hosts can be asked for."""
    tree = list(read_tree("resnet50", "float32").values())
    by_itself = planned(tree, HOSTS, compression=name)
    asked = planned(tree, HOSTS, compression=name, algorithm="nccl/nccl")
    small = choose(jc.CommunicationOptions(), HOSTS).limit
    for pack, same in zip(by_itself.packs, asked.packs, strict=True):
        assert pack == same or (pack.nbytes <= small and "/" in pack.algorithm)
    if name in ("int8", "int4"):
        plan = planned(tree, DEVICES, compression=name)
        assert len({pack.size for pack in plan.packs if pack.format}) == 2
        assert "packs: at most 64 MiB, because no compiler combines" in str(plan)
        assert "leaves over 2 MiB alone" in str(planned(tree, GPUS, compression=name))


def test_defaults_round_gradients_only():
    """A broadcast inside `data_parallel` with a format is exact, and integers are no error."""

    def step(w, x):
        count = jnp.ones((600,), jnp.int32) + x[0, 0].astype(jnp.int32) * 0
        return jc.broadcast(w, "data"), jc.all_reduce("sum", count, "data")

    w = gaussian(1, 600)[0]
    step = jc.data_parallel(step, mesh=mesh_of(2), options=OPTIONS["int4"])
    got, total = step(w, np.zeros((2, 1), "f"))
    np.testing.assert_array_equal(got, w)
    assert int(total[0]) == 2
