"""Reads requested programs: every collective of a StableHLO text, as JAX lowered it."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from jaxcoll._observe.parse.calls import Call, Matmul, carried_out
from jaxcoll._observe.parse.collective import KINDS, Collective, Groups, Operand
from jaxcoll._observe.parse.replica_groups import (
    as_groups,
    device_groups,
    group_size,
    mesh_groups,
    numbers,
)
from jaxcoll._observe.parse.source import Locations

_COMMUNICATES = re.compile(
    r"\b(stablehlo\.|sdy\.|custom_call @(?=ragged))"
    r"((?:all_|collective_|reduce_scatter|ragged_all)\w*|send\b)"
)
_FUNCTION = re.compile(r"func\.func (?:(?:public|private|nested) )?@([\w.$\-]+|\"[^\"]*\")")
_CALL = re.compile(r"\bcall @([\w.$\-]+|\"[^\"]*\")")
_RESULT = re.compile(r"(%[\w$.\-]+)")  # %3
_SIGNATURE = re.compile(r".* : \((.*)\) -> ")
_TENSOR = re.compile(r"tensor<((?:[^<>]|<[^<>]*>)*)>")
_SHAPED = re.compile(r"((?:\d+x)*)([a-zA-Z]\S*)")  # 8x128xf32
_DENSE = re.compile(r"(?:replica_groups|source_target_pairs) = dense<(.*?)> : tensor<(\d+)x(\d+)x")
_MESH_AXES = re.compile(
    r"replica_groups = #stablehlo\.replica_group_mesh_axes<mesh = @(\w+), (.*?)\]>"
)
_AXIS_REF = re.compile(r"axis_ref<name = \"([^\"]*)\"(?:.*?pre_size = (\d+), size = (\d+)>)?>")
_MESH = re.compile(r"sdy\.mesh @(\w+) = <\[(.*?)\](?:, device_ids=\[(.*?)\])?>")
_MESH_AXIS = re.compile(r"\"([^\"]*)\"=(\d+)")  # "data"=8
_DTYPES = {"i1": "pred", "complex<f32>": "c64", "complex<f64>": "c128"}


def read_stablehlo(text: str) -> tuple[Collective, ...]:
    """The collectives of what `lowered.as_text()` returns, before any compiler has seen it.

    Law: as for `read_hlo`, nothing is skipped in silence. A function that is called twice
    counts twice. How often a loop turns is not looked into: `trips` is None inside of one.
    Kinds and types are spelled as in HLO; `debug_info=True` adds the lines of Python.

    Raises:
      ValueError: the text is not StableHLO, is cut off, or uses a notation not known here.
    """
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("module")), None)
    if header is None:
        raise ValueError(
            "expected StableHLO text, with a line that begins with 'module' "
            f"(`lowered.as_text()`); got {text[:60]!r}. What `compiled.as_text()` returns is "
            "HLO: use `read_hlo`."
        )
    reader = _Reader(header, Locations(lines))
    for line in lines:
        reader.read(line.strip())
    if reader.open or "main" not in reader.bodies:
        where = f"inside {reader.open[-1].body!r}" if reader.open else "before the function 'main'"
        raise ValueError(f"the StableHLO text looks cut off: it ends {where}.")
    events = carried_out(reader.bodies, "main", {})
    return tuple(event for event in events if isinstance(event, Collective))


@dataclasses.dataclass(frozen=True)
class _Region:
    """A stretch of lines between braces."""

    body: str  # where what it contains belongs; loops and branches have bodies of their own
    site: str = ""  # the operation that carries the region out, if it is a loop or a conditional
    branch: int | None = None  # which branch of `site` it is
    # The line of the collective whose sum it spells out; the types follow after
    collective: str = ""


class _Reader:
    """Goes through the lines once; MLIR opens regions at line ends, closes them at beginnings."""

    def __init__(self, header: str, locations: Locations) -> None:
        self._locations = locations
        self.bodies: dict[str, list[Collective | Call | Matmul]] = {}
        self.open: list[_Region] = []
        self._meshes: dict[str, tuple[dict[str, int], np.ndarray | None]] = {}
        self._replicas, self._partitions = (
            int(found[1]) if (found := re.search(rf"mhlo\.{count} = (\d+)", header)) else 1
            for count in ("num_replicas", "num_partitions")
        )

    def read(self, line: str) -> None:
        """Take in one line, without the blanks around it."""
        closed = self.open.pop() if line.startswith("}") and self.open else None
        if closed and closed.collective:
            self._add(closed.body, closed.collective, types=line)
        if line.endswith("{"):
            self.open.append(self._region(line, closed))
        elif mesh := _MESH.match(line):
            sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh[2])}
            self._meshes[mesh[1]] = (sizes, np.array(numbers(mesh[3])) if mesh[3] else None)
        elif self.open and not closed:
            body = self.open[-1].body
            if _COMMUNICATES.search(line):
                self._add(body, line, types=line)
            elif call := _CALL.search(line):
                self.bodies[body].append(Call(line[:40], call[1]))

    def _region(self, line: str, closed: _Region | None) -> _Region:
        """The region that `line` opens, perhaps right after another of the same operation."""
        body = self.open[-1].body if self.open else ""
        if function := _FUNCTION.search(line):
            self.bodies[function[1]] = []
            return _Region(function[1])
        if closed and closed.site:
            # The next branch; or the body of a loop, which goes with its condition.
            branch = closed.branch
            return closed if branch is None else self._called(body, closed.site, branch + 1)
        if "stablehlo.case" in line or "stablehlo.if" in line:
            return self._called(body, f"case {len(self.bodies)}", branch=0)
        if line == "cond {" or "stablehlo.while" in line:
            return self._called(body, f"while {len(self.bodies)}", branch=None)
        return _Region(body, collective=line if _COMMUNICATES.search(line) else "")

    def _called(self, caller: str, site: str, branch: int | None) -> _Region:
        """A region with a body of its own, called from the one it stands in."""
        body = f"{caller}, {site}" + ("" if branch is None else f", branch {branch}")
        self.bodies[body] = []
        trips = None if branch is None else 1
        call = Call(site, body, trips=trips, branch=branch, is_loop=branch is None)
        self.bodies[caller].append(call)
        return _Region(body, site, branch)

    def _add(self, body: str, line: str, types: str) -> None:
        """Add the collective that begins on `line`; `types` is the line with its signature."""
        found = _COMMUNICATES.search(line)
        dialect, kind = (found[1], found[2].replace("_", "-")) if found else ("", "")
        if kind == "send" and "is_host_transfer = true" in line:
            return  # to the device's own host, as callbacks do
        if kind not in KINDS or dialect == "sdy.":
            raise ValueError(
                f"`{dialect}{kind}` moves data between devices in a way that is not counted here; "
                f"known are {', '.join(KINDS)}, as StableHLO has them."
            )
        groups = self._groups(kind, line)
        result = _RESULT.match(line)
        operands = _operands(types)
        op_name, source = self._locations.of(types)
        self.bodies[body].append(
            Collective(
                kind=kind,
                name=result[1] if result else "",
                operands=operands[:1] if kind == "ragged-all-to-all" else operands,
                group_size=group_size(kind, groups),
                groups=groups,
                computation=body,
                op_name=op_name,
                source=source,
            )
        )

    def _groups(self, kind: str, line: str) -> Groups:
        found = _MESH_AXES.search(line)
        if found and found[1] in self._meshes:
            sizes, devices = self._meshes[found[1]]
            axes = [
                (name, int(pre or 1), int(size) if size else None)
                for name, pre, size in _AXIS_REF.findall(found[2])
            ]
            listed = mesh_groups(sizes, devices, axes)
        elif found := _DENSE.search(line):
            listed = _dense(found[1], int(found[2]), int(found[3]))
        else:
            raise ValueError(
                "expected replica groups as `dense<...>` or as axes of a mesh that is defined; got "
                f"{line[:200]!r}: the notation is newer than this reader, or the text is damaged."
            )
        return device_groups(
            listed,
            kind,
            has_channel="channel_handle" in line or "channel_id" in line,
            has_global_ids="use_global_device_ids" in line,
            replicas=self._replicas,
            partitions=self._partitions,
        )


def _dense(text: str, rows: int, columns: int) -> Groups:
    """A matrix of device numbers, as MLIR writes it: listed, or one for all, or in hex."""
    if text.startswith('"0x'):
        flat = np.frombuffer(bytes.fromhex(text[3:-1]), dtype="<i8")
    else:
        flat = np.array(numbers(re.sub(r"[\[\]\s]", "", text)), dtype=np.int64)
    if flat.size == 1:
        flat = np.broadcast_to(flat, rows * columns)
    # A -1 fills up the row of a group that is smaller than the others.
    return tuple(tuple(d for d in row if d >= 0) for row in as_groups(flat.reshape(rows, columns)))


def _operands(types: str) -> tuple[Operand, ...]:
    """The arrays on the left of the signature that `types` ends with."""
    signature = _SIGNATURE.match(types)
    if signature is None:
        raise ValueError(
            f"expected a signature, `: (tensor<...>) -> ...`; got {types[:80]!r}: the text looks "
            "cut off or damaged."
        )
    return tuple(map(_operand, _TENSOR.findall(signature[1])))


def _operand(tensor: str) -> Operand:
    found = _SHAPED.fullmatch(tensor)
    if found is None:
        raise ValueError(
            f"expected a tensor of known shape, as in tensor<2x3xf32>; got tensor<{tensor}>: "
            "collectives of unknown shape are not counted here."
        )
    dtype = found[2]
    # What MLIR calls i8, ui8 and f8E4M3FN is s8, u8 and f8e4m3fn in HLO.
    spelled = re.sub(r"^(u?)i(?=\d)", lambda m: m[1] or "s", dtype.lower())
    return Operand(_DTYPES.get(dtype, spelled), numbers(found[1].replace("x", ",")))
