"""PerReplica and Mirrored: views of global arrays, one device a replica."""

import collections
import copy
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CompileCounter, devices
from jax.sharding import AxisType, Mesh, NamedSharding

import jaxcoll as jc

P = jax.sharding.PartitionSpec
KINDS = (jc.PerReplica, jc.distribute.Mirrored)


def pointers(tree):
    """Where the parts of every leaf lie, in the order of the devices' ids."""
    parts = [sorted(x.addressable_shards, key=lambda s: s.device.id) for x in jax.tree.leaves(tree)]
    return [[s.data.unsafe_buffer_pointer() for s in shards] for shards in parts]


def placed(x, spec, mesh=None):
    return jax.device_put(x, NamedSharding(mesh or jax.make_mesh((8,), ("x",)), spec))


# Laws


@pytest.mark.parametrize("n", [1, 3, 8])
def test_pmap_results_wrap_without_copies(n):
    def f(x):
        return {"w": x * 2, "b": x.sum()}

    out = jax.pmap(f, devices=devices(n))(np.arange(n * 3.0, dtype="f").reshape(n, 3))
    value = jc.PerReplica.from_global(out)
    assert pointers(value.tree) == pointers(out) == pointers(jax.tree.map(lambda x: x, value))
    assert value.devices == tuple(devices(n))
    assert (len(value), value.num_replicas) == (n, n)
    with jax.transfer_guard("disallow"):
        back = jax.pmap(f, devices=devices(n))(value.tree["w"])
    np.testing.assert_array_equal(back["w"], value.tree["w"] * 2)


def test_arrays_wrap_without_copies():
    """Copies over any mesh; rows on devices backwards, along an Explicit axis; parts where they lie."""
    x = placed(np.arange(3.0), P(), jax.make_mesh((2, 4), ("a", "b")))
    value = jc.distribute.Mirrored.from_global([x])
    assert [pointers(value[i]) for i in range(8)] == [[[p]] for p in pointers(x)[0]]
    mesh = Mesh(np.array(jax.devices()[5:2:-1]), ("x",), axis_types=(AxisType.Explicit,))
    x = placed(np.arange(3.0), P("x"), mesh)
    value = jc.PerReplica.from_global(x)
    assert [(d.id, v.item()) for d, v in zip(value.devices, value, strict=True)] == [
        (5, 0),
        (4, 1),
        (3, 2),
    ]
    assert pointers(value.tree) == pointers(x)
    parts = [jax.device_put(np.ones(4, "f"), jax.devices()[i]) for i in (6, 1)]
    value = jc.distribute.Mirrored(parts)
    assert [pointers(value[i]) for i in range(2)] == [pointers(x) for x in parts]
    assert [d.id for d in jc.PerReplica(parts).devices] == [6, 1]
    assert jc.PerReplica([jnp.ones(2)] * 3).devices == tuple(devices(3))


def test_several_meshes_share_a_program():
    rows = np.arange(8.0, dtype="f").reshape(4, 2)
    meshes = [
        jax.make_mesh(shape, axes, devices=devices(4))
        for shape, axes in [((4,), ("a",)), ((2, 2), ("x", "y"))]
    ]
    value = jc.PerReplica.from_global([placed(rows, P(mesh.axis_names), mesh) for mesh in meshes])
    for each in jc.NcclAllReduce().reduce("sum", value, value).tree:
        np.testing.assert_array_equal(each, rows.sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_indexing_gives_the_replica(kind):
    value = kind.from_function(lambda i: {"w": np.full((2,), 5.0, "f"), "n": 3}, devices=devices(3))
    for i in range(-1, 3):
        assert value[i]["w"].devices() == {jax.devices()[i % 3]}
        assert value[i]["w"].tolist() == [5, 5]
        assert value.values[i]["n"] == 3
    for i in (3, -4):
        with pytest.raises(IndexError, match=rf"There are replicas 0 to 2; got {i}\."):
            value[i]
    for bad in (slice(0, 2), "a", 1.0):
        with pytest.raises(TypeError, match="is indexed by a replica id, an integer; got"):
            value[bad]
    with CompileCounter() as compiled:
        value.values  # noqa: B018
    assert compiled.count == 0, "a shape is read by one program"


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_passes_through_jax(kind):
    value = kind([{"w": np.ones(2, "f"), "none": None}] * 4)
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: x * 2, v))(value)
    assert isinstance(doubled, kind)
    assert doubled.devices == value.devices
    assert doubled[3]["w"].tolist() == [2.0, 2.0]
    ((path, _),) = jax.tree_util.tree_leaves_with_path(value)
    assert jax.tree_util.keystr(path) == ".tree['w']"
    assert repr(jax.eval_shape(lambda v: v, value)).startswith(f"{kind.__name__}(")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16", "float16", "complex64"])
def test_dtypes_keep_their_bits(dtype):
    rows = np.arange(6).reshape(3, 2).astype(jnp.dtype(dtype))
    value = jc.PerReplica(list(rows))
    assert value.tree.dtype == dtype
    assert np.asarray(value.tree).tobytes() == rows.tobytes()
    numbers = jc.PerReplica([(0, 0.5, 1j, True), (np.int64(1), np.float64(1.5), 2j, False)])
    assert [x.dtype.name for x in numbers.tree] == ["int32", "float32", "complex64", "bool"]
    assert not any(x.weak_type for x in numbers.tree)


TAKES = [
    *[lambda x, kind=kind: kind([x, x]) for kind in KINDS],
    lambda x: jc.NcclAllReduce().broadcast({"x": x}, "cpu:1"),
    lambda x: jc.NcclAllReduce().reduce("sum", x, "cpu:1"),
    lambda x: jc.MirroredStrategy().reduce("mean", x, axis=None),
    lambda x: jc.MirroredStrategy().run(lambda x: x, (x,)),
    lambda x: jc.Elastic(jc.data_parallel(lambda s, x: (s, 0)), x),
]
OF_ROWS = [
    lambda x: list(jc.MirroredStrategy().experimental_distribute_dataset([x])),
    lambda x: list(jc.batches(x, 8)),
    lambda x: list(jc.batches(collections.UserList(x.reshape(8, 1)), 8)),
    lambda x: jc.save_checkpoint(os.devnull, x),
]


def test_large_integers_are_refused():
    for take in TAKES:
        take(2**31 - 1)
        with pytest.raises(OverflowError, match="int32"):
            take(2**31)


def test_a_mask_is_never_dropped():
    for take in TAKES + OF_ROWS:
        with pytest.raises(ValueError, match="masked arrays are not supported|got MaskedArray"):
            take(np.ma.array(np.ones(8, "f"), mask=[0, 1] * 4))


# Bad input


@pytest.mark.tensorflow("L5")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda kind: kind([1], devices=devices(2)), "one device for each value; got 1 value and 2"),
        (lambda kind: kind([1, 1], devices=devices(1) * 2), "`{}` got a device twice: cpu:0"),
        (lambda kind: kind.from_function(int, devices=["cpu:0"]), "`{}` expects devices"),
        (lambda kind: kind.from_function(int, devices=[]), "`{}` got no devices"),
        (3.0, "expects a list or tuple with one value for each replica; got float. `{}.from_g"),
        (np.ones(3), "got ndarray"),
        ([], "`{}` got no values; it needs at least one replica"),
        ([None, None], "`{}` got values without leaves; each needs an array or a number"),
        ([{"a": 1}, {"b": 1}], r"`{}` expects one structure for all replicas; replica 1 has .*'b'"),
        ([{"w": [1]}, {"w": [1.0]}], r"leaf \['w'\]\[0\] has dtype float32 on replica 1, int32 on"),
        ([np.float32(1), np.float16(1)], "has dtype float16 on replica 1, float32 on replica 0"),
        ([{"a": "x"}], r"`{}`: leaf \['a'\] of replica 0 must be an array or a number; got 'x' \("),
        ([{1, 2}, {3}], r"`{}`: replica 0 must be an array or a number; got \{{1, 2\}} \(set\)"),
        ([1, np.array(["a"])], "`{}`: replica 1 must be an array or a number"),
        ([1] * 9, "`{}` expects one device for each value; got 9 values and 8 devices"),
    ],
)  # fmt: skip
def test_bad_replica_values_are_refused(kind, values, message):
    with pytest.raises(ValueError, match=message.format(kind.__name__)):
        values(kind) if callable(values) else kind(values)


def test_unequal_rows_are_uneven():
    strategy = jc.MirroredStrategy(["cpu:0", "cpu:1"])
    parts = [{"w": np.ones(2, "f"), "n": 2}, {"w": np.full(1, 4, "f"), "n": 1}]
    made = jc.PerReplica(parts, devices=devices(2))
    for value in (made, jc.PerReplica.from_function(parts.__getitem__, devices=devices(2))):
        assert [x["w"].tolist() for x in value] == [[1, 1], [4]]
        assert [next(iter(x["n"].devices())) for x in value] == devices(2)
    per_leaf = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    for value in (jc.PerReplica([x["w"] for x in parts], devices=devices(2)), per_leaf["w"]):
        assert strategy.gather(value, axis=0).tolist() == [1, 1, 4]
        assert float(strategy.reduce("mean", value, axis=0)) == 2
        with pytest.raises(ValueError, match="unequal shapes"):
            strategy.run(lambda x: x, (value,))


def test_copies_are_equal():
    mirrored = jc.distribute.Mirrored
    keys = list(jax.random.split(jax.random.key(0), 2))
    for values, words in (
        ([{"a": 1.0}, {"a": 2.0}], r"leaf \['a'\] of replica 1 differs from that of replica 0\."),
        (keys, "the value of replica 1 differs"),
        ([np.ones(2), np.ones(1)], r"one shape.*\(1,\) on replica 1, \(2,\) on r"),
    ):
        with pytest.raises(ValueError, match="`Mirrored` expects .*" + words):
            mirrored(values)
    assert len(mirrored([np.nan, np.nan])) == len(mirrored([keys[0]] * 2)) == 2
    assert (jax.random.bits(jc.PerReplica(keys)[1]) == jax.random.bits(keys[1])).item()
    wide = placed(np.ones(8, "f"), P("x"))
    with pytest.raises(ValueError, match=r"replica 0 spans 8 devices.*`PerReplica.from_global`"):
        jc.PerReplica([wide, wide])


def test_from_global_refuses_other_layouts():
    half = placed(np.ones((4, 2), "f"), P("a"), jax.make_mesh((4, 2), ("a", "b")))
    turned = [jc.PerReplica([1, 2], devices=line).tree for line in (devices(2), devices(2)[::-1])]
    for kind, tree, message in (
        (jc.PerReplica, {"w": half}, r"expects leaf \['w'\] to have a leading replica dimension"),
        (jc.distribute.Mirrored, half, r"expects the value to be replicated over its devices; got shape \(4, 2\) over 8 devices"),
        (jc.PerReplica, jnp.ones(3), "leading replica dimension"),
        (jc.PerReplica, np.ones(3), "expects the value to be a global jax.Array; got ndarray"),
        (jc.distribute.Mirrored, {"a": None}, "`Mirrored` got a tree without leaves; it needs an array"),
        (jc.PerReplica, turned, r"leaf \[1\] lies on cpu:1, cpu:0, but the first leaf on cpu:0, cpu:1; all must lie on the same"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kind.from_global(tree)


def test_absent_values_are_refused(monkeypatch):
    """Traced ones, and those of another process."""
    message, value = "is being traced, so it lies on no device", jc.PerReplica([1.0, 2.0])
    for f, x in (
        (lambda x: jc.PerReplica([x, x]), 1.0),
        (lambda x: jc.PerReplica.from_global(x), 1.0),
        (lambda v: v[0], value),
    ):
        with pytest.raises(ValueError, match=message):
            jax.jit(f)(x)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="Replica 1 lies on cpu:1 of process 0, where process 1"):
        value[1]
    with pytest.raises(ValueError, match="expects a device of process 1 among its devices; all"):
        jc.PerReplica([1.0, 2.0])


@pytest.mark.tensorflow("A5", "A11", "J22")
def test_values_copy_show_never_pickle():
    value = jc.PerReplica([1.0, 2.0, 3.0])
    leaves, treedef = jax.tree.flatten(value)
    again = (treedef.unflatten(leaves), jc.PerReplica(value.values))
    for copied in (copy.copy(value), copy.deepcopy(value), *again):
        assert copied.devices == value.devices
        assert [float(x) for x in copied] == [1.0, 2.0, 3.0]
    for words, call in (
        ("A PerReplica lies on devices and cannot be pickled", lambda: pickle.dumps(value)),
        ("`DistributedValues` is the base class of `PerReplica`", lambda: jc.DistributedValues([1.0])),
        ("unsupported operand", lambda: value + 1),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=words):
            call()
    assert repr(value) == "PerReplica(float32[] on 3: cpu:0, cpu:1, cpu:2)"
    tree = {"b": [np.ones(3, "f")], "w": np.ones((2, 3), "i4")}
    assert repr(jc.distribute.Mirrored.from_function(lambda i: tree)) == (
        "Mirrored({'b': [float32[3]], 'w': int32[2, 3]} on 8: cpu:0, cpu:1, …, cpu:7)"
    )
    assert repr(jc.PerReplica([[1.0] * 99] * 2)) == "PerReplica(99 arrays on 2: cpu:0, cpu:1)"
