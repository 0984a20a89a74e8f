"""`Elastic` in one process: it trains, begins where a checkpoint ends, and refuses what cannot be."""

import re
import threading
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._job.key_value import LocalKeys
from jaxcoll._job.specs import Member
from jaxcoll._job.startup import reach
from jaxcoll._runtime.dispatch import run
from jaxcoll._train.elastic import comparison
from jaxcoll._train.elastic.generation import Generation, RegroupError
from jaxcoll._train.elastic.replicated_state import ReplicatedState
from jaxcoll._train.elastic.rows import convert_batches


@jc.data_parallel(batch_argnums=1)
def step(state, x):
    value, gradient = jc.value_and_grad(lambda w, x: jnp.mean((x - w) ** 2), "data")(state["w"], x)
    return {"w": state["w"] - 0.25 * gradient}, value


START = {"w": np.float32(0.0)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.npz"


def rows(at, rank, world):
    return np.full(8, at, np.float32)


def saved_step(path):
    return jc.restore_checkpoint(path, START)[1]


def test_run_resumes_like_a_loop(path):
    reported = []
    report = lambda finished, loss: reported.append(finished)
    jc.Elastic(step, START, checkpoint=path, every=2, report=report).run(rows, 5)
    assert (reported, saved_step(path)) == ([1, 2, 3, 4, 5], 5)
    second = jc.Elastic(step, START, checkpoint=path)
    state, want = second.run(rows, 9), START
    for at in range(9):
        want, _ = step(want, rows(at, 0, 1))
    assert float(state["w"]) == float(want["w"])
    assert (second.finished, second.workers, second.changes) == (9, (0,), [])


def test_kinds_of_batches_agree():
    source = np.arange(32, dtype=np.float32)
    batches = jc.batches(source, 8, seed=1)
    whole = [batches.share(at, 0, 1) for at in range(4)]
    want = jc.Elastic(step, START).run(lambda at, rank, world: whole[at], 4)["w"]
    for given in (batches, whole, lambda at: whole[at]):
        assert jc.Elastic(step, START).run(given, 4)["w"].tolist() == want.tolist()
    jc.Elastic(step, START).run(whole, 6)  # over and over


@pytest.mark.parametrize("form", ["batches", "list", "function of the step"])
def test_indivisible_rows_are_left_out(form, monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    whole = [np.arange(16.0) + 16 * at for at in range(2)]
    batches = {
        "batches": jc.batches(np.concatenate(whole), 16),
        "list": whole,
        "function of the step": lambda step: whole[step],
    }[form]
    for workers in (1, 3, 5, 8):
        shares = [convert_batches(batches)(1, worker, workers) for worker in range(workers)]
        used = 16 - 16 % (2 * workers)
        assert np.concatenate(shares).tolist() == whole[1][:used].tolist()
        # So the mean over replicas of their means is that over all rows that are used.
        replicas = np.reshape(shares, (2 * workers, -1))
        assert replicas.mean(1).mean() == pytest.approx(whole[1][:used].mean())


def test_paired_rows_stay_together(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    pairs = convert_batches([{"queries": np.arange(8), "negatives": np.arange(16)}])
    assert [len(x) for x in pairs(0, 1, 4).values()] == [4, 2]
    with pytest.raises(ValueError, match=r"have \[8, 16\] rows, which do not all divide"):
        pairs(0, 0, 3)


@pytest.mark.parametrize("where", ["batches", "report", "interrupt"])
def test_errors_save_first(where, path):
    kind = KeyboardInterrupt if where == "interrupt" else ZeroDivisionError

    def fail(at, here):
        if at == 3 and (where == "report") == here:
            raise kind

    report = lambda finished, loss: fail(finished, True)
    give = lambda at, rank, world: fail(at, False) or rows(at, rank, world)
    with pytest.raises(kind) as caught:
        jc.Elastic(step, START, checkpoint=path, report=report).run(give, 9)
    assert saved_step(path) == 3
    assert f"The state after step 3 is saved in {path}." in caught.value.__notes__


def test_fewer_steps_change_nothing(path):
    state = jc.Elastic(step, START, checkpoint=path).run(rows, 5)
    again = jc.Elastic(step, START, checkpoint=path).run(rows, 3)
    assert (again["w"].tolist(), saved_step(path)) == (state["w"].tolist(), 5)
    jc.save_checkpoint(path, state, step=7)  # a later one, which somebody else has written
    jc.Elastic(step, START, checkpoint=path).run(rows, 3)
    assert saved_step(path) == 7


def test_host_state_is_restored(path):
    start = {"w": np.zeros(3), "n": 0, "lr": 0.5}

    @jc.data_parallel(batch_argnums=1)
    def count(s, x):
        return {**s, "w": s["w"] + s["lr"], "n": s["n"] + 1}, 0

    jc.Elastic(count, start, checkpoint=path).run(rows, 1)
    found = jc.Elastic(count, start, checkpoint=path).run(rows, 2)
    assert (found["w"].tolist(), int(found["n"])) == ([1.0] * 3, 2)


def test_newer_checkpoint_is_kept(path, caplog):
    def another_writes(finished, loss):
        if finished == 3:
            jc.save_checkpoint(path, START, step=50)

    jc.Elastic(step, START, checkpoint=path, every=4, report=another_writes).run(rows, 5)
    assert saved_step(path) == 50
    stays = f"Kept {path}, which holds the state after step 50; this one, after {{}}, is older."
    assert [r.getMessage() for r in caplog.records] == [stays.format(k) for k in (4, 5)]


def test_last_unwritten_checkpoint_is_error(path, monkeypatch, caplog):
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        jc.Elastic(step, START, checkpoint=path, every=2).run(rows, 3)
    assert ["after step 2 could not be written" in r.getMessage() for r in caplog.records] == [True]


def test_mistake_in_step_is_raised():
    bad = jc.data_parallel(lambda state, x: 1 / 0, batch_argnums=1)
    with pytest.raises(ZeroDivisionError):
        jc.Elastic(bad, START).run(rows, 1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, x: s, "return the pair .* as in `return state, loss`; this one returns one v"),
        (lambda s, x: (s, 0, 0), "return the pair .* this one returns 3 values"),
        (lambda s, x: ({"w": s["w"].astype(jnp.float16)}, 0),
         r"argument: state\['w'\]: float32\[\]; returned: state\['w'\]: float16\[\]"),
    ],
)  # fmt: skip
def test_step_without_state_is_refused(function, words):
    with pytest.raises(ValueError, match=words):
        jc.Elastic(jc.data_parallel(function, batch_argnums=1), START).run(rows, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_workers": 0}, "`min_workers` to be an integer above 0; got 0"),
        ({"every": 1.5}, "`every` to be an integer above 0; got 1.5"),
        ({"min_workers": 3, "max_workers": 2}, r"`max_workers` \(2\) is below `min_workers` \(3\)"),
        ({"timeout_seconds": float("nan")}, "`timeout_seconds` to be a finite number of seconds above 0; got nan"),
        ({"startup_timeout_seconds": -1}, "`startup_timeout_seconds` to be a finite number of seconds above 0; got -1"),
        ({"step": lambda s, x: (s, x)}, "made by `jc.data_parallel` or `jc.diloco`, and .* got function"),
        ({"step": jc.data_parallel(lambda s, x: (s, x), donate_argnums=0)},
         r"must not donate it; got donate_argnums=\(0,\)"),
        ({"step": jc.data_parallel(lambda s, x: (s, x), axis_name=("a", "b"))},
         "over one mesh axis, along which workers may leave"),
        *(({"step": jc.data_parallel(function, batch_argnums=batch)}, r"of `\(state, batch\)` .* `x, y = b")
          for function, batch in ((lambda s, x, y: (s, x), (1, 2)), (lambda x, s: (s, x), 0))),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings, words):
    settings = {"step": step, **settings}
    with pytest.raises(ValueError, match=words):
        jc.Elastic(settings.pop("step"), START, **settings)


@pytest.mark.parametrize("batches", [[1.0, 2.0], [[1, 2], [3, 4]], lambda step: 3])
def test_batches_without_rows_are_refused(batches):
    words = r"is a number \([13]\.?0?\), which has no rows .* `np.asarray`"
    with pytest.raises(ValueError, match=words):
        jc.Elastic(step, START).run(batches, 2)
    with pytest.raises(ValueError, match="the function returned None for step 0"):
        jc.Elastic(step, START).run(lambda step, worker, workers: None, 2)


class Present:
    """One of several workers, each of which holds a state of its own."""

    name = "0.a"

    def __init__(self, **states):
        self.states = {name[1:]: ReplicatedState(state) for name, state in states.items()}
        self.asked = ""

    def settle(self, state, mesh):
        """Begin a generation, as `Run` does it."""
        offers = {f"{n}.a": s.offer(0)[1] for n, s in self.states.items()}
        state.settle(state.offer(0)[0], offers, self, mesh, None)

    def gather(self, what, value):
        return {f"{n}.a": comparison.digest_state(s.latest) for n, s in self.states.items()}

    def request_regroup(self, why):
        self.asked = why

    def settles(self, number, name="0.a", joined=()):
        """What becomes of one of them in a generation, at its beginning and at a checkpoint."""
        self.name, self.asked = name, ""
        members = tuple(f"{n}.a" for n in self.states)
        self.generation = Generation(number, members, 0, joined=joined)
        state = self.states[name[0]]
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        for settle in (lambda: state.compare(self), lambda: self.settle(state, mesh)):
            try:
                settle()
                yield None
            except Exception as error:
                yield error


ONE, OTHER, THIRD, WIDE = ({"w": np.full(n, k, "f")} for k, n in ((1, 3), (0, 3), (2, 3), (1, 4)))
DIVERGED, MISMATCH = jc.errors.ReplicaDivergenceError, jc.errors.ProgramMismatchError
WORDS = {
    DIVERGED: r"in 1 leaf of the state. The first is state\['w'\]: workers [\d, ]+ \| [\d, |]+\. Give all",
    MISMATCH: r"worker \d: state\['w'\]: float32\[\d\]; worker \d: .*float32\[\d\]",
}


@pytest.mark.parametrize(
    ("number", "states", "joined", "compared", "begun"),
    [
        (0, (ONE, ONE), "", [None] * 2, [None] * 2),
        (0, (ONE, OTHER, ONE), "", [RegroupError, DIVERGED, RegroupError], [DIVERGED] * 3),  # nobody knows who is right
        (0, (ONE, ONE, WIDE), "", None, [MISMATCH] * 3),
        (3, (ONE, OTHER, ONE), "", [RegroupError, DIVERGED, RegroupError], [RegroupError, DIVERGED, RegroupError]),
        (3, (ONE, OTHER), "", [DIVERGED] * 2, [DIVERGED] * 2),
        (3, (ONE, OTHER, THIRD), "", [DIVERGED] * 3, [DIVERGED] * 3),
        (3, (ONE, OTHER, OTHER), "12", None, [RegroupError, DIVERGED, DIVERGED]),  # it has no vote
        (3, (ONE, WIDE, WIDE), "12", None, [RegroupError, MISMATCH, MISMATCH]),
    ],
)  # fmt: skip
def test_minority_ends(number, states, joined, compared, begun):
    several = Present(**{f"w{i}": state for i, state in enumerate(states)})
    for i in range(len(states)):
        errors = [*several.settles(number, f"{i}.a", tuple(f"{k}.a" for k in joined))]
        kinds = [error if error is None else type(error) for error in errors]
        assert kinds[1] is begun[i]
        assert compared is None or kinds[0] is compared[i]
        for error in filter(lambda error: type(error) in WORDS, errors):
            assert re.search(WORDS[type(error)], str(error))
            groups = [list(group) for _, group in sorted(getattr(error, "divergent", {}).items())]
            assert [sorted(g, key=lambda one: (-len(one), one)) for g in groups] == groups
        if kinds[1] is RegroupError:
            odd = ", ".join(str(k) for k, kind in enumerate(begun) if kind is not RegroupError)
            who = f"worker{'s' * (len(odd) > 1)} {odd}"
            assert several.asked == f"the state of {who} differs from the others'"


def test_unrecoverable_job_is_refused(monkeypatch):
    monkeypatch.setattr("jaxcoll._train.elastic.trainer.store", lambda: LocalKeys())
    with pytest.raises(ValueError, match="needs a job that survives the loss of a process"):
        jc.Elastic(step, START).run(rows, 1)


def test_second_failure_is_an_error(monkeypatch):
    failing = Mock(side_effect=RuntimeError("out of memory"))
    monkeypatch.setattr("jaxcoll._train.elastic.run.run", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        jc.Elastic(step, START).run(rows, 1)
    assert failing.call_count == 2


def test_endless_lateness_saves_the_state(path, monkeypatch):
    begun = []

    def late(call):
        if call.name == "step 0":
            return run(call)
        begun.append(call.name)
        seconds = call.timeout_seconds
        raise jc.errors.DeadlineExceededError(f"{call.name} did not finish within {seconds:g} s.")

    monkeypatch.setattr("jaxcoll._train.elastic.run.MOST_ATTEMPTS", 4)
    monkeypatch.setattr("jaxcoll._train.elastic.run.run", late)
    words = (
        r"Workers 0 began the step after step 1 4 times in a row and never finished it.*The last "
        r"time, step 1 did not finish within 60 s\. A larger `timeout_seconds` waits longer\. The "
        "state after step 1 is saved in"
    )
    with pytest.raises(jc.errors.DeadlineExceededError, match=words):
        jc.Elastic(step, START, checkpoint=path).run(rows, 9)
    assert len(begun) == 4
    assert saved_step(path) == 1


def test_too_few_workers_save_state(path):
    words = r"Too few workers are left: 1 \(rank 0\); `min_workers` is 2: .*The state after step 0 is saved in"
    with pytest.raises(jc.errors.PeerLostError, match=words):
        jc.Elastic(step, START, min_workers=2, checkpoint=path).run(rows, 9)
    assert saved_step(path) == 0


def test_failure_after_deadline_is_lateness(monkeypatch, memberships):
    left = [5]

    def fails(call):
        if call.name == "step 1" and left[0]:
            left[0] -= 1
            # On another worker, first.
            memberships[0].request_regroup("step 1 did not finish within 60 s", late=True)
            raise RuntimeError("Connection closed by peer")
        return run(call)

    monkeypatch.setattr("jaxcoll._train.elastic.run.run", fails)
    trainer = jc.Elastic(step, START)
    trainer.run(rows, 3)
    assert (trainer.finished, left) == (3, [0])


@pytest.mark.parametrize(("by_others", "step_saved"), [(0, 3), (7, 7)])
def test_dead_coordinator_saves_the_state(path, memberships, by_others, step_saved):

    def die(finished, loss):
        if finished == 3:
            if by_others:  # who are not cut off, and have gone on
                jc.save_checkpoint(path, START, step=by_others)
            memberships[0].lose_coordinator()

    words = f"The coordinator died, .* The state after step {step_saved} is saved in"
    with pytest.raises(jc.errors.PeerLostError, match=words):
        jc.Elastic(step, START, checkpoint=path, report=die).run(rows, 9)
    assert saved_step(path) == step_saved


def test_coordinator_dead_before_the_run(monkeypatch):
    monkeypatch.setattr(LocalKeys, "set", Mock(side_effect=StoreUnreachableError("it is dead")))
    before = set(threading.enumerate())
    with pytest.raises(
        jc.errors.PeerLostError, match="The coordinator died, is stopped, or is cut"
    ):
        jc.Elastic(step, START).run(rows, 1)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread.name


def test_ended_job_cannot_be_rejoined():
    words = "cannot reach the coordinator at 127.0.0.1:1"
    with pytest.raises(jc.errors.DeadlineExceededError, match=words):
        reach(Member("127.0.0.1:1", 3, 1), 1.0)
