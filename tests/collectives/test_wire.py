"""One algorithm, or one within groups of replicas and another between them: the sum is the same.

Bytes and steps, counted in the compiled program, are the fewest there are and as planned.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import P, compiled_and_planned, grid, held, mapped, noise, rows

import jaxcoll as jc

FLAT = ("ring", "halving_doubling", "shuffle")
ALL = ("native", *FLAT)
PAIRS = [f"{a}/{b}" for a, b in itertools.product(ALL, ALL)]
BOTH = ("node", "data")


def sent_by_the_busiest(collectives, n):
    """Wire bytes of the device that sends most, each device counted by itself."""
    sent = dict.fromkeys(range(n), 0)
    for c in collectives:
        for device in range(n):
            match c.kind:
                case "collective-permute":
                    sent[device] += c.nbytes * sum(device == source for source, _ in c.groups)
                case "all-to-all":
                    sent[device] += c.nbytes * (c.group_size - 1) // c.group_size
                case _:
                    sent[device] += c.wire_bytes
    return max(sent.values())


def summed_as_planned(shape, value, **asked):
    """Every device has the sum, and sends what the plan says, which is returned."""
    n = math.prod(shape)
    program, collectives, plan = compiled_and_planned(shape, value, **asked)
    given = jax.tree.map(lambda x: rows(n, *x.shape, dtype=x.dtype), value)
    for got, x in zip(*map(jax.tree.leaves, (program(given), given)), strict=True):
        assert all((each == x.sum(0)).all() for each in held(got))
    assert sent_by_the_busiest(collectives, n) == plan.wire_bytes
    assert len(collectives) == plan.steps
    return plan


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        *(("halving_doubling", (n,)) for n in range(2, 9)),
        *itertools.product(("ring", "shuffle"), [(2,), (7,), (8,)]),
        *((pair, (2, 3)) for pair in PAIRS),
        *(("rechd/rechd", shape) for shape in ((2, 4), (4, 2), (1, 8), (8, 1), (1, 1))),
        ("nccl/xring", (3, 2)),
    ],
)
def test_algorithms_send_the_least(algorithm, shape):
    n, size = math.prod(shape), 10007
    plan = summed_as_planned(shape, np.zeros(size, "f"), algorithm=algorithm)
    assert plan.wire_bytes <= 1.01 * 2 * (n - 1) / n * 4 * size
    if algorithm == "halving_doubling":
        in_pairs = n.bit_count() == 1  # the last pair to halve swaps all of what it sums, once
        assert plan.steps == 2 * math.ceil(math.log2(n)) - in_pairs, "the fewest"


@pytest.mark.parametrize("algorithm", FLAT)
def test_packs_and_shards_are_counted(algorithm):
    """Packs of a tree; shards side by side; and few owners of a shuffle."""
    tree = {"a": np.zeros((3, 5), "f"), "b": np.zeros(1, "f"), "c": np.zeros(7, np.int32)}
    plan = summed_as_planned((5,), tree, algorithm=algorithm, bytes_per_pack=60)
    assert len(plan.packs) == 3
    if algorithm != "shuffle":
        plan = summed_as_planned((3,), np.zeros(30, "f"), algorithm=algorithm, shards=4)
        assert [pack.size for pack in plan.packs] == [8, 8, 7, 7]
    for shards in (1, 2, 5) if algorithm == "shuffle" else ():
        plan = summed_as_planned((6,), np.zeros(37, "f"), algorithm="pscpu", shards=shards)
        assert plan.wire_bytes == (shards - 1 + 5) * -(-37 // shards) * 4
        assert plan.steps == 10


def test_native_shards_are_combined():
    value = np.zeros(30, "f")
    _, (combined,), plan = compiled_and_planned((3,), value, algorithm="native", shards=4)
    assert (len(combined.operands), combined.wire_bytes) == (4, plan.wire_bytes)
    assert [pack.size for pack in plan.packs] == [8, 8, 7, 7]


def reduced(algorithms, axes, x, **more):
    """The sum by each algorithm."""
    asked = [jc.CommunicationOptions(algorithm=a, **more) for a in algorithms]
    return [jc.all_reduce("sum", x, axes, options=options) for options in asked]


@pytest.mark.usefixtures("optimized")
def test_sums_of_nans_are_one():
    """Each replica's NaN has bits of its own, and a sum of two has those of either."""
    mesh = grid(2, 4)
    nans = (
        np.repeat(np.arange(0x7FC00001, 0x7FC00009, dtype=np.uint32), 16).view("f").reshape(8, 16)
    )
    axes = mesh.axis_names
    for got in mapped(lambda v: reduced(FLAT, axes, v[0]), P(axes), mesh=mesh)(nans):
        bits = held(got).view(np.uint32)
        assert (bits == bits[0]).all()


def test_last_part_takes_other_axes():
    algorithms, mesh = ["nccl/rechd", "ring/shuffle", "ring/native/ring"], grid(2, 2, 2)
    x, axes = rows(8, 11), mesh.axis_names
    for got in mapped(lambda v: reduced(algorithms, axes, v[0]), P(axes), mesh=mesh)(x):
        np.testing.assert_array_equal(held(got), np.stack([x.sum(0)] * 8))
    for algorithm in algorithms:
        options = jc.CommunicationOptions(algorithm=algorithm)
        plan = jc.plan(np.zeros(11), axis_size=(2, 3, 5), options=options)
        spans = [stage.axes for stage in plan.stages(plan.packs[0])]
        assert spans == ([(2,), (0, 1)] if algorithm.count("/") == 1 else [(2,), (1,), (0,)])


def test_nested_vmaps_are_a_mesh():
    x = rows(6, 7).reshape(2, 3, 7)
    f = lambda v: reduced(["nccl/xring", "halving_doubling/shuffle"], BOTH, v)
    for got in jax.jit(jax.vmap(jax.vmap(f, axis_name="data"), axis_name="node"))(x):
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum((0, 1)), x.shape))


@pytest.mark.parametrize("checked", [True, False])
def test_hierarchy_has_its_derivative(checked):
    def f(x, ct):
        dots = lambda v: [jnp.vdot(y, ct) for y in reduced(["nccl/xring", "pscpu/pscpu"], BOTH, v)]
        return [jax.grad(lambda v, k=k: dots(v)[k])(x) for k in range(2)]

    ct, spec = noise(6, 5), P(BOTH)
    want = np.broadcast_to(ct.astype("f8").sum(0), ct.shape)
    program = mapped(f, spec, spec, grid(2, 3), check_vma=checked)
    for got in program(rows(6, 5), ct):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_invariant_axis_is_skipped():
    """Mesh 4 × 2; the leaf holds 2 and 4 along the inner axis, or 1 to 4 along the outer one."""
    options = jc.CommunicationOptions(algorithm="ring/halving_doubling")
    f = lambda x: jc.all_reduce("sum", x, BOTH, options=options, invariant="summed")
    for axis, x, permutes in (
        ("data", [2.0, 4.0], 2 * 1),
        ("node", [1.0, 2.0, 3.0, 4.0], 2 * 2 - 1),
    ):
        program = mapped(f, P(axis), mesh=grid(4, 2))
        assert program(np.array(x)).tolist() == [sum(x)]
        text = program.lower(np.array(x)).as_text()
        assert text.count('"stablehlo.collective_permute"') == permutes


def test_workers_own_shuffled_shards():
    x, mesh = rows(8, 13), grid(4, 2)

    def f(v):
        between = [reduced(["nccl/pscpu"], BOTH, v[0], shards=k)[0] for k in (1, 2, 4)]
        return [*between, *reduced(["pscpu/xring"], BOTH, v[0], shards=5)]

    for got in mapped(f, P(BOTH), mesh=mesh)(x):
        np.testing.assert_array_equal(held(got), np.stack([x.sum(0)] * 8))
    words = r"`shards` is 5, but the shuffle of 'native/shuffle' runs over 4 replicas"
    with pytest.raises(ValueError, match=words):
        mapped(lambda v: reduced(["nccl/pscpu"], BOTH, v, shards=5), P(BOTH), mesh=mesh)(x)


@pytest.mark.parametrize(("order", "checks"), [("acb", True), ("cba", True), ("bca", False)])
def test_reordered_axes_give_equal_sums(order, checks):
    """JAX's ppermute counts replicas in the mesh's order, its axis_index in that of the names."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    algorithms = (*ALL, "native/ring", "ring/native")
    asked = [jc.CommunicationOptions(algorithm=algorithm) for algorithm in algorithms]
    axes, x = tuple(order), rows(8, 11)

    def f(v):
        return reduced(algorithms, axes, v[0]), [jc.all_gather(v, axes, options=o) for o in asked]

    for total, gathered in zip(*mapped(f, P(axes), mesh=mesh, check_vma=checks)(x), strict=True):
        np.testing.assert_array_equal(total, x.sum(0))
        np.testing.assert_array_equal(gathered, x)
