"""The laboratory: eight CPU devices, strict promotion, warnings are errors (pyproject.toml)."""

import collections
import functools
import gc
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax._src import compilation_cache

DURATIONS = Path(__file__).with_name("durations.txt")
write_program = compilation_cache.put_executable_and_time
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Time decides no test: a machine may be busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# What the tests run is small: LLVM would optimize it for longer than it runs. The processes that
# tests start do so, too; the fixture `optimized` compiles as users do.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# In parts, for threads of which all are busy, machine code takes a seventh longer to make.
os.environ["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # the older code for fusions takes half as long to make
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config: pytest.Config) -> None:
    cache = Path(config.rootpath) / ".pytest_cache"
    # A folder that stays from run to run: Matplotlib keeps its list of fonts there.
    os.environ["XDG_CACHE_HOME"] = str(cache / "user")
    if not hasattr(config, "workerinput"):
        forget_much(cache / "programs")
        if config.getoption("--record-durations"):
            config.pluginmanager.register(Recorder())
    keep_compiled(config, cache / "programs")


def keep_compiled(config: pytest.Config, folder: Path) -> None:
    """Let JAX keep compiled programs in a folder from run to run.

    A program is found only if its sources' lines are the same too, so that its text is its own.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.put_executable_and_time = keep_in_order(write_program)
    # Workers share the folder, and JAX does not write a file in one go: who reads half compiles.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error (reading|writing) persistent compilation cache"
    )


def keep_in_order(write: Callable[..., None]) -> Callable[..., None]:
    """Keep no program of a test that would have no order once loaded (`cached_order`)."""

    @functools.wraps(write)
    def write_in_order(key: str, name: str, program: Any, *more: Any) -> None:
        if not may_lose_order(program):
            write(key, name, program, *more)

    return write_in_order


def may_lose_order(program: Any) -> bool:
    """True if several computations have collectives: loaded, XLA runs those in any order."""
    text = "".join(module.to_string() for module in program.hlo_modules())
    collective = re.compile(r" (all-|collective-|reduce-scatter|ragged-)[\w-]*\(")
    return sum(map(bool, map(collective.search, text.split("\n}")))) > 1


def forget_much(folder: Path) -> None:
    """Begin anew once programs of former sources fill 2 GB."""
    if folder.is_dir() and sum(file.stat().st_size for file in os.scandir(folder)) > 2 << 30:
        shutil.rmtree(folder, ignore_errors=True)  # others may be writing there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--few", type=int, metavar="N", help="of each test's cases only N, evenly spaced"
    )
    parser.addoption(
        "--whole", action="append", default=[], metavar="FOLDER", help="all cases there, with --few"
    )
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name} anew")


class Recorder:
    """Sums what each test function took, over its cases, their fixtures included."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.split("[")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        slow = sorted(self._seconds.items(), key=lambda item: -item[1])
        DURATIONS.write_text("".join(f"{s:6.1f} {name}\n" for name, s in slow if s >= 0.1))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns = {path: turn for turn, path in enumerate(order_of_files(items))}
    items.sort(key=lambda item: turns[item.path])
    if few := config.getoption("--few"):
        keep_few(config, items, few)


def keep_few(config: pytest.Config, items: list[pytest.Item], few: int) -> None:
    """Leave `few` cases of each test, of those in the folders of `--whole` all."""
    whole = tuple(config.getoption("--whole"))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {
        id(same[k * len(same) // number])
        for name, same in cases.items()
        for number in [len(same) if name.startswith(whole) else min(few, len(same))]
        for k in range(number)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def order_of_files(items: list[pytest.Item]) -> list[Path]:
    """Files that take long begin, so that no worker is left with one at the end.

    Those that start processes mostly wait for them: one stands before every two that compute.
    """
    seconds: dict[str, float] = collections.Counter()
    for line in DURATIONS.read_text().splitlines():
        took, name = line.split(maxsplit=1)
        seconds[name.split("::")[0]] += float(took)
    root = DURATIONS.parents[1]
    paths = list(dict.fromkeys(item.path for item in items))
    paths.sort(key=lambda path: -seconds[path.relative_to(root).as_posix()])
    waiting = {item.path for item in items if any(item.iter_markers("processes"))}
    computing = [path for path in paths if path not in waiting]
    order = []
    for path in (p for p in paths if p in waiting):
        order += [path, *computing[:2]]
        del computing[:2]
    return order + computing


def pytest_collection_finish() -> None:
    # Traced programs are many small objects that stay: looking for garbage among them all the
    # time took a twentieth of the suite.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, jaxlib {jax.lib.__version__}"


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile as users do: LLVM may make one rounding of a product and a sum."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def dtypes_may_mix() -> Iterator[None]:
    """Optax counts in integers and multiplies them with floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def types_may_mix(dtypes_may_mix: None) -> Iterator[None]:
    """As they do where nobody has forbidden it."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a job are forks, which have imported jaxcoll already."""
    import forks

    from jaxcoll._job.launch import supervisor

    monkeypatch.setattr(supervisor, "killed_on_exit", forks.running)


@pytest.fixture
def launched(
    forked: None, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`jaxcoll launch`, called in this process."""
    from jaxcoll.cli.main import main

    def launch(*flags: object) -> subprocess.CompletedProcess[str]:
        status = main(["launch", *map(str, flags)])
        return subprocess.CompletedProcess(flags, status, *capfd.readouterr())

    return launch


@pytest.fixture(autouse=True, scope="session")
def _eight_devices() -> None:
    assert jax.device_count() == 8, "the tests need the eight devices that conftest asks for"


@pytest.fixture
def coordinator() -> Iterator[socket.socket]:
    """The coordinator's end of this process's connection to it."""
    from jaxcoll._job import liveness  # here: tests of imports come without jaxcoll

    here, there = socket.socketpair()
    connection = liveness.CoordinatorConnection(here.detach())
    liveness.use_connection(connection)
    yield there
    liveness.use_connection(None)
    connection.close()
    there.close()
