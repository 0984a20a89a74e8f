"""One process of a job over hosts with two replicas each: a sum over both axes, and its plan."""

import json
import os
import sys

import jax
import numpy as np

import jaxcoll as jc

SIZE = 1 << 20
AXES = ("host", "local")


def main(named_hosts):
    if named_hosts:
        os.environ["JAXCOLL_HOST"] = f"host {os.environ['JAXCOLL_RANK']}"
    jc.initialize()
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    every = jax.sharding.PartitionSpec(AXES)
    rows = np.arange(4 * SIZE, dtype=np.float32).reshape(4, SIZE) % 1009
    options = jc.CommunicationOptions(compression=sys.argv[2]) if len(sys.argv) > 2 else None

    def total(x):
        return jc.all_reduce("sum", x[0], AXES, options=options)

    program = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=every, out_specs=jax.P()))
    sharding = jax.sharding.NamedSharding(mesh, every)
    x = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
    found = np.asarray(program(x).addressable_data(0))
    plan = jc.plan(jax.ShapeDtypeStruct((SIZE,), np.float32), mesh=mesh, axis_name=AXES)
    exact = rows.sum(0)
    facts = {
        "hosts": plan.world.hosts,
        "inner": plan.world.inner,
        "algorithm": plan.algorithm,
        "error": float(np.max(np.abs(found - exact)) / exact.max()),
        "compiled": sorted({c.kind for c in jc.inspect(program, x).collectives}),
    }
    print("FACTS", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "named")
