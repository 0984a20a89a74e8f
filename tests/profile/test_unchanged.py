"""A watched program is never changed: its output, its exit status, its numbers, its garbage."""

import contextlib
import functools
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll._report.profile import calls, window
from jaxcoll._report.profile import shield as module
from jaxcoll._report.profile.profile import BUSY
from jaxcoll._report.profile.shield import Shield

HEAD = """
import functools, gc, sys, warnings, weakref
import jax, jax.numpy as jnp, numpy as np
warnings.simplefilter("error")
x = jnp.arange(1.0, 4.0)
f = lambda w: jnp.sum(jnp.tanh(w) ** 2)
"""
PROGRAMS = {
    "grad": "print(jax.grad(f)(x))",
    "value_and_grad": "print(jax.value_and_grad(lambda w: jnp.mean((jnp.outer(x, x) @ w) ** 2))(x))",
    "vmap": "print(jax.vmap(lambda a: jnp.where(a > 0, a, 2.0).sum())(jnp.outer(x, x)))",
    "jvp": "print(jax.jvp(jnp.sum, (x,), (x,)), jax.jvp(f, (x,), (x,)))",
    "vjp": "y, back = jax.vjp(f, x); print(y, back(y))",
    "jacfwd": "print(jax.jacfwd(jnp.sin)(x), jax.jacrev(jnp.cos)(x))",
    "hessian": "print(jax.hessian(f)(x))",
    "checkpoint": "print(jax.checkpoint(f)(x), jax.grad(jax.checkpoint(f))(x))",
    "linearize": "y, forward = jax.linearize(f, x); print(y, forward(x))",
    "eval_shape": "print(jax.eval_shape(f, x), jax.make_jaxpr(f)(x))",
    "scan": "print(jax.lax.scan(lambda c, a: (c + a, jnp.sin(c)), 0.0, x))",
    "while": "print(jax.lax.while_loop(lambda c: c < 9, lambda c: jnp.where(c > 2, c * 2, c + 1), 1))",
    "cond": "print(jax.lax.cond(x[0] > 0, jnp.sum, jnp.prod, x))",
    "custom_vjp": """
        @jax.custom_vjp
        def g(w): return jnp.sin(w)
        g.defvjp(lambda w: (g(w), jnp.cos(w)), lambda c, t: (c * t,))
        print(jax.grad(lambda w: g(w).sum())(x), jax.vmap(jax.grad(g))(x))""",
    "custom_jvp": """
        @jax.custom_jvp
        def g(w): return jnp.sin(w)
        g.defjvps(lambda t, out, w: t * jnp.cos(w))
        print(jax.jvp(g, (x,), (x,)), jax.hessian(lambda w: g(w).sum())(x))""",
    "callbacks": """
        shape = jax.ShapeDtypeStruct((3,), "float32")
        print(jax.jit(lambda w: jax.pure_callback(np.sin, shape, w, vmap_method="sequential"))(x))
        jax.debug.print("{}", x)""",
    "optimizer": """
        import optax
        opt = optax.adam(0.1)
        w, state = x, opt.init(x)
        for _ in range(3):
            updates, state = opt.update(jax.grad(f)(w), state)
            w = optax.apply_updates(w, updates)
        print(w)""",
    "short-lived functions": """
        gc.collect()
        before = len(jax.live_arrays())
        for k in range(50):
            x = jax.jit(lambda w, k=k: w + k)(x)
        print(x, len(jax.live_arrays()) - before)""",
    "garbage": """
        step = jax.jit(f)
        step(x)
        gone = [weakref.ref(step), weakref.ref(y := jnp.sin(x))]
        del step, y
        gc.collect()
        print([ref() for ref in gone], gc.garbage)""",
    "objects that answer": """
        class Proxy:
            @property
            def __class__(self): print("asked"); raise RuntimeError
            def __call__(self): return 3
            def __getattr__(self, name): print("asked for", name); raise RuntimeError
        print(functools.partial(Proxy())(), Proxy()())""",
    "recursion": """
        def deep(n): return deep(n - 1) if n else len("abc")
        print(deep(sys.getrecursionlimit() - 60))
        try: deep(10**6)
        except RecursionError as error: print(type(error))""",
    "signals": """
        import signal, time
        class Timeout(Exception): pass
        def alarm(*_): raise Timeout
        signal.signal(signal.SIGALRM, alarm)
        g = jax.jit(f); g(x)  # compiled: an exception in the midst of JAX's Python may leave it locked
        caught = 0
        for k in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003)
                for n in range(10**6): g(x)
            except Timeout: caught += 1
        print(caught)""",
    "forks": """
        import os
        warnings.simplefilter("ignore")
        child = os.fork()
        if not child:
            print(jax.grad(f)(np.ones(3, "f")) if 0 else "child", flush=True)
            os._exit(5)
        print(os.waitpid(child, 0)[1])""",
    "listeners removed": "jax.monitoring.clear_event_listeners(); print(jax.grad(f)(x))",
    "an error": "jax.grad(lambda w: w)(x)",
    "an error's last words": """
        import atexit
        atexit.register(lambda: print(repr(sys.last_value)))
        def hook(*_): print("my hook"); raise KeyError
        sys.excepthook = hook
        raise ValueError(3)""",
    "exit": "sys.exit(7)",
    "no JAX": "print(3)",
    "settings": """
        print(jax.config.jax_enable_x64, jnp.ones(3).dtype, jax.device_count(), __file__, sys.argv)
        print(sorted(set(sys.modules) & {"jax", "numpy", "flax", "optax", "matplotlib"}))""",
}  # fmt: skip
BEFORE = "import os\nos.environ.update(JAX_ENABLE_X64='1', JAX_NUM_CPU_DEVICES='3')\n"


def source(case):
    head = {"settings": BEFORE + HEAD, "no JAX": ""}.get(case, HEAD)
    return head + inspect.cleandoc("\n" + PROGRAMS[case])


def run(folder, *words, alone=True):
    """Return the status, the output and what else is said; `alone` in a Python that is new."""
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jc.__file__).parents[1])}
    if alone:
        variables = {**os.environ, **variables}
        variables.pop("JAX_NUM_CPU_DEVICES", None)
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
    else:
        code = forks.COMMAND if words[0] == "-m" else forks.SCRIPT
        done = forks.with_commands().run(code, *words[words[0] == "-m" :], cwd=folder, **variables)
    return done.returncode, re.sub("0x[0-9a-f]+", "", done.stdout), done.stderr.splitlines()


ALONE = {"settings", "an error", "an error's last words", "exit", "no JAX"}


@pytest.mark.parametrize("case", PROGRAMS)
def test_run_changes_no_program(case, tmp_path):
    (tmp_path / "train.py").write_text(source(case))
    plain = run(tmp_path, "train.py", "1", alone=case in ALONE)
    under = run(tmp_path, "-m", "jaxcoll", "inspect", "--run", "train.py", "1", alone=case in ALONE)
    assert plain[:2] == under[:2], under[2]
    assert under[2][: len(plain[2])] == plain[2]
    if case not in ALONE:
        assert plain[0] == 0, plain[2]
    if case != "listeners removed":
        assert "failed" not in " ".join(under[2]), "none of our hooks fails"


def summed(fun):
    """Return a program of eight devices."""
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))


def body():
    """Something of everything that a hook of ours sees, and what it computes."""
    step = summed(lambda x: jax.lax.psum(x.sum(), "data"))
    x = np.arange(8.0, dtype="f")
    found = [jax.grad(lambda w: jnp.tanh(w).sum())(x)]
    found += [jax.jit(lambda w, k=k: w + float(k))(x) for k in range(3)]
    found += [step(x) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder, jax.profiler.trace(folder):
        found.append(step(x))
    return jax.tree.map(np.asarray, found)


HOOKS = {
    "Watch._start", "Watch._stop", "Watch._programs", "Compilations._note_compilation",
    "Compilations._note_event", "Window._record", "Window._give_way", "Window.close", "Thread.join", "read_profile",
    "unregister_event_duration_listener", "unregister_event_listener", "Calls.start", "Calls.stop",
    *(
        ("_count_everywhere", "Calls._add.<locals>.drop")
        if sys.version_info >= (3, 12)
        else ()
    ),
}  # fmt: skip
"""Everything of ours that a program calls without knowing it."""


@pytest.fixture
def stopped():
    """Stop what a failing `stop` has not; otherwise the end of Python does."""
    yield
    calls._counting = ()
    for tool in (3, 4) if sys.version_info >= (3, 12) else ():
        if sys.monitoring.get_tool(tool) == "jaxcoll":
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("name", sorted(HOOKS))
def test_failing_hook_is_noted(name, monkeypatch):
    seen, shielded, made = set(), Shield.__call__, []

    def failing(self, hook, otherwise=None, **settings):
        seen.add(hook.__qualname__)

        @functools.wraps(hook)
        def raises(*args, **kwargs):
            raise KeyError("on purpose")

        made.append(
            shielded(self, raises if hook.__qualname__ == name else hook, otherwise, **settings)
        )
        return made[-1]

    expected = body()
    monkeypatch.setattr(Shield, "__call__", failing)
    try:
        with jc.inspecting(measure=2) as programs:
            found = body()
            raise ZeroDivisionError  # it, and no other, leaves the block
    except ZeroDivisionError:
        pass
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    if name in seen - {"Compilations._note_event"}:
        (note,) = [note for note in programs.notes if "on purpose" in note]
        assert note.startswith(f"jaxcoll's own {name} failed, which did not affect the program")
    assert seen <= HOOKS, "a new hook is in this list"
    for hook in made:  # those that should have been removed by what failed
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_duration_listener(hook)
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_listener(hook)
    for counting in calls._counting:
        counting.stop()


def test_programs_own_profile_wins(tmp_path, monkeypatch):
    ran = threading.Event()  # no profile is to have a part of the run
    monkeypatch.setattr(window.Window, "_is_quiet", lambda *_: ran.is_set())
    monkeypatch.setattr(window, "_PROBES", (60.0,))
    with jc.inspecting(measure=2) as programs:
        summed(lambda x: jax.lax.psum(x * 2.0, "data").sum())(np.ones(8, "f")).block_until_ready()
        ran.set()
        (watched,) = [t for t in threading.enumerate() if isinstance(t, window.Window)]
        while watched._session is None:
            time.sleep(0.01)
        with jax.profiler.trace(tmp_path / "with"):
            pass
        jax.profiler.start_trace(tmp_path / "call")
        jax.profiler.stop_trace()
    for name in ("with", "call"):
        assert [*(tmp_path / name).rglob("*.xplane.pb")]
    assert programs.notes == (BUSY,)


def test_given_functions_are_shielded():
    given = r"(?:register_callback|_listener|Thread|atexit\.register|weakref\.ref)\("
    for path in Path(module.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            assert not re.search(given, line) or re.search(
                r"shield|ended\)|called\)|None\)|_on_|_at_exit|class |def ", line
            ), line


def test_signal_handlers_error_passes():
    def alarm(*_):
        raise KeyError("the program's")

    before = signal.signal(signal.SIGUSR1, alarm)
    shield = Shield()
    try:
        with pytest.raises(KeyError, match="the program's"):
            shield(lambda: (os.kill(os.getpid(), signal.SIGUSR1), time.sleep(1)))()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert shield(lambda: {}["ours"], 3)() == 3
    assert len(shield.notes) == 1
    assert "KeyError: 'ours'" in shield.notes[0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are counted from 3.12 on")
def test_calls_are_known_or_none():
    x = np.arange(8.0, dtype="f")

    def total(x):
        return jax.lax.psum(x.sum(), "data")

    with jc.inspecting() as programs:
        for k in range(2000):  # so that their ids are used again
            step = summed(total)
            if k % 500 == 0:
                step(x)
    assert [report.calls for report in programs.reports] == [4]
    with jc.inspecting() as programs:
        twice = summed(lambda x: total(x) * 3.0)
        for rows in (x, x[:, None].repeat(2, 1), x):
            twice(rows)
    assert [report.calls for report in programs.reports] == [None, None], "which was called?"
    with jc.inspecting() as programs:
        by_c = summed(lambda x: total(x) * 5.0)
        [*map(by_c, [x, x])]
    assert [report.calls for report in programs.reports] == [None]
