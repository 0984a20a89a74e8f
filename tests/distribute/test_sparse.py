"""IndexedSlices on several replicas: order, padding, and what is refused.

That their sums are those of dense arrays is test_reductions.py's.
"""

import jax
import numpy as np
import pytest

from jaxcoll import IndexedSlices
from jaxcoll.distribute import Mirrored, NcclAllReduce, PerReplica, ReductionToOneDevice

SIMPLE = pytest.mark.parametrize("ops", [ReductionToOneDevice(), NcclAllReduce()], ids=repr)


def sparse(values, indices, dense_shape=None):
    return IndexedSlices(np.array(values, "f"), np.array(indices, "i4"), dense_shape)


B9 = [sparse([[1, 2]], [1], (5, 2)), sparse([[3, 4], [5, 6]], [1, 3], (5, 2))]


@pytest.mark.tensorflow("B9", "B10", "B11", "L28", "L29")
@SIMPLE
def test_sparse_rows_keep_replica_order(ops):
    value = PerReplica(B9)
    for to in (value, "cpu:0"):
        for op, share in (("sum", 1), ("mean", 2)):
            got = ops.batch_reduce(op, [(value, to), (value, to)])[1]
            got = (got[1] if isinstance(got, Mirrored) else got).without_padding()
            assert (share * got.values).tolist() == [[1, 2], [3, 4], [5, 6]]
            assert (got.indices.tolist(), got.dense_shape) == ([1, 1, 3], (5, 2))


@pytest.mark.tensorflow("E7")
def test_broadcast_needs_no_dense_shape():
    got = NcclAllReduce().broadcast(sparse([1], [0]), "cpu:1")
    assert (got.values.tolist(), got.indices.tolist(), got.dense_shape) == ([1.0], [0], None)
    assert got.values.devices() == {jax.devices()[1]}
    assert NcclAllReduce().broadcast(got, PerReplica([0, 0, 0]))[2].values.tolist() == [1.0]


def test_slices_pad_to_the_longest():
    value = PerReplica([{"e": B9[0], "w": 1.0}, {"e": B9[1], "w": 2.0}])
    assert "'e': IndexedSlices(values=float32[2, 2], indices=int32[2], dense_sh" in repr(value)
    assert value[0]["e"].without_padding().indices.tolist() == [1]
    assert value[0]["e"].values.tolist() == [[1, 2], [0, 0]]
    there = [jax.device_put(x, d) for x, d in zip(B9, jax.devices()[2:4], strict=True)]
    assert PerReplica(there).devices == tuple(jax.devices()[2:4])


def test_replicas_that_disagree_are_refused():
    for values, message in (
        *(([B9[0], other], r"one structure for all replicas.* replica 0 .*IndexedSlices\[\(5, 2\)\]")
          for other in (1.0, [B9[0]], sparse([[1, 2]], [1], (6, 2)), sparse([[1, 2]], [1]))),
        ([{"a": np.ones((5, 2))}, {"a": B9[0]}], "replica 1 has .*'a': CustomNode.IndexedSlices"),
        ([sparse([[1, 2]], [1]), sparse([[1]], [1])], r"leaf .values has shape \(1, 1\) on replica 1"),
        ([sparse([[1, 2]], [1]), IndexedSlices([[1, 2]], [1])], "leaf .values has dtype int32 on repl"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="`PerReplica`.*" + message):
            PerReplica(values)
    with pytest.raises(ValueError, match=r"`Mirrored` expects one shape .* has shape \(2, 2\)"):
        Mirrored(B9)  # copies are not padded


@SIMPLE
def test_unsummable_slices_are_refused(ops):
    own = ReductionToOneDevice(accumulation_fn=lambda xs: xs[0])
    for reduce, value, words in (
        (ops.reduce, PerReplica([{"e": IndexedSlices([True], [0])}] * 2), r"cannot reduce leaf \['e'\].values: booleans"),
        (ops.reduce, jax.tree.map(lambda x: x[None], B9[0]), r"`reduce` expects `values` of shape \(k, \*row\)"),
        (own.reduce, PerReplica([{"e": B9[1], "w": 1.0}] * 2), r"adds arrays, but leaf \['e'\] is an IndexedSlices"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            reduce("sum", value, "cpu:0")
