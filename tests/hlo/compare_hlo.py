"""Compares what read_hlo reads in a text with the HLO proto that jaxlib's parser makes of it.

    python tests/hlo/compare_hlo.py FOLDER              texts of other compilers: all *.hlo
    python tests/hlo/compare_hlo.py cpu:8 [NAME ...]    programs of hlo_programs.py, compiled
    python tests/hlo/compare_hlo.py gpu:1x1x8           with jax-cuda13-pjrt; no GPU is needed
    python tests/hlo/compare_hlo.py v5e:2x4             with libtpu; v5p:2x2x2, v6e, tpu7x:2x2x1

Each collective's kind, runs, bytes and groups, runs if the proto says them; prints what differs, and exits with 1 if anything
is refused, or differs without a note of the report. A text is read in all layouts that XLA prints, and in others that
its parser accepts. `count` walks the proto: it knows nothing of `jaxcoll._hlo`.
"""
# ruff: noqa: E402

import os
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "report" / "golden"), str(HERE.parents[1])]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import numpy as np
from hlo_programs import PROGRAMS
from jaxlib import _hlo

from jaxcoll._compat.running import read_field, read_fields
from jaxcoll._hlo.hlo import read_hlo

KINDS = (
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast"
).split()
BITS = [
    0, 8, 8, 16, 32, 64, 8, 16, 32, 64, 16, 32, 64, 0, 0, 64, 16, 0, 128, 8, 8, 4, 4, 8, 8, 8, 2, 2,
    8, 8, 1, 1, 4, 8,
]  # fmt: skip
# by XLA's number of the element type
INSTRUCTIONS = {1: "name", 2: "opcode", 28: "target", 43: "config"}


def fields(message):
    """The fields of a protobuf message by their numbers."""
    found = {}
    for number, value in read_fields(message):
        found.setdefault(number, []).append(value)
    return found


def numbers(values):
    """Repeated integers, packed or not."""
    found = []
    for value in values:
        packed = [] if isinstance(value, int) else bytes(value)
        found += [value] if isinstance(value, int) else []
        while packed:  # read as if each was a field of its own
            _, number, end = read_field(b"\x08" + packed, 0)
            found, packed = [*found, number], packed[end - 1 :]
    return found


def nbytes(shape):
    """Bytes of the arrays of a ShapeProto."""
    shape = fields(shape)
    if inner := shape.get(4):
        return sum(map(nbytes, inner))
    (kind,) = shape[2]
    size = int(np.prod(numbers(shape.get(3, ())), dtype=np.int64))
    return -(-size * BITS[kind] // 8)


class Instruction:
    def __init__(self, message):
        self.fields = found = fields(message)
        for number, name in INSTRUCTIONS.items():
            setattr(self, name, found.get(number, [b""])[0].decode("utf8", "replace"))
        self.id, self.shape = found.get(35, [0])[0], found[3][0]
        self.operands, self.calls = numbers(found.get(36, ())), numbers(found.get(38, ()))
        extra = fields(found[68][0]).get(1, ()) if 68 in found else ()
        pairs = (fields(each) for each in extra)
        self.extra = {x[1][0].decode(): x.get(2, [b""])[0].decode() for x in pairs}

    def groups(self, replicas, partitions):
        found = self.fields
        if 52 in found:
            pairs = (fields(pair) for pair in found[52])
            return [(p.get(1, [0])[0], p.get(2, [0])[0]) for p in pairs]
        listed = [numbers(fields(group).get(1, ())) for group in found.get(49, ())]
        if not listed and 87 in found:
            chosen = fields(found[87][0])
            listed = [numbers(fields(group).get(1, ())) for group in chosen.get(1, ())]
        iota = found.get(92) or (87 in found and fields(found[87][0]).get(2)) or ()
        if iota:
            x = fields(iota[0])
            grid = np.arange(x[1][0] * x[2][0]).reshape(numbers(x[3]))
            listed = grid.transpose(numbers(x[4])).reshape(x[1][0], x[2][0]).tolist()
        if 93 in found:
            listed = mesh_groups(fields(found[93][0]))
        if found.get(71, [0])[0]:
            return listed or [range(replicas * partitions)]
        if 26 in found and self.opcode.startswith(("all-reduce", "all-gather", "reduce-scatter")):
            groups = listed or [range(replicas)]
            return [[r * partitions + p for r in g for p in range(partitions)] for g in groups]
        return listed or [range(partitions if 26 in found else replicas)]


def mesh_groups(message):
    """The devices that differ only along some axes of a mesh, or along factors of these."""
    mesh = fields(message[1][0])
    sizes = [fields(axis)[2][0] for axis in mesh[1]]
    devices = np.array(numbers(mesh.get(2, ())) or np.arange(np.prod(sizes)))
    chosen = []
    for axis in map(fields, message[2]):
        at = axis.get(1, [0])[0]
        before, size = 1, sizes[at]
        if 2 in axis:
            part = fields(axis[2][0])
            before, size = part.get(1, [1])[0], part[2][0]
        chosen.append((at, before, size))
    groups = {}
    for where, device in zip(np.ndindex(*sizes), devices.reshape(-1), strict=True):
        inner, outer = [], list(where)
        for at, before, size in chosen:
            after = sizes[at] // (before * size)
            digit = where[at] // after % size
            inner.append(digit)
            outer[at] -= digit * after
        groups.setdefault(tuple(outer), {})[tuple(inner)] = int(device)
    return [[group[k] for k in sorted(group)] for group in groups.values()]


class Proto:
    """The computations of an HloModuleProto."""

    def __init__(self, message, replicas, partitions):
        module = fields(message)
        self.devices, self.entry = (replicas, partitions), module.get(6, [0])[0]
        self.inside = {}
        for each in map(fields, module[3]):
            number = each.get(5, [0])[0]
            self.inside[number] = {x.id: x for x in map(Instruction, each[2])}
        chains = [x for c in self.inside.values() for x in c.values() if "chain_id" in x.extra]
        self.chained = {x.id for x in chains}
        self.started = {
            x.id
            for inside in self.inside.values()
            for call in inside.values()
            if call.target == "AsyncCollectiveStart"
            for x in map(inside.get, call.operands)
            if x in chains
        }

    def count(self, number=None, runs=1, scatters=False):
        """Counter of (kind, runs, bytes, groups); runs are None in a loop of unknown length."""
        found, inside = Counter(), self.inside[self.entry if number is None else number]
        for x in inside.values():
            kind = x.opcode.removesuffix("-start")
            if kind == "send" and "_xla_send_recv_source_target_pairs" in x.extra:
                text = x.extra["_xla_send_recv_source_target_pairs"]
                groups = [tuple(p) for p in eval(text.replace("{", "[").replace("}", "]"))]
                found[
                    "collective-permute", runs, nbytes(inside[x.operands[0]].shape), key(groups)
                ] += 1
            elif kind in KINDS and not (x.id in self.chained and x.id not in self.started):
                sent = x.operands[:1] if kind == "ragged-all-to-all" else x.operands
                size = sum(nbytes(inside[operand].shape) for operand in sent)
                name = "reduce-scatter" if scatters and kind == "all-reduce" else kind
                found[name, runs, size, key(x.groups(*self.devices))] += 1
            elif kind in ("fusion", "call", "conditional", "async", "custom-call"):
                if not x.opcode.endswith(("-done", "-update")):
                    for called in x.calls:
                        is_scattered = scatters or 'AllReduceScatterFusion"' in x.config
                        found += self.count(called, runs, is_scattered)
            elif kind == "while":
                body, condition = x.calls
                turns = self.turns(x)
                for called, more in ((body, 0), (condition, 1)):
                    all_runs = None if None in (turns, runs) else runs * (turns + more)
                    found += self.count(called, all_runs)
        return found

    @staticmethod
    def turns(loop):
        found = loop.config.partition("known_trip_count")[2].split('"')
        return int(found[4]) if len(found) > 4 else None


def key(groups):
    return frozenset(tuple(group) for group in groups)


def read(text):
    program = read_hlo(text)
    counted = Counter((c.kind, c.trips, c.nbytes, key(c.groups)) for c in program.collectives)
    return counted, (*program.unread, *program.unbounded)


def without_turns(counted, unknown):
    """Only a proof tells how often what is `unknown` to the proto runs; test_golden.py has these."""
    found = Counter()
    for (kind, runs, *rest), count in counted.items():
        found[kind, None if (kind, *rest) in unknown else runs, *rest] += count
    return found


def layouts(text, proto):
    """The text, and others that mean the same to XLA's parser."""
    yield "as it is", text
    module = _hlo.HloModule.from_serialized_hlo_module_proto(proto)
    yield "canonical", module.to_string(_hlo.HloPrintOptions.canonical())
    yield "short", module.to_string(_hlo.HloPrintOptions.short_parsable())
    yield "left margin", "\n".join(line.lstrip() for line in text.splitlines())
    yield "operands on lines of their own", text.replace("), ", ")\n, ").replace(", %", ",\n  %")
    yield "carriage returns", text.replace("\n", "\r\n")
    yield "without a percent", text.replace("%", "")


def compare(name, text, proto=None):
    """Print what differs; True if nothing does that has no note."""
    replicas, partitions = (
        int(text.split(f"{x}=")[1].split(",")[0].split()[0])
        if f"{x}=" in text.splitlines()[0]
        else 1
        for x in ("replica_count", "num_partitions")
    )
    proto = proto or _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    counted, right = Proto(proto, replicas, partitions).count(), True
    unknown = {(kind, *rest) for kind, runs, *rest in counted if runs is None}
    expected = without_turns(counted, unknown)
    for layout, written in layouts(text, proto):
        try:
            found, notes = read(written)
            found = without_turns(found, unknown)
        except ValueError as error:
            found, notes = Counter(), []
            print(f"{name}, {layout}: refused: {error}")
        if found != expected:
            print(f"{name}, {layout}: {'named' if notes else 'WRONG'}")
            for sign, some in (("-", expected - found), ("+", found - expected)):
                for (kind, runs, size, groups), count in some.items():
                    print(
                        f"  {sign} {count} × {kind}, runs {runs}, {size} bytes, {sorted(groups)[:4]}"
                    )
            print(*(f"  note: {note}" for note in notes[:4]), sep="\n")
            right &= bool(notes)
    return right


def compile_text(name, line):
    """The text and the proto of a program for a line of devices."""
    program, arguments = PROGRAMS[name](line)
    compiled = program.lower(*arguments).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    return compiled.as_text(), module.as_serialized_hlo_module_proto()


def main(where, *names):
    import make  # it sets flags that JAX reads with its first device

    results = []
    if Path(where).is_dir():
        for file in sorted(Path(where).glob("*.hlo")):
            proto = file.with_suffix(".pb")  # of the executable itself, if there is one
            proto = proto.read_bytes() if proto.exists() else None
            results.append(compare(file.stem, file.read_text(), proto))
    else:
        line = np.array(make.devices(where), dtype=object)
        for name in names or PROGRAMS:
            try:
                compiled = compile_text(name, line)
            except Exception as error:  # not for this backend
                print(f"{name}: not compiled: {str(error).splitlines()[0][:90]}")
                continue
            results.append(compare(name, *compiled))
    print(f"{where}: {sum(results)} of {len(results)} programs are right or say what is missing")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
