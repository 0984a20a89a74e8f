"""Each room imports downward only, and says only its own words (docs/design.md)."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxcoll

ROOT = Path(jaxcoll.__file__).parent

CLOCK = {"time", "clock", "monotonic", "perf_counter", "perf_counter_ns", "process_time"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}
COLLECTIVES = {
    f"lax.{name}"
    for name in (
        *("psum", "pmean", "pmax", "pmin", "ppermute", "pshuffle", "pbroadcast"),
        *("all_gather", "all_to_all", "psum_scatter", "ragged_all_to_all"),
    )
}
PLACING = {"devices", "Mesh", "jit", "pmap", "shard_map", "device_put"}

FORBIDDEN_WORDS = {
    "_plan": {"lax", "jnp", "print"} | PLACING | CLOCK | ENVIRONMENT,
    "_spmd": {"PartitionSpec", "NamedSharding", "print"} | PLACING | CLOCK | ENVIRONMENT,
    "_host": {"perf_counter", "perf_counter_ns", "clock", "print"} | COLLECTIVES,
    "_observe": {"lax", "device_put", "compile"} | CLOCK,
    "_look": {"lax", "device_put", "compile", "jit", "print"} | CLOCK | ENVIRONMENT,
}

ROOMS_BELOW = {
    "_compat": set(),
    "_compat_callback": set(),
    "_compat_compiler": set(),
    "_compat_coordination": set(),
    "_compat_gloo": set(),
    "_files": set(),
    "_plan": {"_compat"},
    "_spmd": {"_compat", "_compat_callback", "_plan"},
    "_host": {
        *("_compat", "_compat_compiler", "_compat_coordination", "_compat_gloo"),
        *("_files", "_plan", "_spmd"),
    },
    "_observe": {"_compat", "_files", "_plan"},
    "_look": {"_compat", "_plan", "_spmd", "_host", "_observe"},
}

MOST_LINES = 400


def spoken(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name, attribute and imported name, with its line; members of lax also in full."""
    aliases_of_lax = {"lax"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname and alias.name.split(".")[-1] == "lax"
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="re"), attr="compile"):
                pass  # a pattern, not a program
            case ast.Attribute(value=ast.Name(id=base) | ast.Attribute(attr=base), attr=word):
                yield node.lineno, word
                if base in aliases_of_lax:
                    yield node.lineno, f"lax.{word}"
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                yield node.lineno, word
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                module = getattr(node, "module", None) or ""
                for alias in names:
                    for word in [*module.split("."), *alias.name.split(".")]:
                        yield node.lineno, word
                    if module.split(".")[-1] == "lax":
                        yield node.lineno, f"lax.{alias.name}"


def rooms_imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The rooms of jaxcoll that are imported, with the line; "jaxcoll" for the face itself."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(level=0, module=str(module), names=names):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.ImportFrom():
                yield node.lineno, "a relative path"
                continue
            case _:
                continue
        for parts in (module.split(".") for module in modules):
            if parts[0] == "jaxcoll":
                yield node.lineno, parts[1] if len(parts) > 1 else "jaxcoll"


def complaints(room: str, name: str, source: str) -> list[str]:
    """What is wrong with `source` as a file of `room`, each as file:line: why."""
    tree = ast.parse(source)
    found = []
    for line, word in spoken(tree):
        if word in FORBIDDEN_WORDS.get(room, set()):
            found.append(f"{name}:{line}: {room} may not say {word!r}")
        if word == "_src":
            found.append(f"{name}:{line}: jax._src is private to JAX")
    if room in ROOMS_BELOW:
        found += [
            f"{name}:{line}: {room} may not import {other}"
            for line, other in rooms_imported(tree)
            if other != room and other not in ROOMS_BELOW[room]
        ]
    lines = source.count("\n")
    if lines > MOST_LINES:
        found.append(f"{name}:{lines}: more than {MOST_LINES} lines; is it one room, or two?")
    return list(dict.fromkeys(found))


def test_every_file_keeps_to_its_room():
    files = sorted(ROOT.rglob("*.py"))
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in files}
    assert rooms >= set(ROOMS_BELOW), "a room is missing; was it renamed without its law?"
    found = [
        complaint
        for path in files
        for complaint in complaints(
            path.relative_to(ROOT).parts[0].removesuffix(".py"),
            str(path.relative_to(ROOT.parent)),
            path.read_text(encoding="utf-8"),
        )
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("_plan", "import jax\nn = len(jax.devices())", "f.py:2: _plan may not say 'devices'"),
        ("_plan", "import jax.numpy as jnp\njnp.ones(3)", "f.py:2: _plan may not say 'jnp'"),
        ("_plan", "from jax import lax", "f.py:1: _plan may not say 'lax'"),
        ("_plan", "def f(devices): ...", "f.py:1: _plan may not say 'devices'"),
        ("_plan", "import jaxcoll", "f.py:1: _plan may not import jaxcoll"),
        ("_plan", "from . import packing", "f.py:1: _plan may not import a relative path"),
        ("_plan", "from jaxcoll._host import x", "f.py:1: _plan may not import _host"),
        ("_spmd", "import os\nos.environ['A']", "f.py:2: _spmd may not say 'environ'"),
        ("_spmd", "import time", "f.py:1: _spmd may not say 'time'"),
        ("_spmd", "import jax\n@jax.jit\ndef f(): ...", "f.py:2: _spmd may not say 'jit'"),
        ("_spmd", "from jaxcoll import _observe", "f.py:1: _spmd may not import _observe"),
        ("_host", "import jax\njax.lax.psum(1, 'i')", "f.py:2: _host may not say 'lax.psum'"),
        ("_host", "from jax.lax import pmean", "f.py:1: _host may not say 'lax.pmean'"),
        ("_host", "import jax.lax as l\nl.pmax", "f.py:2: _host may not say 'lax.pmax'"),
        ("_host", "print(1)", "f.py:1: _host may not say 'print'"),
        ("_host", "import jaxcoll._observe", "f.py:1: _host may not import _observe"),
        ("_observe", "f.lower().compile()", "f.py:1: _observe may not say 'compile'"),
        ("_observe", "import jaxcoll._spmd.ring", "f.py:1: _observe may not import _spmd"),
        ("_look", "import jax\njax.jit(f)", "f.py:2: _look may not say 'jit'"),
        ("_compat", "import jaxcoll._plan", "f.py:1: _compat may not import _plan"),
        ("cli", "from jax._src import core", "f.py:1: jax._src is private to JAX"),
        ("cli", "import jax\njax._src", "f.py:2: jax._src is private to JAX"),
        ("cli", "x = 1\n" * 401, "f.py:401: more than 400 lines; is it one room, or two?"),
    ],
)
def test_the_check_can_fail(room, source, expected):
    assert expected in complaints(room, "f.py", source)


def test_the_check_can_pass():
    source = """
        import re
        from jax import lax
        from jaxcoll._plan import packing

        PATTERN = re.compile("all-reduce")

        def all_gather(self, timeout):
            return self.strategy.all_gather(lax.axis_index, packing)
    """
    assert complaints("_host", "f.py", textwrap.dedent(source)) == []
    assert complaints("_observe", "f.py", 'import re\nre.compile("all-reduce")\n') == []
