"""CrossDeviceOps.gather: joined to the bit, wherever it is wanted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CompileCounter, assert_trees_equal

import jaxcoll as jc
from jaxcoll import Mirrored, NcclAllReduce, PerReplica, ReductionToOneDevice

RING = jc.CommunicationOptions(bytes_per_pack=64, implementation="ring")
OPS = {
    "one": ReductionToOneDevice(),
    "nccl": NcclAllReduce(),
    "ring": jc.CollectiveAllReduce(jax.devices(), 8, RING),
}
EVERY = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
NCCL = NcclAllReduce()


def over(ops, n):
    """The op for values of the first n devices: one that has a group takes no part of it."""
    has_group = isinstance(ops, jc.CollectiveAllReduce)
    return jc.CollectiveAllReduce(jax.devices()[:n], n, RING) if has_group else ops


def on(ids):
    return Mirrored.from_function(lambda i: 0, devices=[jax.devices()[i] for i in ids])


def parts(n):
    return [
        {"x": np.full((2, 3), i, "f"), "k": [np.array([i + 1, -i], "i4"), None], "b": np.array([i > 1])}
        for i in range(n)
    ]  # fmt: skip


@EVERY
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("where", ["own", "turned", "others", "more", "one", "string"])
def test_trees_are_joined_in_replica_order_wherever_they_are_wanted(ops, n, where):
    value = PerReplica(parts(n))
    to = {
        "own": value,
        "turned": on(range(n - 1, -1, -1)),
        "others": on(range(8 - n, 8)),
        "more": on(range(n + 1)),
        "one": on([n]),
        "string": "/device:CPU:6",
    }[where]
    result = over(ops, n).gather(value, to, axis=0)
    want = jax.tree.map(lambda *xs: np.concatenate(xs), *parts(n))
    matrices = PerReplica([part["x"] + 10 * np.arange(3, dtype="f") for part in parts(n)])
    for axis in (1, -1, -2):
        got = over(ops, n).gather(matrices, to, axis)
        got = got[len(got) - 1] if isinstance(got, Mirrored) else got
        np.testing.assert_array_equal(got, np.concatenate(matrices.values, axis))
    if isinstance(to, str) or len(to) == 1:
        assert_trees_equal(result, want)
        device = jax.devices()[6] if isinstance(to, str) else to.devices[0]
        assert all(x.devices() == {device} for x in jax.tree.leaves(result))
    else:
        assert isinstance(result, Mirrored)
        assert result.devices == to.devices
        for copy in result:
            assert_trees_equal(copy, want)


@EVERY
def test_K5_parts_of_unequal_sizes_are_a_list_or_tuple(ops):
    uneven = [np.full((i, 2), i, "f") for i in (3, 0, 1)]
    lying = tuple(jax.device_put(x, d) for x, d in zip(uneven, jax.devices()[4:], strict=False))
    for given in (uneven, lying):
        for to in ("cpu:1", on([0, 7])):
            result = ops.gather(given, to, axis=0)
            for copy in [result] if isinstance(to, str) else result:
                np.testing.assert_array_equal(copy, np.concatenate(uneven))


@EVERY
def test_of_equal_copies_there_are_as_many_as_replicas(ops):
    ops = over(ops, 3)
    assert ops.gather(Mirrored([np.arange(2)] * 3), "cpu:5", 0).tolist() == [0, 1] * 3
    both = ops.gather(Mirrored([np.arange(2)] * 3), on(range(3)), 0)
    assert [x.tolist() for x in both] == [[0, 1] * 3] * 3


@EVERY
def test_an_array_is_the_value_of_one_replica(ops):
    x = jax.device_put(np.arange(3.0), jax.devices()[2])
    assert ops.gather(x, "cpu:2", 0).tolist() == [0.0, 1.0, 2.0]
    assert [v.tolist() for v in ops.gather(np.arange(2), on([1, 3]), 0)] == [[0, 1]] * 2


def test_it_is_compiled_once_a_shape():
    for to in ("cpu:3", on(range(4))):
        values = [PerReplica([np.full((3, k), i, "f") for i in range(4)]) for k in (2, 2, 5)]
        NCCL.gather(values[0], to, 1)
        with CompileCounter() as again:
            NCCL.gather(values[1], to, axis=1, options=jc.CommunicationOptions())
        with CompileCounter() as other:
            NCCL.gather(values[2], to, 1)
        assert (again.count, other.count) == (0, 1)


@EVERY
@pytest.mark.parametrize(
    ("value", "axis", "message"),
    [
        ([np.ones((1, 1)), np.ones((1, 2))], 0, r"axis 0 only; replica 1 has shape \(1, 2\), replica 0 \(1, 1\)"),
        ([np.ones(1), np.ones((1, 1))], 0, r"replica 1 has shape \(1, 1\), replica 0 \(1,\)"),
        ([np.ones(1, "f"), np.ones(1, "i4")], 0, "expects one dtype; replica 1 has int32, replica 0 float32"),
        ([1.0, 2.0], 0, r"the part of replica 0 is a scalar, which has no axis 0; give it one with `x\[None\]`"),
        ([np.ones(1), "x"], 0, r"the part of replica 1 is 'x' \(str\)"),
        ([], 0, "expected one or more, got 0"),
        (3.0, 0, "the value is a scalar"),
        ("x", 0, r"expects a PerReplica, a Mirrored, an array, or a list .* got 'x' \(str\)"),
        ({"a": np.ones(1)}, 0, r"array for each replica; got \{'a'.*\(dict\)"),
        (np.ones((2, 3)), 2, r"the value has shape \(2, 3\) and so no axis 2; expected one from -2 to 1"),
        (np.ones((2, 3)), "0", "expected `axis` to be an integer; got '0'"),
    ],
    ids=lambda case: type(case).__name__,
)  # fmt: skip
def test_what_cannot_be_joined_is_refused(ops, value, axis, message):
    with pytest.raises(ValueError, match="`gather`.*" + message):
        ops.gather(value, "cpu:0", axis)
    with pytest.raises(ValueError, match="`options` must be a CommunicationOptions"):
        ops.gather(np.ones(3), "cpu:0", 0, options="ring")
    with pytest.raises(ValueError, match="`gather` expects destinations to be"):
        ops.gather(np.ones(3), None, 0)
    assert ops.gather([np.ones(1)] * 2, "cpu:0", 0).tolist() == [1.0, 1.0]


@EVERY
def test_slices_are_not_implemented_alone_in_a_list_or_in_a_tree(ops):
    slices = jc.IndexedSlices([[1.0]], [0], (3, 1))
    for value, where in (
        (slices, "the value"),
        ([np.ones(1), slices], r"leaf \[1\]"),
        (Mirrored([{"s": slices}] * 2), r"leaf \['s'\]"),
    ):
        words = f"dense arrays; {where} is an IndexedSlices. `reduce` gathers the rows"
        with pytest.raises(NotImplementedError, match=words):
            ops.gather(value, "cpu:0", 0)


@EVERY
def test_a_leaf_of_a_distributed_value_is_named(ops):
    value = PerReplica([{"a": np.ones((1, 2)), "b": 1.0}] * 2)
    with pytest.raises(ValueError, match=r"`gather`: leaf \['b'\] is a scalar"):
        ops.gather(value, value, 0)

    with pytest.raises(ValueError, match="is being traced"):
        jax.jit(lambda v: ops.gather(v, "cpu:0", 0))(PerReplica([jnp.ones(1)] * 2))
