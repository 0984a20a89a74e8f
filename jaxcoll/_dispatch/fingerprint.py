"""Fingerprints of programs: lines that processes compare and a person can read.

The same program rounds differently where the compiler gets other flags or compiles for another
processor. Replicas that each update their own copy of the parameters then drift apart, and no
collective notices.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxcoll._compat import settings

VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that compilers read."""

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

_LONGEST_LINE = 2000
"""Letters of a line that are shown to others; a large constant is one line."""


def fingerprint(
    name: str,
    device: jax.Device,
    options: str,
    devices: str,
    lowered: jax.stages.Lowered,
) -> list[str]:
    """All that processes must agree upon before they run a program; the most telling lines first.

    `device` is one of this process's, and `devices` are in the order of the mesh.
    """
    args, kwargs = lowered.args_info
    # Without the places in Python's files, which are elsewhere on another machine.
    program = lowered.as_text().splitlines()
    return [
        f"JAX {jax.__version__} with jaxlib {jaxlib.__version__}",
        f"program {name}",
        *environment(device),
        *([f"options {options}"] if options else []),
        *([f"devices {devices}"] if devices else []),
        *(f"argument {line}" for line in _arrays((args, kwargs), ("args", "kwargs"))),
        *(f"result {line}" for line in _arrays((lowered.out_info,), ("",))),
        *(f"line {k + 1} of the program: {line.strip()}" for k, line in enumerate(program)),
    ]


def _arrays(trees: tuple[Any, ...], names: tuple[str, ...]) -> Iterator[str]:
    for name, tree in zip(names, trees, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            sizes = ",".join(map(str, leaf.shape))
            yield f"{name}{jax.tree_util.keystr(path)}: {leaf.dtype}[{sizes}]"


def mark(lines: Sequence[str]) -> str:
    """A short name that two programs share if their lines are the same."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def packed(lines: Sequence[str]) -> str:
    """Lines as one text, a tenth as long, to be kept and sent."""
    shown = [x if len(x) <= _LONGEST_LINE else f"{x[:200]} … {mark([x])}" for x in lines]
    return base64.b85encode(zlib.compress(json.dumps(shown).encode(), 1)).decode()


def unpacked(text: str) -> list[str]:
    """The lines of a `packed` text."""
    return json.loads(zlib.decompress(base64.b85decode(text)))


def first_difference(sides: Mapping[int, Sequence[str]]) -> str:
    """The lines of two processes where they first differ, as a message shows them."""
    pairs = itertools.zip_longest(*sides.values(), fillvalue="(nothing more)")
    lines = next((pair for pair in pairs if len(set(pair)) > 1), ("(no difference)",) * len(sides))
    return "\n".join(f"process {p}: {line}" for p, line in zip(sides, lines, strict=True))


def environment(device: jax.Device) -> tuple[str, ...]:
    """Everything that programs for `device` depend on beside their text, one line each."""
    version = " ".join(str(device.client.platform_version).split())
    kind = _processor() if device.platform == "cpu" else f"{device.device_kind}, {version}"
    return (
        *(f"{name} {_flags(os.environ.get(name, ''))}" for name in VARIABLES),
        f"processor {kind}",
        *(f"setting {name}={value}" for name, value in settings.numerics().items()),
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
    fields = {}
    for line in cpuinfo.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", "")).split()
    kind = [f"{name} {fields[name]}" for name in _KIND if name in fields]
    instructions = sorted(flag for flag in flags if _INSTRUCTIONS.fullmatch(flag))
    return ", ".join([*kind, " ".join(instructions)])
