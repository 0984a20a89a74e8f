"""One process of a job over hosts with two replicas each: sums over both axes, and their plans."""

import json
import os
import sys

import jax
import numpy as np

import jaxcoll as jc

SIZE = 1 << 20
AXES = ("host", "local")
FORMATS = (None, "int8")


def main(named_hosts):
    if named_hosts:
        os.environ["JAXCOLL_HOST"] = f"host {os.environ['JAXCOLL_RANK']}"
    jc.initialize()
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    every = jax.sharding.PartitionSpec(AXES)
    rows = np.arange(4 * SIZE, dtype=np.float32).reshape(4, SIZE) % 1009
    sharding = jax.sharding.NamedSharding(mesh, every)
    x = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
    print("FACTS", json.dumps([facts(mesh, x, rows.sum(0), name) for name in FORMATS]), flush=True)


def facts(mesh, x, exact, compression):
    options = jc.CommunicationOptions(compression=compression)

    def total(x):
        return jc.all_reduce("sum", x[0], AXES, options=options)

    every = jax.sharding.PartitionSpec(AXES)
    program = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=every, out_specs=jax.P()))
    found = np.asarray(program(x).addressable_data(0))
    leaf = jax.ShapeDtypeStruct(exact.shape, exact.dtype)
    plan = jc.plan(leaf, mesh=mesh, axis_name=AXES, options=options)
    return {
        "hosts": plan.world.hosts,
        "inner": plan.world.inner,
        "algorithm": plan.algorithm,
        "coded": [stage.format is not None for stage in plan.stages(plan.packs[0])],
        "error": float(np.max(np.abs(found - exact)) / exact.max()),
        "compiled": sorted({c.kind for c in jc.inspect(program, x).collectives}),
    }


if __name__ == "__main__":
    main(sys.argv[1] == "named")
