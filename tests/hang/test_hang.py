"""Hang reports: who is named, when nobody is, and that a watched program is not changed."""

import contextvars
import functools
import io
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hang import campaign

from jaxcoll._job import stacks
from jaxcoll._job.frames import read_call
from jaxcoll._job.stacks import Stacks, Thread, classify, name_program
from jaxcoll._report.hang import monitor, process
from jaxcoll._report.hang.judge import Row, judge
from jaxcoll._report.hang.process import HangProcess
from jaxcoll._report.hang.report import show_report
from jaxcoll._report.profile import calls as counting
from jaxcoll._report.profile.shield import Shield

LIMIT = 10.0
STEP, PAIR = {"step": 4, "f": 4}, {"pair": 2}


def row(rank, kind="program", seconds=LIMIT, **more):
    program = "step" if kind == "program" else None
    defaults = {"program": program, "programs": STEP, "devices": 4}
    return Row(rank, kind, seconds, **{**defaults, **more})


def job(*others, waiting=2, **of_waiting):
    rows = [row(rank, **of_waiting) for rank in range(waiting)]
    return {r.rank: r for r in [*rows, *others]}


def calls(*names):
    return {"order": list(names), "calls": {name: names.count(name) for name in names}}


JUDGED = [
    (job(row(2, "python", 11.0)), ("missing", [2])),
    (job(row(2, "silent", 0.0)), ("missing", [2])),
    (job(row(2, "callback", 11.0), row(3)), ("missing", [2])),
    (job(row(2, "shutdown", 9.0, ended="")), ("missing", [2])),
    (job(row(2, "unknown", 0.0)), ("missing", [])),  # nobody can say whether it is there
    (job(row(2, program="other")), ("order", [])),
    (job(row(2, program=None)), ("inside", [])),  # it may be the same
    (job(row(2, "barrier")), ("order", [])),
    (job(row(2, seconds=1.0), seconds=3 * LIMIT), ("missing", [2])),
    (job(row(2), row(3, cpu=0.9)), ("missing", [3])),  # it computes, the others do not
    ({0: row(0, "python", 99.0), 1: row(1, "shutdown"), 2: row(2, "shutdown")}, ("missing", [0])),
    (job(row(2, "python", **calls("step")), **calls("step", "step")), ("missing", [2])),
    (job(row(2, "python", **calls("step")), **calls("step")), ("inside", [2])),
    (job(row(2, **calls("f", "step")), **calls("step", "f")), ("order", [])),
    # A program of two devices is waited for by processes that compiled it only
    (job(row(2, "python"), program="pair", programs=PAIR), ("inside", [])),
    ({r: row(r, "python", 99.0) for r in range(3)}, None),
    ({r: row(r, "compile", 99.0) for r in range(3)}, None),
    ({r: row(r, cpu=0.9) for r in range(3)}, None),  # a program that computes for long
    (job(row(2, "unknown", 0.0), cpu=0.9), None),
    (job(row(2, seconds=1.0), cpu=0.2), None),  # a loop of calls, as seen before Python 3.12
    (job(row(2, "python"), cpu=0.2), None),
    ({0: row(0, cpu=0.9), 1: row(1, "shutdown")}, ("missing", [0])),
    ({r: row(r, seconds=1.0) for r in range(3)}, None),
    (job(row(2, seconds=1.0)), None),  # it came late
    (job(row(2, "compile")), None),  # what the others have compiled
    (job(row(2, "debugger", 99.0)), None),
    ({r: row(r, "shutdown", ended="") for r in range(3)}, None),
]


@pytest.fixture
def over():
    """Threads of a test wait for it."""
    over = threading.Event()
    yield over
    over.set()


def started(target, *args, name="user"):
    thread = threading.Thread(target=target, args=args, name=name)
    thread.start()
    time.sleep(0.1)
    return thread


def frame_of(function, looked):
    return next(f for t in looked for f in t.frames if f.f_code is function.__code__)


def said(rows, collective=""):
    return [*show_report(judge(rows, LIMIT), rows, collective)]


def test_rows_name_who_is_missing():
    for rows, expected in JUDGED:
        verdict = judge(rows, LIMIT)
        assert (verdict and (verdict.kind, verdict.missing)) == expected, rows


def test_report_is_worded():
    here = [["train.py", 7, "main", "step(w, x)", 10.0]]
    there = [["load.py", 3, "__next__", "self.queue.get()", 11.0]]
    of = {"pid": 5, "host": "h"}
    absent = row(2, "python", 11.0, where=there, **of, **calls("step"))
    assert said(job(absent, where=here, **calls("step", "step")), "Its collective.") == [
        "processes 0 and 1 of 3 have waited 10.0 s for process 2.",
        "  processes 0 and 1: in call 2 of `step`",
        "    train.py:7 in main: step(w, x)",
        "    Its collective.",
        "  process 2 has been in no program for 11.0 s, after 1 call of `step` (pid 5 on h):",
        "    load.py:3 in __next__: self.queue.get()  (11.0 s)",
    ]
    there = [["load.py", 3, "main", "step(w, x)", 0.0]]
    absent = row(2, "stopped", 0.0, where=there, silence=12.0, **of, **calls("step"))
    assert said(job(absent, **calls(*8 * ["step"]))) == [  # an old row counts no calls
        "processes 0 and 1 of 3 have waited 10.0 s for process 2.",
        "  processes 0 and 1: in `step`",
        "  process 2 is stopped, as by SIGSTOP (pid 5 on h; last seen 12.0 s ago):",
        "    load.py:3 in main: step(w, x)",
    ]
    ended = row(2, "ended", 6.0, ended="ValueError at a.py:1: loss is nan", **of)
    error = "has ended its program with ValueError at a.py:1: loss is nan"
    assert said(job(ended))[-1] == (
        f"  process 2 {error}, and waits at its end for 6.0 s (pid 5 on h)"
    )
    for cpu, state in ((0.9, "computes"), (0.0, "is in a program")):
        lines = said(job(row(2, seconds=1.0, cpu=cpu), seconds=3 * LIMIT))
        assert lines[-1] == f"  process 2 {state} for 1.0 s"
    rows = {r: row(r, kind, 10.0) for r, kind in enumerate(("silent", "unknown", "program"))}
    lines = said(rows)
    assert lines[0] == "process 2 of 3 has waited 10.0 s for process 0."
    assert lines[-1] == "  nothing can be known of process 1: the coordinator does not answer"
    del rows[0]
    assert said(rows)[0] == "process 2 of 2 has waited 10.0 s."


def test_barriers_are_told_apart(over):
    def wait_at_barrier(key, timeout_in_ms):
        over.wait(timeout_in_ms)

    def save(key):
        client.wait_at_barrier(  # as orbax calls it
            key, timeout_in_ms=60
        )

    client = SimpleNamespace(wait_at_barrier=wait_at_barrier)
    started(save, "saved")
    at = frame_of(save, Stacks().look(0.0, {}, wakes=0))
    assert classify(Thread(False, [at], [0.0, 0.0]), counting.JITTED) == ("barrier", "saved")
    waited = "processes 0 and 1 of 2 have waited 10.0 s"
    for names, first, second in (
        (("saved", "loaded"), ", in different barriers.", "process 0: in barrier `saved`"),
        (("saved", "saved"), " inside barrier `saved`, which all have called.", "processes 0 and 1: in barrier `saved`"),
        ((None, None), " for one another.", "processes 0 and 1: at a barrier of the coordination service"),
    ):  # fmt: skip
        rows = {r: row(r, "barrier", program=name) for r, name in enumerate(names)}
        assert said(rows)[:2] == [f"{waited}{first}", f"  {second}"]


def test_shared_names_compare_no_calls():
    programs = {"programs": {"step": 3, "mean": 3}, "devices": 3}
    one, two = calls("step", "mean", "mean", "step"), calls("step", "mean")
    rows = {
        0: row(0, **one, **programs, mixed=["mean"]),  # its own mean, too
        1: row(1, "program", **calls("step", "mean", "step"), **programs),
        2: row(2, "python", 11.0, **two, **programs),
    }
    verdict = judge(rows, LIMIT)
    assert (verdict.kind, verdict.missing, verdict.call, verdict.calls) == ("missing", [2], 2, {})
    rows[2].order, rows[2].calls = one["order"], one["calls"]
    for waiting in (0, 1):
        rows[waiting].program = "mean"
    assert judge(rows, LIMIT).kind == "missing", "nobody knows which mean it has called"


def test_program_has_one_name():
    assert {*map(name_program, ("jit__step", "jit(_step)", "pmap__step"))} == {"step"}


def test_reading_frames_runs_nothing(over):
    class Trap:
        @property
        def step(self):
            return over

        def __getattr__(self, name):
            raise AssertionError(name)

    def wait():
        trap.step.wait(0.5) or time.sleep(0)

    trap = Trap()
    started(wait)
    frame = frame_of(wait, Stacks().look(0.0, {}, wakes=0))
    assert read_call(frame) == ("trap.step.wait(0.5)", "wait", None)


@pytest.mark.parametrize(
    ("wakes", "most", "calls", "since"),
    [(5, 20, 7, 0.0), (100, 20, 7, 1.0), (5, 20, 8, 1.0), (5, 0, 7, 1.0), (0, 0, 7, 0.0)],
)
def test_wait_survives_signal_checks(monkeypatch, over, wakes, most, calls, since):
    looks, thread = iter([0, wakes]), started(over.wait)
    monkeypatch.setattr(
        stacks, "_count_wakes", lambda i: next(looks) if i == thread.native_id else 0
    )
    times = iter([0.0, 1.0])
    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: next(times)))
    looked = Stacks()
    looked.look(0.0, {thread.ident: (7, None)}, wakes=most)
    threads = looked.look(1.0, {thread.ident: (calls, None)}, wakes=most)
    waiting = [t for t in threads if any(f.f_locals.get("self") is over for f in t.frames)]
    assert [t.since[0] for t in waiting] == [since]


# The CPU seconds of looks that are 5 s apart, for how long it has stood where it is, its share.
@pytest.mark.parametrize(
    ("used", "seconds", "share"),
    [
        ([0.0, 4.0, 4.0], 5.0, 0.0),
        ([0.0, 4.0, 8.0], 0.0, 0.8),
        ([4.0], 0.0, 0.0),
        ([0.0, 8.0, 8.0, 8.0], 15.0, 0.0),
        ([0.0, 1.0, 2.0, 3.0], 15.0, 0.2),
    ],
    ids=["compiled before", "calls in a loop", "first look", "computed first", "still computes"],
)
def test_share_is_of_where_it_stands(monkeypatch, here, used, seconds, share):
    looks = iter(used)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(time, "process_time", lambda: next(looks))
    shares = [here._compute_share(5.0 * k, seconds) for k in range(len(used))]
    assert shares[-1] == share


@pytest.fixture
def here(monkeypatch):
    """This process as the watcher sees it, without counts of calls."""
    jax.devices()
    monkeypatch.setattr(process, "has_main_ended", lambda threads: False)  # pytest's may have
    calls = counting.Calls(Shield())
    return HangProcess(LIMIT, 0.5, calls, calls._shield)


def test_wait_is_in_newest_program_called(monkeypatch, here):
    here._calls._began = True
    monkeypatch.setattr(here, "_choose", lambda threads, now: (threads[0], "program", None))
    for programs, order, named in [
        ({}, ["f"], None),
        ({"f": 4, "g": 4}, ["f", "g", "h"], "g"),
        ({"f": 4}, [], "f"),
        (STEP, [], None),
    ]:
        here._calls.order.clear()
        here._calls.order.extend(order)
        here._compilations.modules = {f"jit_{name}": devices for name, devices in programs.items()}
        assert here._measure(0.0).program == named


def test_other_threads_compute_for_themselves(here, over):
    def work():
        while not over.is_set():
            pass

    started(work)
    here._measure(0.0)
    until = time.process_time() + 0.4
    while time.process_time() < until:
        time.sleep(0.01)
    assert here._measure(1.0).cpu < 0.2


def test_other_threads_have_names(here, over):
    started(lambda: over.wait(), name="trainer_0")
    with ThreadPoolExecutor(1, thread_name_prefix=stacks.OURS) as watcher:
        here._measure(0.0)
        where = watcher.submit(here._measure, LIMIT).result().where
    assert "<lambda> (thread trainer_0)" in [function for _, _, function, *_ in where]


def test_place_is_new_after_calls(over):
    def epoch():
        load()

    def load():
        over.wait()

    looked, since, thread = Stacks(), [], started(epoch)
    for now, calls in ((0.0, (7, None)), (1.0, (8, epoch.__code__)), (2.0, (9, None))):
        for t in looked.look(now, {thread.ident: calls}, wakes=0):
            times = dict(zip([f.f_code for f in t.frames], t.since[1:], strict=True))
            if load.__code__ in times:
                since += [times[threading.Thread.run.__code__], times[epoch.__code__], t.since[1]]
    assert since == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 2.0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are counted from Python 3.12 on")
@pytest.mark.parametrize("fails", [False, True])
def test_counting_never_raises(monkeypatch, fails):
    log, other = counting.Calls(Shield()), counting.Calls(Shield())
    monkeypatch.setattr(counting, "has_backend", lambda: False)
    if fails:
        monkeypatch.setattr(counting, "clean_name", lambda name: 1 / 0)
    log.start()
    try:
        other.start()
        tools = [tool for tool in range(6) if sys.monitoring.get_tool(tool) == "jaxcoll"]
        assert len(tools) == 1, "both share it"
        double = jax.jit(lambda x: 2 * x)
        compiled = double.lower(1.0).compile()
        values = [
            double(1.0), compiled(1.0), jax.grad(jnp.sin)(0.0), jax.vmap(jnp.cos)(jnp.zeros(1))[0],
            jax.checkpoint(jnp.exp)(0.0), jax.jvp(jnp.sin, (0.0,), (1.0,))[1],
        ]  # fmt: skip
    finally:
        log.stop()
        other.stop()
    assert list(map(float, values)) == [2, 2, 1, 1, 1, 1]
    assert log.are_all == other.are_all != fails
    assert fails or log.counts["lambda"] >= 2
    assert log.order == other.order
    assert sys.monitoring.get_tool(tools[0]) is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are counted from Python 3.12 on")
def test_executor_calls_are_counted(monkeypatch):
    def call(function, *args):
        return function(*args)

    monkeypatch.setattr(counting, "has_backend", lambda: False)
    log, step = counting.Calls(Shield()), jax.jit(lambda x: 2 * x)
    in_context = functools.partial(contextvars.copy_context().run, step)
    log.start()
    try:
        for function in (jnp.sin, step, jnp.cos, in_context, np.abs, functools.partial(step)):
            call(function, 1.0)
    finally:
        log.stop()
    assert log.counts["lambda"] == 3


def test_end_keeps_what_was_printed(monkeypatch, tmp_path, over):
    ends, stuck, path = [], io.StringIO(), tmp_path / "out"
    with path.open("w") as out:
        out.write("loss 0.1")
        stuck.flush = over.wait
        monkeypatch.setattr(monitor, "_FLUSH_SECONDS", 0.1)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", stuck)
        monkeypatch.setattr(os, "_exit", lambda status: ends.append((status, path.read_text())))
        watch = monitor.HangWatch(LIMIT, end=True)
        watch._exit()
        watch.close()
    assert ends == [(124, "loss 0.1")]


PROGRAM = """
import os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "3"
print(sys.argv[1:], __name__, __file__, file=sys.stderr)
import jax
print(jax.device_count())
{end}
"""


@pytest.mark.parametrize(
    "end", ["pass", "raise SystemExit(3)", "raise KeyError('x')", "sys.exit('no')"]
)
def test_watching_changes_nothing(tmp_path, end):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(end=end))
    watch = ["-m", "jaxcoll", "inspect", "--hang-seconds", "5"]
    plain, watched, measured = (
        subprocess.run([sys.executable, *flags, script, "a"], capture_output=True, text=True)
        for flags in ([], [*watch, "--run"], [*watch, "--measure", "3", "--run"])
    )
    line = "jaxcoll hang: nothing was watched, because the program joined no job of several processes.\n"
    said = plain.stderr + line * (end == "pass")
    assert watched.stdout == measured.stdout == plain.stdout == "3\n"
    assert watched.stderr == said
    assert measured.stderr.startswith(f"{said}\nNo program with collectives was compiled; ")
    assert watched.returncode == measured.returncode == plain.returncode


SLOW_IMPORTS = """
import atexit, sys, threading, time

class Slowly:
    def find_spec(name, *_):
        if name in ("jaxcoll._report.profile.calls", "jaxcoll._report.hang.process"):
            time.sleep(1.5)

sys.meta_path.insert(0, Slowly)
names = lambda: [thread.name for thread in threading.enumerate() if "jaxcoll" in thread.name]
atexit.register(lambda: print(*names()))  # runs last
"""


def test_watch_ends_before_python(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORTS)
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(end=""))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "jaxcoll", "inspect", "--hang-seconds", "5", "--run", script]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert (run.returncode, run.stdout) == (0, "3\n\n")


BAD_INPUT = {
    "launch --hang-seconds 0 x.py": "--hang-seconds must be a number above 0; got 0.0.",
    "launch --hang-seconds nan x.py": "--hang-seconds must be a number above 0; got nan.",
    "launch --hang-exit x.py": "--hang-exit needs --hang-seconds, as in --hang-seconds 60.",
    "inspect --hang-seconds 9 x.py:f": "--hang-seconds needs --run",
    "inspect --hang-seconds 9 --run absent.py": "absent.py: No such file or directory.",
    "inspect --hang-seconds 9 --run x.py": "the program did not import JAX.",
    "launch -n 1 --hang-seconds 9 x.py --limit 3": "[0] jaxcoll hang: nothing was watched",
}


def test_bad_input_takes_one_line(tmp_path):
    (tmp_path / "x.py").write_text("print('ran')")
    for command, line in BAD_INPUT.items():
        words = ["jaxcoll", *command.split()]
        if "did not import" in line:  # a fork has
            new = [sys.executable, "-m", *words]
            done = subprocess.run(new, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        else:
            done = forks.with_commands().run(forks.COMMAND, *words, cwd=tmp_path)
        assert line in done.stderr, command
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("kind", "style", "processes"),
    [
        ("loader", "pmap", 2),
        ("GIL held", "jit", 2),
        ("stopped 0", "flax", 3),
        ("poll", "shard_map", 2),  # the other waits in block_until_ready
        ("order", "jit", 2),
        ("slow once", "executor", 2),
        ("all load", "jit", 2),
        ("one debugs", "shard_map", 2),
    ],
)
def test_real_hang_is_named(launched, kind, style, processes):
    """By forks, which have imported JAX; the campaign starts Pythons that are new."""
    done = launched(*campaign.words_of_launch(kind, style, processes))
    output = done.stdout + done.stderr
    assert campaign.judge_output(kind, style, processes, output) == "right", output


def test_uncaught_error_is_named():
    """By new Pythons: what is left to do at the end of a fork is in another order."""
    result, output = campaign.run("raised", "shard_map", 2)
    assert result == "right", output
