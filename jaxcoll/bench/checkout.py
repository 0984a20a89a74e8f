"""What of the benchmark is in the source tree, and not in the wheel."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "docs" / "peers"


def from_checkout(what: str, name: str) -> Any:
    """A module of `SOURCES`; where that is not there, an error that begins with `what`."""
    file = SOURCES / f"{name}.py"
    if not file.exists():
        raise ValueError(
            f"{what} in jaxcoll's source tree (docs/peers), not in the wheel: run `jaxcoll bench` "
            "from a checkout."
        )
    return _loaded(file)


@functools.cache
def _loaded(file: Path) -> Any:
    name = f"jaxcoll_peers_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    # Dataclasses look their module up by its name.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
