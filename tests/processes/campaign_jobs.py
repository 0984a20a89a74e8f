"""What a process does in the campaign of faults; prints what became of it, as one line of JSON."""

import json
import os
import resource
import signal
import sys
import time

SPEC = json.loads(sys.argv[1])
RANK = int(os.environ["JAXCOLL_RANK"])
AGAIN = "again" in sys.argv


def injected(moment, step=None):
    """Do to this process what the fault says, at this moment."""
    for fault in SPEC["faults"]:
        if fault["rank"] != RANK or fault["when"] not in (moment, step) or AGAIN:
            continue
        print("FAULT " + json.dumps([time.time()]), flush=True)
        match fault["what"]:
            case "sleep":
                time.sleep(600)
            case "raise":
                raise KeyError("a mistake of the user's")
            case "exit":
                os._exit(9)
            case "full disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
            case name:
                os.kill(os.getpid(), getattr(signal, name))


injected("before the start")

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")

import hashlib  # noqa: E402

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxcoll as jc  # noqa: E402


def told(outcome, **more):
    print("TOLD " + json.dumps({"outcome": outcome, "at": time.time(), **more}), flush=True)


@jc.data_parallel(batch_argnums=1)
def step(state, batch):
    injected("while compiling")

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    value, gradient = jc.value_and_grad(loss, "data")(state["w"], *batch)
    return {**state, "w": state["w"] - 0.05 * gradient, "seen": state["seen"] + 1}, value


def batches(at, rank, world):
    injected("step", at)
    if world < SPEC.get("until", world + 1):  # give a newcomer time to start
        time.sleep(SPEC.get("pause", 0.0))
    rng = np.random.default_rng((at, rank))
    n = 4 if at >= 20 and RANK == 1 and SPEC.get("odd") in ("rows", "slow rows") else 8
    if n == 4:
        print("FAULT " + json.dumps([time.time()]), flush=True)
    return rng.standard_normal((n, 16)).astype("f"), rng.standard_normal(n).astype("f")


def odd_elastic():
    """The same with another step, or number of steps, on one process."""
    odd = RANK == 1 and SPEC.get("odd")

    def slow(state, batch):
        if batch[1].shape == (4,):
            time.sleep(8)
        return step.__wrapped__(state, batch)

    function = slow if odd == "slow rows" else step.__wrapped__
    slow.__name__ = "step"
    rate = jc.CommunicationOptions(algorithm="ring") if odd == "options" else None
    other = jc.data_parallel(function, batch_argnums=1, options=rate)
    if odd == "function":
        other = jc.data_parallel(lambda s, b: (s, jnp.float32(0)), batch_argnums=1)
    every = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    shards = jax.sharding.NamedSharding(every, jax.sharding.PartitionSpec("x"))
    sharded = jax.make_array_from_callback(
        (len(jax.devices()),), shards, lambda at: np.zeros(1, "f")
    )
    refused = ""
    try:
        jc.Elastic(other, {"w": sharded})
    except ValueError as error:
        refused = str(error)
    if "state['w'] is sharded over processes, so that no other has a copy" not in refused:
        raise AssertionError(f"a state in shards: {refused}")
    start = {"w": np.zeros(16, "f"), "seen": np.int32(0)}
    trainer = jc.Elastic(other, start, timeout_seconds=3.0, startup_seconds=60.0)
    trainer.run(batches, 30 if odd == "steps" else 40)


def bits(state):
    return hashlib.sha256(np.asarray(state["w"]).tobytes()).hexdigest()[:16]


def elastic():
    """Train by `jc.Elastic`, and then once more without it from where the world became smaller."""
    start = {"w": np.zeros(16, "f"), "seen": np.int32(0), "large": np.ones(4096, "f")}
    kept = {0: start}
    settings = {"timeout_seconds": 3.0, "startup_seconds": 60.0} | SPEC.get("settings", {})
    trainer = jc.Elastic(
        step, start, **settings, report=lambda n, loss: kept.update({n: trainer._state.host(n)})
    )
    injected("before training")
    print("TRAINING", flush=True)
    try:
        state = trainer.run(batches, SPEC["steps"])
    finally:
        changes = [[c.step, c.workers, c.lost, c.joined, c.why, c.seconds] for c in trainer.changes]
        told("changes", changes=changes, finished=trainer.finished)
    if state is None:
        return told("spare")
    again = None
    if trainer.changes and not trainer.changes[-1].joined:
        change = trainer.changes[-1]
        devices = [d for r in change.workers for d in jax.devices() if d.process_index == r]
        plain = step.on(jax.sharding.Mesh(np.array(devices), ("data",)))
        again = kept[change.step]
        for at in range(change.step, SPEC["steps"]):
            rank = change.workers.index(RANK)
            rng = np.random.default_rng((at, rank))
            rows = rng.standard_normal((8, 16)).astype("f"), rng.standard_normal(8).astype("f")
            again = plain(again, rows)[0]
        again = bits(again)
    told("trained", bits=bits(state), again=again, seen=int(state["seen"]))
    if "leaves" in SPEC:
        raise SystemExit(SPEC["leaves"])
    return None


def plain():
    """Calls of one or two `data_parallel` steps, of which one process makes one otherwise."""
    timeout = SPEC.get("timeout", 3.0)
    options = jc.CommunicationOptions(timeout_seconds=timeout)
    size, dtype = 8, np.float32
    odd = RANK == 1 and SPEC.get("odd")
    if odd == "options":
        options = jc.CommunicationOptions(timeout_seconds=timeout, algorithm="ring")
    one = jc.data_parallel(lambda x: jc.all_reduce("mean", x.sum(0), "data"), options=options)
    two = jc.data_parallel(lambda x: jc.all_reduce("sum", x.sum(0), "data"), options=options)
    one(np.ones((2, 8), "f")), two(np.ones((2, 8), "f"))
    began = time.time()
    for at in range(12):
        injected("step", at)
        if at == 6:
            size = 4 if odd == "shape" else size
            dtype = np.int32 if odd == "dtype" else dtype
            if odd == "recompile":
                one = one.on(one.mesh)
            if odd == "op":
                one = two
            if odd == "skip":
                continue
        calls = (two, one) if odd == "swap" and at == 6 else (one, two)
        for call in calls:
            began = time.time()
            call(np.ones((2, size), dtype))
    told("trained", waited=time.time() - began)


injected("before the meeting")
connect = jax.distributed.initialize
jax.distributed.initialize = lambda *a, **k: (injected("while connecting"), connect(*a, **k))
try:
    jc.initialize(initialization_timeout=SPEC.get("arrival", 20), rejoin=AGAIN)
    injected("after the meeting")
    {"elastic": elastic, "odd_elastic": odd_elastic, "plain": plain}[SPEC["job"]]()
except SystemExit:
    raise
except BaseException as error:
    notes = " ".join(getattr(error, "__notes__", ()))
    told(type(error).__name__, message=f"{error} {notes}", ranks=getattr(error, "ranks", None))
    sys.exit(3)
