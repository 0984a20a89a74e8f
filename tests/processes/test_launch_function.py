"""`jc.launch`: a function in several processes, its results in order, its errors with their rank."""

import atexit
import itertools
import linecache
import os
import signal
import sys
import time
from functools import partial

import jax
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll._compat.settings import numerics
from jaxcoll._train.batches import order
from jaxcoll.cli.main import main

pytestmark = pytest.mark.processes


def test_results_keep_order_and_numerics(launch, capfd):
    class Rank(int):
        """A class that no module defines, like one of a notebook."""

    def run():
        print("from", jax.process_index())
        print("aside", file=sys.stderr)
        share = np.arange(8.0) + 8 * jax.process_index()
        total = jc.data_parallel(lambda x: jc.all_reduce("sum", x.sum(), "data"))(share)
        assert jax.device_count() == 4
        return Rank(jax.process_index()), total, {k: str(value) for k, value in numerics().items()}

    before = jax.config.jax_softmax_custom_jvp
    with jax.enable_x64(True):
        jax.config.update("jax_softmax_custom_jvp", not before)
        try:
            settings = {name: str(value) for name, value in numerics().items()}
            results = launch(run, 2, devices_per_process=2)
        finally:
            jax.config.update("jax_softmax_custom_jvp", before)
    for number, (rank, total, found) in enumerate(results):
        assert (type(rank), rank, found) == (Rank, number, settings)
        assert (type(total), total.dtype, float(total)) == (np.ndarray, np.float64, 120.0)
    out, err = capfd.readouterr()
    assert {"[0] from 0", "[1] from 1"} <= set(out.splitlines())
    assert {"[0] aside", "[1] aside"} <= set(err.splitlines())


ROWS = {"id": np.arange(50), "x": np.arange(100.0).reshape(50, 2).astype("f")}


def read(state):
    """The rows and sums of two batches from a state on, and the state after them."""
    batches = jc.batches(ROWS, 12, seed=5, uneven="pad")
    batches.state = state
    weighted = lambda b: jc.all_reduce("sum", (b[0]["x"] * b[1][:, None]).sum(0), "data")
    total, counted = jc.data_parallel(weighted), []
    for batch, weights in itertools.islice(batches, 2):
        mine = {s.index[0].start: np.asarray(s.data) for s in batch["id"].addressable_shards}
        counted.append((mine, np.asarray(total((batch, weights)))))
    return counted, batches.state


def refusals(*calls):
    """The results of calls, or the text with which one process's are refused."""
    for call in calls:
        try:
            yield call()
        except jc.errors.ProgramMismatchError as error:
            yield str(error)


def test_batches_agree_between_processes(launch):
    def run():
        rank, eight = jax.process_index(), np.arange(8.0, dtype="f")
        # Each process has devices for all rows: the axis that crosses processes holds copies.
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("model", "data"))
        (batch,) = jc.batches(ROWS, 50, mesh=mesh)
        halves = [np.asarray(s.data).tolist() for s in batch["id"].addressable_shards]
        assert halves == [ROWS["id"][:25].tolist(), ROWS["id"][25:].tolist()]
        local = jax.sharding.Mesh(jax.local_devices(), ("data",))  # of this process alone
        plain = refusals(*(
            lambda count=count, size=size, how=how: len([*jc.batches(np.zeros(count), size, **how)])
            for count, size, how in (
                (8, 4, {"seed": 3}), (8, 4, {"seed": rank, "mesh": local}), (8, 8, {}),
                (8, 4, {"seed": 3 + rank}), (8 + rank, 4, {}), (8, 4 + 4 * rank, {}), (8, 4, {"seed": rank or None}),
            )
        ))  # fmt: skip
        step = jc.data_parallel(lambda s, x: (s + jc.psum(x.sum()), jc.pmean(x.mean())))
        elastic = refusals(*(
            lambda batches=batches: float(jc.Elastic(step, np.float32(0)).run(batches, 2))
            for batches in (
                jc.batches(eight, 4, seed=rank), jc.batches(eight[: 8 - 4 * rank], 4), [eight + rank],
                jc.batches(eight, 4, seed=1), [eight[:4], eight[4:]], lambda step, worker, workers: eight[4 * worker :][:4],
            )
        ))  # fmt: skip
        return *read({"epoch": 0, "row": 0, "rows": 50, "seed": 5}), [*plain], [*elastic]

    results = launch(run, 2, devices_per_process=2)
    counts, states, plains, elastics = zip(*results, strict=True)
    numbers = order(50, 5, 0)
    for step in range(2):
        held = counts[0][step][0] | counts[1][step][0]
        want = numbers[12 * step : 12 * step + 12]
        assert np.concatenate([held[start] for start in sorted(held)]).tolist() == want.tolist()
        for counted in counts:
            np.testing.assert_allclose(counted[step][1], ROWS["x"][want].sum(0))
    assert states == ({"epoch": 0, "row": 24, "rows": 50, "seed": 5},) * 2
    # One process with eight devices goes on with the rows that two have left.
    ((left, _), *_), _ = read(states[0])
    assert (
        np.concatenate([x for _, x in sorted(left.items())])[:12].tolist()
        == numbers[24:36].tolist()
    )
    for at, outcomes in enumerate(zip(*plains, strict=True)):
        refused = [text for text in outcomes if isinstance(text, str)]
        assert len(refused) == (at > 2), at
        assert all("but another one" in text for text in refused)
    for elastic in elastics:
        assert all("pass different batches" in text for text in elastic[:3])
        assert elastic[3:] == [28, 28, 56]


def wrong():
    if jax.process_index() == 1:
        raise KeyError("no such row")
    time.sleep(600)


def killed():
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def of_a_cell():
    """A function as a notebook's cell makes it, whose lines the caller alone knows."""
    lines = ["def bad():", "    if jax.process_index() == 1:", "        raise ValueError(row)"]
    linecache.cache["<cell 3>"] = 1, None, [f"{line}\n" for line in lines], "<cell 3>"
    made = {"__name__": "__main__", "jax": jax, "row": "no such row"}
    exec(compile("\n".join(lines), "<cell 3>", "exec"), made)
    return made["bad"]


class OfAnother:
    """What a process returns, and no other can read."""

    def __reduce__(self):
        return int, ("no number",)


def ends(how):
    """Rank 1 ends in some way; the others return."""
    if os.environ["JAXCOLL_RANK"] != "1":
        return os.environ["JAXCOLL_RANK"]
    if how == "after its result":
        atexit.register(os._exit, 3)
        return "1"
    return os._exit(0) if how == "without a result" else OfAnother()


@pytest.mark.parametrize(
    ("fn", "settings", "rank", "message"),
    [
        (wrong, {}, 1, r"rank 1 of 2 raised KeyError: 'no such row'\n\nTraceback of rank 1 .*in wrong\n    raise KeyError\(\"no such row\"\)"),
        (of_a_cell(), {}, 1, r'rank 1 of 2 raised ValueError: no such row\n.*File "<cell 3>", line 3, in bad\n    raise ValueError\(row\)'),
        (killed, {}, 1, "rank 1 of 2 was killed by SIGKILL"),
        (partial(time.sleep, 600), {"timeout_seconds": 1.0}, (0, 1), "ranks 0, 1 of 2 did not end within 1 s"),
        (lambda: jc.data_parallel(lambda x: x, varying_outputs="concatenate")(np.arange(4.0)), {}, None,
         "the function returned a sharded array, float32.8.. Return"),
        (partial(ends, "without a result"), {"processes": 3}, 1, "rank 1 of 3 ended with status 0 before the function returned"),
        (partial(ends, "after its result"), {}, 1, "rank 1 of 2 ended with status 3"),
        (partial(ends, "with what cannot be read"), {}, 1, "the return value of rank 1 of 2 cannot be unpickled here: ValueError: invalid literal"),
    ],
    ids=lambda x: x.args[0] if isinstance(x, partial) else "",
)  # fmt: skip
def test_first_failing_rank_is_named(launch, fn, settings, rank, message):
    began = time.monotonic()
    with pytest.raises(jc.errors.LaunchError, match=f"(?s){message}") as caught:
        launch(fn, **{"processes": 2, **settings})
    assert caught.value.ranks in (rank, (rank,)) or (rank is None and len(caught.value.ranks) == 1)
    assert time.monotonic() < began + 120


def test_interrupt_ends_all(launch, tmp_path):
    files = [tmp_path / str(rank) for rank in range(2)]

    def run():
        files[jax.process_index()].write_text(str(os.getpid()))
        time.sleep(600)

    def interrupt(*_):
        if all(file.exists() and file.read_text() for file in files):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(run, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_local_functions_need_cloudpickle(forked, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert sorted(jc.launch(partial(divmod, 7, 2), 1, timeout_seconds=120)) == [(3, 1)]
    made = lambda: 1
    made.__module__ = "__main__"
    for fn in (lambda: 1, partial(map, made)):
        with pytest.raises(ImportError, match="`pip install 'jaxcoll.notebook.'`, or move it"):
            jc.launch(fn)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 0}, "`processes` to be an integer above 0; got 0"),
        ({"devices_per_process": True}, "`devices_per_process` to be an integer above 0; got True"),
        ({"platform": "tpu"}, "`platform` to be 'cpu' or 'gpu'; got 'tpu'"),
        ({"timeout_seconds": 0}, "`timeout_seconds` to be a finite number of seconds above 0; got 0"),
        ({"fn": 3}, "`launch` expects a function; got int"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        jc.launch(**{"fn": os.getpid, **settings})


def test_windows_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("platform.system", lambda: "Windows")
    message = "several processes need Linux or macOS: on Windows, JAX has no"
    with pytest.raises(OSError, match=message):
        jc.launch(os.getpid)
    with pytest.raises(OSError, match=message):
        jc.initialize("127.0.0.1:1", 2, 0)
    jc.initialize()
    assert main(["launch", "-m", "jaxcoll"]) == 2
    assert message in capsys.readouterr().err
