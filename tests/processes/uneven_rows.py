"""What each worker gets of rows whose number differs from replica to replica, and of other trees."""

from collections import OrderedDict

import jax
import numpy as np

import jaxcoll as jc


def rows_of(i, seed):
    """The rows of replica i, sometimes none."""
    rng = np.random.default_rng([seed, i])
    return rng.integers(-8, 8, (rng.integers(0 if seed else 1, 4), 2)).astype("f")


def values(strategy, seed, here):
    """The same rows, in every form in which a worker may pass its own."""
    yield (
        "function",
        strategy.experimental_distribute_values_from_function(
            lambda context: rows_of(context.replica_id_in_sync_group, seed)
        ),
    )
    # As a dataset splits them: the first replicas of a worker have a row more.
    batch = np.concatenate([rows_of(i, seed) for i in here])
    yield "dataset", next(iter(strategy.experimental_distribute_dataset([{"x": batch}])))["x"]
    mine = rows_of(jax.process_index(), seed)  # one value for all replicas of this worker
    yield "share", jc.PerReplica([mine] * len(here), devices=jax.local_devices())


def attempt(call):
    try:
        return np.asarray(call()).tolist()
    except (ValueError, jc.errors.ProgramMismatchError) as error:
        return f"{type(error).__name__}: {error}"


def found():
    strategy = jc.MultiWorkerMirroredStrategy()
    rank = jax.process_index()
    here = [i for i, d in enumerate(strategy.devices) if d.process_index == rank]
    found = {}
    for seed, op in ((0, "sum"), (1, "mean")):
        for kind, value in values(strategy, seed, here):
            calls = {
                f"{op} {axis}": lambda axis=axis, value=value: strategy.reduce(op, value, axis)  # noqa: B023
                for axis in (None, 0, 1, (0, 1), 2)
            }
            calls |= {
                f"gather {axis}": lambda axis=axis, value=value: strategy.gather(value, axis)
                for axis in (0, 1, -2, 2)
            }
            calls["run"] = lambda value=value: strategy.run(lambda x: x.sum(), (value,))[here[0]]
            for call, do in calls.items():
                found[f"{kind} | {seed} | {call}"] = attempt(do)
    a, b = (strategy.experimental_distribute_values_from_function(lambda _: x) for x in (1.0, 2.0))  # noqa: B023
    trees = OrderedDict(a=a, b=b), OrderedDict(b=b, a=a)
    whole = strategy.experimental_distribute_values_from_function(lambda _: np.ones((2, 2)))
    refused = {
        "other trees": lambda: strategy.reduce("sum", trees[rank % 2], axis=None),
        "other axes": lambda: strategy.reduce("sum", whole, axis=rank % 2),
        "other gathers": lambda: strategy.gather(whole, axis=rank % 2),
        "other shapes": lambda: strategy.gather(
            jc.PerReplica.from_function(lambda i: np.ones(1 + rank % 2), devices=strategy.devices),
            axis=0,
        ),
        "other copies": lambda: jc.distribute.Mirrored.from_function(
            lambda i: float(rank), devices=strategy.devices
        ),
    }
    found |= {name: attempt(call) for name, call in refused.items()}
    found["afterwards"] = attempt(lambda: strategy.reduce("sum", 1.0, axis=None))
    return found
