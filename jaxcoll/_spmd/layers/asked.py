"""What the caller of `jc.scan_layers` asks for beside its arguments, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxcoll._plan.checks import count, shown
from jaxcoll._plan.options import ReduceOp

CALLER = "scan_layers"


@dataclasses.dataclass(frozen=True)
class Asked:
    """How layers are gathered, differentiated and reduced; see `jc.scan_layers`."""

    reduce_op: ReduceOp
    gather_dtype: Any = None
    ahead: int = 1
    remat: Any = True
    unroll: int = 1

    def __post_init__(self) -> None:
        count("ahead", " number of layers (0: gathered where they are used)", self.ahead)
        if count("unroll", " number of turns", self.unroll) < 1:
            raise ValueError(f"`unroll` must be at least 1; got {self.unroll!r}.")
        if not isinstance(self.remat, bool) and not callable(self.remat):
            raise ValueError(
                "`remat` must be True, False or a policy of `jax.checkpoint_policies`; got "
                f"{shown(self.remat)}."
            )
        if self.gather_dtype is not None and not _is_float(self.gather_dtype):
            raise ValueError(
                "`gather_dtype` must be None or a floating type, as `jnp.bfloat16`; got "
                f"{shown(self.gather_dtype)}."
            )


def _is_float(dtype: Any) -> bool:
    try:
        return jax.dtypes.issubdtype(np.dtype(dtype), np.floating)
    except TypeError:
        return False
