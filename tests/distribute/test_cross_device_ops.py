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
    for bad in ("", "cpu", "cpu:x", "xpu:0", "cpu:8", [0], (1,), 3, None, np.ones(2), "job:a/cpu:0",
     "/job:worker/task:1/device:CPU:0", "/job:worker/task:0/device:CPU:8", "/job:ps/task:0/device:CPU:0",
     "/job:worker/device:CPU:0", "/job:worker/task:0cpu:1",
    ):  # fmt: skip
        value = PerReplica([1.0, 2.0])
        message = (
            r"(expects destinations to be a PerReplica, a Mirrored, a jax.Array, a device or a device "
            r"string|expects a device string such as|but there is no such device. There are: cpu:0, )"
        )
        with pytest.raises(ValueError, match="`reduce` .*" + message):
            NCCL.reduce("sum", value, bad)
        with pytest.raises(ValueError, match=r"`batch_reduce\[1\]` .*" + message):
            NCCL.batch_reduce("sum", [(value, value), (value, bad)])
        with pytest.raises(ValueError, match="`broadcast` .*" + message):
            NCCL.broadcast(1.0, bad)
        assert NCCL.reduce("sum", value, "cpu:0").item() == 3.0


@pytest.mark.parametrize(
    "spelling",
    ["cpu:3", "CPU:3", "/cpu:3", "/device:CPU:3", "device:cpu:3", jax.devices()[3],
     "/job:worker/task:0/device:CPU:3", "/job:worker/replica:0/task:0/device:CPU:3",
     "/job:localhost/replica:0/task:0/device:CPU:3", "/job:worker/task:0/cpu:3",
     lambda: jax.device_put(1.0, jax.devices()[3])],
    ids=lambda spelling: spelling if isinstance(spelling, str) else type(spelling).__name__,
)  # fmt: skip
def test_devices_have_many_spellings(spelling):
    if callable(spelling):
        spelling = spelling()
    value = PerReplica([1.0, 3.0])
    assert NcclAllReduce().reduce("sum", value, spelling).devices() == {jax.devices()[3]}
    if isinstance(spelling, str):
        assert jc.MirroredStrategy([spelling]).devices == (jax.devices()[3],)


def test_task_means_its_first_device():
    value = PerReplica([1.0, 3.0])
    first = NcclAllReduce().reduce("sum", value, "/job:worker/task:0")
    assert first.devices() == {jax.devices()[0]}
    wide = jax.device_put(np.ones((3, 2)), NamedSharding(jax.make_mesh((3,), ("x",)), P("x")))
    check(NcclAllReduce().reduce("sum", value, wide), 4.0, on(devices(3)))


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
        results = ops.batch_reduce(op, [(x, x), (y, "cpu:2"), (one, one), (rows, "cpu:2")])
        arrays = (*results[:2], results[2]["x"], results[3].values)
        pointers = [r.unsafe_buffer_pointer() for r in arrays]
        assert pointers == [r.unsafe_buffer_pointer() for r in (x, y, x, y)]


def test_broadcast_keeps_placed_copies():
    x = jax.device_put(np.ones(5, "f"), jax.devices()[2])
    pointer = x.unsafe_buffer_pointer()
    result = NCCL.broadcast({"x": x}, on(devices(4)))
    assert result[2]["x"].unsafe_buffer_pointer() == pointer
    assert NCCL.broadcast(x, "cpu:2").unsafe_buffer_pointer() == pointer
    again = NCCL.broadcast(result, on(jax.devices()[3::-1]))
    assert again.devices == tuple(jax.devices()[3::-1])
    assert again[1]["x"].unsafe_buffer_pointer() == pointer
    assert NCCL.broadcast(result, "cpu:2")["x"].unsafe_buffer_pointer() == pointer
    wider = NCCL.broadcast(result, on(jax.devices()[2:7]))
    assert wider[0]["x"].unsafe_buffer_pointer() == pointer
    assert wider[4]["x"].tolist() == [1.0] * 5


@SIMPLE
def test_a_shape_is_compiled_once(ops):
    def batch(scale):
        shapes = [(k + 2, 3) for k in range(3)]
        values = [of_replicas(3, lambda i, s=s: np.full(s, scale * i, "f")) for s in shapes]
        return [*((v, v) for v in values), (values[0], "cpu:5")]

    ops.batch_reduce("sum", batch(1.0))
    pairs = batch(2.0)
    with CompileCounter() as compiled:
        results = ops.batch_reduce("sum", pairs)
        type(ops).batch_reduce(ops, "SUM", pairs, options=jc.CommunicationOptions())
    assert compiled.count == 0
    assert results[2][0].tolist() == [[6.0] * 3] * 4


def test_one_batch_is_one_program():
    pairs = [
        (v, v)
        for k in range(6)
        for v in [PerReplica.from_function(lambda i, k=k: np.full((k + 1,), i, "f2"),
                                           devices=devices(6)[:: 1 if k % 2 else -1])]
    ]  # fmt: skip
    elsewhere = [(pairs[0][0], "cpu:7"), (pairs[0][0], on(devices(2)))]
    with CompileCounter() as compiled:
        *results, one, two = NcclAllReduce().batch_reduce("sum", [*pairs, *elsewhere])
    assert compiled.count == 1
    assert (one.tolist(), two[1].tolist()) == ([15.0], [15.0])
    for (value, _), result in zip(pairs, results, strict=True):
        assert result.devices == value.devices
        assert result[1].tolist() == [15.0] * value[0].size


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
    for op, options, words in (("max", None, "`reduce_op` must be a ReduceOp or one of the strings SUM"),
     ("sum", "ring", "`options` must be a CommunicationOptions, as in .*, or None; got"),
    ):  # fmt: skip
        value = PerReplica([1.0, 2.0])
        with pytest.raises(ValueError, match=words):
            NCCL.reduce(op, value, value, options)
        with pytest.raises(ValueError, match=words):
            NCCL.batch_reduce(op, [(value, value)], options)


def test_bad_values_are_refused():
    words = (
        r"`reduce` expects a PerReplica, a Mirrored, an array or a number; got .*"
        r"`PerReplica` takes a list with each replica's value"
    )
    for bad in ([1.0, 2.0], (1.0,), {"a": 1.0}, "1", None, object()):
        with pytest.raises(ValueError, match=words):
            NCCL.reduce("sum", bad, "cpu:0")
    wide = jax.pmap(lambda x: x)(np.arange(8.0))
    with pytest.raises(ValueError, match="got an array over 8 devices, which may hold"):
        NCCL.reduce("sum", wide, wide)
    assert NCCL.reduce("sum", PerReplica.from_global(wide), wide)[7].item() == 28.0
    expected = "`broadcast` expects arrays or numbers, or a Mirrored; "
    with pytest.raises(ValueError, match=expected + "the value is PerReplica"):
        NCCL.broadcast(PerReplica([1, 2]), "cpu:0")
    with pytest.raises(ValueError, match=expected + r"leaf \['a'\]\[1\] is 'x' \(str\)"):
        NCCL.broadcast({"a": [1, "x"]}, "cpu:0")


def test_one_device_arguments_are_checked():
    for arguments, message in (
        ((3,), "`reduce_to_device` must be a device, a device string or N"),
        (("cpu:9",), "`reduce_to_device` got 'cpu:9', but there is no such device"),
        ((None, "sum"), "`accumulation_fn` must be a function from a list of arrays"),
        *((( None, fn), r"must return an array like each of its arguments, float32\[3\]; got")
          for fn in (lambda xs: jnp.stack(xs), lambda xs: xs[0].astype(int), lambda xs: xs)),
    ):  # fmt: skip
        value = PerReplica([np.ones(3, "f"), np.ones(3, "f")])
        with pytest.raises(ValueError, match=message):
            ReductionToOneDevice(*arguments).reduce("sum", value, value)


@pytest.mark.tensorflow("L7")
def test_one_device_reduction_stays_local(monkeypatch):
    with pytest.raises(TypeError, match=r"abstract method '?_prepare"):
        jc.distribute.CrossDeviceOps()
    assert issubclass(NcclAllReduce, jc.distribute.CrossDeviceOps)
    value = PerReplica([1.0, 3.0])
    for device in ("CPU:3", jax.devices()[3]):  # only where it is added
        check(ReductionToOneDevice(reduce_to_device=device).reduce("sum", value, value), 4.0, value)
    shown = repr(ReductionToOneDevice("cpu:1"))
    assert shown.startswith("ReductionToOneDevice(reduce_to_device='cpu:1', acc")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    words = r"between the devices of one process; cpu:0 belongs to process 0\. Reduce to"
    with pytest.raises(ValueError, match=words):
        ReductionToOneDevice().reduce("sum", value, value)
