"""The coordination service of `jax.distributed`, which has no public name in JAX.

This imports neither JAX nor jaxcoll, because the coordinator's process loads it as a file.
"""

from __future__ import annotations

from typing import Any

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]


def start_service(address: str, num_processes: int, **settings: Any) -> Any:
    """Start the service on `address`; `settings` are jaxlib's, such as its timeouts."""
    return _jax.get_distributed_runtime_service(address, num_processes, **settings)
