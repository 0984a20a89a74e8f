"""A rank of JAX: jaxcoll's algorithms, and the baseline of one `psum` per leaf."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc
from benchmarks.ranks.data import Exact, block, held, leaf
from benchmarks.ranks.rank import Rank, serve
from jaxcoll.cli.bench import AGAIN, BASELINE, make_mesh, make_program
from jaxcoll.cli.flags import parse_options

ALONE = "JAX alone"
"""The baseline in processes that jaxcoll did not set up."""

FEEDBACK = "+feedback"
"""Suffix of an algorithm with a wire format: keep a residual from call to call."""


class WithResidual:
    """A compiled reduction that adds the previous call's rounding error to each call."""

    def __init__(self, algorithm: str, mesh: Mesh, reduce_op: str, arrays: list[Any]) -> None:
        axes, options = mesh.axis_names, parse_options(algorithm)

        def reduce(tree: Any, kept: Any) -> Any:
            leaves = [x[0] for x in tree]
            return jc.all_reduce(reduce_op, leaves, axes, residual=kept, options=options)

        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays]
        self._residual = jc.compression.residual(shapes, axes, mesh=mesh)
        rows, copies = PartitionSpec(axes), PartitionSpec()
        program = jax.shard_map(reduce, mesh=mesh, in_specs=rows, out_specs=(copies, rows))
        self._compiled = jax.jit(program).lower(arrays, self._residual).compile()
        self.as_text = self._compiled.as_text

    def __call__(self, arrays: list[Any]) -> Any:
        """Reduce, and keep the residual for the next call."""
        sums, self._residual = self._compiled(arrays, self._residual)
        return sums


class JaxRank(Rank):
    """One process of a JAX job; `devices` are those of all its processes."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._mesh = make_mesh(devices)
        self._rows = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        self._compiled: dict[str, Any] = {}
        self._parts: dict[str, slice] = {}
        self._ones = self._placed((), lambda replica: np.ones((), np.int32))
        # The barrier is a sum of one number, which returns only after all ranks have entered it.
        self._barrier = make_program(BASELINE, self._mesh, "sum")

    def world(self) -> dict[str, Any]:
        """See `Rank`; `device` is JAX's name for the first device."""
        return {
            "devices": self._mesh.size,
            "processes": jax.process_count(),
            "device": self._mesh.devices.flat[0].device_kind,
            "library": f"jax {jax.__version__}",
        }

    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """See `Rank`."""
        self._compiled, self._parts, self._reduce_op = {}, {}, reduce_op
        self._specs = [jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"]) for x in leaves]
        blocks = [block(replica) for replica in range(self._mesh.size)]
        dtypes = dict.fromkeys(spec.dtype for spec in self._specs)
        # Round to each dtype before the exact sum, so that only the reduction's error counts.
        rounded = {dtype: [held(values, dtype) for values in blocks] for dtype in dtypes}
        self._exact = {d: Exact(values, reduce_op == "mean") for d, values in rounded.items()}
        self._arrays = [
            self._placed(spec.shape, lambda r, i=i, s=spec: leaf(rounded[s.dtype][r], i, s.shape))
            for i, spec in enumerate(self._specs)
        ]

    def _placed(self, shape: tuple[int, ...], row: Any) -> jax.Array:
        """Return an array with one row per replica."""
        return jax.make_array_from_callback(
            (self._mesh.size, *shape), self._rows, lambda index: row(index[0].start or 0)[None]
        )

    def compile(self, name: str) -> float:
        """Trace, lower and compile a new function, which is in no cache; return the seconds."""
        start = time.perf_counter()
        self.build(name, name, 0, len(self._arrays))
        return time.perf_counter() - start

    def build(self, name: str, algorithm: str, first: int, stop: int) -> None:
        """Compile the contestant `name` to reduce leaves `first` to `stop` - 1."""
        self._parts[name] = slice(first, stop)
        arrays, plain = self._arrays[first:stop], algorithm.removesuffix(FEEDBACK)
        if plain != algorithm:
            self._compiled[name] = WithResidual(plain, self._mesh, self._reduce_op, arrays)
            return
        algorithm = BASELINE if algorithm == ALONE else algorithm
        program = make_program(algorithm, self._mesh, self._reduce_op)
        self._compiled[name] = program.lower(arrays).compile()

    def describe(self, name: str) -> dict[str, Any]:
        """Return the error on this process's first device, and figures of the compiled program."""
        compiled = self._compiled[name]
        # One device per process is enough, because every replica gets the same sum.
        errors = [
            self._exact[spec.dtype].error(i, np.asarray(x.addressable_data(0)))
            for i, (spec, x) in enumerate(zip(self._specs, compiled(self._arrays), strict=True))
        ]
        report = jc.inspect(compiled.as_text())
        return {
            "error": max(errors, default=0.0),
            "wire_bytes": report.wire_bytes,
            "operands": sum(c.turns * len(c.operands) for c in report.collectives),
        }

    def barrier(self) -> None:
        """See `Rank`."""
        jax.block_until_ready(self._barrier([self._ones]))

    def call(self, name: str) -> None:
        """See `Rank`."""
        jax.block_until_ready(self._compiled[name](self._arrays[self._parts[name]]))

    def pipelined(self, names: list[str], compute: float, *, send: bool) -> float:
        """Dispatch contestants one by one, each after its part of a backward pass.

        A sleep of `compute` seconds stands for the backward pass; without `send` nothing is
        dispatched. Returns seconds until the last result is ready.
        """
        self.barrier()
        start = time.perf_counter()
        results = []
        for name in names:
            if compute:
                time.sleep(compute / len(names))
            if send:
                results.append(self._compiled[name](self._arrays[self._parts[name]]))
        jax.block_until_ready(results)
        return time.perf_counter() - start

    def plan(self, name: str) -> str:
        """Return the name of a contestant's plan; equal plans have equal names."""
        if (name := name.removesuffix(AGAIN)) == BASELINE:
            return BASELINE
        where = {"mesh": self._mesh, "axis_name": self._mesh.axis_names}
        options = parse_options(name.removesuffix(FEEDBACK))
        return jc.plan(self._specs, **where, options=options, reduce_op=self._reduce_op).name


def enter() -> JaxRank:
    """Join the job that the environment describes."""
    jc.initialize()
    return JaxRank(jax.devices())


def enter_alone() -> JaxRank:
    """Join the same job as plain JAX does."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, *(int(os.environ[k]) for k in ("WORLD_SIZE", "RANK")))
    return JaxRank(jax.devices())


if __name__ == "__main__":
    serve(enter_alone if sys.argv[1:] == [ALONE] else enter)
