"""The public scan over layers whose parameters are in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxcoll._mesh.world import scope_here
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked
from jaxcoll._spmd.layers import scan


def scan_layers(
    layer: Callable[[Any, Any], Any],
    carry: Any,
    stacked: Any,
    axis_name: str | tuple[str, ...],
    *,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    gather_dtype: Any = None,
    ahead: int = 1,
    remat: Any = True,
    sharded: Any = None,
    unroll: int = 1,
    options: CommunicationOptions | None = None,
) -> tuple[Any, Any]:
    """Scan."""
    return scan.scan_layers(
        layer,
        carry,
        stacked,
        axis_name,
        sharded=sharded,
        asked=scan.Asked(ReduceOp.of(reduce_op), gather_dtype, ahead, remat, unroll),
        scope=scope_here(),
        options=checked(options),
    )
