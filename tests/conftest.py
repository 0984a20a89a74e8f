"""The laboratory: eight CPU devices, strict promotion, warnings are errors (pyproject.toml)."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, jaxlib {jax.lib.__version__}"


@pytest.fixture(autouse=True, scope="session")
def _eight_devices() -> None:
    assert jax.device_count() == 8, "the tests need the eight devices that conftest asks for"
