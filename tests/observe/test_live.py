"""Programs compiled here and now, on whatever JAX this is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxcoll as jc
from jaxcoll._observe.parse.collective import Operand, wire_bytes
from jaxcoll._observe.parse.hlo import read_hlo
from jaxcoll._observe.parse.stablehlo import read_stablehlo

P = PartitionSpec
ALL = (tuple(range(8)),)


def lowered(function, *arrays, grid=(8,), axes=("d",), in_specs=None, **more):
    devices = np.array(jax.devices()[: np.prod(grid)]).reshape(grid)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
    specs = tuple(P(axes) for _ in arrays) if in_specs is None else in_specs
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, **{"out_specs": P(), **more})
    return jax.jit(mapped).lower(*arrays)


def both(*args, **more):
    program = lowered(*args, **more)
    return read_stablehlo(program.as_text()), read_hlo(program.compile().as_text())


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def outline(collectives):
    return [(c.kind, c.operands, c.group_size, c.trips) for c in collectives]


def test_psum():
    requested, compiled = both(lambda x: lax.psum(x, "d"), shaped(8, 100))
    expected = [("all-reduce", (Operand("f32", (1, 100)),), 8, 1)]
    assert outline(requested) == outline(compiled) == expected
    assert compiled[0].groups == requested[0].groups == ALL
    assert "psum" in compiled[0].op_name
    assert wire_bytes(compiled) == 2 * (100 - 12) * 4


def test_sums_that_the_compiler_combines():
    arrays = shaped(8, 100), shaped(8, 3, 5), shaped(8, 7)
    requested, compiled = both(lambda *x: lax.psum(x, "d"), *arrays)
    assert len(requested) == 3
    assert len(compiled) == 1
    assert sorted(o.shape for o in compiled[0].operands) == [(1, 3, 5), (1, 7), (1, 100)]
    assert wire_bytes(compiled) == wire_bytes(requested) == 2 * ((100 - 12) + (15 - 1) + 7) * 4


@pytest.mark.parametrize(
    ("kind", "function", "nbytes"),
    [
        ("all-gather", lambda x: lax.all_gather(x, "d", tiled=True), 7 * 8 * 16 * 4),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "d", tiled=True), 7 * 16 * 4),
        ("all-to-all", lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), 7 * 16 * 4),
        ("collective-permute", lambda x: lax.ppermute(x, "d", [(0, 1)]), 8 * 16 * 4),
    ],
)
def test_each_kind(kind, function, nbytes):
    requested, compiled = both(function, shaped(64, 16), out_specs=P("d"))
    assert [c.kind for c in requested] == [c.kind for c in compiled] == [kind]
    assert requested[0].nbytes == compiled[0].nbytes == 8 * 16 * 4
    assert wire_bytes(requested) == wire_bytes(compiled) == nbytes


def test_a_permutation_that_moves_nothing():
    stay = [(i, i) for i in range(8)]
    requested, _ = both(lambda x: lax.ppermute(x, "d", stay), shaped(8, 4), out_specs=P("d"))
    assert requested[0].group_size == 0
    assert wire_bytes(requested) == 0


def test_a_sum_inside_a_scan():
    def step(carry, _):
        return lax.pcast(jnp.tanh(lax.psum(carry, "d")), "d", to="varying"), None

    requested, compiled = both(
        lambda x: lax.psum(lax.scan(step, x, None, length=7)[0], "d"), shaped(8, 256)
    )
    assert [c.trips for c in requested] == [None, 1]
    assert [c.trips for c in compiled] == [7, 1]
    assert wire_bytes(compiled) == 8 * 2 * 7 * 32 * 4


def test_a_scan_inside_a_scan():
    def inner(carry, _):
        return lax.pcast(jnp.tanh(lax.psum(carry, "d")), "d", to="varying"), None

    def outer(carry, _):
        return lax.scan(inner, carry, None, length=3)[0] + 1.0, None

    _, compiled = both(
        lambda x: lax.scan(outer, x, None, length=5)[0], shaped(8, 256), out_specs=P("d")
    )
    assert [c.trips for c in compiled] == [15]


def test_a_while_loop_does_not_say_how_often_it_turns():
    def body(x):
        return lax.psum(lax.pcast(x, "d", to="varying"), "d")

    requested, compiled = both(
        lambda x: lax.while_loop(lambda x: jnp.sum(x) < 100.0, body, lax.psum(x, "d")),
        shaped(8, 64),
    )
    assert [c.trips for c in requested] == [c.trips for c in compiled] == [1, None]


def test_bfloat16_is_widened_on_cpu():
    requested, compiled = both(lambda x: lax.psum(x, "d"), shaped(8, 64, dtype=jnp.bfloat16))
    assert requested[0].operands == (Operand("bf16", (1, 64)),)
    assert compiled[0].operands == (Operand("f32", (1, 64)),)
    assert wire_bytes(compiled) == 2 * wire_bytes(requested)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bool", "pred"), ("int8", "s8"), ("uint32", "u32"), ("complex64", "c64"), ("int4", "s4")],
)
def test_requested_types_are_spelled_as_in_hlo(dtype, name):
    requested, _ = both(
        lambda x: lax.all_gather(x, "d", tiled=True), shaped(8, 4, dtype=dtype), out_specs=P("d")
    )
    assert requested[0].operands == (Operand(name, (1, 4)),)


def test_one_axis_of_a_mesh():
    def sums(x):
        return lax.psum(x, "inner"), lax.psum(x, "outer")

    requested, compiled = both(
        sums,
        shaped(8, 32),
        grid=(2, 4),
        axes=("outer", "inner"),
        out_specs=(P("outer"), P("inner")),
    )
    expected = {((0, 1, 2, 3), (4, 5, 6, 7)): 4, ((0, 4), (1, 5), (2, 6), (3, 7)): 2}
    for collectives in (requested, compiled):
        assert {c.groups: c.group_size for c in collectives} == expected


def test_a_function_that_is_called_twice():
    @jax.jit
    def total(x):
        return lax.psum(x, "d")

    def step(x):
        return total(lax.pcast(total(x) * 2.0, "d", to="varying"))

    requested, compiled = both(step, shaped(8, 32))
    assert len(requested) == len(compiled) == 2


def test_branches_that_do_not_send_alike():
    def step(x):
        some = lax.psum(jnp.sum(x), "d") > 0.0
        return lax.cond(some, lambda x: lax.psum(x, "d"), lambda _: jnp.zeros((1, 64)), x)

    requested, compiled = both(step, shaped(8, 64))
    for collectives in (requested, compiled):
        always, sometimes = collectives
        assert (always.branches, len(sometimes.branches)) == ((), 1)
    assert wire_bytes(compiled) == wire_bytes(requested) == 8 + 448


def test_sharding_alone_requests_nothing_and_compiles_to_something():
    mesh = Mesh(np.array(jax.devices()), ("d",), axis_types=(AxisType.Auto,))
    rows = jax.NamedSharding(mesh, P("d"))
    program = jax.jit(jnp.sum, in_shardings=rows).lower(shaped(64))
    assert read_stablehlo(program.as_text()) == ()
    assert outline(read_hlo(program.compile().as_text())) == [
        ("all-reduce", (Operand("f32", ()),), 8, 1)
    ]


def test_pmap():
    program = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i").lower(shaped(8, 3))
    for collectives in (
        read_stablehlo(program.as_text()),
        read_hlo(program.compile().as_text()),
    ):
        assert [(c.kind, c.nbytes, c.group_size) for c in collectives] == [("all-reduce", 12, 8)]


def test_locations_do_not_matter():
    program = lowered(lambda x: lax.psum(x, "d"), shaped(8, 100))
    plain, located = program.as_text(), program.as_text(debug_info=True)
    assert outline(read_stablehlo(plain)) == outline(read_stablehlo(located))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "options",
    [
        jc.CommunicationOptions(),
        jc.CommunicationOptions(bytes_per_pack=64),
        jc.CommunicationOptions(implementation="ring"),
    ],
    ids=repr,
)
def test_a_plan_and_what_was_compiled_of_it_agree(n, options):
    def step(tree):
        return jc.all_reduce("sum", tree, "data")

    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    step = jc.data_parallel(step, mesh=mesh, options=options)
    tree = [shaped(n, 5), shaped(n), shaped(n, 0), shaped(n, 3, 7, dtype=jnp.int32), shaped(n, 40)]
    (plan,) = step.plans(tree)
    program = step.lower(tree)
    assert wire_bytes(read_hlo(program.compile().as_text())) == plan.wire_bytes
    assert wire_bytes(read_stablehlo(program.as_text())) == plan.wire_bytes
