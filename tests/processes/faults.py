"""What each process of a faulty Gloo world runs; prints one line a fault for the tests to read."""

import sys

import jaxcoll as jc

jc.initialize()

import collections  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxcoll._compat.coordination import store  # noqa: E402
from jaxcoll._job.liveness import coordinator_connection  # noqa: E402
from jaxcoll._runtime import watchdog  # noqa: E402

WATCH = watchdog.watchdog()
RANK = WATCH.peers.process
HURRIED = jc.CommunicationOptions(timeout_seconds=1.5)


def total(tree):
    return jc.all_reduce("sum", jax.tree.map(lambda x: x[0], tree), "data")


def double(tree):
    return jc.all_reduce("sum", jax.tree.map(lambda x: 2 * x[0], tree), "data")


def average(tree):
    return jc.all_reduce("mean", jax.tree.map(lambda x: x[0], tree), "data")


step, twice, mean = map(jc.data_parallel, (total, double, average))
hurried = jc.data_parallel(total, options=HURRIED)


def ones(size=4, dtype="float32"):
    return np.ones((1, size), dtype)


PART = ""


def attempt(name, call):
    start = time.monotonic()
    try:
        result = jax.tree.leaves(call())[0]
        found = {"sum": float(np.asarray(result.addressable_data(0)).ravel()[0])}
    except Exception as error:
        found = {
            "error": type(error).__name__,
            "message": str(error),
            "ranks": list(getattr(error, "ranks", ())),
            "packs": getattr(error, "packs", {}),
        }
    found["seconds"] = time.monotonic() - start
    print("FAULT " + json.dumps({"part": PART, "fault": name, **found}), flush=True)


def meet(name, processes=None):
    store()._ask("wait_at_barrier", f"{PART} {name}", 60_000, processes)


def out_of_step():
    """Two processes that go on after each fault, until the last ones."""
    odd = RANK == 1
    attempt("none", lambda: step(ones()))
    attempt("shape", lambda: step(ones(6 if odd else 5)))
    attempt("dtype", lambda: step(ones(4, "int32" if odd else "float32")))
    attempt("tree", lambda: step({"b" if odd else "a": ones()}))
    attempt("order in a tree", lambda: step({"a": ones(2 + odd), "b": ones(3 - odd)}))
    attempt("op", lambda: (mean if odd else step)(ones(8)))
    ring = jc.data_parallel(total, options=jc.CommunicationOptions(algorithm="ring"))
    attempt("options", lambda: (ring if odd else step)(ones(9)))
    for name, f in zip(
        "first second".split(), (twice, step) if odd else (step, twice), strict=True
    ):
        attempt(f"swapped {name}", lambda f=f: f(ones(7)))
    ops = jc.NcclAllReduce()
    per_replica = over_all(ones(3))
    attempt(
        "cross-device op",
        lambda: ops.reduce("mean" if odd else "sum", per_replica, per_replica).tree,
    )
    attempt("afterwards", lambda: step(ones()))
    patient = jc.data_parallel(total, options=jc.CommunicationOptions(timeout_seconds=20))
    attempt("known", lambda: patient(ones()))
    attempt("one recompiles", lambda: patient(ones(11 if odd else 4)))
    meet("end")


def other_meaning():
    """Calls that look alike, of which two processes mean something else, before each is right."""

    def one_of(*choices):
        return choices[RANK]

    def sine(x):
        return jc.all_reduce("sum", jnp.sin(x[0]), "data")

    def exponential(x):
        return jc.all_reduce("sum", jnp.exp(x[0]), "data")

    def scaled(by):
        def step(x):
            return jc.all_reduce("sum", by * x[0], "data")

        return jc.data_parallel(step)

    exponential.__name__ = sine.__name__ = "step"
    moments = collections.namedtuple("Moments", one_of("mean var", "var mean"))
    strategy = jc.MultiWorkerMirroredStrategy()
    value = jc.PerReplica([np.ones((2, 2), "f")])
    in_order = lambda one, two: collections.OrderedDict(
        one_of([("a", one), ("b", two)], [("b", one), ("a", two)])
    )
    names = one_of("a", "c")
    nested = one_of({"a": {"b": value}}, {"a": value})
    own = {
        "code": lambda: jc.data_parallel(one_of(sine, exponential))(ones(20)),
        "lambda": lambda: jc.data_parallel(one_of(lambda x: total(x), lambda x: -total(x)))(ones()),
        "constant": lambda: scaled(one_of(0.1, 0.2))(ones()),
        "tree of a step": lambda: step(in_order(ones(), ones())),
        "run": lambda: strategy.run(one_of(lambda x: jnp.sin(x), lambda x: jnp.exp(x)), (value,)),
        "arguments of run": lambda: strategy.run(lambda x: x, (in_order(value, value),)),
        "order": lambda: strategy.reduce("sum", in_order(value, value), None),
        "names": lambda: strategy.reduce("sum", {names: value}, None),
        "fields": lambda: strategy.reduce("sum", moments(value, value), None),
        "nesting": lambda: strategy.reduce("sum", nested, None),
        "axis": lambda: strategy.reduce("sum", value, one_of(0, 1)),
        "op along an axis": lambda: strategy.reduce(one_of("sum", "mean"), value, 0),
        "names along an axis": lambda: strategy.reduce("sum", {names: value}, 0),
        "order of a gather": lambda: strategy.gather(in_order(value, value), 0),
        "axis of a gather": lambda: strategy.gather(value, one_of(0, 1)),
        "batch": lambda: jc.NcclAllReduce().batch_reduce(
            "sum", [(v, v) for v in [over_all(in_order(ones(2), ones(2)))]]
        ),
    }
    for name, call in own.items():
        attempt(name, call)
        attempt(f"after {name}", lambda: step(ones()))
    meet("end")


def over_all(tree):
    """A value over all processes, of which this one has a row."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    place = lambda x: jax.make_array_from_process_local_data(rows, x)
    return jc.PerReplica.from_global(jax.tree.map(place, tree))


def departs():
    """Two pairs that went round a loop, or called one program; then one of each departs from it."""
    loops = RANK % 2 == 0
    pair = [0, 2] if loops else [1, 3]
    one, two = step.on(of(pair)), twice.on(of(pair))
    for f in (one, one, two) * 4 if loops else (one, two):
        f(ones())
    if not loops:
        for _ in range(1000):
            one(ones())
    for f in (one, one, two) if RANK < 2 else (one, two, one):
        attempt("departs", lambda f=f: f(ones()))
    attempt("afterwards", lambda: one(ones()))
    meet("end")


def late():
    """One comes when the other has given up waiting for it, and both go on."""
    attempt("warm", lambda: step(ones()))
    if RANK == 1:
        meet("given up")
    attempt("late", lambda: (hurried, step)[RANK](ones()))
    if RANK == 0:
        meet("given up")
    attempt("afterwards", lambda: step(ones()))
    meet("end")


def losses():
    """Four processes: one is killed, one is stopped, and of two that are left one ends."""
    attempt("none", lambda: step(ones()))
    if RANK == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    attempt("killed", lambda: step(ones()))
    strategy = jc.MultiWorkerMirroredStrategy()
    attempt("again", lambda: strategy.run(lambda: jc.psum(1.0 + jax.lax.axis_index("replica"))))
    attempt("three", lambda: step.on(of([0, 1, 3]))(ones()))
    three = jc.data_parallel(total, options=jc.CommunicationOptions(timeout_seconds=4))
    meet("before one is stopped", [0, 1, 3])
    if RANK == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    attempt("stopped", lambda: three.on(of([0, 1, 3]))(ones()))
    attempt("two", lambda: step.on(of([0, 1]))(ones()))
    call = jc.data_parallel(slowly, varying_outputs="concatenate").on(of([0, 1]))
    few, many = np.float32([[1, 0]]), np.float32([[1, 4]])
    attempt("warm", lambda: call(few))
    attempt("done", lambda: call(few if RANK else many))
    if RANK == 0:
        attempt("ended", lambda: call(few))


def slowly(x):
    """A sum, of which a process has a part left to do by itself."""
    whole = jc.all_reduce("sum", x[0], "data")
    seconds = x[:, 1] + 0 * whole[0]  # which begin when the sum is there
    return whole, jax.pure_callback(lambda s: time.sleep(float(s[0])) or s, seconds, seconds)


def of(processes):
    chosen = [d for d in jax.devices() if d.process_index in processes]
    return jax.sharding.Mesh(np.array(chosen), ("data",))


if __name__ == "__main__":
    try:
        for PART in sys.argv[1:]:
            globals()[PART]()
    finally:
        watchdog.watchdog().end()
        coordinator_connection().close()  # which reports what is done
        sys.stdout.flush()
        time.sleep(0.5 * (RANK == 0))
        os._exit(0)  # without the service's farewell, which waits for the dead
