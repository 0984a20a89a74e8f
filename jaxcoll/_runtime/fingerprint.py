"""Fingerprints of programs that several processes run, and digests of their first arguments.

With other compiler flags, or on another processor, the same program rounds differently. Replicas
that each update their own copy of the parameters then drift apart, and no collective notices. The
same happens if they start with different parameters; and if all processes pass the same rows, one
batch counts several times. Processes compare both once.
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
from jaxcoll._plan.packs.leaves import argument_name, flatten_with_paths, reveal_key
from jaxcoll._plan.plan import THE_VALUE
from jaxcoll._plan.scope_names import names, parse_pack
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import Program, describe_array, describe_call, plans

VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that compilers read."""

# Flags that do not change numbers, so processes may differ in them.
_HARMLESS = re.compile(
    r"--?(xla_force_host_platform_device_count|xla_hlo_profile|xla_\w*dump\w*|xla_\w*timeout\w*"
    r"|xla_\w*cache_(dir|file|mode))\b"
)
# Instruction sets that a compiler can use; Linux also lists flags of the kernel and hypervisor.
_INSTRUCTIONS = re.compile(
    r"(sse|ssse|avx|amx|fma|bmi|sha|asimd|sve)\w*|v?aes|v?pclmulqdq|f16c|popcnt|adx|gfni|movbe|abm"
    r"|sme2?|bf16|i8mm|fp|fphp|crc32|fcma"
)
_KIND = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "uarch", "isa")

_LONGEST_LINE = 2000
"""Most characters of a line that other processes see; a large constant is one line."""


def fingerprint(
    name: str,
    device: jax.Device,
    options: str,
    devices: str,
    lowered: jax.stages.Lowered,
) -> list[str]:
    """List what processes must agree on before they run a program, most helpful lines first.

    `device` is one of this process's; `devices` lists the ids in the order of the mesh.
    """
    args, kwargs = lowered.args_info
    # Without source locations, which differ between machines.
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
        for path, leaf in flatten_with_paths(tree)[0]:
            yield f"{name}{path}: {describe_array(leaf)}"


def digest_lines(lines: Sequence[str]) -> str:
    """Digest a program's lines into 16 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def pack_lines(lines: Sequence[str]) -> str:
    """Compress lines into one text, about a tenth as long, to store and to send."""
    shown = [x if len(x) <= _LONGEST_LINE else f"{x[:200]} … {digest_lines([x])}" for x in lines]
    return base64.b85encode(zlib.compress(json.dumps(shown).encode(), 1)).decode()


def unpack_lines(text: str) -> list[str]:
    return json.loads(zlib.decompress(base64.b85decode(text)))


def find_difference(sides: Mapping[str, Sequence[str]]) -> str:
    """Find the first line in which two named texts differ, and write it of both."""
    pairs = itertools.zip_longest(*sides.values(), fillvalue="(nothing more)")
    lines = next((pair for pair in pairs if len(set(pair)) > 1), ("(no difference)",) * len(sides))
    return "\n".join(f"{name}: {line}" for name, line in zip(sides, lines, strict=True))


def environment(device: jax.Device) -> tuple[str, ...]:
    """List what a program's numbers depend on besides its text, for `device`."""
    version = " ".join(str(device.client.platform_version).split())
    kind = _processor() if device.platform == "cpu" else f"{device.device_kind}, {version}"
    return (
        *(f"{name} {_normalize_flags(os.environ.get(name, ''))}" for name in VARIABLES),
        f"processor {kind}",
        *(f"setting {name}={value}" for name, value in settings.numerics().items()),
    )


def _normalize_flags(text: str) -> str:
    """Sort flags by name, without those that do not change numbers."""
    if text and not text.lstrip().startswith("-") and Path(text).is_file():
        text = Path(text).read_text("utf8", "replace")  # as XLA does
    last = {flag.partition("=")[0]: flag for flag in text.split()}
    return " ".join(flag for _, flag in sorted(last.items()) if not _HARMLESS.match(flag)) or "-"


@functools.cache
def _processor() -> str:
    try:
        kind = parse_cpuinfo(Path("/proc/cpuinfo").read_text("utf8", "replace"))
    except OSError:  # not Linux
        kind = platform.processor()
    return f"{platform.machine()}, {kind}"


def parse_cpuinfo(cpuinfo: str) -> str:
    """Name the first processor in Linux's `cpuinfo`, as far as compilers distinguish them."""
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

    replicated: dict[str, str]  # of each replicated leaf, by its path
    # Of each leaf that is split by rows, this process's share. Leaves that repeat one number are
    # left out, because they may be equal by chance
    rows: dict[str, str]

    def short(self) -> tuple[str, str]:
        """Digest all replicated leaves into one text, and all rows into another ("" for none)."""
        # Without names: a step's parameters may have other names in another process
        values = self.replicated.values(), self.rows.values()
        whole, rows = (json.dumps([*digests]).encode() for digests in values)
        return digest_bytes(whole), digest_bytes(rows) if self.rows else ""


def compile_shared(
    lowered: jax.stages.Lowered, name: str, leaves: Sequence[Any], settings: str
) -> Program:
    """Compile a program that several processes run; they compare its text and `settings`."""
    meshes = (getattr(x.sharding, "mesh", None) for x in leaves)
    mesh = next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)), None)
    # Device ids in the program's order, which is that of the first array's mesh.
    devices = "" if mesh is None else " ".join(str(d.id) for d in mesh.devices.flat)
    here = filter(None, (x.sharding.addressable_devices for x in leaves))
    device = min(next(here, jax.local_devices()), key=lambda d: d.id)
    lines = fingerprint(f"`{name}`", device, settings, devices, lowered)
    return Program(
        lowered.compile(), describe_call(name, leaves), pack_lines(lines), digest_lines(lines)
    )


def describe_exchange(call: Call) -> Program:
    """Describe a call that only exchanges values, as `compile_shared` does a program."""
    lines = [f"exchange of {call.settings_text()}"]
    return Program(None, call.name, pack_lines(lines), digest_lines(lines), is_first=True)


def describe_collective(program: Program) -> str:
    """Describe the collective in which processes that arrived wait for the others."""
    if program.compiled is None:
        return ""
    return describe_first(program.compiled.as_text() or "", program.name)


def describe_first(text: str, name: str) -> str:
    """Describe the first collective of a compiled program; "" if it cannot be parsed."""
    # Imported when something went wrong, so that no other program loads the reader.
    from jaxcoll._hlo.hlo import read_hlo

    try:
        collectives = read_hlo(text).collectives
    except ValueError:
        return ""
    if not collectives:
        return f"{name} has no collective."
    first, n = collectives[0], len(collectives)
    which = f"first of {n} collectives" if n > 1 else "only collective"
    types = ", ".join(map(describe_array, first.operands))
    groups = ",".join(f"{{{','.join(map(str, group))}}}" for group in first.groups)
    paths = names(first.op_name)
    source = f", requested as {paths[0].rpartition('/')[2]}" if paths else ""
    packs = dict.fromkeys(filter(None, map(parse_pack, paths)))
    carrying = f", carrying {' and '.join(packs)}" * bool(packs)
    what = f"{first.kind} {types} among {{{groups}}}{source}{carrying}{_leaves(packs)}"
    return f"The {which} in {name} is {what}."


def _leaves(packs: Iterable[str]) -> str:
    """Describe the leaves that a collective carries, in packs or as gathered rows."""
    carried = []
    for pack in packs:
        name, _, part = pack.partition("/")
        if plan := plans.get(name):
            k = int(part.lstrip("packrows"))
            leaves = plan.carried(k) if part.startswith("pack") else plan.leaves[k].path
            carried.append(f"{pack} has {leaves or THE_VALUE}")
    return f" ({'; '.join(carried)})" if carried else ""


def digest_arguments(call: Call) -> FirstValues:
    """Digest this process's part of a call's arguments. Cost: one read of it."""
    replicated, rows = {}, {}
    arguments = tuple(call.args), dict(call.kwargs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        name, shards = argument_name(path, call.name_of), leaf.addressable_shards
        if leaf.is_fully_replicated:
            if call.compares and shards:
                replicated[name] = digest_bytes(view_bytes(shards[0].data))
        elif call.rows:
            parts = [view_bytes(shard.data) for shard in shards]
            if any(np.any(x != x[:1]) for x in parts):
                rows[name] = digest_bytes(b"".join(x.tobytes() for x in parts))
    return FirstValues(replicated, rows)


def view_bytes(x: Any) -> np.ndarray:
    """View an array as rows of bytes, uint8[size, itemsize]; of several copies here, the first."""
    # NaNs and zeros are compared bit by bit.
    x = reveal_key(x)
    first = x.addressable_data(0) if isinstance(x, jax.Array) else x
    flat = np.ascontiguousarray(first).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, -1) if flat.size else np.zeros((0, 1), np.uint8)


def digest_bytes(data: Any) -> str:
    """Digest an object's memory into 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
