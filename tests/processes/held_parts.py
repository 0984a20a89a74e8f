"""What each worker passes of a value, and gets of it, through every entry there is."""

import jax
import numpy as np

import jaxcoll as jc

WIDTH = 2


def of_replica(i):
    """The value of one replica."""
    return np.arange(1.0, 1 + WIDTH, dtype=np.float32) * (i + 1)


def rows_of(i):
    """Rows of a table, of a number of its own on each replica."""
    return jc.IndexedSlices(
        np.full((1 + i % 3, WIDTH), 1.0 + i, np.float32),
        np.arange(1 + i % 3, dtype=np.int32),
        (4, WIDTH),
    )


class Held:
    """Every kind of value that a worker may pass."""

    def __init__(self, strategy):
        self.all = strategy.devices
        self.here = tuple(jax.local_devices())
        self.replicas = [i for i, d in enumerate(self.all) if d in self.here]
        self.rank = jax.process_index()

    def values(self):
        local = dict(zip(self.here, self.replicas, strict=True))
        shared, mine = of_replica(2), of_replica(self.rank)
        first = self.here[0]
        values = {
            "per replica, all": jc.PerReplica.from_function(of_replica, devices=self.all),
            "per replica, here": jc.PerReplica(
                [of_replica(local[d]) for d in self.here], devices=self.here
            ),
            "mirrored, all": jc.distribute.Mirrored.from_function(
                lambda i: shared, devices=self.all
            ),
            "mirrored, here": jc.distribute.Mirrored([mine] * len(self.here), devices=self.here),
            "array": mine,
            "array on a device": jax.device_put(mine, first),
            "number": float(self.rank + 1),
            "rows, all": jc.PerReplica.from_function(rows_of, devices=self.all),
            "rows, here": jc.PerReplica([rows_of(local[d]) for d in self.here], devices=self.here),
            "rows": rows_of(self.rank),
        }
        if len(self.here) > 1:  # a share of this process's share
            values["elsewhere"] = jc.PerReplica([mine])
        return values


def entries(strategy, held):
    """Each takes an op and a value, and returns what this worker gets."""
    n, first, last = len(held.all), held.here[0], held.here[-1]
    fixed = jc.distribute.CollectiveAllReduce(list(held.here), n)
    workers = [
        [f"/job:worker/task:{k}/device:CPU:{d}" for d in range(len(held.here))]
        for k in range(jax.process_count())
    ]
    tiered = jc.MultiWorkerAllReduce(workers, len(held.here), "nccl/xring")
    own = lambda v: v if isinstance(v, jc.DistributedValues) else jax.device_put(0.0, last)
    extended = strategy.extended
    options = jc.CommunicationOptions(timeout_seconds=60)
    return {
        "reduce": lambda op, v: strategy.reduce(op, v, axis=None, options=options),
        "reduce_to own": lambda op, v: extended.reduce_to(op, v, own(v)),
        "reduce_to a task": lambda op, v: extended.reduce_to(op, v, "/job:worker/task:0/device:CPU:0"),
        "reduce_to all": lambda op, v: extended.reduce_to(op, v, strategy.run(lambda: 1.0)),
        "batch_reduce_to": lambda op, v: extended.batch_reduce_to(op, [(v, own(v)), (v, first)])[0],
        "collective": lambda op, v: fixed.reduce(op, v, own(v)),
        "collective to one": lambda op, v: fixed.batch_reduce(op, [(v, first), (v, own(v))])[0],
        "workers": lambda op, v: tiered.reduce(op, v, own(v)),
        "no group": lambda op, v: jc.NcclAllReduce().reduce(op, v, "/cpu:0"),
        "run": lambda op, v: strategy.run(
            lambda x: jc.get_replica_context().all_reduce(op, x), (v,)
        ),
        "along an axis": lambda op, v: strategy.reduce(op, v, axis=0),
        "gather": lambda op, v: strategy.gather(v, axis=0),
    }  # fmt: skip


def plain(result, held):
    """What this worker has of a result; all of its copies must be equal and on its devices."""
    copies = [result]
    if isinstance(result, jc.DistributedValues):
        copies = [result[k] for k, d in enumerate(result.devices) if d in held.here]
    dense = [np.asarray(x.to_dense() if isinstance(x, jc.IndexedSlices) else x) for x in copies]
    assert dense, "nothing is here"
    assert all(np.array_equal(x, dense[0]) for x in dense)
    for leaf in jax.tree.leaves(copies):
        assert leaf.devices() <= set(held.here)
    return dense[0].tolist()


def found():
    """Each entry meets each value and each op, but not each value with both."""
    strategy = jc.MultiWorkerMirroredStrategy()
    held, found = Held(strategy), {}
    for i, (name, value) in enumerate(held.values().items()):
        for k, (entry, call) in enumerate(entries(strategy, held).items()):
            op = ("sum", "mean")[(i + k) % 2]
            try:
                got = plain(call(op, value), held)
            except (
                ValueError,
                NotImplementedError,
                jc.errors.ProgramMismatchError,
                jc.errors.ReplicaDivergenceError,
            ) as error:
                got = f"{type(error).__name__}: {error}"
            found[f"{entry} | {name} | {op}"] = got
    return found
