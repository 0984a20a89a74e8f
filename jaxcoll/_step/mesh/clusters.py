"""Clusters by name: their hosts and chips, and their descriptions for compilers."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxcoll._plan.world import World

_FORM = re.compile(r"([a-z][a-z0-9]*):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU for XLA's compiler, with the field names of its `GpuDeviceInfoProto`.

    Source of the numbers: XLA's own descriptions, `xla/backends/gpu/target_config/specs`.
    """

    kind: str
    capability: int
    core_count: int
    device_memory_size: int
    memory_bandwidth: int
    l2_cache_size: int
    clock_rate_ghz: float
    fpus_per_core: int = 128
    shared_memory_per_core: int = 233472
    shared_memory_per_block_optin: int = 232448
    most_per_host: int = 8

    def description(self) -> str:
        """Write its `GpuTargetConfigProto` as text."""
        ours = ("kind", "capability", "most_per_host")
        body = " ".join(f"{k}: {number}" for k, number in vars(self).items() if k not in ours)
        return (
            f"gpu_device_info {{ {body} threads_per_block_limit: 1024 threads_per_warp: 32 "
            "threads_per_core_limit: 2048 shared_memory_per_block: 49152 block_dim_limit_x: "
            "2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
            "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
            f"cuda_compute_capability {{ major: {self.capability} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
            "runtime_version { major: 12 minor: 8 patch: 0 } "
            f'device_description_str: "{self.kind}"'
        )


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU and the layout of its chips. A host has four of them, 2 × 2."""

    kind: str
    dimensions: int
    most_chips: int
    per_chip: int = 1


CHIPS: dict[str, Gpu | Tpu | None] = {
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", 8, 108, 85100068864, 2039040000000, 41943040, 1.41),
        *(64, 167936, 166912, 16),
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 84942979072, 3352320000000, 52428800, 1.98),
    "h200": Gpu("NVIDIA H200", 9, 132, 151397597184, 4800000000000, 52428800, 1.98),
    "b200": Gpu("NVIDIA B200", 10, 148, 191514411008, 7672320000000, 132644864, 1.965),
    "v5e": Tpu("TPU v5 lite", 2, 256),
    "v6e": Tpu("TPU v6 lite", 2, 256),
    "v5p": Tpu("TPU v5", 3, 8960),
    "tpu7x": Tpu("TPU7x", 3, 9216, per_chip=2),
    "cpu": None,
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A cluster to compile for, which this process need not reach."""

    name: str  # as the user wrote it
    chip: str  # the part of the name before the colon
    platform: str  # JAX's name: "gpu", "tpu" or "cpu"
    kind: str  # JAX's `device_kind`
    # The numbers in the name: hosts and GPUs per host, or chips along each dimension
    shape: tuple[int, ...]
    hosts: int  # number of hosts, with one process each
    size: int  # number of devices, over all hosts

    def sizes(self, axes: int) -> tuple[int, ...]:
        """Return the default sizes of a mesh with this number of axes, outer first."""
        if axes > 2:
            raise ValueError(
                f"The topology {self.name!r} does not say how its {self.size} replicas lie along "
                f"{axes} axes. Give `mesh`, an `AbstractMesh(sizes, names)`, or `axis_size`."
            )
        return (self.size,) if axes == 1 else (self.hosts, self.size // self.hosts)

    def request(self) -> dict[str, Any]:
        """Make the arguments of `topologies.get_topology_desc`."""
        chip = CHIPS[self.chip]
        if isinstance(chip, Gpu):
            return {
                "topology_name": self.chip,
                "platform": "cuda",
                # NVLink domains, hosts per domain, GPUs per host
                "topology": f"{self.hosts}x1x{self.size // self.hosts}",
                "target_config": chip.description(),
            }
        return {"topology_name": self.name, "platform": self.platform}

    def __str__(self) -> str:
        hosts = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{self.name} ({self.size} × {self.kind}, {hosts})"


def topology_named(name: Any) -> Topology:
    """Look up the cluster with this name, a chip and numbers as in docs/clusters.md."""
    if isinstance(name, Topology):
        return name
    match = _FORM.fullmatch(name.lower()) if isinstance(name, str) else None
    if match is None or match[1] not in CHIPS:
        raise ValueError(
            f"There is no topology {name!r}. {_nearest(str(name))} Chips that can be compiled for: "
            f"{', '.join(CHIPS)}."
        )
    shape = tuple(int(number) for number in match[2].split("x"))
    topology = _laid_out(match[1], shape)
    if isinstance(topology, str):
        raise ValueError(f"There is no topology {name!r}: {topology}. {_nearest(name)}")
    return topology


def _laid_out(name: str, shape: tuple[int, ...]) -> Topology | str:
    """Lay out a cluster, or say why it does not exist."""
    text, total, chip = f"{name}:{'x'.join(map(str, shape))}", math.prod(shape), CHIPS[name]
    if not total:
        return "it would be empty"
    if chip is None:
        simulated = Topology(text, name, "cpu", "cpu", shape, 1, total)
        return simulated if len(shape) == 1 else "expected a number of simulated CPUs"
    if isinstance(chip, Gpu):
        if len(shape) > 2:
            return "expected a number of GPUs, or hosts x GPUs per host"
        per_host = shape[len(shape) - 1]
        if per_host > chip.most_per_host:
            return f"a host has at most {chip.most_per_host} GPUs of type {name}"
        return Topology(text, name, "gpu", chip.kind, shape, total // per_host, total)
    if len(shape) != chip.dimensions:
        return f"{name} chips have {chip.dimensions} dimensions"
    if total > chip.most_chips:
        return f"at most {chip.most_chips:,} {name} chips are connected"
    if total > 1 and (shape[0] % 2 or shape[1] % 2):
        return "a host has 2 x 2 chips, so the first two numbers must be even"
    # Each host has 4 chips; there are single chips, too.
    hosts = max(1, total // 4)
    return Topology(text, name, "tpu", chip.kind, shape, hosts, total * chip.per_chip)


def _nearest(name: str) -> str:
    """Name the existing clusters closest to `name`, by chip first, then by size."""
    chip, _, rest = name.lower().partition(":")
    close = difflib.get_close_matches(chip, CHIPS, n=2, cutoff=0.5) or list(CHIPS)
    wanted = math.prod([int(number) for number in re.findall(r"\d+", rest)]) or 1

    def distance(topology: Topology) -> tuple[int, float, float]:
        likeness = difflib.SequenceMatcher(None, name, topology.name).ratio()
        ratio = math.prod(topology.shape) / wanted
        return close.index(topology.chip), abs(math.log2(ratio)), -likeness

    nearest = sorted((topology for c in close for topology in _usual(c)), key=distance)
    return f"Nearest: {', '.join(repr(topology.name) for topology in nearest[:5])}."


def _usual(name: str) -> Iterator[Topology]:
    """Yield common clusters of a chip, from small to large."""
    chip = CHIPS[name]
    if chip is None or isinstance(chip, Gpu):
        shapes = [(1,), (2,), (4,), (8,)]
        shapes += [(2**k, 8) for k in range(1, 11)] if chip else [(16,), (32,), (64,)]
    else:
        flat = [(2**a, 2**b) for a in range(1, 5) for b in (a, a + 1)]
        deep = [(a, b, c) for a, b in flat for c in sorted({1, 2, b})]
        shapes = flat if chip.dimensions == 2 else deep
    for shape in shapes:
        topology = _laid_out(name, shape)
        if isinstance(topology, Topology):
            yield topology


def topology_world(topology: Topology, sizes: tuple[int, ...] = ()) -> World:
    """Describe the world of a reduction over a cluster, along axes of these sizes, outer first."""
    return World(
        topology.platform,
        sizes or (topology.size,),
        topology.hosts,
        device_kind=topology.kind * (topology.platform != "cpu"),
        hosts=topology.hosts if topology.platform == "gpu" else 1,
    )


def abstract_mesh(topology: Topology, axes: tuple[str, ...]) -> AbstractMesh:
    """Make the default mesh of a topology: one axis, or hosts and devices per host."""
    return AbstractMesh(topology.sizes(len(axes)), axes, (AxisType.Auto,) * len(axes))


def fit_mesh(mesh: Any, topology: Topology) -> AbstractMesh:
    """Strip `mesh` of its devices, and enlarge it to the topology's size if it has one axis."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        must = f"a jax.sharding.Mesh or AbstractMesh to compile for {topology.name!r}"
        raise ValueError(f"`mesh` must be {must}; got {type(mesh).__name__}.")
    if mesh.size == topology.size:
        return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    if len(mesh.axis_names) == 1:
        return AbstractMesh((topology.size,), mesh.axis_names, mesh.axis_types)
    had = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    raise ValueError(
        f"The mesh ({had}) does not fit {topology}. Pass `mesh=jax.sharding.AbstractMesh(sizes, "
        f"{tuple(mesh.axis_names)!r})` with sizes that multiply to {topology.size}."
    )
