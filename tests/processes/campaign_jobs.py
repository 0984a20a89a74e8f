"""What a process does in the campaign of faults; prints what became of it, as lines of JSON."""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

SPEC = json.loads(sys.argv[1])
RANK = int(os.environ["JAXCOLL_RANK"])
AGAIN = "again" in sys.argv


def emit(word, **more):
    print(f"{word} " + json.dumps({"at": time.time(), **more}), flush=True)


def injected(*moments):
    """Do to this process what the fault says, at this moment."""
    for fault in SPEC["faults"]:
        if fault["rank"] != RANK or fault["when"] not in moments or AGAIN:
            continue
        emit("FAULT")
        match fault["what"]:
            case "sleep":
                time.sleep(600)
            case "hold":  # as `pickle.load` of a data set does
                fault["when"] = "once"
                ctypes.PyDLL(None).sleep(7)
            case name:
                os.kill(os.getpid(), getattr(signal, name))


def before(module, name, moment):
    """Let the fault happen before a function is called."""
    function = getattr(module, name)
    setattr(module, name, lambda *args, **how: (injected(moment), function(*args, **how))[1])


import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")

import hashlib  # noqa: E402
import io  # noqa: E402

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jaxlib import _jax  # noqa: E402

import jaxcoll as jc  # noqa: E402
from jaxcoll._train.elastic import replicated_state  # noqa: E402

EXPIRES = {"at": 0.0}
"""When the deadline of what this process waits for, or waited for last, passes."""


def expires_in(seconds):
    EXPIRES["at"] = time.time() + seconds


@jc.data_parallel(batch_argnums=1)
def step(state, batch):
    injected("while compiling")

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    value, gradient = jc.value_and_grad(loss, "data")(state["w"], *batch)
    return {**state, "w": state["w"] - 0.05 * gradient, "seen": state["seen"] + 1}, value


def rows(at, rank):
    rng = np.random.default_rng((at, rank))
    return rng.standard_normal((8, 16)).astype("f"), rng.standard_normal(8).astype("f")


def bits(state):
    return hashlib.sha256(np.asarray(state["w"]).tobytes()).hexdigest()[:16]


class Elastic:
    """Training by `jc.Elastic`, and once more without it from where the world became smaller."""

    step = staticmethod(step)
    start = {"w": np.zeros(16, "f"), "seen": np.int32(0), "large": np.ones(4096, "f")}  # noqa: RUF012

    def __init__(self):
        self.settings = {"timeout_seconds": SPEC["timeout"], "startup_timeout_seconds": 60.0}
        self.settings |= SPEC.get("settings", {})
        if RANK in SPEC.get("without a file", ()):
            self.settings.pop("checkpoint")
        self.trainer = jc.Elastic(self.step, self.start, **self.settings, report=self.report)
        self.kept, self.changes, self.expiries = {0: self.start}, [], []

    def batches(self, at, rank, world):
        injected(at, f"{at} of {world}")
        if self.awaits_newcomer(at, world):
            time.sleep(SPEC.get("pause", 0.0))
        expires_in(SPEC["timeout"])
        self.expiries.append(EXPIRES["at"])
        return rows(at, rank)

    def awaits_newcomer(self, at, world):
        if SPEC["again with"]:
            return at > 20 and not Path("again.ended").exists()
        return world < SPEC.get("until", world + 1)

    def report(self, finished, loss):
        self.kept[finished] = self.trainer._job.state.copy_to_host(finished)
        self.note_changes()

    def note_changes(self):
        now = time.time()
        for change in self.trainer.changes[len(self.changes) :]:
            noticed = now - change.seconds
            before = [t for t in self.expiries if t - SPEC["timeout"] < noticed]
            times = {"noticed": noticed, "again": now, "expired": max(before, default=0.0)}
            self.changes.append({**dataclasses.asdict(change), **times})
            if "good" in SPEC:
                good = jc.restore_checkpoint(self.settings["checkpoint"], self.start)[1]
                self.changes[-1]["good"] = good

    def run(self):
        injected("before training")
        emit("TRAINING")
        expires_in(self.settings["startup_timeout_seconds"])
        try:
            state = self.trainer.run(self.batches, SPEC["steps"])
        finally:
            self.note_changes()
            emit("CHANGES", changes=self.changes)
        if state is None:
            return {"spare": True}
        again = self.smaller() if self.trainer.changes else state
        return {"bits": bits(state), "again": bits(again), "seen": int(state["seen"])}

    def smaller(self):
        """The state that the last world would have reached by itself."""
        change = self.trainer.changes[-1]
        if change.joined:
            return self.trainer._job.state.latest
        devices = [d for r in change.workers for d in jax.devices() if d.process_index == r]
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        plain, state = self.step.on(mesh), self.kept[change.step]
        for at in range(change.step, SPEC["steps"]):
            state = plain(state, rows(at, change.workers.index(RANK)))[0]
        return state


class Odd(Elastic):
    """The same with another step or other rows on one process."""

    def __init__(self):
        self.odd = (SPEC["again with"] if AGAIN else SPEC["odd"]) if RANK == 1 else ""
        self.since = {"function": 0, "drift": 12}.get(self.odd, 20)
        if self.odd and AGAIN:
            emit("FAULT")
        super().__init__()

        function = step.__wrapped__
        if self.odd == "function":
            function = lambda state, batch: (state, jnp.float32(0))
        if SPEC["odd"] == "drift":
            function = drifting
        other = jc.data_parallel(function, batch_argnums=1)
        self.trainer = jc.Elastic(other, self.start, **self.settings, report=self.report)

    def batches(self, at, rank, world):
        if self.odd and at == self.since:
            emit("FAULT")
        few = at >= 20 and self.odd == "rows"
        rows = tuple(x[: 4 if few else 8] for x in super().batches(at, rank, world))
        if SPEC["odd"] != "drift":
            return rows
        return *rows, np.full(8, 1e-6 if self.odd and at >= self.since else 0, "f")


def drifting(state, batch):
    """A number that is wrongly said to be the same everywhere, and is so at first."""
    *rows, error = batch
    state, value = step.__wrapped__(state, tuple(rows))
    return {**state, "w": state["w"] + jc.same(error.max())}, value


drifting.__name__ = "step"


def write_in_two_parts():
    """Let a checkpoint be half written for a moment."""
    write, save, steps = np.lib.format.write_array, replicated_state.save_newest, []

    def write_array(file, array, **settings):
        whole = io.BytesIO()
        write(whole, array, **settings)
        half = whole.tell() // 2
        file.write(whole.getvalue()[:half])
        if steps:  # in the first leaf of each checkpoint
            injected(f"while writing {steps.pop()}")
            time.sleep(SPEC["slow"])
        file.write(whole.getvalue()[half:])

    np.lib.format.write_array = write_array
    replicated_state.save_newest = lambda path, state, stamp, *more: (
        steps.append(stamp.step) or save(path, state, stamp, *more)
    )


class Calls:
    """Calls of two programs in turn."""

    def __init__(self):
        jax.devices()
        self.options = jc.CommunicationOptions(timeout_seconds=SPEC["timeout"])

    def made(self, reduce_op):
        return jc.data_parallel(
            lambda x: jc.all_reduce(reduce_op, x.sum(0), "data"), options=self.options
        )

    def run(self):
        injected("before the first call")
        one, two = (self.made(reduce_op) for reduce_op in ("mean", "sum"))
        for at in range(SPEC["steps"]):
            injected(at)
            for call in (one, two):
                expires_in(SPEC["timeout"])
                call(np.ones((2, 8), "f"))
        return {}


injected("before the meeting")
try:
    expires_in(SPEC["arrival"])
    before(jax.distributed, "initialize", "while connecting")
    before(_jax, "make_gloo_tcp_collectives", "while exchanging")
    jc.initialize(initialization_timeout_seconds=SPEC["arrival"], rejoin=AGAIN)
    injected("after the meeting")
    job = {"elastic": Elastic, "odd": Odd, "calls": Calls}[SPEC["job"]]()
    write_in_two_parts()
    emit("ENDED", outcome="trained", **job.run())
except BaseException as error:
    notes = " ".join(getattr(error, "__notes__", ()))
    ranks = sorted(getattr(error, "ranks", ()))
    kind = type(error).__name__
    emit("ENDED", outcome=kind, message=f"{error} {notes}", ranks=ranks, expired=EXPIRES["at"])
    sys.exit(3)
finally:
    if AGAIN:
        Path("again.ended").touch()
raise SystemExit(SPEC["leaves"])  # not by `sys.exit`, which might be wrapped
