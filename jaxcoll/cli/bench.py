"""`jaxcoll bench`: measure all-reduces of several sizes with several algorithms."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc
from jaxcoll._job.hosts import hosts_of_job
from jaxcoll._show.table import Table
from jaxcoll._show.units import scale
from jaxcoll.cli import flags
from jaxcoll.cli.flags import UNITS, parse_bytes, parse_options

EPILOG = """\
In a job that jc.initialize can join (jaxcoll launch, Slurm, Open MPI, ...), all processes take part
and process 0 prints. "per-leaf" is one lax.psum or lax.pmean per leaf; it is measured twice, and
the two differ by the noise of the run. ms: one call on the slowest process, the median of all
rounds; ÷: its ratio to per-leaf; busbw: GB/s as in nccl-tests; sent: bytes that leave one device,
as compiled; arrays: passed to collectives; temp: temporary memory; error: the norm of the deviation
from the exact result, relative to its norm; build: the time to trace and compile.
"""

BASELINE = "per-leaf"
AGAIN = " again"
BUILDS, WARM = 2, 2
SHORTEST, MOST_CALLS = 0.01, 100
"""A turn repeats its call until it takes this many seconds, or has made this many calls."""

_BLOCK = 65_537  # the period of the elements in each array; no pack or shard is a multiple of it
T = TypeVar("T")


def parse_sizes(text: str) -> dict[str, int]:
    """Parse "size", "first:last" or "first:last:factor" (default 2) into bytes by name."""
    parts = re.fullmatch(r"([^:]+)(?::([^:]+))?(?::(\d+))?", text)
    low, high = (parse_bytes(parts[1]), parse_bytes(parts[2] or parts[1])) if parts else (1, 0)
    factor = int(parts[3] or 2) if parts else 0
    if high < low or factor < 2:
        raise ValueError(
            "--sizes: expected SIZE, FIRST:LAST or FIRST:LAST:FACTOR, in increasing order and with "
            f"an integer factor of at least 2, as in 1KiB:256MiB; got {text!r}."
        )
    # In floating point the logarithm of 1000 to the base 10 is less than 3.
    count = math.floor(math.log(high / low, factor) + 1e-9) + 1
    return {spell_size(size): size for size in (low * factor**k for k in range(count))}


def spell_size(nbytes: int) -> str:
    """Format a size in the largest unit that needs at most one decimal: "1.5KiB"."""
    units = reversed(UNITS.items())
    unit, size = next((u, s) for u, s in units if not (nbytes < s or 10 * nbytes % s))
    return f"{nbytes / size:g}{unit}"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median over rounds, and its 95 % bootstrap interval (2,000 resamples)."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the median of one or more values, one per round."""
    rounds = np.asarray(values, float)
    # The median, not the mean: a disturbed round may be off by any factor.
    picks = np.random.default_rng(0).integers(0, len(rounds), (2000, len(rounds)))
    low, high = np.percentile(np.median(rounds[picks], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(rounds)), float(low), float(high))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Estimate the ratio of two measurements, round by round."""
    return estimate([a / b for a, b in zip(numerator, denominator, strict=True)])


def interleave(calls: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Make every call once per round, in reverse order every other round; yield results by name."""
    names = list(calls)
    for k in range(rounds):
        # Reversing cancels a drift of the machine within rounds over two of them.
        order = names if k % 2 == 0 else names[::-1]
        yield {name: calls[name]() for name in order}


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Make a mesh with one axis, or with two if several hosts or processes have several devices."""
    grid, axes = np.array(devices, dtype=object), ("data",)
    owners = [device.process_index for device in devices]
    hosts = [hosts_of_job()[owner] for owner in owners] if len(set(owners)) > 1 else []
    # Hierarchical algorithms need an axis within a host or process, and one between them.
    for name, islands in (("host", hosts), ("process", owners)):
        groups = len(set(islands))
        is_even = islands == sorted(islands) and len(set(Counter(islands).values())) == 1
        if 1 < groups < len(devices) and is_even:
            grid, axes = grid.reshape(groups, -1), (name, "device")
            break
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def make_program(algorithm: str, mesh: Mesh, reduce_op: str) -> Any:
    """Return the jitted reduction of a list of arrays with a leading dimension of replicas."""
    axes, plain = mesh.axis_names, lax.pmean if reduce_op == "mean" else lax.psum
    algorithm = algorithm.removesuffix(AGAIN)

    def reduce(arrays: list[jax.Array]) -> list[jax.Array]:
        leaves = [x[0] for x in arrays]
        if algorithm == BASELINE:
            return [plain(x, axes) for x in leaves]
        return jc.all_reduce(reduce_op, leaves, axes, options=parse_options(algorithm))

    rows, copies = PartitionSpec(axes), PartitionSpec()
    return jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=rows, out_specs=copies))


def measure(
    name: str,
    leaves: Sequence[jax.ShapeDtypeStruct],
    algorithms: Sequence[str],
    mesh: Mesh,
    *,
    reduce_op: str,
    rounds: int,
) -> list[dict[str, Any]]:
    """Measure the reduction of `leaves` with each algorithm; all processes return equal lines."""
    n, nbytes = mesh.size, sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    numbers = np.random.default_rng(0).standard_normal((n, _BLOCK))
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def place(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def row(index: Any) -> np.ndarray:
            return np.resize(numbers[index[0].start or 0], leaf.shape)[None].astype(leaf.dtype)

        return jax.make_array_from_callback((n, *leaf.shape), rows, row)

    arrays, ones = [place(leaf) for leaf in leaves], place(jax.ShapeDtypeStruct((), np.int32))
    # The sum of one number is a barrier: it returns once all processes have entered it.
    barrier = make_program(BASELINE, mesh, "sum")
    compiled: dict[str, Any] = {}
    built: dict[str, list[float]] = {a: [] for a in algorithms}
    for _ in range(BUILDS):
        for a in algorithms:
            start = time.perf_counter()
            compiled[a] = make_program(a, mesh, reduce_op).lower(arrays).compile()
            built[a].append(time.perf_counter() - start)

    def turn(a: str, calls: int) -> float:
        jax.block_until_ready(barrier([ones]))
        start = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(compiled[a](arrays))
        return (time.perf_counter() - start) / calls

    once = [_gather_slowest([turn(a, 1) for a in algorithms]) for _ in range(WARM)][-1]
    calls = {
        a: min(MOST_CALLS, math.ceil(SHORTEST / s)) for a, s in zip(algorithms, once, strict=True)
    }
    turns = {a: functools.partial(turn, a, calls[a]) for a in algorithms}
    timed = [[r[a] for a in algorithms] for r in interleave(turns, rounds)]
    seconds = dict(zip(algorithms, _gather_slowest(timed).T.tolist(), strict=True))
    exact = numbers.sum(0) / (n if reduce_op == "mean" else 1)
    lines = []
    for a in algorithms:
        report = jc.inspect(compiled[a].as_text())
        errors = [
            _deviation(np.asarray(x.addressable_data(0), float), exact) for x in compiled[a](arrays)
        ]
        algbw = nbytes / float(np.median(seconds[a])) / 1e9
        lines.append({
            "workload": name, "algorithm": a, "bytes": nbytes, "leaves": len(leaves),
            "devices": n, "processes": jax.process_count(),
            "device": mesh.devices.flat[0].device_kind, "jax": jax.__version__,
            "reduce_op": reduce_op, "rounds": rounds, "calls": calls[a],
            "seconds": dataclasses.asdict(estimate(seconds[a])),
            "ratio": dataclasses.asdict(ratio(seconds[a], seconds[BASELINE])),
            "algbw": algbw, "busbw": algbw * 2 * (n - 1) / n,
            "wire_bytes": report.wire_bytes, "error": max(errors, default=0.0),
            "operands": sum(c.turns * len(c.operands) for c in report.collectives),
            "temporary_bytes": int(compiled[a].memory_analysis().temp_size_in_bytes),
            "compile_seconds": min(built[a]), "compile_ratio": min(built[a]) / min(built[BASELINE]),
        })  # fmt: skip
    return lines


def _deviation(value: Any, exact: np.ndarray) -> float:
    x, exact = np.asarray(value, float), np.resize(exact, value.shape)
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact)) if x.size else 0.0


def _gather_slowest(values: Any) -> np.ndarray:
    """Return the maximum of each value over all processes."""
    mine = np.asarray(values)
    return np.max(np.reshape(process_allgather(mine), (-1, *mine.shape)), axis=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    flags.add_tree(parser, action="append", default=[])
    add = parser.add_argument
    text = "one array of each size: 1MiB, 1KiB:256MiB (each doubled), 1KiB:1GiB:4 (times 4)"
    add("--sizes", metavar="RANGE", help=text)
    text = (
        "comma-separated: auto, native, ring, halving_doubling, shuffle, or two of them as "
        "inner/outer; add +bf16, +int8 or +int4 for the wire format, @4MiB or @all for the largest "
        "pack (default: auto)"
    )
    add("--algorithms", default="auto", metavar="LIST", help=text)
    flags.add_devices(parser)
    text = "start N CPU processes on this machine, over Gloo, with --devices each (default: 1)"
    add("--processes", type=flags.minimum(2), metavar="N", help=text)
    add("--rounds", type=flags.minimum(1), default=20, help="timed rounds (default: 20)")
    text = "also write one JSON line per result to FILE; - prints these only"
    add("--json", metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and return the exit status."""
    names = list(dict.fromkeys(name.strip() for name in args.algorithms.split(",")))
    for name in names:
        if name.removesuffix(AGAIN) != BASELINE:
            parse_options(name)
    trees = args.tree or ([] if args.sizes else ["resnet50"])
    workloads = [(name, list(flags.read_tree(name, args.dtype).values())) for name in trees]
    for name, size in parse_sizes(args.sizes).items() if args.sizes else ():
        dtype = flags.parse_dtype(args.dtype)
        if size % dtype.itemsize:
            raise ValueError(f"--sizes: {name} is not a whole number of {dtype} elements.")
        workloads.append((name, [jax.ShapeDtypeStruct((size // dtype.itemsize,), dtype)]))
    work = functools.partial(_measure_all, workloads, [BASELINE, BASELINE + AGAIN, *names], args)
    if args.processes and args.platform not in (None, "cpu"):
        raise ValueError("--processes starts CPU processes; leave --platform out.")
    devices = args.devices or 1
    lines = jc.launch(work, n, devices_per_process=devices)[0] if (n := args.processes) else work()
    if jax.process_index() == 0:
        flags.write_json(args.json, lines, as_lines=True)
        if args.json != "-":
            print(format_lines(lines))
    return 0


def _measure_all(
    workloads: Sequence[tuple[str, Sequence[jax.ShapeDtypeStruct]]],
    names: Sequence[str],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    mesh = make_mesh(flags.choose_devices(args.platform, args.devices))
    lines = []
    for name, leaves in workloads:
        if jax.process_index() == 0 and sys.stderr.isatty():
            print(f"measuring {name} …", file=sys.stderr, flush=True)
        lines += measure(name, leaves, names, mesh, reduce_op=args.reduce_op, rounds=args.rounds)
    return lines


def format_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    """Format the lines as a table, below a line on the devices and versions."""
    columns = ("", "algorithm", "ms", f"÷ {BASELINE} [95 %]", "busbw", "sent", "arrays", "temp",
               "error", "build s", "÷")  # fmt: skip
    rows = [
        [
            x["workload"], x["algorithm"], f"{x['seconds']['median'] * 1e3:.3g}",
            str(Estimate(**x["ratio"])), f"{x['busbw']:.3g}", f"{scale(x['wire_bytes'])}B",
            str(x["operands"]), f"{scale(x['temporary_bytes'])}B", f"{x['error']:.1e}",
            f"{x['compile_seconds']:.2f}", f"{x['compile_ratio']:.2f}",
        ]
        for x in lines
    ]  # fmt: skip
    first = lines[0]
    head = (
        f"{first['reduce_op']} over {first['devices']} devices ({first['device']}) of "
        f"{first['processes']} process{'es' * (first['processes'] > 1)}, JAX {first['jax']}, "
        f"medians of {first['rounds']} rounds"
    )
    return f"{head}\n{Table(columns, '<<>>>>>>>>>', rows).text()}"
