"""The packing laws, over random trees, and what random trees do not reach."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcoll._collectives.pipeline import pack, unpack
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.packing import UNPACKED, BytesPerPack, ReadyOrder, plan_packs
from jaxcoll.distribute._routes import GroupSmall, NumPacks

DTYPES = [
    np.dtype(d)
    for d in (
        np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint16, np.int32,
        np.int64, np.complex64, np.complex128, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    )
]  # fmt: skip
SHAPES = [(), (0,), (1,), (3,), (5, 3), (2, 0, 3), (7,), (4, 4), (13,)]


def leaf(shape, dtype=np.float32, **more):
    return Leaf("", tuple(shape), np.dtype(dtype), np.dtype(dtype), **{"over": (2,), **more})


mixed = st.builds(
    leaf, st.sampled_from(SHAPES), st.sampled_from(DTYPES), kind=st.sampled_from("ab"),
    over=st.sampled_from([(2,), (2, 3), (1, 1)]), solid=st.booleans(), ready=st.integers(0, 5),
)  # fmt: skip
alike = st.builds(leaf, st.sampled_from([(), (2,), (3,), (11,)]), ready=st.integers(0, 5))
leaves = st.lists(mixed, max_size=12) | st.lists(alike, max_size=12)
rules = st.one_of(
    st.builds(BytesPerPack, st.integers(1, 200)),
    st.builds(NumPacks, st.integers(1, 9)),
    st.builds(GroupSmall, st.integers(0, 200), st.integers(1, 5)),
    st.builds(ReadyOrder, st.integers(1, 200), st.integers(1, 60), st.integers(0, 20)),
    st.just(UNPACKED),
)


@given(leaves, rules)
def test_every_element_is_packed_once(leaves, rule):
    covered = {i: 0 for i, x in enumerate(leaves) if x.travels}
    starts = []
    for p in plan_packs(leaves, rule):
        starts.append((p.segments[0].leaf, p.segments[0].start))
        assert p.size > 0
        for s in p.segments:
            assert s.start == covered[s.leaf]
            assert s.size > 0
            covered[s.leaf] += s.size
        if not isinstance(rule, ReadyOrder):
            assert [s.leaf for s in p.segments] == sorted(s.leaf for s in p.segments)
    assert covered == {i: leaves[i].size for i in covered}
    assert starts == sorted(starts) or isinstance(rule, ReadyOrder)


@given(leaves, rules)
def test_a_pack_is_uniform(leaves, rule):
    packs, again = plan_packs(leaves, rule), plan_packs(tuple(leaves), rule)
    assert packs == again
    assert hash(packs) == hash(again)
    for p in packs:
        members = [leaves[s.leaf] for s in p.segments]
        agreed = {(x.wire, x.over, x.kind) for x in members}
        assert agreed == {(p.dtype, p.over, p.kind)}
        if any(x.solid for x in members):
            assert [s.size for s in p.segments] == [members[0].size]


@given(leaves, st.integers(1, 200))
def test_packs_close_before_their_limit(leaves, limit):
    packs = plan_packs(leaves, BytesPerPack(limit))
    for p in packs:
        assert p.nbytes <= limit or len(p.segments) == 1
        assert all(s.size == leaves[s.leaf].size for s in p.segments), "a leaf is never split"
    open_packs = {}
    for p in packs:
        if leaves[p.segments[0].leaf].solid or p.nbytes > limit:
            continue
        before = open_packs.get((p.dtype, p.over, p.kind))
        if before is not None:
            first = leaves[p.segments[0].leaf].nbytes
            assert before.nbytes + first > limit, "a pack that had room was closed"
        open_packs[p.dtype, p.over, p.kind] = p


@given(leaves, st.integers(8, 200), st.integers(1, 8))
def test_ready_packs_come_in_order(leaves, limit, last):
    packs = plan_packs(leaves, ReadyOrder(limit, last, 0))
    done = [max(leaves[s.leaf].ready for s in p.segments) for p in packs]
    assert done == sorted(done)
    for p in packs:
        whole = all(s.size == leaves[s.leaf].size for s in p.segments)
        assert p.nbytes <= max(limit, p.dtype.itemsize) or (whole and len(p.segments) == 1)


def test_ready_packs_taper():
    matrices = [leaf((1000,), ready=9 - i) for i in range(10)]
    biases = [leaf((2,), ready=9 - i) for i in range(10)]
    packs = plan_packs([*matrices, *biases], ReadyOrder(4000, 400, 100))
    assert [p.segments[0].leaf for p in packs[:6]] == [9, 8, 7, 6, 5, 4]
    tapering = [3000, 2248, 1688, 1264, 948, 712, 532, 400, 400, 400, 400, 8 + 10 * 8]
    assert [p.nbytes for p in packs] == [4000] * 7 + tapering
    assert [s.leaf for s in packs[-1].segments if s.leaf >= 10] == [19 - i for i in range(10)]
    packs = plan_packs([*matrices, *biases], ReadyOrder(4000, 5 * 8, 100))
    assert [s.leaf for s in packs[-1].segments if s.leaf > 14] == [19 - i for i in range(5)]


@pytest.mark.tensorflow("L19")
@given(leaves, st.integers(1, 20))
def test_num_packs_are_near_equal(leaves, count):
    members = [x for x in leaves if x.travels and not x.solid]
    packs = [p for p in plan_packs(leaves, NumPacks(count)) if not leaves[p.segments[0].leaf].solid]
    groups = {(x.wire, x.over, x.kind) for x in members}
    elements = sum(x.size for x in members)
    assert len(packs) == min(max(count, len(groups)), elements)
    for group in groups:
        sizes = [p.size for p in packs if (p.dtype, p.over, p.kind) == group]
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60)
@given(leaves, rules, st.integers(0, 2**32 - 1))
def test_unpacking_inverts_packing(leaves, rule, seed):
    """NaN payloads, negative zeros and subnormals included: the bytes are random.

    But for the NaNs of bfloat16 and 8-bit floats: XLA's CPU compiler widens these types to copy
    them, which keeps a NaN a NaN and neither its sign nor its payload.
    """
    rng = np.random.default_rng(seed)

    def random_bits(x):
        values = np.frombuffer(rng.bytes(x.size * x.dtype.itemsize), x.dtype).reshape(x.shape)
        widened = x.dtype.name == "bfloat16" or x.dtype.name.startswith("float8")
        with np.errstate(invalid="ignore"):  # bfloat16 is widened to be asked, and NaNs signal
            return np.where(np.isnan(values), x.dtype.type(1), values) if widened else values

    with jax.enable_x64(True):
        arrays = [jnp.asarray(random_bits(x)) for x in leaves]
        packs = plan_packs(leaves, rule)
        packed = pack(arrays, packs, leaves)
        back = unpack(packed, packs, leaves)
    for array, plan in zip(packed, packs, strict=True):
        assert array.dtype == plan.dtype
        assert array.size == plan.size
    for x, array, again in zip(leaves, arrays, back, strict=True):
        if not x.travels:
            assert again is None
            continue
        assert again.shape == x.shape
        assert again.dtype == x.dtype
        assert np.asarray(again).tobytes() == np.asarray(array).tobytes()


def test_whole_leaf_is_no_copy():
    x = jnp.ones((3, 4))
    packs = plan_packs([leaf((3, 4))], BytesPerPack(1))
    (packed,) = pack([x], packs, [leaf((3, 4))])
    assert packed is x
    assert unpack([packed], packs, [leaf((3, 4))])[0] is x


def test_dtypes_share_packs_by_bytes():
    packs = plan_packs([leaf((100,)), leaf((10,), np.int32)], NumPacks(4))
    assert [(p.dtype.name, p.size) for p in packs] == [
        ("float32", 34), ("float32", 33), ("float32", 33), ("int32", 10),
    ]  # fmt: skip


@given(leaves, st.sampled_from([0, 8, 12, 44, 200]), st.integers(1, 5))
def test_small_neighbours_travel_together(leaves, max_bytes, max_group):
    packs = plan_packs(leaves, GroupSmall(max_bytes, max_group))
    travelling = [i for i, x in enumerate(leaves) if x.travels]
    assert [s.leaf for p in packs for s in p.segments] == travelling, "in order, each once"
    for p in packs:
        members = [s.leaf for s in p.segments]
        assert len(members) <= max_group
        if len(members) > 1:
            assert all(leaves[i].nbytes <= max_bytes and not leaves[i].solid for i in members)
    for before, after in itertools.pairwise(packs):
        last, first = leaves[before.segments[-1].leaf], leaves[after.segments[0].leaf]
        small = last.nbytes <= max_bytes and first.nbytes <= max_bytes
        alike = (last.wire, last.kind, last.over) == (first.wire, first.kind, first.over)
        if small and alike and not (last.solid or first.solid):
            assert len(before.segments) == max_group, "a group that had room was closed"


@pytest.mark.tensorflow("E8")
def test_pack_limit_is_a_ceiling():
    """TensorFlow makes [f32 128 B, i32 32 B, i64 800 B] and [i32 4 B] of a limit of 200."""
    shapes = [((2, 4, 4), "f4"), ((8,), "i4"), ((10, 10), "i8"), ((1,), "i4")]
    packs = plan_packs([leaf(shape, dtype) for shape, dtype in shapes], BytesPerPack(200))
    assert [[s.leaf for s in p.segments] for p in packs] == [[0], [1, 3], [2]]


def test_huge_pack_has_static_slices():
    leaves = [leaf((1 << 30,), np.float16)] * 3
    packs = plan_packs(leaves, BytesPerPack(1 << 40))
    packed = [jax.ShapeDtypeStruct((3 << 30,), np.float16)]
    cut = jax.eval_shape(lambda p: unpack(p, packs, leaves, on_cpus=True), packed)
    assert [piece.shape for piece in cut] == [(1 << 30,)] * 3
