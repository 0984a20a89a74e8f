"""Calls of one worker that another makes only after all of them were given up."""

import jax
import numpy as np

import jaxcoll as jc
from jaxcoll._compat.coordination import store


def found():
    strategy = jc.MultiWorkerMirroredStrategy()
    context, keys = jc.get_replica_context, store()
    in_time = jc.CommunicationOptions(timeout_seconds=0.5)
    rank, here = jax.process_index(), jax.local_devices()
    mine = jc.PerReplica([np.full(2, rank + 1.0, np.float32)] * len(here), devices=here)

    # Of values over all replicas: those of this process's share begin with an exchange of sizes.
    whole = jc.PerReplica.from_function(
        lambda i: np.full(2, i + 1.0, np.float32), devices=strategy.devices
    )
    calls = {
        "reduce_to": lambda o: strategy.extended.reduce_to("sum", mine, here[0], options=o),
        "reduce": lambda o: strategy.reduce("sum", mine, axis=None, experimental_hints=o),
        "along an axis": lambda o: strategy.reduce("sum", whole, axis=0, options=o),
        "gather": lambda o: strategy.gather(whole, axis=0, options=o),
        "run": lambda o: strategy.run(lambda x: context().all_reduce("sum", x, o), (mine,)),
    }
    found = {}
    for name, call in calls.items():
        if rank == 0:
            try:
                call(in_time)
            except jc.errors.DeadlineExceededError as error:
                found[name] = str(error)
            keys.set(f"given up/{name}", "")
        else:
            keys.get(f"given up/{name}", 60)
            call(None)  # what the other has given up ends by this
        # No deadline: the given-up call of the other has to end first, in its own time.
        total = strategy.reduce("mean", mine, axis=None)
        found[f"{name}, afterwards"] = np.asarray(total).tolist()
    return found
