"""The options of a compiler, as far as the one of this version knows them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding


def known_options(wanted: Mapping[str, Any], device: jax.Device) -> dict[str, Any]:
    """The options among `wanted` that the compiler for `device` knows; it warns of the others.

    Cost: the first time, the compilation of an empty program for each option.
    """
    unknown = [name for name, value in wanted.items() if not _is_known(name, value, device)]
    if unknown:
        warnings.warn(
            f"the compiler for {device.platform} does not know {', '.join(unknown)}, by which "
            "jaxcoll would keep packs apart (`overlap=True`): it may combine them. `jc.inspect` "
            "shows what it does.",
            RuntimeWarning,
            stacklevel=2,
        )
    return {name: value for name, value in wanted.items() if name not in unknown}


@functools.cache
def _is_known(name: str, value: Any, device: jax.Device) -> bool:
    nothing = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(nothing).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True
