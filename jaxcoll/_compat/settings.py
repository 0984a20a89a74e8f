"""JAX's configuration, backends and tracebacks, and compiler options."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxcoll._compat import private

_NUMERICS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    *("jax_threefry_partitionable", "jax_softmax_custom_jvp", "jax_high_dynamic_range_gumbel"),
    *("jax_accurate_erf_inv", "jax_use_hlo_logistic_lowering", "jax_allow_f16_reductions"),
    *("jax_use_direct_linearize", "jax_compiler_enable_remat_pass", "jax_optimization_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_level"),
    *("jax_memory_fitting_effort", "jax_disable_most_optimizations"),
)

LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]jaxcoll[/\\]_\w+[/\\.]")
"""Files that are not the user's: installed packages, and the rooms of this one."""


def numerics() -> dict[str, Any]:
    """Read by name the settings that change numerical results, if this JAX has them."""
    # Attributes have this thread's values; the table has all settings.
    table = jax.config.values
    return {name: getattr(jax.config, name, table[name]) for name in _NUMERICS if name in table}


def configuration() -> Any:
    """Read all of this thread's configuration that a trace depends on, as a hashable value."""
    return private.trace_context()


def has_backend() -> bool:
    """After JAX has initialized its backends, processes cannot be joined."""
    return private.backends_are_initialized()


def read_option(name: str) -> Any:
    """Read `jax.config.jax_<name>`, which type checkers do not know."""
    return getattr(jax.config, f"jax_{name}")


def checks_of_thread() -> Callable[[], contextlib.ExitStack] | None:
    """Make a context for other threads with this thread's NaN and Inf checks, or None."""
    config: Any = jax.config
    if not (config.jax_debug_nans or config.jax_debug_infs):
        return None
    wanted = config.jax_debug_nans, config.jax_debug_infs

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for check, is_wanted in zip((jax.debug_nans, jax.debug_infs), wanted, strict=True):
            stack.enter_context(check(is_wanted))
        return stack

    return enter


@contextlib.contextmanager
def past_cache() -> Iterator[None]:
    """Compile what this thread compiles anew: JAX neither writes it to its cache nor reads it.

    No other compilation has its key, which names the program's lines if those of others do not.
    """
    names_lines = private.cache_names_lines
    with private.cache_seconds(float("inf")), names_lines(not names_lines.value):
        yield


def line_here() -> str:
    """Find the innermost running line outside of libraries, as file:line."""
    frame: Any = sys._getframe()
    while frame is not None and LIBRARIES.search(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def warn(message: str, category: type[Warning] = UserWarning, line: str = "") -> None:
    """Warn at a user's line, as file:line; "": at the innermost one that is running."""
    file, _, number = (line or line_here()).rpartition(":")
    if file:
        warnings.warn_explicit(message, category, file, int(number))
    else:
        warnings.warn(message, category, stacklevel=2)


Function = TypeVar("Function", bound=Callable[..., Any])

# JAX_TRACEBACK_FILTERING=off shows our frames too, like JAX's.
private.hide_frames(str(pathlib.Path(__file__).parent.parent))


def boundary(fun: Function) -> Function:
    """Wrap `fun` so that its tracebacks leave out the frames of JAX and of this package."""
    return private.boundary(fun)


def drop_unknown_options(wanted: Mapping[str, Any], device: jax.Device) -> dict[str, Any]:
    """Keep the options among `wanted` that the compiler for `device` knows; warn of the others.

    Cost: on first use, compiling an empty program for each option.
    """
    unknown = [name for name, value in wanted.items() if not _is_known(name, value, device)]
    if unknown:
        warnings.warn(
            f"the compiler for {device.platform} does not know {', '.join(unknown)}, with which "
            "jaxcoll keeps packs apart (`overlap=True`), so it may combine them. `jc.inspect` "
            "shows the result.",
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
