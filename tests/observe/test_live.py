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

P = PartitionSpec


def lowered(function, *arrays, grid=(8,), axes=("d",), in_specs=None, **more):
    devices = np.array(jax.devices()[: np.prod(grid)]).reshape(grid)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
    specs = tuple(P(axes) for _ in arrays) if in_specs is None else in_specs
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, **{"out_specs": P(), **more})
    return jax.jit(mapped).lower(*arrays)


def both(*args, **more):
    program = lowered(*args, **more)
    return read(program.as_text("hlo")), read(program.compile().as_text())


def read(text):
    return read_hlo(text).collectives


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def outline(collectives):
    return [(c.kind, c.operands, c.group_size, c.trips) for c in collectives]


def test_a_while_loop_does_not_say_how_often_it_turns():
    def body(x):
        return lax.psum(lax.pcast(x, "d", to="varying"), "d")

    requested, compiled = both(
        lambda x: lax.while_loop(lambda x: jnp.sum(x) < 100.0, body, lax.psum(x, "d")),
        shaped(8, 64),
    )
    assert [c.trips for c in requested] == [c.trips for c in compiled] == [1, None]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bool", "pred"), ("int8", "s8"), ("uint32", "u32"), ("complex64", "c64"), ("int4", "s4")],
)
def test_narrow_and_wide_types_are_read_as_they_were_requested(dtype, name):
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


def test_sharding_alone_requests_nothing_and_compiles_to_something():
    mesh = Mesh(np.array(jax.devices()), ("d",), axis_types=(AxisType.Auto,))
    rows = jax.NamedSharding(mesh, P("d"))
    program = jax.jit(jnp.sum, in_shardings=rows).lower(shaped(64))
    assert read(program.as_text("hlo")) == ()
    assert outline(read(program.compile().as_text())) == [
        ("all-reduce", (Operand("f32", ()),), 8, 1)
    ]


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
    assert wire_bytes(read(program.compile().as_text())) == plan.wire_bytes
    assert wire_bytes(read(program.as_text("hlo"))) == plan.wire_bytes
