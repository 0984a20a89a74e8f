"""PerReplica and Mirrored: views of global arrays, one device a replica."""

import copy
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CompileCounter, assert_trees_equal, devices
from jax.sharding import AxisType, Mesh, NamedSharding

import jaxcoll as jc

P = jax.sharding.PartitionSpec
KINDS = (jc.PerReplica, jc.distribute.Mirrored)


class Items(list):
    """Rows one by one, which are no pytree."""


def of_device(shard):
    return shard.device.id


def pointers(tree):
    """Where the parts of every leaf lie, in the order of the devices' ids."""
    return [
        [s.data.unsafe_buffer_pointer() for s in sorted(x.addressable_shards, key=of_device)]
        for x in jax.tree.leaves(tree)
    ]  # fmt: skip


# Laws


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_pmap_results_wrap_without_copies(n):
    def f(x):
        return {"w": x * 2, "b": x.sum()}

    out = jax.pmap(f, devices=devices(n))(np.arange(n * 3.0, dtype="f").reshape(n, 3))
    value = jc.PerReplica.from_global(out)
    assert pointers(value.tree) == pointers(out)
    assert value.devices == tuple(devices(n))
    assert (len(value), value.num_replicas) == (n, n)
    again = jax.tree.map(lambda x: x, value)
    assert pointers(again) == pointers(out)
    with jax.transfer_guard("disallow"):
        back = jax.pmap(f, devices=devices(n))(value.tree["w"])
    np.testing.assert_array_equal(back["w"], value.tree["w"] * 2)


def test_replicated_array_wraps_without_copies():
    x = jax.device_put(np.arange(3.0), NamedSharding(jax.make_mesh((2, 4), ("a", "b")), P()))
    value = jc.distribute.Mirrored.from_global([x])
    assert pointers(value.tree) == pointers(x)
    assert [pointers(value[i]) for i in range(8)] == [[[p]] for p in pointers(x)[0]]


def test_any_mesh_is_taken():
    """Explicit axes, another name, devices backwards: rows keep their devices."""
    mesh = Mesh(np.array(jax.devices()[5:2:-1]), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.arange(3.0), NamedSharding(mesh, P("x")))
    value = jc.PerReplica.from_global(x)
    assert [d.id for d in value.devices] == [5, 4, 3]
    assert [v.item() for v in value] == [0.0, 1.0, 2.0]
    assert pointers(value.tree) == pointers(x)


def test_several_meshes_share_a_program():
    rows = np.arange(8.0, dtype="f").reshape(4, 2)
    value = jc.PerReplica.from_global([
        jax.device_put(rows, NamedSharding(jax.make_mesh(shape, axes, devices=devices(4)), P(axes)))
        for shape, axes in [((4,), ("a",)), ((2, 2), ("x", "y"))]
    ])  # fmt: skip
    for each in jc.NcclAllReduce().reduce("sum", value, value).tree:
        np.testing.assert_array_equal(each, rows.sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_indexing_gives_the_replica(kind):
    value = kind.from_function(lambda i: {"w": np.full((2,), 5.0, "f"), "n": 3}, devices=devices(3))
    for i in range(3):
        assert value[i]["w"].devices() == {jax.devices()[i]}
        assert value[i]["w"].shape == (2,)
        assert value.values[i]["n"] == 3
    assert value[-1]["w"].devices() == {jax.devices()[2]}
    for i in (3, -4):
        with pytest.raises(IndexError, match=rf"There are replicas 0 to 2; got {i}\."):
            value[i]


def test_placed_arrays_stay():
    parts = [jax.device_put(np.full((4,), i, "f"), jax.devices()[i]) for i in (6, 1, 3)]
    assert [d.id for d in jc.PerReplica(parts).devices] == [6, 1, 3]
    same = [jax.device_put(np.ones((4,), "f"), jax.devices()[i]) for i in (6, 1)]
    value = jc.distribute.Mirrored(same)
    assert [pointers(value[i]) for i in range(2)] == [pointers(x) for x in same]
    assert jc.PerReplica([jnp.ones(2)] * 3).devices == tuple(devices(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_passes_through_jax(kind):
    value = kind([{"w": np.ones(2, "f"), "none": None}] * 4)
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: x * 2, v))(value)
    assert isinstance(doubled, kind)
    assert doubled.devices == value.devices
    assert doubled[3]["w"].tolist() == [2.0, 2.0]
    assert doubled[3]["none"] is None
    paths = jax.tree_util.tree_leaves_with_path(value)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".tree['w']"]
    shapes = jax.eval_shape(lambda v: v, value)
    assert repr(shapes).startswith(f"{kind.__name__}(")
    assert_trees_equal(copy.deepcopy(value).values, value.values)


def test_prng_keys_can_be_held():
    keys = jax.random.split(jax.random.key(0), 2)
    value = jc.PerReplica(list(keys))
    assert (jax.random.bits(value[1]) == jax.random.bits(keys[1])).item()
    assert len(jc.distribute.Mirrored([keys[0], keys[0]])) == 2
    with pytest.raises(ValueError, match="expects equal copies; the value of replica 1 differs"):
        jc.distribute.Mirrored(list(keys))


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


@pytest.mark.parametrize("take", TAKES)
def test_large_integers_are_refused(take):
    take(2**31 - 1)
    with pytest.raises(OverflowError, match="int32"):
        take(2**31)


@pytest.mark.parametrize(
    "take",
    [
        *TAKES,
        lambda x: list(jc.MirroredStrategy().experimental_distribute_dataset([x])),
        lambda x: list(jc.batches(x, 8)),
        lambda x: list(jc.batches(Items(x.reshape(8, 1)), 8)),
        lambda x: jc.save_checkpoint(os.devnull, x),
    ],
)
def test_a_mask_is_never_dropped(take):
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
    rows = jc.PerReplica([x["w"] for x in parts], devices=devices(2))
    for value in (rows, per_leaf["w"]):
        assert strategy.gather(value, axis=0).tolist() == [1, 1, 4]
        assert float(strategy.reduce("mean", value, axis=0)) == 2
        with pytest.raises(ValueError, match="unequal shapes"):
            strategy.run(lambda x: x, (value,))
    with pytest.raises(
        ValueError, match=r"`Mirrored` expects one shape.*\(1,\) on replica 1, \(2,\) on r"
    ):
        jc.distribute.Mirrored([x["w"] for x in parts])


def test_unequal_copies_are_refused():
    differs = r"equal copies; leaf \['a'\] of replica 1 differs from that of replica 0. "
    with pytest.raises(ValueError, match=differs):
        jc.distribute.Mirrored([{"a": 1.0}, {"a": 2.0}])
    assert len(jc.distribute.Mirrored([np.nan, np.nan])) == 2
    wide = jax.device_put(np.ones(8, "f"), NamedSharding(jax.make_mesh((8,), ("x",)), P("x")))
    with pytest.raises(ValueError, match=r"replica 0 spans 8 devices.*`PerReplica.from_global`"):
        jc.PerReplica([wide, wide])


def half():
    mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
    return jax.device_put(np.ones((4, 2), "f"), NamedSharding(mesh, P("a")))


def pair(order):
    return jc.PerReplica([1, 2], devices=jax.devices()[:2][::order]).tree


def test_from_global_refuses_other_layouts():
    for kind, tree, message in (
        (jc.PerReplica, lambda: {"w": half()}, r"expects leaf \['w'\] to have a leading replica dimension"),
        (jc.distribute.Mirrored, half, r"expects the value to be replicated over its devices; got shape \(4, 2\) over 8 devices"),
        (jc.PerReplica, lambda: jnp.ones(3), "leading replica dimension"),
        (jc.PerReplica, lambda: np.ones(3), "expects the value to be a global jax.Array; got ndarray"),
        (jc.distribute.Mirrored, lambda: {"a": None}, "`Mirrored` got a tree without leaves; it needs an array"),
        (jc.PerReplica, lambda: [pair(1), pair(-1)],
         r"leaf \[1\] lies on cpu:1, cpu:0, but the first leaf on cpu:0, cpu:1; all must lie on the same"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kind.from_global(tree())


def test_traced_values_are_refused():
    message = "is being traced, so it lies on no device"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: jc.PerReplica([x, x]))(1.0)
    with pytest.raises(ValueError, match=message + r".*`jc.all_reduce`"):
        jax.jit(lambda x: jc.PerReplica.from_global(x))(1.0)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda v: v[0])(jc.PerReplica([1.0, 2.0]))


def test_remote_values_are_refused(monkeypatch):
    value = jc.PerReplica([1.0, 2.0])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="Replica 1 lies on cpu:1 of process 0, where process 1"):
        value[1]
    with pytest.raises(ValueError, match="expects a device of process 1 among its devices; all"):
        jc.PerReplica([1.0, 2.0])


def test_reading_one_shape_compiles_once():
    value = jc.PerReplica([np.ones((3, 7), "f")] * 3)
    value.values  # noqa: B018
    with CompileCounter() as compiled:
        value.values  # noqa: B018
        jc.PerReplica([np.ones((3, 7), "f")] * 3)
    assert compiled.count == 0


@pytest.mark.parametrize("bad", [slice(0, 2), "a", 1.0])
def test_index_is_a_replica_id(bad):
    with pytest.raises(TypeError, match="PerReplica is indexed by a replica id, an integer; got"):
        jc.PerReplica([1.0, 2.0, 3.0])[bad]


@pytest.mark.tensorflow("A5")
def test_values_copy_show_never_pickle():
    value = jc.PerReplica([1.0, 2.0, 3.0])
    leaves, treedef = jax.tree.flatten(value)
    again = (treedef.unflatten(leaves), jc.PerReplica(value.values))
    for copied in (copy.copy(value), copy.deepcopy(value), *again):
        assert copied.devices == value.devices
        assert [float(x) for x in copied] == [1.0, 2.0, 3.0]
    with pytest.raises(TypeError, match="A PerReplica lies on devices and cannot be pickled"):
        pickle.dumps(value)
    with pytest.raises(
        TypeError, match="`DistributedValues` is the base class of `PerReplica` and `Mirrored`"
    ):
        jc.DistributedValues([1.0])
    assert repr(value) == "PerReplica(float32[] on 3: cpu:0, cpu:1, cpu:2)"
    tree = {"b": [np.ones(3, "f")], "w": np.ones((2, 3), "i4")}
    assert repr(jc.distribute.Mirrored.from_function(lambda i: tree)) == (
        "Mirrored({'b': [float32[3]], 'w': int32[2, 3]} on 8: cpu:0, cpu:1, …, cpu:7)"
    )
    assert repr(jc.PerReplica([[1.0] * 99] * 2)) == "PerReplica(99 arrays on 2: cpu:0, cpu:1)"
