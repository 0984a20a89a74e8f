"""What each worker of a strategy over several processes runs; prints one line that the tests read."""

import hashlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np

import jaxcoll as jc

# TensorFlow's way into a job.
own, *_ = (os.environ.pop(f"JAXCOLL_{name}") for name in ("RANK", "PROCESSES", "COORDINATOR"))
cluster = {"worker": [f"127.0.0.1:{port}" for port in os.environ["PORTS"].split()]}
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": cluster, "task": {"type": "worker", "index": int(own)}}
)

strategy = jc.MultiWorkerMirroredStrategy()
rank, workers, n = jax.process_index(), jax.process_count(), strategy.num_replicas_in_sync
context = jc.get_replica_context
found = {}


def plain(tree):
    return jax.tree.map(lambda x: np.asarray(x).tolist(), tree)


def of_replica(fun):
    return strategy.experimental_distribute_values_from_function(
        lambda context: fun(context.replica_id_in_sync_group)
    )


def refused(fun):
    try:
        fun()
    except ValueError as error:
        return str(error)
    return ""


# Which replicas are whose.
ids = strategy.run(lambda: context().replica_id_in_sync_group)
found["ids"] = plain(strategy.experimental_local_results(ids))

# Reductions and gathers between programs; those of every kind of value are in held_parts.py.
here = len(found["ids"])
uneven = of_replica(lambda i: np.arange(1.0 + i // here + i % here, dtype=np.float32))
found["uneven mean"] = plain(strategy.reduce("mean", uneven, axis=0))
found["host rows"] = plain(strategy.reduce("mean", np.arange(1.0 + rank), axis=0))

found["uneven gather"] = plain(strategy.gather(uneven, axis=0))
wrong = of_replica(lambda i: np.ones((2, 2 + i // here), np.float32))
found["refused gather"] = refused(lambda: strategy.gather(wrong, axis=0))
found["refused strategy"] = refused(lambda: jc.MirroredStrategy(list(strategy.devices)))
elsewhere = next(d for d in strategy.devices if d.process_index != rank)
own = jc.PerReplica(
    [np.ones(2, np.float32)] * len(jax.local_devices()), devices=jax.local_devices()
)
nccl = jc.NcclAllReduce()
found["refused elsewhere"] = [
    refused(lambda: jc.MirroredStrategy([elsewhere])),
    refused(lambda: nccl.broadcast(1.0, elsewhere)),
]
found["refused reduction to all"] = refused(lambda: nccl.reduce("sum", own, ids))
found["local strategy"] = jc.MirroredStrategy().num_replicas_in_sync

# Destinations, broadcasts and updates.
shared = strategy.extended.broadcast_to({"w": np.full(2, rank, np.float32), "on": rank == 0}, ids)
found["broadcast"] = plain(strategy.experimental_local_results(shared))
summed = strategy.extended.reduce_to("sum", of_replica(float), ids)
updated = strategy.extended.update(of_replica(float), lambda x, y: x + y, (summed,))
found["updated"] = plain(strategy.experimental_local_results(updated))
of_mine = strategy.extended.update(own, lambda x, y: x + y, (summed,))
found["updated here"] = [np.asarray(x).tolist() for x in of_mine]
small = of_replica(lambda i: jnp.full(1 + rank, 1 + rank, jnp.float8_e4m3b11fnuz))
found["8 bits"] = plain(strategy.gather(small, axis=0).astype(jnp.float32))
keys = jc.PerReplica([jax.random.split(jax.random.key(0), 1)] * len(own), devices=own.devices)
found["refused keys"] = refused(lambda: strategy.gather(keys, axis=0))

# Training: each worker feeds its own rows, and starts from the first worker's parameters.
rng = np.random.default_rng(0)
x, y = rng.standard_normal((24, 5)).astype("f"), rng.standard_normal(24).astype("f")
share = slice(rank * 24 // workers, (rank + 1) * 24 // workers)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def step(w, batch):
    value, grad = jc.value_and_grad(loss, "replica")(w, *batch)
    return w - 0.1 * grad, value


w = strategy.extended.broadcast_to(np.full(5, float(rank), np.float32), ids)
losses = []
for batch in strategy.experimental_distribute_dataset([(x[share], y[share])] * 3):
    w, value = strategy.run(step, (w, batch))
    losses.append(float(strategy.experimental_local_results(value)[0]))
reference = np.zeros(5, np.float32)
for k in range(3):
    value, grad = jax.value_and_grad(loss)(reference, x, y)
    np.testing.assert_allclose(losses[k], value, rtol=1e-5)
    reference = reference - np.float32(0.1) * np.asarray(grad)
mine = strategy.experimental_local_results(w)
np.testing.assert_allclose(mine[0], reference, rtol=1e-5)
found["bits"] = [hashlib.sha256(np.asarray(copy).tobytes()).hexdigest() for copy in mine]

# Whether all hold the same: copies on one device of each worker, plain values, rows of a value.
whole = jax.sharding.NamedSharding(jax.make_mesh((n,), ("data",)), jax.sharding.PartitionSpec())
copies = [jax.device_put(np.full(3, rank == 1, np.float32), d) for d in jax.local_devices()]
lying = jax.make_array_from_single_device_arrays((3,), whole, copies)
held = {"w": w, "lying": lying, "plain": np.float32(rank), "same": 7, "rows": of_replica(float)}
found["check"] = sorted(jc.check_replicas(held).divergent())
found["who"] = [list(group) for group in jc.check_replicas(lying).divergent()[""]]

print("RESULT " + json.dumps(found))
