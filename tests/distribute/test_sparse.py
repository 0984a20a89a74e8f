"""IndexedSlices on several replicas, reduced between programs."""

import jax
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll import IndexedSlices, Mirrored, NcclAllReduce, PerReplica, ReductionToOneDevice

OPS = {
    "one": ReductionToOneDevice(),
    "nccl": NcclAllReduce(),
    "hierarchical": jc.HierarchicalCopyAllReduce(),
    "small": jc.AllReduceCrossDeviceOps("nccl", 0, 100, 10),
}
EVERY = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
SIMPLE = pytest.mark.parametrize("ops", [OPS["one"], OPS["nccl"]], ids=["one", "nccl"])


def sparse(values, indices, dense_shape=None):
    return IndexedSlices(np.array(values, "f"), np.array(indices, "i4"), dense_shape)


def total_of(parts):
    """The rows of the sum, by index."""
    total = sum(np.asarray(part.to_dense()) for part in parts)
    return {i: row.tolist() for i, row in enumerate(total) if row.any()}


def dense_rows(slices):
    """The rows of the dense array that are not zero, by index."""
    return total_of([slices])


def one(result):
    """The copy on the last device."""
    return result[len(result) - 1] if isinstance(result, Mirrored) else result


def reduced(ops, op, value, how="reduce", to=None):
    to = value if to is None else to
    if how == "reduce":
        return ops.reduce(op, value, to)
    return ops.batch_reduce(op, [(value, to), (value, to)])[1]


HOW = pytest.mark.parametrize("how", ["reduce", "batch_reduce"])
B9 = [sparse([[1, 2]], [1], (5, 2)), sparse([[3, 4], [5, 6]], [1, 3], (5, 2))]


@EVERY
@HOW
def test_B9_B10_B11_L28_L29_uneven_lengths(ops, how):
    value = PerReplica(B9)
    for to in (value, "cpu:0"):
        total = one(reduced(ops, "sum", value, how, to))
        assert dense_rows(total) == {1: [4, 6], 3: [5, 6]}
        mean = one(reduced(ops, "mean", value, how, to))
        assert dense_rows(mean) == {1: [2, 3], 3: [2.5, 3]}
        exact, halves = total.without_padding(), mean.without_padding()
        assert (exact.values.tolist(), exact.indices.tolist()) == (
            [[1, 2], [3, 4], [5, 6]], [1, 1, 3]
        )  # fmt: skip
        assert halves.values.tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
        assert exact.dense_shape == (5, 2)


@SIMPLE
def test_E1_E2_E4_dense_and_sparse_have_one_arithmetic(ops):
    first = sparse([[1, 2], [3, 4]], [0, 2], (3, 2))
    second = sparse([[5, 6], [7, 8]], [1, 2], (3, 2))
    value = PerReplica([first, second])
    want = np.array([[1, 2], [5, 6], [10, 12]])
    for op, share in (("sum", 1), ("mean", 2)):
        got = one(ops.reduce(op, value, value))
        assert isinstance(got, IndexedSlices)
        np.testing.assert_array_equal(got.to_dense(), want / share)
        dense = PerReplica([first.to_dense(), second.to_dense()])
        np.testing.assert_array_equal(one(ops.reduce(op, dense, dense)), want / share)


@SIMPLE
def test_E7_a_broadcast_without_a_dense_shape(ops):
    got = ops.broadcast(sparse([1], [0]), "cpu:1")
    assert (got.values.tolist(), got.indices.tolist(), got.dense_shape) == ([1.0], [0], None)
    assert got.values.devices() == {jax.devices()[1]}
    wide = ops.broadcast(got, PerReplica([0, 0, 0]))
    assert wide[2].values.tolist() == [1.0]


ROWS = [[0, 1], [1, 2], [7, 8], [3, 2]]
F8 = [sparse([[2 * i + 1], [2 * i + 2]], rows, (10, 1)) for i, rows in enumerate(ROWS)]
F14 = [sparse([[3], [4]], [k % 4, 4], (5, 1)) for k in range(4)]


@EVERY
def test_F7_F8_F13_F14_L31_L43_reduce_and_batch_reduce(ops):
    for n in (2, 4):
        x, y = PerReplica(F8[:n]), PerReplica(F14[:n])
        want = [total_of(F8[:n]), total_of(F14[:n])]
        total = one(ops.reduce("sum", x, x))
        assert dense_rows(total) == want[0]
        if ops is OPS["nccl"]:
            assert total.indices.tolist() == np.concatenate(ROWS[:n]).tolist()
        mean = {i: [v / n for v in row] for i, row in want[0].items()}
        assert dense_rows(one(ops.reduce("mean", x, x))) == mean
        got = ops.batch_reduce("sum", [(x, x), (y, y)])
        assert [dense_rows(one(g)) for g in got] == want


@pytest.mark.parametrize("n", [3, 6])
def test_F31_F32_workers_with_one_and_two_devices(n):
    rows = [[[1, 2]], [[3, 4]], [[2, 1]], [[0, 0]], [[3, 1]], [[2, 1]]]
    parts = [sparse(rows[i], [i + 1], (10, 2)) for i in range(n)]
    value, workers = PerReplica(parts), [f"/job:worker/task:{i}" for i in range(3)]
    for ops in (
        jc.MultiWorkerAllReduce(workers, n // 3),
        jc.CollectiveAllReduce(jax.devices()[:n], n),
    ):
        (got,) = ops.batch_reduce("sum", [(value, value)])
        assert dense_rows(got[0]) == dense_rows(got[n - 1]) == total_of(parts)


@HOW
@pytest.mark.parametrize("ring", [True, False])
def test_F35_fixed_and_variable_lengths_on_two_devices(how, ring):
    options = jc.CommunicationOptions(implementation="ring" if ring else "nccl")
    ops = jc.CollectiveAllReduce(jax.devices()[:2], 2, options)
    first = sparse([[1, 2]], [1], (10, 2))
    for second in (sparse([[3, 4]], [2], (10, 2)), sparse([[3, 4], [3, 4]], [2, 2], (10, 2))):
        got = reduced(ops, "sum", PerReplica([first, second]), how)
        assert dense_rows(one(got)) == total_of([first, second])


@SIMPLE
def test_F20_positions_are_kept_in_a_tuple_and_in_a_batch(ops):
    parts = (sparse([[1]], [0], (5, 1)), 1.0, {"b": sparse([[3]], [2], (5, 1)), "a": 2.0})
    value = PerReplica([parts, parts])
    first, dense, rest = one(ops.reduce("sum", value, value))
    assert (dense_rows(first), float(dense)) == ({0: [2]}, 2)
    assert (dense_rows(rest["b"]), float(rest["a"])) == ({2: [6]}, 4)
    x, y = PerReplica([parts[0]] * 2), PerReplica([1.0, 1.0])
    got = ops.batch_reduce("mean", [(x, x), (y, y), (x, "cpu:0"), (y, "cpu:3")])
    assert dense_rows(one(got[0])) == dense_rows(got[2]) == {0: [1]}
    assert float(one(got[1])) == float(got[3]) == 1


@SIMPLE
def test_a_mirrored_value_and_one_of_a_single_replica(ops):
    slices = sparse([[1, 2]], [1], (5, 2))
    mirrored = Mirrored([slices] * 4)
    assert dense_rows(one(ops.reduce("sum", mirrored, mirrored))) == {1: [4, 8]}
    assert dense_rows(one(ops.reduce("mean", mirrored, mirrored))) == {1: [1, 2]}
    on_device = jax.device_put(slices, jax.devices()[3])
    for value in (slices, on_device):
        for op in ("sum", "mean"):
            got = ops.reduce(op, value, "cpu:3")
            assert (dense_rows(got), got.values.devices()) == ({1: [1, 2]}, {jax.devices()[3]})
    same = ops.reduce("mean", on_device, "cpu:3")
    assert same.values.unsafe_buffer_pointer() == on_device.values.unsafe_buffer_pointer()
    whole = IndexedSlices(np.array([3]), np.array([0]), (2,))
    assert ops.reduce("mean", whole, "cpu:0").values.dtype == np.float32


def test_PerReplica_pads_to_the_longest_and_shows_what_it_has():
    value = PerReplica([{"e": B9[0], "w": 1.0}, {"e": B9[1], "w": 2.0}])
    assert repr(value) == (
        "PerReplica({'e': IndexedSlices(values=float32[2, 2], indices=int32[2], "
        "dense_shape=(5, 2)), 'w': float32[]} on 2: cpu:0, cpu:1)"
    )
    assert value[0]["e"].without_padding().indices.tolist() == [1]
    assert value[0]["e"].values.tolist() == [[1, 2], [0, 0]]
    empty = PerReplica([sparse(np.zeros((0, 2)), [], (5, 2)), B9[1]])
    assert dense_rows(one(NcclAllReduce().reduce("sum", empty, empty))) == {1: [3, 4], 3: [5, 6]}
    there = [jax.device_put(x, d) for x, d in zip(B9, jax.devices()[2:4], strict=True)]
    assert PerReplica(there).devices == tuple(jax.devices()[2:4])


# Bad input


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([B9[0], 1.0], "the value is an IndexedSlices on replica 0, but of type float on replica 1; "
                       "it must be sparse on all replicas or dense on all"),
        ([{"a": np.ones((5, 2))}, {"a": B9[0]}],
         r"leaf \['a'\] is an IndexedSlices on replica 1, but of type ndarray on replica 0"),
        ([B9[0], sparse([[1, 2]], [1], (6, 2))],
         r"the value has dense_shape \(6, 2\) on replica 1, \(5, 2\) on replica 0"),
        ([B9[0], sparse([[1, 2]], [1])], "the value has dense_shape None on replica 1"),
        ([sparse([[1, 2]], [1]), sparse([[1]], [1])], r"leaf .values has shape \(1, 1\) on replica 1"),
        ([sparse([[1, 2]], [1]), IndexedSlices([[1, 2]], [1])], "leaf .values has dtype int32 on repl"),
        ([B9[0], [B9[0]]], "expects one structure for all replicas"),
    ],
)  # fmt: skip
def test_replicas_that_disagree_are_refused(values, message):
    with pytest.raises(ValueError, match="`PerReplica`.*" + message):
        PerReplica(values)


def test_lengths_of_other_processes_count_and_so_do_their_tables(monkeypatch):
    """Over real processes: tests/processes/test_strategies.py."""
    from jaxcoll._distribute.values import assemble

    devices = tuple(jax.devices()[:4])
    assert (
        assemble.padded_alike("PerReplica", {0: B9[0], 1: B9[1]}, devices[:2])[0].values.shape[0]
        == 2
    )
    others = np.array([[[1, 7]], [[5, 7]]])  # lengths, and what the tables' shapes come to
    monkeypatch.setattr(assemble, "known_to_all", lambda *_: others)
    found = assemble.padded_alike("PerReplica", {0: B9[0], 1: B9[1]}, devices)
    assert [x.values.shape for x in found.values()] == [(5, 2), (5, 2)]
    others[1, 0, 1] += 1
    with pytest.raises(
        ValueError, match=r"rows of one array; those here have the dense_shape \(5, 2\), and other"
    ):
        assemble.padded_alike("PerReplica", {0: B9[0], 1: B9[1]}, devices)


def test_copies_are_not_padded():
    with pytest.raises(ValueError, match=r"`Mirrored` expects one shape .* has shape \(2, 2\)"):
        Mirrored(B9)


@SIMPLE
def test_rows_of_booleans_and_broken_parts_are_refused_and_the_next_call_works(ops):
    flags = PerReplica([{"e": IndexedSlices([True], [0])}] * 2)
    with pytest.raises(ValueError, match=r"cannot reduce leaf \['e'\].values: booleans"):
        ops.reduce("sum", flags, flags)
    broken = jax.tree.map(lambda x: x[None], B9[0])
    with pytest.raises(ValueError, match=r"`reduce` expects `values` of shape \(k, \*row\)"):
        ops.reduce("sum", broken, "cpu:0")
    value = PerReplica(B9)
    assert dense_rows(one(ops.reduce("sum", value, value))) == {1: [4, 6], 3: [5, 6]}


def test_an_accumulation_fn_has_nothing_to_say_about_rows():
    ops = ReductionToOneDevice(accumulation_fn=lambda xs: xs[0])
    value = PerReplica([{"e": B9[1], "w": 1.0}] * 2)
    with pytest.raises(ValueError, match=r"adds arrays, but leaf \['e'\] is an IndexedSlices"):
        ops.reduce("sum", value, value)
