"""CrossDeviceOps: TensorFlow's cases, laws, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CompileCounter,
    assert_trees_equal,
    check,
    devices,
    each_row,
    of_replicas,
    on,
    tree,
)
from jax.sharding import NamedSharding

import jaxcoll as jc
from jaxcoll.distribute import Mirrored, NcclAllReduce, PerReplica, ReductionToOneDevice

P = jax.sharding.PartitionSpec

NCCL = NcclAllReduce()
SIMPLE = pytest.mark.parametrize("ops", [ReductionToOneDevice(), NCCL], ids=["one", "nccl"])


# Part L


@pytest.mark.tensorflow("L2", "L41")
@SIMPLE
def test_short_floats_keep_their_type(ops):
    large = PerReplica([[np.array(60000, dtype) for dtype in ("float16", "bfloat16")]] * 3)
    means, totals = (ops.reduce(op, large, "cpu:0") for op in ("mean", "sum"))
    assert [x.dtype for x in means] == [x.dtype for x in totals] == ["float16", "bfloat16"]
    assert all(abs(mean.astype("f").item() - 60000) < 300 for mean in means)
    assert [np.isinf(total.astype("f").item()) for total in totals] == [True, False]


@pytest.mark.tensorflow("L4")
def test_booleans_are_refused():
    value = PerReplica([{"ok": True}, {"ok": False}])
    with pytest.raises(ValueError, match=r"cannot reduce leaf \['ok'\]: booleans have no sum"):
        NCCL.reduce("sum", value, value)
    with pytest.raises(ValueError, match=r"cannot reduce leaf \[1\]\['ok'\]: booleans"):
        NCCL.batch_reduce("mean", [(PerReplica([1, 2]), "cpu:0"), (value, "cpu:0")])
    with pytest.raises(ValueError, match=r"cannot reduce the value: a typed PRNG key has no sum"):
        NCCL.reduce("sum", jax.random.key(0), "cpu:0")


@pytest.mark.tensorflow("L10")
def test_bad_destinations_are_refused():
    value = PerReplica([1.0, 2.0])
    message = (
        r"(expects destinations to be a PerReplica, a Mirrored, a jax.Array, a device or a device "
        r"string|expects a device string such as|but there is no such device. There are: cpu:0, )"
    )
    for bad in ("", "cpu", "cpu:x", "xpu:0", "cpu:8", [0], 3, None, np.ones(2), "job:a/cpu:0",
     "/job:worker/task:1/device:CPU:0", "/job:worker/task:0/device:CPU:8", "/job:ps/task:0/device:CPU:0",
     "/job:worker/device:CPU:0", "/job:worker/task:0cpu:1",
    ):  # fmt: skip
        for name, call in (
            ("reduce", lambda to: NCCL.reduce("sum", value, to)),
            (r"batch_reduce\[1\]", lambda to: NCCL.batch_reduce("sum", [(value, value), (value, to)])),
            ("broadcast", lambda to: NCCL.broadcast(1.0, to)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"`{name}` .*" + message):
                call(bad)


def test_devices_have_many_spellings():
    value, third = PerReplica([1.0, 3.0]), jax.devices()[3]
    for spelling in (
        "cpu:3", "CPU:3", "/cpu:3", "/device:CPU:3", "device:cpu:3", third, jax.device_put(1.0, third),
        "/job:worker/task:0/device:CPU:3", "/job:worker/replica:0/task:0/device:CPU:3",
        "/job:localhost/replica:0/task:0/device:CPU:3", "/job:worker/task:0/cpu:3",
    ):  # fmt: skip
        assert NCCL.reduce("sum", value, spelling).devices() == {third}
        if isinstance(spelling, str):
            assert jc.MirroredStrategy([spelling]).devices == (third,)
    of_task = NCCL.reduce("sum", value, "/job:worker/task:0")
    assert of_task.devices() == {jax.devices()[0]}, "its first"
    wide = jax.device_put(np.ones((3, 2)), NamedSharding(jax.make_mesh((3,), ("x",)), P("x")))
    check(NCCL.reduce("sum", value, wide), 4.0, on(devices(3)))


@pytest.mark.tensorflow("L13")
def test_batch_reduce_refuses_malformed_pairs():
    value = PerReplica([1.0, 2.0])
    assert NCCL.batch_reduce("sum", []) == []
    generator = ((value, value) for _ in range(2))
    assert [r[1].item() for r in NCCL.batch_reduce("sum", generator)] == [3.0, 3.0]
    expected = r"`batch_reduce` expects an iterable of tuples \(value, destinations\); "
    for bad, found in (
        (3, "got 3"),
        (None, "got None"),
        ([[value, value]], "item 0 is a list"),
        ([(value, value), (value, value, value)], "item 1 is a tuple of 3"),
        ((value, value), "item 0 is a PerReplica"),
        ("ab", "item 0 is a str"),
    ):
        with pytest.raises(ValueError, match=expected + found):
            NCCL.batch_reduce("sum", bad)


# Laws


def test_ops_reduce_like_all_reduce():
    """To the bit: the same packs through `jc.all_reduce` under pmap."""
    value = each_row(5, tree(5))
    reduce = jax.pmap(lambda v: jc.all_reduce("mean", v, "i"), axis_name="i", devices=devices(5))
    got = NcclAllReduce(num_packs=0).reduce("mean", value, value)
    assert_trees_equal(got[3], jax.tree.map(lambda a: a[3], reduce(value.tree)))


def test_accumulation_fn_adds_components():
    ops = ReductionToOneDevice(accumulation_fn=lambda xs: functools.reduce(jnp.maximum, xs))
    value = PerReplica([1.0, 3.0, 2.0])
    check(ops.reduce("sum", value, value), 3.0, value)
    check(ops.reduce("mean", value, value), 1.0, value)
    integers = ops.reduce("mean", PerReplica([{"a": 1}, {"a": 3}]), "cpu:1")
    assert (integers["a"].item(), integers["a"].dtype) == (1.5, np.float32)


# Nothing is copied or compiled twice


@pytest.mark.tensorflow("L14")
@SIMPLE
def test_lone_replica_returns_itself(ops):
    x, y = (jax.device_put(np.full(5, i, "f"), jax.devices()[i]) for i in (1, 2))
    one, rows = Mirrored.from_global({"x": x}), jc.IndexedSlices(y, jnp.arange(5))
    for op in ("sum", "mean"):
        a, b, c, d = ops.batch_reduce(op, [(x, x), (y, "cpu:2"), (one, one), (rows, "cpu:2")])
        assert [where(r) for r in (a, b, c["x"], d.values)] == [where(r) for r in (x, y, x, y)]


def where(array):
    return array.unsafe_buffer_pointer()


def test_broadcast_keeps_placed_copies():
    x = jax.device_put(np.ones(5, "f"), jax.devices()[2])
    result = NCCL.broadcast({"x": x}, on(devices(4)))
    again = NCCL.broadcast(result, on(jax.devices()[3::-1]))
    assert again.devices == tuple(jax.devices()[3::-1])
    wider = NCCL.broadcast(result, on(jax.devices()[2:7]))
    assert wider[4]["x"].tolist() == [1.0] * 5
    alone = NCCL.broadcast(result, "cpu:2"), NCCL.broadcast({"x": x}, "cpu:2")
    assert {where(tree["x"]) for tree in (result[2], again[1], wider[0], *alone)} == {where(x)}


@SIMPLE
def test_a_shape_is_compiled_once(ops):
    def batch(scale):
        values = [of_replicas(3, lambda i, k=k: np.full((k, 3), scale * i, "f")) for k in (2, 4)]
        return [*((v, v) for v in values), (values[0], "cpu:5")]

    ops.batch_reduce("sum", batch(1.0))
    pairs = batch(2.0)
    with CompileCounter() as compiled:
        results = ops.batch_reduce("sum", pairs)
        ops.batch_reduce("SUM", pairs, options=jc.CommunicationOptions())
    assert compiled.count == 0
    assert results[1][0].tolist() == [[6.0] * 3] * 4


def test_one_batch_is_one_program():
    turned = [devices(6), devices(6)[::-1]]
    values = [
        PerReplica([np.full((k + 1,), i, "f2") for i in range(6)], devices=turned[k % 2])
        for k in range(6)
    ]
    elsewhere = [(values[0], "cpu:7"), (values[0], on(devices(2)))]
    with CompileCounter() as compiled:
        *results, one, two = NcclAllReduce().batch_reduce(
            "sum", [*((v, v) for v in values), *elsewhere]
        )
    assert compiled.count == 1
    assert (one.tolist(), two[1].tolist()) == ([15.0], [15.0])
    for k, (value, result) in enumerate(zip(values, results, strict=True)):
        assert result.devices == value.devices
        assert result[1].tolist() == [15.0] * (k + 1)


def test_reproducible_batches_ignore_company():
    lines = [devices(8), [devices(8)[i] for i in (3, 1, 4, 0, 5, 7, 2, 6)]]
    rows = list(np.random.default_rng(0).normal(size=(8, 500)).astype("f"))
    values = [PerReplica(rows, devices=line) for line in lines]
    options = jc.CommunicationOptions(reproducible=True)
    results = NcclAllReduce().batch_reduce("sum", [(v, "cpu:0") for v in values], options=options)
    np.testing.assert_array_equal(*results)


# Options


def test_deadline_traces_once_and_here():
    traced = []

    def accumulation(xs):
        traced.append(jax.config.jax_enable_x64)
        return sum(xs[1:], xs[0])

    value = PerReplica([1.0, 3.0])
    patient = jc.CommunicationOptions(timeout_seconds=60)
    ops = ReductionToOneDevice(accumulation_fn=accumulation)
    for _ in range(2):
        assert ops.reduce("sum", value, value, options=patient)[1].item() == 4.0
    assert traced == [False]


# Bad input


def test_bad_requests_are_refused():
    value = PerReplica([1.0, 2.0])
    for op, options, words in (("max", None, "`reduce_op` must be a ReduceOp or one of the strings SUM"),
     ("sum", "ring", "`options` must be a CommunicationOptions, as in .*, or None; got"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            NCCL.reduce(op, value, value, options)
        with pytest.raises(ValueError, match=words):
            NCCL.batch_reduce(op, [(value, value)], options)
    words = (
        r"`reduce` expects a PerReplica, a Mirrored, an array or a number; got .*"
        r"`PerReplica` takes a list with each replica's value"
    )
    wide = jax.pmap(lambda x: x)(np.arange(8.0))
    for bad in ([1.0, 2.0], {"a": 1.0}, "1", None, wide):
        with pytest.raises(ValueError, match="over 8 devices, which may" if bad is wide else words):
            NCCL.reduce("sum", bad, "cpu:0")
    assert NCCL.reduce("sum", PerReplica.from_global(wide), wide)[7].item() == 28.0
    for bad, words in (
        (value, "the value is PerReplica"),
        ({"a": [1, "x"]}, r"leaf \['a'\]\[1\] is 'x' \(str\)"),
    ):
        with pytest.raises(
            ValueError, match="`broadcast` expects arrays or numbers, or a Mirrored; " + words
        ):
            NCCL.broadcast(bad, "cpu:0")


def test_own_sums_are_checked():
    value = PerReplica([np.ones(3, "f"), np.ones(3, "f")])
    for fn in (lambda xs: jnp.stack(xs), lambda xs: xs[0].astype(int), lambda xs: xs):
        with pytest.raises(
            ValueError, match=r"must return an array like each of its arguments, float32\[3\]; got"
        ):
            ReductionToOneDevice(None, fn).reduce("sum", value, value)


@pytest.mark.tensorflow("L7")
def test_one_device_reduction_stays_local(monkeypatch):
    with pytest.raises(TypeError, match=r"abstract method '?_prepare"):
        jc.distribute.CrossDeviceOps()
    assert issubclass(NcclAllReduce, jc.distribute.CrossDeviceOps)
    value = PerReplica([1.0, 3.0])
    for device in ("CPU:3", jax.devices()[3]):  # only where it is added
        check(ReductionToOneDevice(reduce_to_device=device).reduce("sum", value, value), 4.0, value)

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    words = r"between the devices of one process; cpu:0 belongs to process 0\. Reduce to"
    with pytest.raises(ValueError, match=words):
        ReductionToOneDevice().reduce("sum", value, value)
