"""The coordination service of `jax.distributed`, which JAX gives no public name.

Imports neither JAX nor jaxcoll: the coordinator's process loads this as a file.
"""

from __future__ import annotations

from typing import Any

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]


def start_service(address: str, num_processes: int, **settings: Any) -> Any:
    """Start the service on `address`.

    Args:
      address: host and port it listens on.
      num_processes: how many processes join.
      settings: of its time limits and of its end, as `jaxlib` names them.

    Returns:
      The service, which has `shutdown()`.

    Raises:
      RuntimeError: the service did not start.
    """
    return _jax.get_distributed_runtime_service(address, num_processes, **settings)
