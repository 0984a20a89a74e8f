"""Measure jaxcoll on one GPU, in one run of less than nine minutes.

    python -m benchmarks.on_one_gpu --json one_gpu.json

packing: jaxcoll's packs, compared with a copy of each leaf and of one array of the same size.
codecs: encoding and decoding as bf16, int8 and int4, compared with the same copy. step: a call of
`jc.data_parallel`, compared with `jax.jit` of the same step. programs: programs compiled by a
client of eight GPUs (seven are mocked by JAX), compared with those compiled ahead of time for such
a cluster. Every baseline is measured twice. A section that cannot be measured has a reason instead
of figures. The file says where it ran; without a GPU it runs on the CPU, and its figures say
nothing about GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcoll as jc
from benchmarks.all_reduce import parser_of
from jaxcoll._report.shown_plan import Plan
from jaxcoll.cli import flags
from jaxcoll.cli.bench import Estimate, estimate, interleave, ratio
from jaxcoll.compression import Bf16, Int4, Int8

ROOT = Path(__file__).parents[1]
SECTIONS = ("packing", "codecs", "step", "programs")
AGAIN = " again"
MEASURING, COMPILING = 45.0, 240.0
"""Limits in seconds for the rounds of a section, and for all compiling subprocesses."""
MOST_ROUNDS, FEWEST_ROUNDS = 200, 5
LEAVES = (10, 100, 1000)
FORMATS = {"bf16": Bf16(), "int8": Int8(), "int4": Int4()}
PROGRAMS = (
    *("benchmarks.on_one_gpu:one_pack", "benchmarks.on_one_gpu:unpacked"),
    "transformer:example",  # of docs/examples
)
MOCKED = "1x8x1"
"""A partition of eight hosts with one GPU each: a host must have as many GPUs as this one."""
AHEAD = ("h100:8x1", "h100:8")


def packing(budget: float, tree: str = "resnet50") -> dict[str, Any]:
    """Compare copying a tree's gradients into packs and back with plain copies.

    An optimization barrier stands for the collective in between, so that nothing fuses across it.
    A plain copy reads and writes the tree once, packing and unpacking twice.
    """
    from jaxcoll._collectives.pipeline import pack, unpack

    shapes = list(flags.read_tree(tree, "float32").values())
    nbytes = sum(4 * math.prod(x.shape) for x in shapes)
    # Plan for eight devices from shapes alone, because one device has nothing to send.
    plans = {
        "our packs": jc.plan(shapes, topology="h100:8", options=_packs_of(32 << 20)),
        "one pack": jc.plan(shapes, topology="h100:8", options=_packs_of(1 << 60)),
    }

    def packed(leaves: list[jax.Array], plan: Plan) -> Any:
        packs = lax.optimization_barrier(pack(leaves, plan.packs, plan.leaves))
        return unpack([x + 1 for x in packs], plan.packs, plan.leaves)

    leaves = [jnp.full(x.shape, 0.5, x.dtype) for x in shapes]
    whole = jnp.full(nbytes // 4, 0.5, jnp.float32)
    each = jax.jit(lambda xs: [x + 1 for x in xs])
    calls = {
        "one copy": functools.partial(jax.jit(lambda x: x + 1), whole),
        "a copy a leaf": functools.partial(each, leaves),
    }
    for name, plan in plans.items():
        calls[name] = functools.partial(jax.jit(functools.partial(packed, plan=plan)), leaves)
    times = timed(calls, "one copy", budget)
    for name, found in times.items():
        passes = 2 if name in plans else 1
        found["GB/s"] = 2 * passes * nbytes / found["seconds"]["median"] / 1e9
    counts = {name: len(plan.packs) for name, plan in plans.items()}
    return {"tree": tree, "leaves": len(shapes), "bytes": nbytes, "packs": counts, "times": times}


def _packs_of(nbytes: int) -> jc.CommunicationOptions:
    return jc.CommunicationOptions(bytes_per_pack=nbytes)


def codecs(budget: float, nbytes: int = 256 << 20) -> dict[str, Any]:
    """Compare encoding and decoding one float32 array in each wire format with a copy of it."""
    numbers = jax.random.normal(jax.random.key(0), (nbytes // 4,), jnp.float32)
    calls: dict[str, Callable[[], Any]] = {
        "one copy": functools.partial(jax.jit(lambda x: x + 1), numbers)
    }
    traffic = {"one copy": 2 * nbytes}
    for name, wire_format in FORMATS.items():
        encode, decode = codec_of(name)
        blocks = numbers.reshape(1, -1, wire_format.block)
        codes = jax.block_until_ready(jax.jit(encode)(blocks))
        calls[f"encode {name}"] = functools.partial(jax.jit(encode), blocks)
        calls[f"decode {name}"] = functools.partial(jax.jit(decode), codes)
        traffic |= dict.fromkeys((f"encode {name}", f"decode {name}"), nbytes + codes.nbytes)
    times = timed(calls, "one copy", budget)
    for name, found in times.items():
        # The fewest bytes that must be read and written; more is the format's overhead.
        moved = traffic[name.removesuffix(AGAIN)]
        found |= {"bytes": moved, "GB/s": moved / found["seconds"]["median"] / 1e9}
    return {"bytes": nbytes, "times": times}


def codec_of(name: str) -> tuple[Callable[..., Any], ...]:
    """Return a wire format's encode, of float32 (..., blocks, block), and decode functions."""
    wire_format = FORMATS[name]
    arithmetic = (wire_format.encode, wire_format.decode)
    return tuple(functools.partial(f, feedback=False) for f in arithmetic)


def step(budget: float, counts: Sequence[int] = LEAVES) -> dict[str, Any]:
    """Measure a call's overhead on one device: until it returns, and until results are ready."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))

    def update(params: list[Any], x: Any) -> list[Any]:
        return [p - 0.1 * x.mean() for p in params]

    def shared(params: list[Any], x: Any) -> list[Any]:
        grads = jc.all_reduce("mean", [x.mean() * jnp.ones_like(p) for p in params], "data")
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    found = {}
    for count in counts:
        params = jax.device_put([jnp.full(4, k, jnp.float32) for k in range(count)], whole)
        x = jax.device_put(jnp.ones((8, 2)), rows)
        ours = jc.data_parallel(shared, mesh=mesh, batch_argnums=1)
        jitted = jax.jit(update)
        calls = {
            "jit": functools.partial(jitted, params, x),
            "data_parallel": functools.partial(ours, params, x),
        }
        share = budget / len(counts) / 2
        found[str(count)] = {
            "until it returns": timed(calls, "jit", share, waits=False),
            "until it is done": timed(calls, "jit", share),
        }
    return {"leaves": found}


def programs(budget: float, names: Sequence[str] = PROGRAMS, layers: int = 4) -> dict[str, Any]:
    """Compare programs compiled by this backend's client with those compiled ahead of time."""
    found: dict[str, Any] = {"mocked": MOCKED, "layers": layers}
    if jax.default_backend() == "cpu":
        found["client"] = "eight simulated CPU devices, because there is no GPU"
        variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    else:
        found["client"] = f"one GPU, and seven that JAX mocks ({MOCKED})"
        # The parent holds the GPU's memory; a compiling subprocess needs little.
        variables = {"JAX_MOCK_GPU_TOPOLOGY": MOCKED, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    until = time.monotonic() + budget
    on_cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    for name in names:
        columns = {"client": child(name, "", layers, variables, until)}
        for topology in AHEAD:
            columns[topology] = child(name, topology, layers, on_cpu, until)
        compiled = [c for c in columns.values() if "reason" not in c]
        keys = ("kinds", "wire_bytes", "collectives", "packs") if len(compiled) > 1 else ()
        alike = {key: all(c[key] == compiled[0][key] for c in compiled) for key in keys}
        found[name] = {"compiled": columns, "alike": alike}
    return found


def child(
    name: str, topology: str, layers: int, variables: Mapping[str, str], until: float
) -> dict[str, Any]:
    """Compile a program in a subprocess; return its figures, or the reason for a failure."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "docs" / "examples"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-m", "benchmarks.on_one_gpu", "--compile", name, topology]
    limit = max(1.0, until - time.monotonic())
    try:
        done = subprocess.run(
            [*command, str(layers)], env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"reason": "the time limit passed before it was compiled"}
    if done.returncode == 0 and done.stdout:
        return json.loads(done.stdout.splitlines()[-1])
    return {"reason": f"it ended with status {done.returncode}: {done.stderr[-500:]}"}


def _step_of(options: jc.CommunicationOptions) -> tuple[Any, tuple[Any, ...]]:
    """Return a step with cheap gradients and their mean, and the shapes of its arguments."""

    @jc.data_parallel
    def step(params: list[Any], x: jax.Array) -> list[Any]:
        grads = [jnp.cos(p) * x.mean() for p in params]
        grads = jc.all_reduce("mean", grads, "data", options=options)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    leaves = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 16
    return step, (leaves, jax.ShapeDtypeStruct((8,), jnp.float32))


def one_pack() -> tuple[Any, tuple[Any, ...]]:
    """Reduce sixteen leaves in one pack."""
    return _step_of(_packs_of(1 << 30))


def unpacked() -> tuple[Any, tuple[Any, ...]]:
    """Reduce the same leaves, combined by the compiler."""
    return _step_of(jc.CommunicationOptions())


def compile_here(name: str, topology: str, layers: int) -> dict[str, Any]:
    """Compile a program with this process's client, or for a topology; return its figures."""
    module, _, function = name.partition(":")
    example = importlib.import_module(module)
    if hasattr(example, "LAYERS"):
        example.LAYERS = layers
    fun, arguments = getattr(example, function)()
    report = jc.inspect(fun, *arguments, topology=topology or None)
    collectives = [
        {"kind": row.compiled.kind, "operands": len(row.compiled.operands),
         "asynchronous": row.compiled.is_async, "packs": len(row.packs), "leaves": len(row.leaves),
         "bytes": sum(operand.nbytes for operand in row.compiled.operands)}
        for row in report.rows
    ]  # fmt: skip
    kinds = [c["kind"] for c in collectives]
    return {
        "devices": topology or f"{len(jax.devices())} × {jax.devices()[0].device_kind}",
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "wire_bytes": report.wire_bytes,
        "packs": [len(pack.segments) for plan in report.plans for pack in plan.packs],
        "overlapped": report.overlapped,
        "uncounted": len(report.uncounted),
        "collectives": collectives,
    }


def timed(
    calls: Mapping[str, Callable[[], Any]], baseline: str, budget: float, *, waits: bool = True
) -> dict[str, Any]:
    """Measure the seconds of each call, and their ratio to the baseline's, measured twice.

    Each call is warmed up twice. Rounds are interleaved; their number follows from the budget, in
    seconds.
    """

    def turn(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        result = call()
        if waits:
            jax.block_until_ready(result)
        seconds = time.perf_counter() - start
        jax.block_until_ready(result)
        return seconds

    both = {baseline: calls[baseline], baseline + AGAIN: calls[baseline], **calls}
    turns = {name: functools.partial(turn, call) for name, call in both.items()}
    for _ in range(2):
        start = time.perf_counter()
        for call in turns.values():
            call()
        once = time.perf_counter() - start
    rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(budget / once)))
    found = list(interleave(turns, rounds))
    seconds = {name: [measured[name] for measured in found] for name in turns}
    return {
        name: {
            "seconds": dataclasses.asdict(estimate(values)),
            "ratio": dataclasses.asdict(ratio(values, seconds[baseline])),
            "rounds": rounds,
        }
        for name, values in seconds.items()
    }


@contextlib.contextmanager
def _recorded(found: dict[str, Any]) -> Iterator[None]:
    """Record an error among the figures, so that other sections are still measured."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    found["took_seconds"] = time.perf_counter() - start


def machine() -> dict[str, Any]:
    """Describe this machine."""
    devices = jax.devices()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.mem", "--format=csv"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split("\n")
    except OSError:
        gpus = []
    return {
        "platform": devices[0].platform, "kind": devices[0].device_kind, "devices": len(devices),
        "gpus": gpus, "is_gpu": devices[0].platform == "gpu", "cores": os.cpu_count(),
        "python": platform.python_version(), "jax": jax.__version__,
        "jaxlib": jax.lib.__version__, "jaxcoll": jc.__version__,
    }  # fmt: skip


def text_of(results: Mapping[str, Any]) -> str:
    """Return the figures as lines of text."""
    ran = results["ran_on"]
    lines = [f"{ran['kind']} ({ran['platform']}), JAX {ran['jax']}"]

    def walk(name: str, node: Any) -> None:
        if isinstance(node, Mapping) and "ratio" in node and "seconds" in node:
            rate = f", {node['GB/s']:.0f} GB/s" if "GB/s" in node else ""
            milliseconds = node["seconds"]["median"] * 1e3
            lines.append(f"{name}: {milliseconds:.4g} ms, × {Estimate(**node['ratio'])}{rate}")
        elif isinstance(node, Mapping):
            for key, value in node.items():
                walk(f"{name} {key}".strip(), value)
        elif " alike " in name or name.endswith(("reason", "wire_bytes", "overlapped")):
            lines.append(f"{name}: {node}")

    walk("", results["sections"])
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every section, print and write the results; returns the figures."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add(
        "--sections",
        default=",".join(SECTIONS),
        help=f"to measure (default: {','.join(SECTIONS)})",
    )
    add("--tiny", action="store_true", help="small arrays and few rounds, for a trial")
    add(
        "--json",
        default="one_gpu.json",
        metavar="FILE",
        help="file to write (default: one_gpu.json)",
    )
    add("--compile", nargs=3, metavar=("NAME", "TOPOLOGY", "LAYERS"), help="used by subprocesses")
    args = parser.parse_args(argv)
    if args.compile:
        name, topology, layers = args.compile
        compiled: dict[str, Any] = {}
        with _recorded(compiled):
            compiled.update(compile_here(name, topology, int(layers)))
        print(json.dumps(compiled))
        return compiled
    budget = 0.2 if args.tiny else MEASURING
    small: dict[str, dict[str, Any]] = {
        "packing": {"tree": "200x1KiB"},
        "codecs": {"nbytes": 1 << 16},
        "step": {"counts": (10,)},
        "programs": {"names": PROGRAMS[:1], "layers": 1},
    }
    sections = {"packing": packing, "codecs": codecs, "step": step, "programs": programs}
    found: dict[str, Any] = {}
    for name in args.sections.split(","):
        limit = COMPILING if name == "programs" else budget
        found[name] = {}
        with _recorded(found[name]):
            found[name].update(sections[name](limit, **small[name] if args.tiny else {}))
        results = {"ran_on": machine(), "tiny": args.tiny, "sections": found}
        flags.write_json(args.json, results)  # after each section, in case of a timeout
    print(text_of(results))
    return results


if __name__ == "__main__":
    main()
