"""What users do wrong in several processes at once: told in words, where it is wrong."""

import warnings

import jax
import numpy as np
import pytest

import jaxcoll as jc

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("types_may_mix")]
SAME, ALONE = np.arange(4, dtype="f"), "All workers end."
ROWS = np.ones((3, 2), "f")


def over(*places):
    return jax.sharding.Mesh(np.array(jax.devices())[list(places)], ("data",))


def summed(x):
    return jc.all_reduce("sum", x.sum() + jax.lax.axis_index("data"), "data")


def test_mistakes_over_processes_are_named(launch):
    def run():
        rank, total = jax.process_index(), jc.data_parallel(summed, batch_argnums=())
        strategy = jc.MultiWorkerMirroredStrategy()
        number = strategy.experimental_distribute_values_from_function(
            lambda context: float(context.replica_id_in_sync_group)
        )
        reduce = lambda: strategy.reduce("sum", number, axis=None)
        for call, *words in (
            (lambda: jc.data_parallel(lambda x: x, mesh=over(0, 1, 2))(ROWS), "have different numbers of devices"),
            (lambda: total.on(over(*([0, 1], [2, 3])[rank == 0]))(ROWS),
             f"all devices of the mesh belong to process {1 - rank}"),
            (lambda: total.on(over(*[0, 1, 2, 3][:: 1 - 2 * rank]))(ROWS), "about to run different programs",
             "process 0: devices 0 1 2048 2049\nprocess 1: devices 2049 2048 1 0"),
            (reduce if rank else lambda: strategy.run(lambda x: x, (number,)),
             "about to run different programs", "process 1: program `batch_reduce`"),
        ):  # fmt: skip
            with pytest.raises((ValueError, jc.errors.ProgramMismatchError)) as caught:
                call()
            assert all(text in str(caught.value) for text in words), caught.value

        every = jax.NamedSharding(over(0, 1, 2, 3), jax.P("data"))
        parts = jax.make_array_from_callback((4,), every, lambda at: np.zeros(1, "f"))
        words = r"state\['w'\] is sharded over processes, so no other"
        with pytest.raises(ValueError, match=words):
            jc.Elastic(step_of(1), {"w": parts})

    launch(run, 2, devices_per_process=2)


LEAVES = """
import sys
import jaxcoll as jc
jc.initialize()
import jax, numpy as np
options = jc.CommunicationOptions(timeout_seconds=60)
total = jc.data_parallel(lambda x: jc.psum(x.sum()), options=options)
total(np.ones(1, "f"))
if jax.process_index():
    sys.exit()
try:
    total(np.ones(1, "f"))
except jc.errors.PeerLostError as error:
    print("left:", error, flush=True)
sys.exit(3)  # while a thread waits in a collective for a process that has ended
"""


def test_exit_beside_blocked_thread_keeps_status(launched, tmp_path):
    (tmp_path / "job.py").write_text(LEAVES)
    done = launched("-n", "2", "--keep-going", "--timeout-seconds", "120", tmp_path / "job.py")
    (left,) = [line for line in done.stdout.splitlines() if line.startswith("[0] left: ")]
    assert "process 1 has ended" in left
    assert "process 0 of 2 ended with status 3." in done.stderr, done.stderr


def step_of(factor):
    def step(w, x):
        return w + jc.pmean(x.mean()) * factor, jc.pmean(x.mean())

    return jc.data_parallel(step)


def diloco_of(factor):
    train = jc.diloco(lambda w, s, x: (w - factor * x.mean(), s, x.mean()), every=1)
    return train, train.init(np.arange(3, dtype="f"), ())


def elastic(step, state, rows):
    jc.Elastic(step, state).run(lambda step, worker, workers: rows, 2)


def diloco(factor, rows):
    train, state = diloco_of(factor)
    train(state, rows)


ENTRIES = {
    "call": lambda factor, rows: step_of(factor)(np.float32(0), rows),
    "elastic": lambda factor, rows: elastic(step_of(factor), np.float32(0), rows),
    "diloco": diloco,
    "elastic diloco": lambda factor, rows: elastic(*diloco_of(factor), rows),
}


def test_every_entry_keeps_promises(launch):
    """Equal rows are warned of, and other programs refused."""

    def run():
        rank = jax.process_index()
        for name, entry in ENTRIES.items():
            for rows, warns in ((SAME + rank, False), (SAME, True)):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    entry(1.0, rows)
                kinds = {w.category for w in seen if "Rows" in w.category.__name__}
                assert kinds == ({jc.errors.SameRowsWarning} if warns else set()), name
        for name in ("call", "elastic"):
            with pytest.raises(jc.errors.ProgramMismatchError, match="process 1: line ") as caught:
                ENTRIES[name](1.0 + rank, SAME + rank)
            assert str(caught.value).startswith("Processes are about to run")
            assert name == "call" or str(caught.value).endswith(ALONE)

    launch(run, 2)


def test_worker_whose_step_fails_leaves_others(launch, tmp_path):
    """With a file, members also agree on who writes it; a worker that leaves must not await that."""
    path = str(tmp_path / "last.npz")

    def run():
        rank = jax.process_index()

        def look(x):
            if rank:
                raise ValueError("no such row")
            return x

        def step(w, x):
            x = jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return w + jc.pmean(x.mean()), jc.pmean(x.mean())

        train = jc.Elastic(jc.data_parallel(step), np.float32(0), checkpoint=path)
        try:
            train.run(lambda step, worker, workers: SAME + rank, 2)
        except Exception as error:
            return str(error)
        return train.workers, [change.why for change in train.changes]

    (workers, changes), failure = launch(run, 2)
    assert workers == (0,)
    assert changes[-1] == "worker 1 ended"
    assert "no such row" in failure
