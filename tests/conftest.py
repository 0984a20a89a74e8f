"""The laboratory: eight CPU devices, strict promotion, warnings are errors (pyproject.toml)."""

import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Nobody's own calibration changes a test.
os.environ.pop("JAXCOLL_TERMS", None)


def pytest_configure(config: pytest.Config) -> None:
    # A folder that stays from run to run: Matplotlib keeps its list of fonts there.
    cache = Path(config.rootpath) / ".pytest_cache" / "user"
    os.environ["XDG_CACHE_HOME"] = str(cache)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--few", type=int, metavar="N", help="of each test's cases only N, evenly spaced"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    few = config.getoption("--few")
    if not few:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {
        id(found[k * len(found) // min(few, len(found))])
        for found in cases.values()
        for k in range(min(few, len(found)))
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, jaxlib {jax.lib.__version__}"


@pytest.fixture(autouse=True, scope="session")
def _eight_devices() -> None:
    assert jax.device_count() == 8, "the tests need the eight devices that conftest asks for"
