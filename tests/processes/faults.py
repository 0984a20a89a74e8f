"""One of four processes: one is killed, one is stopped, and of two that are left one ends.

    python faults.py, as process 0 … 3

Ends with 0 if every call of it does what it should.
"""

import jaxcoll as jc

jc.initialize()

import os  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from jaxcoll._compat.coordination import store  # noqa: E402
from jaxcoll._job.liveness import coordinator_connection  # noqa: E402
from jaxcoll._runtime.watchdog import watchdog  # noqa: E402

RANK = jax.process_index()
LATE, LOST = jc.errors.DeadlineExceededError, jc.errors.PeerLostError


def total(x):
    return jc.all_reduce("sum", x[0], "data")


def slowly(x):
    """A sum, of which a process has a part left to do by itself."""
    whole = jc.all_reduce("sum", x[0], "data")
    seconds = x[:, 1] + 0 * whole[0]  # which begin when the sum is there
    return whole, jax.pure_callback(lambda s: time.sleep(float(s[0])) or s, seconds, seconds)


def among(step, *processes):
    chosen = [d for d in jax.devices() if d.process_index in processes]
    return step.on(jax.sharding.Mesh(np.array(chosen), ("data",)))


def fails(call, kind, ranks):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.ranks == ranks, caught.value
    return str(caught.value)


def first(result):
    return float(np.asarray(jax.tree.leaves(result)[0].addressable_data(0)).ravel()[0])


def main():
    step, ones = jc.data_parallel(total), np.ones((1, 4), "f")
    assert first(step(ones)) == 4
    if RANK == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    strategy = jc.MultiWorkerMirroredStrategy()
    index = lambda: jc.psum(1.0 + jax.lax.axis_index("replica"))
    for call in (lambda: step(ones), lambda: strategy.run(index)):
        words = "process 2 has died, or was cut off: its connection"
        assert words in fails(call, LOST, (2,))
    assert first(among(step, 0, 1, 3)(ones)) == 3
    patient = jc.data_parallel(total, options=jc.CommunicationOptions(timeout_seconds=4))
    store()._ask("wait_at_barrier", "before one is stopped", 60_000, [0, 1, 3])
    if RANK == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    fails(lambda: among(patient, 0, 1, 3)(ones), LATE, (3,))
    assert first(among(step, 0, 1)(ones)) == 2
    call = among(jc.data_parallel(slowly, varying_outputs="concatenate"), 0, 1)
    few, many = np.float32([[1, 0]]), np.float32([[1, 4]])
    call(few)
    began = time.monotonic()
    assert first(call(few if RANK else many)) == 2  # the other has ended for more than two beats
    if RANK == 0:
        assert time.monotonic() - began > 1.4
        words = "Call 4 among 2 processes was not started: process 1 has ended"
        assert fails(lambda: call(few), LOST, (1,)).startswith(words)


try:
    main()
finally:
    watchdog().end()
    coordinator_connection().close()  # which reports what is done
print("held", flush=True)
time.sleep(0.5 * (RANK == 0))
os._exit(0)  # without the service's farewell, which waits for the dead
