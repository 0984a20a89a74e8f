"""Without `mesh=`, the mesh of `jax.set_mesh` is the mesh, if it has the axis."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import plans_of
from jax.sharding import AxisType

import jaxcoll as jc
from jaxcoll import distribute
from jaxcoll.compression import residual

P = jax.sharding.PartitionSpec
X = np.random.default_rng(0).standard_normal((16, 3)).astype("f")
W = np.arange(3, dtype="f")
SHAPES = {"data": (8,), "data model": (4, 2), "model data": (2, 4), "other": (8,)}


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w))


def in_own_shard_map(w, x):
    """What a user maps over the mesh around."""
    specs = P(), P("data")
    x = jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), specs[1]))
    mapped = jax.shard_map(jc.value_and_grad(loss, "data"), in_specs=specs, out_specs=P())
    return jax.jit(mapped)(w, x)


def on_strategy(w, x):
    strategy = distribute.MirroredStrategy()
    (rows,) = strategy.experimental_distribute_dataset([x])
    grad = lambda x: distribute.get_replica_context().all_reduce("mean", jax.grad(loss)(w, x))
    value = strategy.run(grad, (rows,)).values[0]
    return jax.device_get(value)  # of one device, as it is by its documentation


STEP = jc.data_parallel(jc.value_and_grad(loss, "data"))  # made once, for all meshes
ADAM = jc.sharded_optimizer(optax.adam(0.1), "data")
ENTRIES = {
    "data_parallel": STEP,
    "rows": jc.data_parallel(lambda w, x: x @ w, varying_outputs="concatenate"),
    "value_and_grad in shard_map": in_own_shard_map,
    "run": on_strategy,
    "batches": lambda w, x: [*jc.batches(x, 8)],
    "shard": lambda w, x: jc.shard(x, "data"),
    "residual": lambda w, x: residual(x, "data"),
    "sharded_optimizer.init": lambda w, x: ADAM.init(w),
    "in jit": lambda w, x: jax.jit(ADAM.init)(w),
    "sharded_optimizer.shard": lambda w, x: ADAM.shard(ADAM.unshard(ADAM.init(w)), w),
}
OF_THE_MESH_AROUND = "value_and_grad in shard_map", "in jit"  # JAX lets them have no other


def mesh_of(axes, kind):
    names = tuple(axes.split())
    return jax.make_mesh(SHAPES[axes], names, axis_types=(kind,) * len(names))


def leaves(tree):
    return jax.tree.leaves(jc.unshard(tree))  # parts lie otherwise on another mesh


@pytest.mark.parametrize(
    ("axes", "kind"), [*zip(SHAPES, [AxisType.Explicit, AxisType.Auto] * 2, strict=True)]
)
def test_ambient_mesh_changes_no_result(axes, kind):
    mesh = mesh_of(axes, kind)
    is_taken = "data" in mesh.axis_names
    for name, entry in ENTRIES.items():
        if not is_taken and name in OF_THE_MESH_AROUND:
            continue
        want = (STEP if name == "value_and_grad in shard_map" else entry)(W, X)
        with jax.set_mesh(mesh):
            got = entry(W, X)
            for x in jax.tree.leaves(got) if is_taken else ():
                if name != "run":
                    assert x.sharding.mesh == mesh, name
                jax.block_until_ready(jnp.sin(x) + 1)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


def test_each_mesh_has_its_program():
    compiled = []
    for axes in ("data", "data model", None, "data", "other", "data model"):
        mesh = mesh_of(axes, AxisType.Explicit) if axes else None
        n = dict(mesh.shape).get("data", 8) if axes else 8
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            worlds = jc.plan(W).world, plans_of(STEP, W, X)[0].world
            assert {STEP.num_replicas, *(world.replicas for world in worlds)} == {n}
            assert jc.inspect(STEP, W, X).collectives[0].group_size == n
            assert not axes or "data" not in axes or STEP.mesh == mesh
            compiled.append(STEP.lower(W, X).as_text())
    assert compiled[0] == compiled[3] != compiled[1] == compiled[5]
    assert compiled[2] == compiled[4]
