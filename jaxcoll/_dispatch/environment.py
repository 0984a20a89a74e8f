"""The environment of a compilation, in lines that processes compare, and the options it takes.

The same program rounds differently where the compiler gets other flags or compiles for another
processor. Replicas that each update their own copy of the parameters then drift apart, and no
collective notices.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that compilers read."""

SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    *("jax_threefry_partitionable", "jax_softmax_custom_jvp", "jax_high_dynamic_range_gumbel"),
    *("jax_accurate_erf_inv", "jax_use_hlo_logistic_lowering", "jax_allow_f16_reductions"),
    *("jax_use_direct_linearize", "jax_compiler_enable_remat_pass", "jax_optimization_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_level"),
    *("jax_memory_fitting_effort", "jax_disable_most_optimizations"),
)
"""Settings of JAX that change numbers, as far as this version has them."""

# Flags that change no number, so that processes may differ in them.
_HARMLESS = re.compile(
    r"--?(xla_force_host_platform_device_count|xla_hlo_profile|xla_\w*dump\w*|xla_\w*timeout\w*"
    r"|xla_\w*cache_(dir|file|mode))\b"
)
# Instructions that a compiler can use; Linux lists flags of the kernel and hypervisor beside them.
_INSTRUCTIONS = re.compile(
    r"(sse|ssse|avx|amx|fma|bmi|sha|asimd|sve)\w*|v?aes|v?pclmulqdq|f16c|popcnt|adx|gfni|movbe|abm"
    r"|sme2?|bf16|i8mm|fp|fphp|crc32|fcma"
)
_KIND = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "uarch", "isa")


def environment(device: jax.Device) -> tuple[str, ...]:
    """Everything that programs for `device` depend on beside their text, one line each."""
    here = object()
    settings = ((name, getattr(jax.config, name, here)) for name in SETTINGS)
    version = " ".join(str(device.client.platform_version).split())
    kind = _processor() if device.platform == "cpu" else f"{device.device_kind}, {version}"
    return (
        *(f"{name} {_flags(os.environ.get(name, ''))}" for name in VARIABLES),
        f"processor {kind}",
        *(f"setting {name}={value}" for name, value in settings if value is not here),
    )


def _flags(text: str) -> str:
    """Flags in order of their names, without those that change no number."""
    if text and not text.lstrip().startswith("-") and Path(text).is_file():
        text = Path(text).read_text("utf8", "replace")  # as XLA does
    last = {flag.partition("=")[0]: flag for flag in text.split()}
    return " ".join(flag for _, flag in sorted(last.items()) if not _HARMLESS.match(flag)) or "-"


@functools.cache
def _processor() -> str:
    """The kind of this host's processor, as a compiler distinguishes processors."""
    try:
        kind = kind_of(Path("/proc/cpuinfo").read_text("utf8", "replace"))
    except OSError:  # no Linux
        kind = platform.processor()
    return f"{platform.machine()}, {kind}"


def kind_of(cpuinfo: str) -> str:
    """The first processor that Linux describes, as far as a compiler knows it."""
    known = {}
    for line in cpuinfo.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        known[name.strip()] = value.strip()
    flags = known.get("flags", known.get("Features", "")).split()
    kind = [f"{name} {known[name]}" for name in _KIND if name in known]
    instructions = sorted(flag for flag in flags if _INSTRUCTIONS.fullmatch(flag))
    return ", ".join([*kind, " ".join(instructions)])


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
