"""A rank of JAX: jaxcoll's algorithms, and one `psum` per leaf, as JAX users write it today."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc
from jaxcoll._cluster.hosts import hosts_of_job
from jaxcoll._cluster.initialize import initialize
from jaxcoll._cluster.launch.local import join
from jaxcoll._mesh.scopes import mesh_scope
from jaxcoll._observe.parse.collective import wire_bytes
from jaxcoll._observe.parse.hlo import read_hlo
from jaxcoll._spmd.scope import entered
from jaxcoll.bench.naming import AGAIN, BASELINE, FEEDBACK, options_of
from jaxcoll.bench.ranks.data import Exact, block, held, leaf
from jaxcoll.bench.ranks.rank import Rank, serve


class JaxRank(Rank):
    """One process of a JAX world, which has the `devices` of all processes."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._mesh = _mesh(devices)
        self._axes = self._mesh.axis_names
        self._arrays: list[jax.Array] = []
        self._compiled: dict[str, Any] = {}
        self._parts: dict[str, slice] = {}
        self._exact: dict[np.dtype, Exact] = {}
        every = NamedSharding(self._mesh, PartitionSpec(self._axes))
        self._ones = jax.make_array_from_callback(
            (self._mesh.size,), every, lambda index: np.ones(1, np.int32)
        )
        # A sum of one number is the barrier: nothing returns before all ranks have entered it.
        self._meet = self._program(lambda x: lax.psum(x, self._axes))

    def world(self) -> dict[str, Any]:
        """See `Rank`; `device` is what JAX calls the first one."""
        first = self._mesh.devices.flat[0]
        return {
            "devices": self._mesh.size,
            "processes": jax.process_count(),
            "platform": first.platform,
            "device": first.device_kind,
            "library": f"jax {jax.__version__}",
        }

    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """See `Rank`."""
        self._arrays, self._compiled, self._parts, self._reduce_op = [], {}, {}, reduce_op
        self._specs = [jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"]) for x in leaves]
        n, rows = self._mesh.size, NamedSharding(self._mesh, PartitionSpec(self._axes))
        blocks = [block(replica) for replica in range(n)]
        dtypes = dict.fromkeys(spec.dtype for spec in self._specs)
        # Rounded to each dtype before the exact sum, so that only the reduction counts as error.
        held_as = {dtype: [held(values, dtype) for values in blocks] for dtype in dtypes}
        mean = reduce_op == "mean"
        self._exact = {dtype: Exact(values, mean) for dtype, values in held_as.items()}
        for i, spec in enumerate(self._specs):

            def row(index: Any, i: int = i, spec: Any = spec) -> np.ndarray:
                return leaf(held_as[spec.dtype][index[0].start or 0], i, spec.shape)[None]

            shape = (n, *spec.shape)
            self._arrays.append(jax.make_array_from_callback(shape, rows, row))

    def compile(self, name: str) -> float:
        """Trace, lower and compile, from a new function, so that no cache of traces can help."""
        start = time.perf_counter()
        self._compiled[name] = self._built(name, self._arrays)
        return time.perf_counter() - start

    def describe(self, name: str) -> dict[str, Any]:
        """The error on this process's first device, and what the compiler says."""
        compiled = self._compiled[name]
        # One device of each process, since every replica gets the same sum.
        errors = [
            self._exact[spec.dtype].error(i, np.asarray(x.addressable_data(0)))
            for i, (spec, x) in enumerate(zip(self._specs, compiled(self._arrays), strict=True))
        ]
        memory = compiled.memory_analysis()
        sent = read_hlo(compiled.as_text()).collectives
        return {
            "error": max(errors, default=0.0),
            "wire_bytes": wire_bytes(sent),
            "operands": sum((c.trips or 1) * len(c.operands) for c in sent),
            "temporary_bytes": int(memory.temp_size_in_bytes) if memory else None,
        }

    def barrier(self) -> None:
        """See `Rank`."""
        jax.block_until_ready(self._meet(self._ones))

    def call(self, name: str) -> None:
        """See `Rank`."""
        arrays = self._arrays[self._parts[name]] if name in self._parts else self._arrays
        jax.block_until_ready(self._compiled[name](arrays))

    def pipelined(self, names: list[str], compute: float, *, send: bool) -> float:
        """Dispatch contestants one by one, each after its part of a backward pass.

        The backward pass is a sleep of `compute` seconds; without `send` nothing is dispatched.
        Returns seconds until the last result is there.
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

    def build(self, name: str, algorithm: str, first: int, stop: int) -> None:
        """Compile the contestant `name`, which reduces leaves `first` to `stop` - 1."""
        self._parts[name] = slice(first, stop)
        with entered(mesh_scope(self._mesh)):
            self._compiled[name] = self._built(algorithm, self._arrays[first:stop])

    def plan(self, name: str) -> str:
        """What the plan of a contestant is called: equal plans share it."""
        if (name := name.removesuffix(AGAIN)) == BASELINE:
            return BASELINE
        options = options_of(name)
        where = {"mesh": self._mesh, "axis_name": self._axes}
        return jc.plan(self._specs, **where, options=options, reduce_op=self._reduce_op).name

    def _built(self, name: str, arrays: list[jax.Array]) -> Any:
        op, axes, name = self._reduce_op, self._axes, name.removesuffix(AGAIN)
        plain = lax.pmean if op == "mean" else lax.psum

        def reduce(tree: Any, residual: Any = None) -> Any:
            if name == BASELINE:
                return jax.tree.map(lambda x: plain(x, axes), tree)
            return jc.all_reduce(op, tree, axes, residual=residual, options=options_of(name))

        if FEEDBACK not in name:
            return self._program(reduce).lower(arrays).compile()
        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays]
        residual = jc.residual(shapes, axes, mesh=self._mesh, options=options_of(name))
        compiled = self._program(reduce, residual).lower(arrays, residual).compile()
        return _WithResidual(compiled, residual)

    def _program(self, reduce: Callable[..., Any], *kept: Any) -> Any:
        """The jitted reduction of trees with a leading replica dimension, and what is `kept`."""

        def body(tree: Any, *kept: Any) -> Any:
            return reduce(jax.tree.map(lambda x: x[0], tree), *kept)

        rows, copies = PartitionSpec(self._axes), PartitionSpec()
        inputs, outputs = (rows, *[rows] * len(kept)), (copies, rows) if kept else copies
        return jax.jit(jax.shard_map(body, mesh=self._mesh, in_specs=inputs, out_specs=outputs))


class _WithResidual:
    """A compiled reduction that adds to each call what the one before it lost."""

    def __init__(self, compiled: Any, residual: Any) -> None:
        self._compiled, self._residual = compiled, residual
        self.as_text, self.memory_analysis = compiled.as_text, compiled.memory_analysis

    def __call__(self, arrays: list[jax.Array]) -> Any:
        sums, self._residual = self._compiled(arrays, self._residual)
        return sums


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    """One axis over all devices, or two where several hosts, or processes, have several each."""
    grid, axes = np.array(devices, dtype=object), ("data",)
    owners = [device.process_index for device in devices]
    hosts = [hosts_of_job()[owner] for owner in owners] if len(set(owners)) > 1 else []
    # Hierarchical algorithms need an axis within a host or process and one between them.
    for name, of_devices in (("host", hosts), ("process", owners)):
        groups = len(set(of_devices))
        alike = of_devices == sorted(of_devices) and len(set(Counter(of_devices).values())) == 1
        if 1 < groups < len(devices) and alike:
            grid, axes = grid.reshape(groups, -1), (name, "device")
            break
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def main() -> None:
    """Serve, with as many devices as the argument says, in the world that the environment names."""

    def enter() -> JaxRank:
        jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
        if not join():
            initialize()
        return JaxRank(jax.devices())

    serve(enter)


if __name__ == "__main__":
    main()
