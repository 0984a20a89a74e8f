"""`MultiWorkerMirroredStrategy` over real processes: what workers pass, and what they get."""

import re
import sys
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import ranks

import jaxcoll as jc
from benchmarks.teams import free_port
from jaxcoll._compat.coordination import store

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("types_may_mix")]
WORKERS, DEVICES = 2, 2
N = WORKERS * DEVICES
ERRORS = (
    *(ValueError, NotImplementedError),
    *(jc.errors.ProgramMismatchError, jc.errors.ReplicaDivergenceError),
)

# TensorFlow's way into a job.
JOINS = """
import json, os
own, *_ = (os.environ.pop(f"JAXCOLL_{name}") for name in ("RANK", "PROCESSES", "COORDINATOR"))
cluster = {"worker": [f"127.0.0.1:{port}" for port in os.environ["PORTS"].split()]}
task = {"type": "worker", "index": int(own)}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
import jax
import jaxcoll as jc
assert jc.MultiWorkerMirroredStrategy().num_replicas_in_sync == 2
assert jax.process_index() == int(own)
"""


def test_tf_config_joins_a_job():
    ports = " ".join(str(free_port()) for _ in range(2))
    ranks.launch([sys.executable, "-c", JOINS], 2, timeout=120, env={"PORTS": ports})


@pytest.fixture(scope="module")
def workers(launch):
    """Calls a function of a strategy and this worker's number in two workers of two devices each."""

    def run(function):
        call = lambda: function(jc.MultiWorkerMirroredStrategy(), jax.process_index())
        return launch(call, WORKERS, devices_per_process=DEVICES)

    return run


def dense(i):
    """The value of one replica, or worker."""
    return np.float32([1 + i, 2 + 2 * i])


def table(i):
    """Rows of a table, of a number of its own on each replica."""
    n = 1 + i % 3
    return jc.IndexedSlices(np.full((n, 2), 1.0 + i, "f"), np.arange(n, dtype="i"), (4, 2))


def kinds(strategy, rank):
    """Every kind of value that a worker may pass, and the parts that are summed or gathered."""
    every, here = strategy.devices, jax.local_devices()
    numbers = [DEVICES * rank + k for k in range(DEVICES)]
    parts = [dense(i) for i in range(N)]
    rows = [np.asarray(table(i).to_dense()) for i in range(N)]
    per_replica, mirrored = jc.PerReplica, jc.distribute.Mirrored
    return {
        "per replica, all": (per_replica.from_function(dense, devices=every), parts),
        "per replica, here": (per_replica([dense(i) for i in numbers], devices=here), parts),
        "mirrored, all": (mirrored.from_function(lambda i: dense(2), devices=every), parts[2:3] * N),
        "mirrored, here": (mirrored([dense(rank)] * DEVICES, devices=here), [dense(i // DEVICES) for i in range(N)]),
        "array": (dense(rank), parts[:WORKERS]),
        "array on a device": (jax.device_put(dense(rank), here[0]), parts[:WORKERS]),
        "number": (1.0 + rank, [1.0 + k for k in range(WORKERS)]),
        "rows, all": (per_replica.from_function(table, devices=every), rows),
        "rows, here": (per_replica([table(i) for i in numbers], devices=here), rows),
        "rows": (table(rank), rows[:WORKERS]),
        "elsewhere": (per_replica([dense(rank)]), None),  # a share of this worker's share
    }  # fmt: skip


def entries(strategy):
    """Each takes an op and a value, and returns what this worker gets."""
    here, extended, context = jax.local_devices(), strategy.extended, jc.get_replica_context
    fixed = jc.distribute.CollectiveAllReduce(here, N)
    tasks = [
        [f"/job:worker/task:{k}/device:CPU:{d}" for d in range(DEVICES)] for k in range(WORKERS)
    ]
    tiered = jc.MultiWorkerAllReduce(tasks, DEVICES, "nccl/xring")
    own = lambda v: v if isinstance(v, jc.DistributedValues) else jax.device_put(0.0, here[-1])
    options = jc.CommunicationOptions(timeout_seconds=60)
    return {
        "reduce": lambda op, v: strategy.reduce(op, v, axis=None, options=options),
        "reduce_to own": lambda op, v: extended.reduce_to(op, v, own(v)),
        "reduce_to a task": lambda op, v: extended.reduce_to(op, v, "/job:worker/task:0/device:CPU:0"),
        "reduce_to all": lambda op, v: extended.reduce_to(op, v, strategy.run(lambda: 1.0)),
        "batch_reduce_to": lambda op, v: extended.batch_reduce_to(op, [(v, own(v)), (v, here[0])])[0],
        "collective": lambda op, v: fixed.reduce(op, v, own(v)),
        "collective to one": lambda op, v: fixed.batch_reduce(op, [(v, here[0]), (v, own(v))])[0],
        "workers": lambda op, v: tiered.reduce(op, v, own(v)),
        "no group": lambda op, v: jc.NcclAllReduce().reduce(op, v, "/cpu:0"),
        "run": lambda op, v: strategy.run(lambda x: context().all_reduce(op, x), (v,)),
        "along an axis": lambda op, v: strategy.reduce(op, v, axis=0),
        "gather": lambda op, v: strategy.gather(v, axis=0),
    }  # fmt: skip


def expected(entry, name, op, parts):
    """What NumPy makes of all parts; text: the error that says why there is nothing."""
    plain, sparse = name in {"array", "array on a device", "number", "rows"}, "rows" in name
    if name == "elsewhere":
        return "got a value over|is a PerReplica over"
    if entry == "gather":
        if sparse:
            return "NotImplementedError: `gather` expects dense arrays"
        return "got the plain value|is a scalar" if plain else np.concatenate(parts)
    if entry == "along an axis" and (sparse or name == "number"):
        return "expects dense arrays|is a scalar|whose SUM over"
    # An argument that all replicas share must be the same on all.
    if entry == "run" and (plain or name == "mirrored, here"):
        return "ProgramMismatchError" if name == "rows" else "ReplicaDivergenceError: .* args"
    axis = (0, 1) if entry == "along an axis" else 0
    return getattr(np, op)(parts, axis)


def copy_here(result):
    """What this worker has of a result; all of its copies must be equal and on its devices."""
    copies, here = [result], jax.local_devices()
    if isinstance(result, jc.DistributedValues):
        copies = [result[k] for k, d in enumerate(result.devices) if d in here]
    arrays = [np.asarray(x.to_dense() if isinstance(x, jc.IndexedSlices) else x) for x in copies]
    assert arrays, "nothing is here"
    assert all(np.array_equal(x, arrays[0]) for x in arrays)
    assert all(leaf.devices() <= {*here} for leaf in jax.tree.leaves(copies))
    return arrays[0]


def outcome(call):
    try:
        return copy_here(call())
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"


def test_results_are_of_all_replicas(workers):
    """Each entry meets each value and each op, but not each value with both."""

    def run(strategy, rank):
        wrong = []
        for i, (name, (value, parts)) in enumerate(kinds(strategy, rank).items()):
            for k, (entry, call) in enumerate(entries(strategy).items()):
                if entry == "no group" and not name.endswith("all"):
                    continue  # it is for the value's own devices
                op = ("sum", "mean")[(i + k) % 2]
                want = expected(entry, name, op, parts)
                got = outcome(lambda: call(op, value))  # noqa: B023
                if isinstance(want, str):
                    held = isinstance(got, str) and re.search(want, got)
                else:
                    held = not isinstance(got, str) and np.allclose(got, want, rtol=1e-6)
                if not held:
                    wrong.append(f"{entry} | {name} | {op}: {got}; expected {want}")
        assert not wrong, "\n".join(wrong)

    workers(run)


def of_replicas(strategy, fun):
    return strategy.experimental_distribute_values_from_function(
        lambda context: fun(context.replica_id_in_sync_group)
    )


@pytest.mark.tensorflow("H23", "H25", "L37", "L58", "L59", "L61")
def test_workers_get_their_parts(workers):
    def run(strategy, rank):
        extended, here = strategy.extended, jax.local_devices()
        own = list(range(rank * DEVICES, (rank + 1) * DEVICES))
        replicas = lambda fun: of_replicas(strategy, fun)
        context, total = jc.get_replica_context, N * (N - 1) / 2
        mine = lambda x: [np.asarray(x).tolist() for x in strategy.experimental_local_results(x)]
        ids = strategy.run(lambda: context().replica_id_in_sync_group)
        assert mine(ids) == own, "replicas are counted worker by worker"
        rows = np.concatenate([np.arange(1.0 + k) for k in range(WORKERS)])
        host = strategy.reduce("mean", np.arange(1.0 + rank), axis=0)
        assert np.asarray(host) == pytest.approx(rows.mean())
        assert jc.MirroredStrategy().num_replicas_in_sync == DEVICES

        elsewhere = next(d for d in strategy.devices if d.process_index != rank)
        ones, nccl = jc.PerReplica([np.ones(2, "f")] * DEVICES, devices=here), jc.NcclAllReduce()
        keys = jc.PerReplica([jax.random.split(jax.random.key(0), 1)] * DEVICES, devices=here)
        wrong = replicas(lambda i: np.ones((2, 2 + i // DEVICES), "f"))
        for call, words in (
            (lambda: strategy.gather(wrong, axis=0), f"shape (2, 3) on replica {DEVICES}, (2, 2) on replica 0"),
            (lambda: jc.MirroredStrategy([*strategy.devices]), "Use `MultiWorkerMirroredStrategy` instead"),
            (lambda: jc.MirroredStrategy([elsewhere]), f"belongs to process {1 - rank}, and this is another, whose devices are cpu:"),
            (lambda: nccl.broadcast(1.0, elsewhere), f"belongs to process {1 - rank}, and this is another, whose devices are cpu:"),
            (lambda: nccl.reduce("sum", ones, ids), "between the devices of one process; cpu:"),
            (lambda: strategy.gather(keys, axis=0), "a part is a typed PRNG key. Pass its"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=re.escape(words)):
                call()

        shared = extended.broadcast_to({"w": np.full(2, rank, "f"), "on": rank == 0}, ids)
        held = [jax.tree.map(np.asarray, x) for x in strategy.experimental_local_results(shared)]
        assert [(x["w"].tolist(), bool(x["on"])) for x in held] == [([0, 0], True)] * DEVICES
        summed = extended.reduce_to("sum", replicas(float), ids)
        add = lambda x, y: x + y
        assert mine(extended.update(replicas(float), add, (summed,))) == [i + total for i in own]
        of_mine = extended.update(ones, add, (summed,))
        assert [np.asarray(x).tolist() for x in of_mine] == [[1 + total] * 2] * DEVICES
        small = replicas(lambda i: jnp.full(1 + rank, 1 + rank, jnp.float8_e4m3b11fnuz))
        got = strategy.gather(small, axis=0).astype(jnp.float32).tolist()
        assert got == [1.0 + k for k in range(WORKERS) for _ in range(DEVICES * (k + 1))]

    workers(run)


def test_strategy_trains_and_compares(workers):
    """Each worker feeds its own rows, and starts from the first worker's parameters."""

    def run(strategy, rank):
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((24, 5)).astype("f"), rng.standard_normal(24).astype("f")
        share = slice(rank * 24 // WORKERS, (rank + 1) * 24 // WORKERS)
        loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)

        def step(w, batch):
            value, grad = jc.value_and_grad(loss, "replica")(w, *batch)
            return w - 0.1 * grad, value

        ids, want = strategy.run(lambda: 1), np.zeros(5, "f")
        w = strategy.extended.broadcast_to(np.full(5, float(rank), "f"), ids)
        for batch in strategy.experimental_distribute_dataset([(x[share], y[share])] * 3):
            w, value = strategy.run(step, (w, batch))
            exact, grad = jax.value_and_grad(loss)(want, x, y)
            np.testing.assert_allclose(
                strategy.experimental_local_results(value)[0], exact, rtol=1e-5
            )
            want = want - np.float32(0.1) * np.asarray(grad)
        copies = [np.asarray(copy) for copy in strategy.experimental_local_results(w)]
        np.testing.assert_allclose(copies[0], want, rtol=1e-5)

        whole = jax.NamedSharding(jax.make_mesh((N,), ("data",)), jax.P())
        each = [jax.device_put(np.full(3, rank == 1, "f"), d) for d in jax.local_devices()]
        lying = jax.make_array_from_single_device_arrays((3,), whole, each)
        rows = of_replicas(strategy, float)
        held = {"w": w, "lying": lying, "plain": np.float32(rank), "same": 7, "rows": rows}
        assert sorted(jc.check_replicas(held).divergent()) == [
            "['lying']",
            "['plain']",
            "['rows'].tree",
        ]
        who = jc.check_replicas(lying).divergent()[""]
        assert {name[-10:] for name in who[-1]} == {" process 1"}
        return {copy.tobytes() for copy in copies}, who

    (first, who), (second, others) = workers(run)
    assert first == second
    assert len(first) == 1, "all replicas have the same parameters"
    assert who == others


@pytest.mark.tensorflow("L62")
def test_calls_end_at_their_deadline(launch):
    """Calls of one worker that another makes only after all of them were given up."""

    def run():
        strategy, context, keys = jc.MultiWorkerMirroredStrategy(), jc.get_replica_context, store()
        in_time = jc.CommunicationOptions(timeout_seconds=0.5)
        rank, here = jax.process_index(), jax.local_devices()
        mine = jc.PerReplica([np.full(2, rank + 1.0, "f")] * DEVICES, devices=here)
        # Of values over all replicas: those of this worker's share begin with an exchange of sizes.
        whole = jc.PerReplica.from_function(dense, devices=strategy.devices)
        for name, call in {
            "reduce_to": lambda o: strategy.extended.reduce_to("sum", mine, here[0], options=o),
            "reduce": lambda o: strategy.reduce("sum", mine, axis=None, experimental_hints=o),
            "along an axis": lambda o: strategy.reduce("sum", whole, axis=0, options=o),
            "gather": lambda o: strategy.gather(whole, axis=0, options=o),
            "run": lambda o: strategy.run(lambda x: context().all_reduce("sum", x, o), (mine,)),
        }.items():
            if rank == 0:
                with pytest.raises(
                    jc.errors.DeadlineExceededError, match="not finish within 0.5 s"
                ):
                    call(in_time)
                keys.set(f"given up/{name}", "")
            else:
                keys.get(f"given up/{name}", 60)
                call(None)  # what the other has given up ends by this
            # No deadline: the given-up call of the other has to end first, in its own time.
            total = strategy.reduce("mean", mine, axis=None)
            assert np.asarray(total).tolist() == [1.5, 1.5], "the process stays usable"

    launch(run, WORKERS, devices_per_process=DEVICES)


def uneven(i, seed):
    """The rows of replica i, sometimes none."""
    rng = np.random.default_rng([seed, i])
    return rng.integers(-8, 8, (rng.integers(0 if seed else 1, 4), 2)).astype("f")


def forms(strategy, rank, seed):
    """Uneven rows in every form in which a worker may pass its own, and those of each replica."""
    numbers, parts = (
        range(DEVICES * rank, DEVICES * (rank + 1)),
        [uneven(i, seed) for i in range(N)],
    )
    yield of_replicas(strategy, lambda i: uneven(i, seed)), parts
    # As a dataset splits them: the first replicas of a worker have a row more.
    batch = {"x": np.concatenate([parts[i] for i in numbers])}
    yield next(iter(strategy.experimental_distribute_dataset([batch])))["x"], parts
    shared = jc.PerReplica([uneven(rank, seed)] * DEVICES, devices=jax.local_devices())
    yield shared, [uneven(i // DEVICES, seed) for i in range(N)]


def combined(strategy, rank, op, value, rows):
    """What this worker gets by every reduction and gather, and what it should where that is known."""
    numpy = getattr(np, op)
    for axis in (None, 0, 1, (0, 1), 2):
        fits = axis in (0, (0, 1)) and len(rows) > 0
        got = outcome(lambda: strategy.reduce(op, value, axis))  # noqa: B023
        yield got, numpy(rows, axis) if fits else None
    for axis in (0, 1, -2, 2):
        fits = axis in (0, -2) and len(rows) > 0
        yield outcome(lambda: strategy.gather(value, axis)), rows if fits else None  # noqa: B023
    yield outcome(lambda: strategy.run(lambda x: x.sum(), (value,))[DEVICES * rank]), None


def test_uneven_rows_reduce_like_numpy(workers):
    """Through functions, datasets and shares; every reduction and every gather, alike on all."""

    def run(strategy, rank):
        found = []
        for seed, op in ((0, "sum"), (1, "mean")):
            for value, parts in forms(strategy, rank, seed):
                is_uneven = len({len(part) for part in parts}) > 1
                for got, want in combined(strategy, rank, op, value, np.concatenate(parts)):
                    if want is None:
                        assert isinstance(got, str) or not is_uneven, got
                    else:
                        np.testing.assert_allclose(got, want, rtol=1e-5)
                    found.append(got if isinstance(got, str) else got.tolist())
                found.pop()  # its sum on each replica is its own
        other, pick = of_replicas(strategy, lambda i: 2.0), lambda *choices: choices[rank]
        one, whole = (
            of_replicas(strategy, lambda i: 1.0),
            of_replicas(strategy, lambda i: np.ones((2, 2))),
        )
        trees = pick(OrderedDict(a=one, b=other), OrderedDict(b=other, a=one))
        for call in (
            lambda: strategy.reduce("sum", trees, axis=None),
            lambda: strategy.reduce("sum", whole, axis=rank),
            lambda: strategy.gather(whole, axis=rank),
        ):
            with pytest.raises(jc.errors.ProgramMismatchError):
                call()
        ones = jc.PerReplica.from_function(lambda i: np.ones(1 + rank), devices=strategy.devices)
        assert np.asarray(strategy.gather(ones, axis=0)).tolist() == [1.0] * DEVICES * 3
        with pytest.raises(ValueError, match="`Mirrored` expects equal copies"):
            jc.distribute.Mirrored.from_function(lambda i: float(rank), devices=strategy.devices)
        assert float(strategy.reduce("sum", 1.0, axis=None)) == WORKERS
        return found

    first, second = workers(run)
    assert first == second
