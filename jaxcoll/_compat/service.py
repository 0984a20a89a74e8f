"""The coordination service of `jax.distributed`, which JAX gives no public name.

Imports neither JAX nor jaxcoll: the coordinator's process loads this as a file.
"""

from __future__ import annotations

from typing import Any

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]


def start_service(address: str, num_processes: int, **settings: Any) -> Any:
    """Start the service on `address`, with the time limits and the end that `settings` name."""
    return _jax.get_distributed_runtime_service(address, num_processes, **settings)
