"""What a worker does on a host of its own: it trains until the others, or the coordinator, are gone."""

import json
import sys
import time

import jaxcoll as jc

RANK, COUNT, ADDRESS, PATH = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
STEPS = 60
jc.initialize(ADDRESS, COUNT, RANK, initialization_timeout_seconds=90, heartbeat_timeout_seconds=6)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402


@jc.data_parallel(batch_argnums=1)
def step(w, x):
    value, gradient = jc.value_and_grad(lambda w, x: jnp.mean((x - w) ** 2), "data")(w, x)
    return w - 0.1 * gradient, value


def batches(at, place, world):
    if at == 10:
        print("TRAINING", flush=True)
    time.sleep(0.04)
    return np.random.default_rng((at, place)).standard_normal(8).astype("f")


# The last one is patient, so that the others have gone on when it gives up.
seconds = 5.0 if RANK == COUNT - 1 else 2.5
trainer = jc.Elastic(step, np.float32(0), timeout_seconds=seconds, checkpoint=PATH, every=5)
found = {}
try:
    trainer.run(batches, STEPS)
except jc.errors.PeerLostError as error:
    found["error"] = str(error)
changes = [[c.workers, c.lost, c.seconds] for c in trainer.changes]
print(
    "RESULT " + json.dumps({**found, "changes": changes, "finished": trainer.finished}), flush=True
)
