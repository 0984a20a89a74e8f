"""Residuals in the state of `Elastic`: whoever stays keeps its own, and nothing is lost in silence."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of

import jaxcoll as jc
from jaxcoll._train.elastic import residuals
from jaxcoll._train.elastic.generation import Generation
from jaxcoll._train.elastic.replicated_state import ReplicatedState

INT4 = jc.CommunicationOptions(compression="int4")
LIKE = np.zeros(600, "f")


@jc.data_parallel(batch_argnums=1)
def step(state, x):
    total, residual = jc.all_reduce("sum", x[0], "data", residual=state["r"], options=INT4)
    return {"sum": state["sum"] + total, "r": residual}, jnp.sum(total)


def rows(at, rank=0, world=1):
    return np.random.default_rng((at, rank)).standard_normal((8, 600)).astype("f")


def start():
    return {"sum": LIKE, "r": jc.compression.residual(LIKE)}


def owed(state):
    return np.asarray(jc.unshard(state["r"]), "f8")


def test_checkpoint_holds_summed_residuals(tmp_path):
    path = tmp_path / "last.npz"
    first = jc.Elastic(step, start(), checkpoint=path, every=3)
    state, want = first.run(rows, 4), start()
    for at in range(4):
        want, _ = step(want, rows(at))
    jax.tree.map(np.testing.assert_array_equal, state, want)
    given = sum(rows(at).astype("f8").sum(0) for at in range(4))
    size = np.linalg.norm(given)
    assert np.linalg.norm(np.asarray(state["sum"], "f8") + owed(state) - given) < 1e-6 * size
    assert np.linalg.norm(owed(state)) > 1e-3 * size
    for n in (1, 3):  # the file is one of `save_checkpoint`, for any number of replicas
        like = {"sum": LIKE, "r": jc.compression.residual(LIKE, mesh=mesh_of(n))}
        saved, _ = jc.restore_checkpoint(path, like)
        np.testing.assert_allclose(owed(saved), owed(state), rtol=0, atol=1e-6)
    for again in (jc.Elastic(step, start(), checkpoint=path), first):
        state = again.run(rows, 6 + (again is first))
        given = sum(rows(at).astype("f8").sum(0) for at in range(again.finished))
        assert np.linalg.norm(np.asarray(state["sum"], "f8") + owed(state) - given) < 1e-6 * size
    assert (again.finished, again.changes) == (7, [])


class Worker:
    """One of several workers, with devices and a state of its own."""

    def __init__(self, rank, state, step=0):
        self.name = f"{rank}.a"
        self.mesh = jax.sharding.Mesh(jax.devices()[2 * rank : 2 * rank + 2], ("data",))
        self.state = ReplicatedState(state)
        self.state.reset(state, step)

    def settle(self, offers, step, number):
        """Go on from a step with other workers that offer this."""
        self.gather = lambda what, value: dict.fromkeys(offers, value)
        self.generation = Generation(number, tuple(offers), step)
        self.state.settle(self.state.offer(step)[0], offers, self, self.mesh, None)

    def works(self, step, seed):
        """Hold the state after another step, with a residual of its own."""
        parts = [
            np.random.default_rng(seed).standard_normal(x.shape).astype("f") for x in self.r.parts
        ]
        r = residuals.place_rows(self.r.replace(parts), self.mesh)
        self.state.keep(step, {"sum": self.state.latest["sum"], "r": r})

    @property
    def r(self):
        return self.state.latest["r"]

    @property
    def owes(self):
        return np.asarray(residuals.sum_replicas(self.r).parts[0], "f8")


def settled(workers, step, number=1):
    """All go on from a step."""
    offers = {worker.name: worker.state.offer(step)[1] for worker in workers}
    for worker in workers:
        worker.settle(offers, step, number)


def sum_of(value):
    """A state of numpy arrays, as a file gives it: what all replicas owe together."""
    r = jc.compression.residual(LIKE, mesh=mesh_of(1))
    return {"sum": LIKE, "r": r.replace([np.full(x.shape, value, "f") for x in r.parts])}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_first_sum_is_divided(n):
    workers = [Worker(rank, sum_of(6.0), step=5) for rank in range(n)]
    settled(workers, 5, number=0)
    assert all(w.r.layout.replicas == 2 for w in workers)
    np.testing.assert_allclose(sum(w.owes for w in workers), 6.0, rtol=1e-6)
    for w in workers:
        np.testing.assert_allclose(np.asarray(w.r.parts[0]), 6.0 / (2 * n), rtol=1e-6)


def test_survivors_keep_their_residuals():
    workers = [Worker(rank, start()) for rank in range(3)]
    one, two, _ = workers
    settled(workers, 0, number=0)
    for worker in workers:
        worker.works(1, seed=int(worker.name[0]))
        worker.works(2, seed=10 + int(worker.name[0]))
    kept = [np.asarray(w.r.parts[0]) for w in (one, two)]
    # The newcomer has read a file that was written after the same step.
    newcomer = Worker(2, sum_of(5.0), step=2)
    settled([one, two, newcomer], 2)
    for worker, rows in zip((one, two), kept, strict=True):
        np.testing.assert_array_equal(worker.r.parts[0], rows)
    assert not np.any(newcomer.r.parts[0])
    # Not given the state after a step that others have, it has nothing either.
    late = Worker(2, sum_of(5.0), step=0)
    late.state._held = {7: late.state.latest}
    late.state.finished = 7
    settled([one, two, late], 2, number=2)
    assert not np.any(late.r.parts[0])
    assert residuals.norm([one.r]) == one.state.residual_norm > 0


def test_return_to_start_loses_nothing():
    workers = [Worker(rank, sum_of(6.0), step=5) for rank in range(2)]
    settled(workers, 5, number=0)
    one, _ = workers
    one.works(6, seed=1)  # the other one died in that step
    settled([one], 5)
    np.testing.assert_allclose(one.owes, 6.0, rtol=1e-6)
    assert one.state.residual_norm == 0  # would be lost with it: others know the sum
    one.works(6, seed=1)
    assert one.state.residual_norm > 0
    one.works(7, seed=1)
    assert one.state.offer(5)[1]["residuals"] == "nothing"
    assert one.state.offer(6)[1]["residuals"] == "rows"


def test_lone_checkpoint_is_logged(caplog):
    (one,) = workers = [Worker(0, sum_of(6.0), step=5)]
    settled(workers, 5, number=0)
    np.testing.assert_array_equal(one.state.collect(5)["r"].parts[0], np.full((5, 128), 6.0))
    assert not caplog.records
    one.works(6, seed=1)
    with caplog.at_level(logging.WARNING):
        saved = one.state.collect(6)["r"]
    np.testing.assert_allclose(np.asarray(saved.parts[0], "f8"), one.owes, rtol=1e-6)
    (record,) = caplog.records
    assert "step 6 has only the residual of worker 0: those of the other" in record.getMessage()


def test_foreign_residuals_are_refused(monkeypatch):
    state = {"sum": LIKE, "r": jc.compression.residual(LIKE, "x", mesh=mesh_of(2, "x"))}
    with pytest.raises(ValueError, match=r"a residual over 'x', but the step's axis is 'data'"):
        jc.Elastic(step, state)
    monkeypatch.setattr(residuals, "_is_elsewhere", lambda x: isinstance(x, jax.Array))
    jc.Elastic(step, start())
    given = start()
    given["r"] = jax.tree.map(lambda x: x + 1, given["r"])
    with pytest.raises(ValueError, match=r"state\['r'\] is a residual that is not zero"):
        jc.Elastic(step, given)
    abstract = given["r"].replace([jax.ShapeDtypeStruct((5, 128), "f")])
    with pytest.raises(ValueError, match="must be an array of numbers; got ShapeDtypeStruct"):
        jc.Elastic(step, {"r": abstract})
