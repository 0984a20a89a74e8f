"""Each room imports downward only, and says only its own words (docs/design.md)."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import jaxcoll

ROOT = Path(jaxcoll.__file__).parent

CLOCK = {"clock", "monotonic", "perf_counter", "perf_counter_ns", "process_time", "sleep"}
TIME = CLOCK | {"time"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}
SOCKETS = {"socket", "socketpair", "selectors", "ipaddress"}
THREADS = {"threading", "Thread", "queue"}
COLLECTIVES = {
    f"lax.{name}"
    for name in (
        *("psum", "pmean", "pmax", "pmin", "ppermute", "pshuffle", "pbroadcast"),
        *("all_gather", "all_to_all", "psum_scatter", "ragged_all_to_all"),
    )
}
COMPILING = {"jit", "pmap", "shard_map"}
SPECS = {"PartitionSpec", "NamedSharding"}
DEVICES = {"devices", "Mesh", "device_put"}

FORBIDDEN_WORDS = {
    "distribute": SOCKETS | THREADS | TIME | ENVIRONMENT | {"print"} | COLLECTIVES,
    "_train/elastic": SOCKETS | {"print", "jit", "pmap", "lax"},
    "_report": {"lax", "shard_map", "pmap"},
    "_train": SOCKETS | THREADS | TIME | ENVIRONMENT | {"print", "subprocess"},
    "_step": SOCKETS | THREADS | TIME | {"print"} | COLLECTIVES,
    "_step/mesh": SOCKETS | THREADS | TIME | {"print", "lax"} | COMPILING,
    "_runtime": {"lax", "shard_map", "pmap", "print", *SPECS, "device_put"},
    "_gradients": {"print"} | SPECS | DEVICES | COMPILING | TIME | ENVIRONMENT,
    "_collectives": {"print"} | SPECS | DEVICES | COMPILING | TIME | ENVIRONMENT,
    "_gradients/proof": {"jnp", "print"} | DEVICES | COMPILING | TIME | ENVIRONMENT,
    "_hlo": {"jnp", "lax", "device_put", "compile", "print"} | TIME | ENVIRONMENT,
    "_job": {"jnp", "lax", "Array"} | DEVICES | SPECS | COMPILING,
    "_plan": {"lax", "jnp", "print"} | DEVICES | COMPILING | TIME | ENVIRONMENT,
    "_compression": {"print"} | SPECS | DEVICES | COMPILING | TIME | ENVIRONMENT | COLLECTIVES,
    "_show": {"jax", "jnp", "lax", "Plan", "Report", "print"} | TIME | ENVIRONMENT,
}

PRIVATE_TO_JAX = {"_src", "_jax", "xla_client", "_profiler"}
HOLD_PRIVATE = ("_compat/private.py", "_compat/service.py")


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


def imports_of_the_face(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What is imported from jaxcoll itself or from a relative path: import-linter sees neither."""
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
        for face, *inner in (module.split(".") for module in modules):
            if face == "jaxcoll" and not ROOMS.intersection(inner[:1]):
                yield node.lineno, inner[0] if inner else "jaxcoll"


def complaints(room: str, name: str, tree: ast.AST) -> list[str]:
    """What is wrong with a file of `room`, each as file:line: why."""
    wrong = []
    for line, word in spoken(tree):
        if word in FORBIDDEN_WORDS.get(room, set()):
            wrong.append(f"{name}:{line}: {room} may not say {word!r}")
        if word in PRIVATE_TO_JAX and not name.endswith(HOLD_PRIVATE):
            wrong.append(f"{name}:{line}: {word} is private to JAX")
    if room not in ("__init__", "__main__", "cli"):
        faces = imports_of_the_face(tree)
        wrong += [f"{name}:{line}: {room} may not import {face}" for line, face in faces]
    return list(dict.fromkeys(wrong))


FILES = {path: ast.parse(path.read_text("utf8")) for path in sorted(ROOT.rglob("*.py"))}


def room_of(path):
    """The innermost room with words of its own, else the outermost folder."""
    inside = path.relative_to(ROOT)
    rooms = [str(folder) for folder in inside.parents if str(folder) in FORBIDDEN_WORDS]
    return rooms[0] if rooms else inside.parts[0].removesuffix(".py")


ROOMS = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}


def imports_among(modules: dict[str, ast.AST]) -> dict[str, set[str]]:
    """Which module imports which, `TYPE_CHECKING` included, by their dotted names."""
    imported = {}
    for module, tree in modules.items():
        names = [
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        ]
        # `from package import module`, or `from module import name`.
        imported[module] = {n if n in modules else n.rpartition(".")[0] for n in names}
    return {module: (there & modules.keys()) - {module} for module, there in imported.items()}


def test_files_keep_to_rooms():
    missing = set(FORBIDDEN_WORDS) - {room_of(path) for path in FILES}
    assert not missing, "was a room renamed without its law?"
    wrong = [
        complaint
        for path, tree in FILES.items()
        for complaint in complaints(room_of(path), str(path.relative_to(ROOT.parent)), tree)
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_have_no_circle():
    modules = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): tree
        for path, tree in FILES.items()
    }
    TopologicalSorter(imports_among(modules)).prepare()


def test_circles_are_found():
    for last in ("from a import x", "from p import d\nfrom q import y"):
        sources = {
            "a": "from b import x",
            "b": "if TYPE_CHECKING:\n  from p import c",
            "p.c": last,
            "p.d": "from p import c",
        }
        modules = {name: ast.parse(source) for name, source in sources.items()}
        with pytest.raises(CycleError):
            TopologicalSorter(imports_among(modules)).prepare()


RIGHT = """
import re
from jax import lax
from jaxcoll._plan.packs import packing

PATTERN = re.compile("all-reduce")

def all_gather(self, timeout):
    return self.strategy.all_gather(lax.axis_index, packing)
"""


def test_wrong_words_are_found():
    for room, source, expected in (
        ("_step", RIGHT, None),
        ("_hlo", 'import re\nre.compile("all-reduce")', None),
        ("_plan", "import jax\nn = len(jax.devices())", "f.py:2: _plan may not say 'devices'"),
        ("_plan", "import jax.numpy as jnp\njnp.ones(3)", "f.py:2: _plan may not say 'jnp'"),
        ("_plan", "def f(devices): ...", "f.py:1: _plan may not say 'devices'"),
        ("_plan", "import jaxcoll", "f.py:1: _plan may not import jaxcoll"),
        ("_plan", "from . import packing", "f.py:1: _plan may not import a relative path"),
        ("_gradients", "import jax\n@jax.jit\ndef f(): ...", "f.py:2: _gradients may not say 'jit'"),
        ("_step", "import jax\njax.lax.psum(1, 'i')", "f.py:2: _step may not say 'lax.psum'"),
        ("_step", "from jax.lax import pmean", "f.py:1: _step may not say 'lax.pmean'"),
        ("_step", "import jax.lax as l\nl.pmax", "f.py:2: _step may not say 'lax.pmax'"),
        ("_hlo", "f.lower().compile()", "f.py:1: _hlo may not say 'compile'"),
        ("cli", "import jax\njax._src", "f.py:2: _src is private to JAX"),
        ("_compat", "from jax._src import core", "f.py:1: _src is private to JAX"),
    ):  # fmt: skip
        found = complaints(room, "f.py", ast.parse(source))
        assert expected in found if expected else not found, source
