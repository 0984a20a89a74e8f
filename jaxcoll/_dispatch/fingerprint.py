"""Fingerprints of programs that several processes run, and digests of their first arguments.

The same program rounds differently where the compiler gets other flags or compiles for another
processor. Replicas that each update their own copy of the parameters then drift apart, and no
collective notices. So do those that begin with different parameters; and rows that are the same on
all processes are one batch several times. Processes compare both once.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from jaxcoll._compat import settings
from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.executable import Program, name_of, plans, type_of
from jaxcoll._observe.parse.hlo import read_hlo
from jaxcoll._plan.collective_plan import THE_VALUE
from jaxcoll._plan.scope_names import names, pack_of

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
            yield f"{name}{jax.tree_util.keystr(path)}: {type_of(leaf)}"


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


@dataclasses.dataclass
class FirstValues:
    """Digests of one process's arguments."""

    replicated: dict[str, str]  # of each leaf that every replica gets in full, by its path
    # Of each leaf of which this process has its share; leaves that hold one number in every place
    # are left out, because equal ones prove nothing
    rows: dict[str, str]

    def short(self) -> tuple[str, str]:
        """Return all of them, as two digests; the second is "" without rows."""
        whole, rows = (json.dumps(digests).encode() for digests in (self.replicated, self.rows))
        return _digest(whole), _digest(rows) if self.rows else ""


def shared_program(
    lowered: jax.stages.Lowered, name: str, leaves: Sequence[Any], settings: str
) -> Program:
    """Compile a program that other processes run, too; they compare `settings` beside its text."""
    meshes = (getattr(x.sharding, "mesh", None) for x in leaves)
    mesh = next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)), None)
    # The devices in the order in which the program counts them, as the first array lies on them.
    devices = "" if mesh is None else " ".join(str(d.id) for d in mesh.devices.flat)
    here = filter(None, (x.sharding.addressable_devices for x in leaves))
    device = min(next(here, jax.local_devices()), key=lambda d: d.id)
    lines = fingerprint(f"`{name}`", device, settings, devices, lowered)
    return Program(lowered.compile(), name_of(name, leaves), packed(lines), mark(lines))


def starts_with(program: Program) -> str:
    """Return the collective at which processes that arrived wait for the others, in words."""
    try:
        moved = read_hlo(program.compiled.as_text() or "").collectives
    except ValueError:  # it is not understood
        return ""
    if not moved:
        return f"{program.name} has no collective."
    of, first = f" of {len(moved)}" * (len(moved) > 1), moved[0]
    types = ", ".join(map(type_of, first.operands))
    groups = ",".join(f"{{{','.join(map(str, group))}}}" for group in first.groups)
    paths = names(first.op_name)
    asked = f", asked for as {paths[0].rpartition('/')[2]}" if paths else ""
    packs = dict.fromkeys(filter(None, map(pack_of, paths)))
    carrying = f", carrying {' and '.join(packs)}" * bool(packs)
    what = f"{first.kind} {types} among {{{groups}}}{asked}{carrying}{_leaves(packs)}"
    return f"Collective 1{of} of {program.name} is {what}."


def _leaves(packs: Iterable[str]) -> str:
    """The leaves that a collective carries, in packs or as gathered rows."""
    carried = []
    for pack in packs:
        name, _, part = pack.partition("/")
        if plan := plans.get(name):
            k = int(part.lstrip("packrows"))
            leaves = plan.carried(k) if part.startswith("pack") else plan.leaves[k].path
            carried.append(f"{pack} has {leaves or THE_VALUE}")
    return f" ({'; '.join(carried)})" if carried else ""


def first_values(call: Call) -> FirstValues:
    """The digests of a call's arguments, of which this process's part is read once."""
    replicated, rows = {}, {}
    for tree, name in ((tuple(call.args), "args"), (dict(call.kwargs), "kwargs")):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            shards = [_bytes(shard.data) for shard in leaf.addressable_shards]
            place = name + jax.tree_util.keystr(path)
            if shards and leaf.is_fully_replicated:
                replicated[place] = _digest(shards[0])
            elif shards and call.rows and any(np.any(x != x[:1]) for x in shards):
                rows[place] = _digest(b"".join(x.tobytes() for x in shards))
    return FirstValues(replicated, rows)


def _bytes(x: jax.Array) -> np.ndarray:
    """The elements as bytes, a row each: bits are compared, whatever they mean."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    flat = np.ascontiguousarray(np.asarray(x)).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, -1) if flat.size else np.zeros((0, 1), np.uint8)


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
