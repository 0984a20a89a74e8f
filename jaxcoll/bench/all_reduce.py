"""The all-reduce benchmark of one process: compile, check, time, and describe each variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll.bench.timing import Ratio, interleaved, ratio, seconds
from jaxcoll.bench.trees import tree_of
from jaxcoll.bench.variants import all_devices, program, row, values, variants

BASELINE = "per-leaf"
COMPILES = 3


@dataclasses.dataclass(frozen=True)
class Result:
    """One variant on one tree and world.

    Attributes:
      variant: its name.
      tree: the tree's name.
      devices: replicas.
      processes: processes.
      bytes: bytes of the tree on one replica (S).
      seconds: median wall seconds of one reduction.
      algbw: S / seconds, in GB/s (10^9 bytes), as nccl-tests defines it.
      busbw: algbw × 2(n-1)/n.
      ratio: seconds over the baseline's, paired by round.
      compile_seconds: median of lowering and compiling, over several interleaved rounds.
      compile_ratio: compile_seconds over the baseline's, paired by round.
      temporary_bytes: memory beside arguments and results, as the compiler states it.
      error: largest |x - exact| / sum of magnitudes over elements, exact in float64.
    """

    variant: str
    tree: str
    devices: int
    processes: int
    bytes: int
    seconds: float
    algbw: float
    busbw: float
    ratio: Ratio
    compile_seconds: float
    compile_ratio: Ratio
    temporary_bytes: int
    error: float


def measure(
    tree: str,
    *,
    names: Sequence[str],
    dtype: str = "float32",
    reduce_op: str = "mean",
    rounds: int = 20,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[Result]:
    """Measure some variants on one tree over all devices of this world.

    Args:
      tree: a name that `tree_of` knows, or a JSON file.
      names: variants; the baseline and its A/A twin are always among them.
      dtype: of leaves whose tree does not say.
      reduce_op: "mean" or "sum".
      rounds: timed rounds, after two that are not.
      progress: told what is being done.

    Returns:
      One result a variant, the baseline's first.

    Raises:
      ValueError: a name is none of the variants, or the tree is unknown.
    """
    known = variants(reduce_op)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no variant {unknown[0]!r}: choose from {', '.join(known)}.")
    chosen = list(dict.fromkeys([BASELINE, f"{BASELINE} again", *names]))
    mesh = all_devices()
    shapes = tree_of(tree, dtype)
    arrays = values(shapes, mesh)
    exact = _exact(shapes, mesh.size, reduce_op)

    compiled, compile_times = {}, {name: [] for name in chosen}
    for k in range(COMPILES):
        for name in chosen if k % 2 == 0 else chosen[::-1]:
            progress(f"compile {name}")
            # A new function each time, so that no cache of traces can help.
            fresh = program(lambda t, reduce=known[name]: reduce(t), mesh)

            def build(name: str = name, fresh: Any = fresh) -> None:
                compiled[name] = fresh.lower(arrays).compile()

            compile_times[name].append(seconds(build))

    calls = {n: (lambda c=c: jax.block_until_ready(c(arrays))) for n, c in compiled.items()}
    errors = {n: _error(c(arrays), exact) for n, c in compiled.items()}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for k, measured in enumerate(interleaved(calls, rounds + 2)):
        progress(f"round {k + 1}/{rounds + 2}")
        if k >= 2:
            for name, value in measured.items():
                times[name].append(value)

    nbytes = sum(s.size * s.dtype.itemsize for s in shapes)
    n = mesh.size
    results = []
    for name in chosen:
        median = float(np.median(times[name]))
        algbw = nbytes / median / 1e9
        memory = compiled[name].memory_analysis()
        results.append(
            Result(
                variant=name,
                tree=tree,
                devices=n,
                processes=jax.process_count(),
                bytes=nbytes,
                seconds=median,
                algbw=algbw,
                busbw=algbw * 2 * (n - 1) / n,
                ratio=ratio(times[name], times[BASELINE]),
                compile_seconds=float(np.median(compile_times[name])),
                compile_ratio=ratio(compile_times[name], compile_times[BASELINE]),
                temporary_bytes=int(memory.temp_size_in_bytes) if memory else -1,
                error=errors[name],
            )
        )
    return results


def _exact(
    shapes: list[jax.ShapeDtypeStruct], replicas: int, reduce_op: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each leaf's reduction in float64, and the sum of its magnitudes in the same units."""
    scale = 1 / replicas if reduce_op == "mean" else 1.0
    pairs = []
    for i, spec in enumerate(shapes):
        total, size = np.zeros(spec.shape), np.zeros(spec.shape)
        for replica in range(replicas):
            wide = row(i, spec, replica).astype(np.float64) * scale
            total += wide
            size += np.abs(wide)
        pairs.append((total, size))
    return pairs


def _error(results: list[jax.Array], exact: list[tuple[np.ndarray, np.ndarray]]) -> float:
    worst = [
        np.max(np.abs(np.asarray(got, np.float64) - want) / (size + 1e-30), initial=0.0)
        for got, (want, size) in zip(results, exact, strict=True)
    ]
    return float(max(worst, default=0.0))
