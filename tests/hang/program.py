"""An ordinary program of several processes that hangs in one of many ways: KIND STYLE HOST:PORT.

It knows nothing of jaxcoll. The last process misbehaves in step 6, unless the kind says otherwise.
"""

import asyncio
import atexit
import concurrent.futures
import ctypes
import fcntl
import os
import pdb
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, multihost_utils

KIND, STYLE, ADDRESS = sys.argv[1:4]
RANK, SIZE = int(os.environ["JAXCOLL_RANK"]), int(os.environ["JAXCOLL_PROCESSES"])
SECONDS, BAD, AT = 12, SIZE - 1, 6  # of a hang, its process and its step
STEPS = 10

jax.distributed.initialize(ADDRESS, SIZE, RANK)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
rows, whole = jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(mesh, jax.P())
here = np.ones((1, 64), "f")
x = jax.make_array_from_process_local_data(rows, here)
params = jax.device_put(np.zeros(64, "f"), whole)


def slow(w):
    """Compute for long: some 12 seconds of one core."""
    big = jnp.ones((400, 400)) * w.mean()
    return jax.lax.fori_loop(0, 4000, lambda _, b: jnp.tanh(b @ b) / 400, big).mean()


def on_host(w):
    # Without an axis, the first device calls.
    if RANK == (0 if STYLE in ("jit", "flax", "executor") else BAD):
        sleep()
    return np.float32(0)


def model(w, x):
    if KIND == "callback":
        w = w + io_callback(on_host, jax.ShapeDtypeStruct((), "float32"), w[0])
    if KIND == "long program":
        w = w + 0 * slow(w)
    return w + jnp.mean(x * 0.01)


# The step of each style of program: takes and returns (w, something to print).
@jax.jit
def jit_step(w, x):
    return model(w, x), x.sum()


def _shard_step(w, x):
    value = jax.lax.psum(x.sum(), "data")
    return model(w, x[0]) + 0 * value, value


shard_step = jax.jit(
    jax.shard_map(
        _shard_step, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(),
        check_vma=False,
    )
)  # fmt: skip


def pmap_body(w, x):
    value = jax.lax.pmean(x.sum(), "data")
    return model(w, x) + 0 * value, value


class TrainState:
    """As in flax's examples: a state, and a jitted function that updates it."""

    def __init__(self, params):
        self.params = params
        self.train_step = jax.jit(self._train_step)

    @staticmethod
    def _train_step(params, batch):
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((batch - p) ** 2))(params)
        return model(params, batch) - 0.1 * gradient, loss


def shift(w, x):
    around = [(k, (k + 1) % SIZE) for k in range(SIZE)]
    return (jax.lax.ppermute(w + x[0], "data", around)[None],)


evaluate = jax.jit(
    jax.shard_map(
        shift, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"),
        check_vma=False,
    )
)  # fmt: skip


@jax.jit
def local(a):
    return jax.lax.fori_loop(0, 50, lambda _, b: jnp.tanh(b @ b) / 400, a)


def branches(w, x):
    def one(v):
        return jax.lax.psum(v, "data")

    def two(v):
        return jax.lax.all_gather(v, "data").sum(0) + jax.lax.psum(jnp.ones((7,)), "data").sum()

    is_bad = jax.lax.axis_index("data") == BAD
    return jax.lax.cond(is_bad, two, one, w + x[0].mean())


branch_step = jax.jit(
    jax.shard_map(
        branches, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False
    )
)


# What goes wrong: a report should show this line, or the function.
def spin():
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pass


def fail():
    raise ValueError("not a number in the loss")


def join():
    thread = threading.Thread(target=time.sleep, args=(SECONDS,))
    thread.start()
    thread.join()


def poll():
    thread = threading.Thread(target=lambda: time.sleep(SECONDS))
    thread.start()
    while thread.is_alive():
        time.sleep(0.2)


def lock_file():
    with tempfile.TemporaryFile() as file, open(f"/proc/self/fd/{file.fileno()}") as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(again, fcntl.LOCK_EX)


class Loader:
    """A loader whose worker starves."""

    def __init__(self):
        self.queue = queue.Queue(1)

    def __next__(self):
        return self.queue.get()


def save():
    with tempfile.TemporaryDirectory() as folder:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            np.save(f"{folder}/state.npy", np.ones(1 << 20))


def evaluate_alone():
    a = jnp.ones((400, 400))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        a = local(a)
        a.block_until_ready()


def sleep():
    time.sleep(SECONDS)


def work():
    while True:
        sum(range(200_000))
        time.sleep(0.01)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


commands, typed = os.pipe()
sockets, locks = socket.socketpair(), 2 * [threading.Lock()]
FAULTS = {
    "sleep": sleep, "slow once": sleep, "all work": sleep, "loop": spin, "stopped": stop, "raised": fail,
    "thread": join, "poll": poll, "file lock": lock_file, "left": sys.exit,
    "lock": lambda: [lock.acquire(timeout=SECONDS) for lock in locks],
    "queue": lambda: queue.Queue().get(timeout=SECONDS),
    "subprocess": lambda: subprocess.run(["sleep", str(SECONDS)], check=True),
    "socket": lambda: sockets[0].recv(1),
    "input": lambda: input(),
    "GIL held": lambda: ctypes.PyDLL(None).sleep(SECONDS),
    "GIL busy": lambda: sum(range(800_000_000)),
    "future": lambda: concurrent.futures.ThreadPoolExecutor().submit(sleep).result(),
    "event loop": lambda: asyncio.run(asyncio.sleep(SECONDS)),
    "signal": lambda: signal.pause(),
    "loader": lambda: next(Loader()),
    "in a library": lambda: sorted([1, 2], key=lambda _: time.sleep(SECONDS / 2)),
    "exit": lambda: (atexit.register(lambda: time.sleep(SECONDS)), sys.exit()),
}  # fmt: skip
OF_RANK_0 = {"stopped 0": stop, "raised 0": fail, "sleep 0": sleep, "saves": save,
             "evaluates": evaluate_alone}  # fmt: skip
EVERYWHERE = {"all load": sleep, "all evaluate": evaluate_alone, "all stop": stop}


def interfere(step):
    """Do what is wrong with this kind, before a step."""
    if KIND in EVERYWHERE and step == AT:
        EVERYWHERE[KIND]()
    if RANK == BAD and step == AT and KIND in FAULTS:
        FAULTS[KIND]()
    if RANK == 0 and step == AT and KIND in OF_RANK_0:
        OF_RANK_0[KIND]()
    if KIND == "all slow":
        time.sleep(1.5 * (RANK == step % SIZE))
    if KIND == "one debugs" and RANK == BAD and step == AT:
        threading.Timer(SECONDS, os.write, (typed, b"continue\n")).start()
        pdb.set_trace()


def main():
    state, w = TrainState(params), params
    sys.stdin = os.fdopen(commands)
    time.sleep(2)  # as if it loaded data
    if KIND == "all work":  # in another thread
        threading.Thread(target=work, daemon=True).start()
    pool = concurrent.futures.ThreadPoolExecutor()
    p = jax.pmap(pmap_body, axis_name="data")
    w_of_pmap = jnp.zeros((1, 64))
    late = {"jit": 1, "shard_map": 5, "pmap": 100, "flax": 3, "executor": 1}[STYLE]
    steps = STEPS - (RANK == BAD and KIND == "fewer") + (RANK == BAD and KIND == "more")
    for step in range(steps):
        interfere(step)
        if KIND == "barrier" and step == AT:
            if RANK == BAD:
                sleep()
            multihost_utils.sync_global_devices("saved")
        if KIND == "all compile" and step == AT:
            jax.jit(lambda a: jax.lax.fori_loop(0, 3, lambda _, b: (time.sleep(SECONDS), b)[1], a))(
                w
            )
        if KIND == "order" and step == AT and RANK == BAD:
            evaluate(params, x)[0].block_until_ready()
        if KIND == "branch" and step == AT:
            branch_step(params, x).block_until_ready()
        if STYLE == "jit":
            w, value = jit_step(w, x)
        elif STYLE == "shard_map":
            w, value = shard_step(w, x)
        elif STYLE == "executor":
            w, value = pool.submit(jit_step, w, x).result()
            asyncio.run(asyncio.to_thread(value.block_until_ready))
        elif STYLE == "pmap":
            w_of_pmap, value = p(w_of_pmap, here)
        else:
            state.params, value = state.train_step(state.params, x)
        if KIND == "order" and step == AT and RANK != BAD:
            evaluate(params, x)[0].block_until_ready()
        if step % late == late - 1:
            if STYLE == "shard_map":
                value.block_until_ready()
            first = np.asarray(value.addressable_data(0)).ravel()[0]
            print(step, float(value) if STYLE == "flax" else first, flush=True)
    print("ended", np.asarray(value.addressable_data(0)).ravel()[0], flush=True)


main()
