"""What each of two processes with two devices runs; prints one line a mistake."""

import sys

import jaxcoll as jc

jc.initialize()

import jax  # noqa: E402
import numpy as np  # noqa: E402

RANK = jax.process_index()
ROWS = np.ones((3, 2), np.float32)


def summed(x):
    return jc.all_reduce("sum", x.sum() + jax.lax.axis_index("data"), "data")


total = jc.data_parallel(summed, batch_argnums=())


def attempt(name, call):
    try:
        call()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error!s}".replace("\n", "; "), flush=True)


def over(*places):
    return jax.sharding.Mesh(np.array(jax.devices())[list(places)], ("data",))


strategy = jc.MultiWorkerMirroredStrategy()
number = strategy.experimental_distribute_values_from_function(
    lambda context: float(context.replica_id_in_sync_group)
)
attempt("uneven", lambda: jc.data_parallel(lambda x: x, mesh=over(0, 1, 2))(ROWS))
attempt("other's", lambda: total.on(over(*[0, 1] if RANK else [2, 3]))(ROWS))
attempt("order", lambda: total.on(over(*[0, 1, 2, 3][:: 1 - 2 * RANK]))(ROWS))
if RANK:
    attempt("name", lambda: strategy.reduce("sum", number, axis=None))
else:
    attempt("name", lambda: strategy.run(lambda x: x, (number,)))
bounded = jc.data_parallel(
    summed, batch_argnums=(), options=jc.CommunicationOptions(timeout_seconds=60)
)
bounded(ROWS)
if RANK:
    sys.exit()
attempt("left", lambda: bounded(ROWS))
sys.exit(3)  # while a thread waits in a collective for a process that has ended
