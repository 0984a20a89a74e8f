"""One algorithm within groups of replicas, another between them: any two, over any mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import WHOLE, grid, mapped, noise, rows

import jaxcoll as jc

P = jax.sharding.PartitionSpec
ALL = ("native", "ring", "halving_doubling", "shuffle")
TENSORFLOW = ("nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu")
MESHES = ((2, 4), (1, 8), (8, 1), (1, 1))


def over(shape, f, *, checked=True, ins=None, outs=WHOLE):
    mesh = grid(*shape)
    names = mesh.axis_names
    ins = P(names) if ins is None else ins
    return mapped(lambda *args: f(names, *args), ins, outs, mesh, check_vma=checked)


def reduced(algorithms, shape, x, *, checked=True, **more):
    """The sum by each algorithm, in one program."""
    asked = [jc.CommunicationOptions(algorithm=a, **more) for a in algorithms]
    f = lambda names, v: [jc.all_reduce("sum", v, names, options=options) for options in asked]
    return over(shape, f, checked=checked)(x)


def agrees(found, x):
    for got in found:
        for g, v in zip(jax.tree.leaves(got), jax.tree.leaves(x), strict=True):
            np.testing.assert_array_equal(np.asarray(g)[0], v.sum(0))
            assert len({np.asarray(s.data).tobytes() for s in g.addressable_shards}) == 1


@pytest.mark.parametrize(
    ("algorithms", "shape", "checked"),
    [
        *(([f"{a}/{b}" for b in ALL], (2, 3), True) for a in ALL),
        *((TENSORFLOW[1:3], shape, True) for shape in MESHES),
        (TENSORFLOW, (4, 2), True),
        (TENSORFLOW, (2, 3), False),
    ],
)
def test_any_two_algorithms_make_an_all_reduce(algorithms, shape, checked):
    n = math.prod(shape)
    x = {"a": rows(n, 3, 5), "b": rows(n), "c": rows(n, 7, dtype=np.int32)}
    agrees(reduced(algorithms, shape, x, checked=checked), x)


def test_of_three_axes_the_last_part_of_a_name_takes_what_is_left():
    algorithms = ["nccl/rechd", "ring/shuffle", "ring/native/ring"]
    x = rows(8, 11)
    agrees(reduced(algorithms, (2, 2, 2), x), x)
    for algorithm in algorithms:
        options = jc.CommunicationOptions(algorithm=algorithm)
        plan = jc.plan(np.zeros(11), axis_size=(2, 3, 5), options=options)
        spans = [stage.axes for stage in plan.stages(plan.packs[0])]
        assert spans == ([(2,), (0, 1)] if algorithm.count("/") == 1 else [(2,), (1,), (0,)])


@pytest.mark.parametrize("algorithm", ["nccl/xring", "halving_doubling/shuffle"])
def test_two_nested_vmaps_are_a_mesh_too(algorithm):
    x = rows(6, 7).reshape(2, 3, 7)
    options = jc.CommunicationOptions(algorithm=algorithm)
    f = lambda v: jc.all_reduce("sum", v, ("node", "data"), options=options)
    got = jax.jit(jax.vmap(jax.vmap(f, axis_name="data"), axis_name="node"))(x)
    np.testing.assert_array_equal(got, np.broadcast_to(x.sum((0, 1)), x.shape))


@pytest.mark.parametrize("checked", [True, False])
def test_the_derivative_is_the_same_reduction(checked):
    def f(names, x, ct):
        found = []
        for algorithm in ("nccl/xring", "nccl/rechd", "pscpu/pscpu"):
            options = jc.CommunicationOptions(algorithm=algorithm)
            reduce = lambda v, o=options: jc.all_reduce("sum", v, names, options=o)
            found.append(jax.grad(lambda v, reduce=reduce: jnp.vdot(reduce(v), ct))(x))
        return found

    ct = noise(6, 5)
    spec = P(("node", "data"))
    want = np.broadcast_to(ct.astype(np.float64).sum(0), ct.shape)
    for got in over((2, 3), f, checked=checked, ins=spec, outs=spec)(rows(6, 5), ct):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_leaf_that_varies_along_one_axis_only_needs_one_of_the_two():
    """Mesh 4 × 2; the leaf holds 2 and 4 along the inner axis, or 1 to 4 along the outer one."""
    options = jc.CommunicationOptions(algorithm="ring/halving_doubling")

    def f(names, x):
        return jc.all_reduce("sum", x, names, options=options, invariant="summed")

    inner, outer = (over((4, 2), f, ins=P(axis)) for axis in ("data", "node"))
    assert inner(np.array([2.0, 4.0])).tolist() == [6.0]
    assert outer(np.arange(1.0, 5.0)).tolist() == [10.0]
    for program, x, permutes in ((inner, np.zeros(2), 2 * 1), (outer, np.zeros(4), 2 * 2)):
        text = program.lower(x).as_text()
        assert text.count('"stablehlo.collective_permute"') == permutes


def test_shards_are_owned_by_workers_where_a_shuffle_is_between_them():
    x = rows(8, 13)
    for shards in (1, 2, 4):
        agrees(reduced(["nccl/pscpu"], (4, 2), x, shards=shards), x)
    with pytest.raises(
        ValueError, match=r"`shards` is 5, but the shuffle of 'native/shuffle' runs over 4 replicas"
    ):
        reduced(["nccl/pscpu"], (4, 2), x, shards=5)
    agrees(reduced(["pscpu/xring"], (4, 2), x, shards=5), x)


def test_a_single_axis_is_told_that_a_pair_is_needed():
    options = jc.CommunicationOptions(algorithm="nccl/xring")
    with pytest.raises(
        ValueError,
        match=r"'native/ring' is hierarchical.*a tuple of 2 axes .* \(outer, inner\), and got 1",
    ):
        jax.vmap(lambda v: jc.all_reduce("sum", v, "i", options=options), axis_name="i")(rows(2))
    total = jax.jit(jax.vmap(lambda v: jc.all_reduce("sum", v, "i"), axis_name="i"))(rows(2))
    assert total.tolist() == [sum(rows(2))] * 2


@pytest.mark.parametrize(
    ("order", "checks"), [("acb", True), ("bca", True), ("cba", True), ("bca", False)]
)
def test_axes_in_another_order_than_the_meshs_are_the_same_sum(order, checks):
    """JAX's ppermute counts replicas in the mesh's order, its axis_index in that of the names."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    asked = [jc.CommunicationOptions(algorithm=algorithm) for algorithm in ALL]
    axes = tuple(order)
    x = rows(8, 11)

    def f(v):
        sums = [jc.all_reduce("sum", v[0], axes, options=options) for options in asked]
        return sums, [jc.all_gather(v, axes, options=options) for options in asked]

    for total, gathered in zip(*mapped(f, P(axes), mesh=mesh, check_vma=checks)(x), strict=True):
        np.testing.assert_array_equal(total, x.sum(0))
        np.testing.assert_array_equal(gathered, x)
