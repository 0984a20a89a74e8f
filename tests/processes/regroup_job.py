"""A worker of `jc.Elastic` that comes late, or dies and is started again, as often as it is told."""

import collections
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import jaxcoll as jc
from jaxcoll._train.elastic.membership import Membership
from jaxcoll._train.elastic.residuals import own_rows

WHAT, FOLDER, AGAIN = sys.argv[1], Path(sys.argv[2]), "JAXCOLL_REJOIN" in os.environ
RANK = int(os.environ["JAXCOLL_RANK"])

import jax  # noqa: E402

if WHAT == "lost" and AGAIN and RANK == 0 and not (FOLDER / "refused").exists():
    (FOLDER / "refused").touch()
    jax.config.update("jax_num_cpu_devices", 2)
jc.initialize()

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from regroup_rows import local_start, local_step, owing_rows  # noqa: E402

MEMBERSHIPS = []
START = np.zeros(16, "f")
enter, is_complete = Membership.enter, Membership._is_complete
Membership.enter = lambda membership, *brings: (
    MEMBERSHIPS.append(membership) or enter(membership, *brings)
)
# However slow this machine is, one that was late once is waited for.
Membership._is_complete = lambda membership, ready, waited, number: is_complete(
    membership, ready, max(0.0, waited - 20), number
)


@jc.data_parallel(batch_argnums=1)
def step(w, x):
    value, gradient = jc.value_and_grad(lambda w, x: jnp.mean((x - w) ** 2), "data")(w, x)
    return w - 0.1 * gradient, value


def rows(at, rank):
    return np.random.default_rng((at, rank)).standard_normal((8, 16)).astype("f")


def bits(w):
    return hashlib.sha256(np.asarray(w).tobytes()).hexdigest()[:16]


def descriptors():
    """How many are open, once nothing that was left waits any more."""
    counts = [len(os.listdir("/proc/self/fd"))]
    until = time.monotonic() + 5
    while len(counts) < 2 or (counts[-1] != counts[-2] and time.monotonic() < until):
        time.sleep(0.1)
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1]


def train_alone_until_taken_in(at, world):
    """Wait where a worker may join for one that was started again."""
    while world < 3 and at % 10 == 9 and not MEMBERSHIPS[0]._waiting():
        time.sleep(0.02)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Job:
    step, start, steps, settings = staticmethod(step), START, 60, {"timeout_seconds": 20}

    def result(self, state):
        return {}


class Late(Job):
    """Process 1 brings the rows of four steps in a row only when the other waits no longer."""

    steps, settings = 8, {"timeout_seconds": 1.5}

    def __init__(self):
        self.late, self.begun, self.open = 4, -1, []

    def batches(self, at, place, world):
        generation = MEMBERSHIPS[0].generation.number
        if self.begun == generation and RANK == 1 and self.late:
            self.late -= 1
            MEMBERSHIPS[0].woken.wait(60)  # which the others do when they wait no longer
            while not MEMBERSHIPS[0]._is_over:
                time.sleep(0.01)
            self.open.append(descriptors())
        self.begun = generation  # the first step of each is compiled, for which it may take longer
        return rows(at, place)

    def result(self, state):
        plain, w = step.on(state.sharding.mesh), START  # whose connections work afterwards, too
        for at in range(self.steps):
            w = plain(w, rows(at, RANK))[0]
        return {"plain": bits(w), "late": self.late, "open": self.open}


class Owing(Job):
    """Sums of 4 bits with feedback: process 1 kills itself in step 12, and is taken in again."""

    def __init__(self):
        self.settings = {**self.settings, "checkpoint": FOLDER / "last.npz"}
        self.start = {"sum": np.zeros(600, "f"), "r": jc.compression.residual(np.zeros(600, "f"))}

    @staticmethod
    @jc.data_parallel(batch_argnums=1)
    def step(state, x):
        options = jc.CommunicationOptions(compression="int4")
        total, r = jc.all_reduce("sum", x[0], "data", residual=state["r"], options=options)
        return {"sum": state["sum"] + total, "r": r}, total[0]

    def batches(self, at, place, world):
        if RANK == 1 and at == 12 and not AGAIN:
            for step in trainer._job.state.held:
                self.owed(trainer._job.state.copy_to_host(step), f"{step}.npy")
            die()
        train_alone_until_taken_in(at, world)
        return owing_rows(at, RANK)

    def owed(self, state, name):
        (part,) = own_rows(state["r"]).parts
        np.save(FOLDER / name, part.reshape(-1)[:600])

    def result(self, state):
        self.owed(state, f"rank{RANK}.npy")
        np.save(FOLDER / "sum.npy", np.asarray(state["sum"]))
        return {"residual": [change.residual for change in trainer.changes]}


class Rounds(Job):
    """Local updates: process 1 kills itself in the middle of a round, and is taken in again."""

    def __init__(self):
        self.step, self.begun = jc.diloco(local_step, every=5), []
        self.start = self.step.init(*local_start())

    def batches(self, at, place, world):
        if RANK == 1 and at == 18 and not AGAIN:
            die()
        train_alone_until_taken_in(at, world)
        self.begun.append(at)
        return owing_rows(at, RANK)

    def result(self, state):
        np.savez(FOLDER / f"rank{RANK}.npz", *jax.tree.leaves((state.shared, state.replicas)))
        return {"begun": self.begun}


class Lost(Job):
    """Those whose turn it is kill themselves, two steps after all are there again."""

    steps = 200

    def __init__(self):
        self.steps_of, self.turns = collections.Counter(), FOLDER / "turns"

    def batches(self, at, place, world):
        generation = MEMBERSHIPS[0].generation.number
        self.steps_of[generation] += world == 3
        (last, *turns) = map(int, self.turns.read_text().split())
        if self.steps_of[generation] > 2 and generation > last and turns and turns[0] == RANK:
            written = FOLDER / "written"
            written.write_text(" ".join(map(str, (generation, *turns[1:]))))
            written.replace(self.turns)
            die()
        train_alone_until_taken_in(at, world)
        return rows(at, place)


job = {"late": Late, "lost": Lost, "owing": Owing, "rounds": Rounds}[WHAT]()
try:
    trainer = jc.Elastic(job.step, job.start, **job.settings)
    state = trainer.run(job.batches, job.steps)
    found = {
        "bits": bits(jax.tree.leaves(getattr(state, "shared", state))[-1]),
        "workers": trainer.workers,
        "changes": [[c.step, c.lost, c.joined] for c in trainer.changes],
        **job.result(state),
    }
except Exception as error:
    found = {"error": type(error).__name__, "message": str(error)}
print("RESULT " + json.dumps(found), flush=True)
sys.exit(3 if "error" in found else 0)
