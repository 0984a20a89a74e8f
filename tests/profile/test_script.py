"""`jaxcoll inspect --run`: unedited programs, their own status and output, and the table."""

import json
import math
import re
from pathlib import Path

import forks
import pytest

JIT = """
import sys
import jax, jax.numpy as jnp
mesh = jax.make_mesh((4,), ("data",))
rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], []))

@jax.jit
def step(w, x):
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient

w, x = jax.device_put(jnp.ones((16, 8)), whole), jax.device_put(jnp.ones((32, 16)), rows)
for _ in range(3):
    w = step(w, x)
print("ended", *sys.argv[1:])
"""

PMAP = """
import jax, jax.numpy as jnp
step = jax.pmap(lambda x: jax.lax.pmean(x, "i") + jax.lax.all_gather(x, "i").sum(0), "i")
for _ in range(3):
    x = step(jnp.ones((4, 100)))
"""


def inspect(folder, text, *flags, arguments=(), name="train.py", **variables):
    """Run a script under `jaxcoll inspect`, with its report as JSON if it was written."""
    (folder / name).write_text(text)
    report = folder / "report.json"
    done = forks.with_commands().run(
        forks.COMMAND, "jaxcoll", "inspect", "--json", report, *flags, "--run", name, *arguments,
        cwd=folder, timeout=120, JAX_NUM_CPU_DEVICES="4", JAX_PLATFORMS="cpu", **variables,
    )  # fmt: skip
    return done, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize(
    ("text", "kinds", "nbytes", "line"),
    [
        (JIT, {"all-reduce"}, 4 * 16 * 8, 9),
        (PMAP, {"all-reduce", "all-gather"}, 2 * 4 * 100, 3),
    ],
    ids=["jit", "pmap"],
)
def test_programs_are_inspected_unedited(text, kinds, nbytes, line, tmp_path):
    done, report = inspect(tmp_path, text)
    assert done.returncode == 0, done.stderr
    (program,) = report["programs"]
    sent = [row["compiled"] for row in program["rows"]]
    assert {c["kind"] for c in sent} == kinds
    elements = [(c["kind"], math.prod(x["shape"])) for c in sent for x in c["operands"]]
    assert sum(4 * n for _, n in elements) == nbytes
    # A device sends its share of an all-reduce to three others twice, and of an all-gather once.
    wire = [2 * math.ceil(3 * n / 4) if kind == "all-reduce" else 3 * n for kind, n in elements]
    assert program["wire_bytes"] == 4 * sum(wire)
    assert program["name"] in done.stderr
    places = {source.rpartition(":")[::2] for row in program["rows"] for source in row["sources"]}
    assert {(Path(file).name, number) for file, number in places} == {("train.py", str(line))}


def test_flags_after_run_are_scripts(tmp_path):
    done, report = inspect(tmp_path, JIT, arguments=["--measure=20", "--limit", "max_count=0"])
    assert (done.returncode, done.stdout) == (0, "ended --measure=20 --limit max_count=0\n")
    assert re.search(r"jit_step +[–3] +1 all-reduce, 512 B +768 B", done.stderr)
    assert report["programs"][0]["measured"] is None
    assert report["quiet"] > 0
    assert "programs without collectives." in done.stderr
    lines = done.stderr.splitlines()[:2]  # before it runs
    assert [line.split()[2] for line in lines] == ["--measure", "--limit"]
    assert all("comes after --run and is passed to the script" in line for line in lines)


ENDS = {
    "raises": ("raise KeyError('mine')", 1),
    "exits with 3": ("jax.clear_caches(); del step; sys.exit(3)", 3),
    "exits with words": ("sys.exit('because')", 1),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(10)", 130),
    "lives on": (
        "class A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)\n"
        "child = os.fork()\nif not child: os._exit(5)\nprint(os.waitpid(child, 0)[1])\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), step(w, x), print('done'))).start()\n"
        "atexit.register(lambda: print('late', __name__))",
        0,
    ),
    "spawns": (
        "if __name__ == '__main__':\n"
        " p = multiprocessing.get_context('spawn').Process(target=len, args=('',))\n"
        " p.start(); p.join(); print(p.exitcode)",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_script_ends_as_alone(end, tmp_path):
    code, status = ENDS[end]
    imports = "import atexit, multiprocessing, os, pickle, signal, threading, time, warnings\n"
    text = JIT.lstrip() + imports + "warnings.simplefilter('ignore')\n" + code + "\n"
    if end == "spawns":  # a spawned process imports the script anew
        text = "if __name__ == '__main__':\n " + JIT.strip().replace("\n", "\n ") + "\n"
        text += "import multiprocessing\n" + code
    done, report = inspect(tmp_path, text)
    assert done.returncode == status, done.stderr
    assert [program["name"] for program in report["programs"]] == ["jit_step"]
    assert done.stdout.startswith("ended\n")
    if end == "lives on":
        assert done.stdout.split()[1:] == ["True", "1280", "done", "late", "__main__"]
    if end in ("raises", "Ctrl-C"):
        trace = done.stderr[: done.stderr.index("jit_step ")]
        assert trace.startswith("Traceback (most recent call last):\n")
        assert re.findall(r'File "([^"]*)"', trace) == [str(tmp_path / "train.py")]
    if end == "exits with words":
        assert done.stderr.startswith("because\n")


def test_nothing_to_show_is_said(tmp_path):
    done, report = inspect(tmp_path, "import jax\njax.jit(lambda x: x * 2)(1.0)")
    assert (done.returncode, report["programs"]) == (0, [])
    assert done.stderr.strip().startswith("No program with collectives was compiled; ")
    assert done.stderr.strip().count("\n") == 0
    done, _ = inspect(tmp_path, "print(1)", "--limit", "max_count=0")
    assert done.returncode == 1
    assert "No program with collectives was compiled; 0 programs" in done.stderr
    assert "no program was compiled" in done.stderr


def test_modules_run_as_in_python(tmp_path):
    package = tmp_path / "mine" / "inner"
    package.mkdir(parents=True)
    code = "from . import near\nimport sys\nprint(__name__, __package__, sys.argv[1:], near.here)\n"
    (package / "__main__.py").write_text(code)
    (package / "near.py").write_text("here = __package__")
    for path in (package, package.parent):
        (path / "__init__.py").write_text("")
    run = forks.with_commands().run
    done = run(forks.COMMAND, "jaxcoll", "inspect", "--run", "-m", "mine.inner", "-x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "__main__ mine.inner ['-x'] mine.inner\n")


def test_limits_hold_at_end(tmp_path):
    done, _ = inspect(tmp_path, JIT, "--limit", "max_count=1", arguments=["--limit", "x"])
    assert done.returncode == 0
    assert "comes after" not in done.stderr
    done, _ = inspect(tmp_path, JIT, "--limit", "max_count=0", "--limit", "dtypes=bf16,s8")
    assert (done.returncode, done.stdout) == (1, "ended\n")
    assert "max_count=0, found 1 in one run." in done.stderr
    assert "dtypes=['bf16', 's8'], found f32 in #0." in done.stderr


def test_notebook_line_names_cell(tmp_path):
    pytest.importorskip("IPython")
    cells = [
        "import jax, jaxcoll as jc\nmesh = jax.sharding.Mesh(jax.devices(), ('data',))",
        "def total(x):\n    return jax.lax.psum(x, 'data')",
        "with jc.inspecting() as programs:\n    jax.jit(jax.shard_map(total, mesh=mesh, "
        "in_specs=jax.P('data'), out_specs=jax.P()))(jax.numpy.ones(4))",
        "print(programs)",
    ]
    code = (
        "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\nshell.history_manager.enabled = False\n"
        "for cell in sys.argv: shell.run_cell(cell, store_history=True).raise_error()"
    )
    done = forks.with_commands().run(
        code, *cells, cwd=tmp_path, IPYTHONDIR=str(tmp_path), JAX_NUM_CPU_DEVICES="4"
    )
    assert re.search(r"\n +Cell In\[2\]:2\n", done.stdout), done.stdout + done.stderr
