"""Clusters by name: their hosts and chips, and how a compiler describes them."""

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
    """A GPU as XLA's compiler knows it, by the names that its `GpuDeviceInfoProto` has.

    The numbers are those of XLA's own descriptions, `xla/backends/gpu/target_config/specs`.
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
    threads_per_block_limit: int = 1024
    threads_per_warp: int = 32
    threads_per_core_limit: int = 2048
    shared_memory_per_block: int = 49152
    block_dim_limit_x: int = 2**31 - 1
    block_dim_limit_y: int = 65535
    block_dim_limit_z: int = 65535
    registers_per_core_limit: int = 65536
    registers_per_block_limit: int = 65536

    def description(self) -> str:
        """The `GpuTargetConfigProto` of it, as text."""
        ours = ("kind", "capability", "most_per_host")
        body = " ".join(f"{k}: {number}" for k, number in vars(self).items() if k not in ours)
        return (
            f"gpu_device_info {{ {body} cuda_compute_capability {{ major: {self.capability} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
            "runtime_version { major: 12 minor: 8 patch: 0 } "
            f'device_description_str: "{self.kind}"'
        )


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU: how its chips are laid out. Four of them, 2 × 2, are on a host."""

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
    """A cluster to compile for, which need not be here."""

    name: str  # as the user wrote it
    chip: str  # the part of the name before the colon
    platform: str  # "gpu", "tpu" or "cpu", as JAX calls it
    kind: str  # what JAX calls `device_kind`
    # The numbers of the name: hosts and GPUs of a host, or chips along each dimension
    shape: tuple[int, ...]
    hosts: int  # processes, one per host
    size: int  # replicas it has room for, over all hosts

    def sizes(self, axes: int) -> tuple[int, ...]:
        """Sizes of a mesh of so many axes, outer first, that it has by itself."""
        if axes > 2:
            raise ValueError(
                f"The topology {self.name!r} does not say how its {self.size} replicas lie along "
                f"{axes} axes; it has {self.hosts} hosts of {self.size // self.hosts} each. Give "
                "the sizes: `jax.sharding.AbstractMesh(sizes, names)` as `mesh`, or `axis_size`."
            )
        return (self.size,) if axes == 1 else (self.hosts, self.size // self.hosts)

    def request(self) -> dict[str, Any]:
        """Return the arguments of `topologies.get_topology_desc`."""
        chip = CHIPS[self.chip]
        if isinstance(chip, Gpu):
            return {
                "topology_name": self.chip,
                "platform": "cuda",
                # Domains of NVLink, hosts in each, GPUs in each of these.
                "topology": f"{self.hosts}x1x{self.size // self.hosts}",
                "target_config": chip.description(),
            }
        return {"topology_name": self.name, "platform": self.platform}

    def __str__(self) -> str:
        hosts = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{self.name} ({self.size} × {self.kind}, {hosts})"


def topology_named(name: Any) -> Topology:
    """The cluster of a name, a chip and its numbers, as docs/clusters.md lists them."""
    if isinstance(name, Topology):
        return name
    match = _FORM.fullmatch(name.lower()) if isinstance(name, str) else None
    if match is None or match[1] not in CHIPS:
        raise ValueError(
            f"There is no topology {name!r}. {_nearest(str(name))} The chips that can be compiled "
            f"for: {', '.join(CHIPS)}."
        )
    shape = tuple(int(number) for number in match[2].split("x"))
    found = _laid_out(match[1], shape)
    if isinstance(found, str):
        raise ValueError(f"There is no topology {name!r}: {found}. {_nearest(name)}")
    return found


def _laid_out(name: str, shape: tuple[int, ...]) -> Topology | str:
    """The cluster, or why there is none."""
    text, total, chip = f"{name}:{'x'.join(map(str, shape))}", math.prod(shape), CHIPS[name]
    if not total:
        return "it would be empty"
    if chip is None:
        simulated = Topology(text, name, "cpu", "cpu", shape, 1, total)
        return simulated if len(shape) == 1 else "a number of simulated CPUs is expected"
    if isinstance(chip, Gpu):
        if len(shape) > 2:
            return "a number of GPUs is expected, or hosts x GPUs of a host"
        per_host = shape[len(shape) - 1]
        if per_host > chip.most_per_host:
            return f"a host has at most {chip.most_per_host} GPUs of the kind {name}"
        return Topology(text, name, "gpu", chip.kind, shape, total // per_host, total)
    if len(shape) != chip.dimensions:
        return f"chips of the kind {name} lie in {chip.dimensions} dimensions"
    if total > chip.most_chips:
        return f"at most {chip.most_chips:,} chips of the kind {name} are connected"
    if total > 1 and (shape[0] % 2 or shape[1] % 2):
        return "a host has 2 x 2 chips, so the first two numbers must be even"
    hosts = max(1, total // 4)
    return Topology(text, name, "tpu", chip.kind, shape, hosts, total * chip.per_chip)


def _nearest(name: str) -> str:
    """A sentence with existing names that are like `name`, in letters first, then in size."""
    chip, _, rest = name.lower().partition(":")
    close = difflib.get_close_matches(chip, CHIPS, n=2, cutoff=0.5) or list(CHIPS)
    asked = math.prod([int(number) for number in re.findall(r"\d+", rest)]) or 1

    def distance(known: Topology) -> tuple[int, float, float]:
        likeness = difflib.SequenceMatcher(None, name, known.name).ratio()
        size = math.prod(known.shape)
        return close.index(known.chip), abs(math.log2(size / max(asked, 1))), -likeness

    found = sorted((known for c in close for known in _usual(c)), key=distance)
    return f"Nearest: {', '.join(repr(known.name) for known in found[:5])}."


def _usual(name: str) -> Iterator[Topology]:
    """Clusters of a chip that are common, small to large."""
    chip = CHIPS[name]
    if chip is None or isinstance(chip, Gpu):
        shapes = [(1,), (2,), (4,), (8,)]
        shapes += [(2**k, 8) for k in range(1, 11)] if chip else [(16,), (32,), (64,)]
    else:
        flat = [(2**a, 2**b) for a in range(1, 5) for b in (a, a + 1)]
        deep = [(a, b, c) for a, b in flat for c in (1, 2, b)]
        shapes = flat if chip.dimensions == 2 else deep
    for shape in shapes:
        known = _laid_out(name, shape)
        if isinstance(known, Topology):
            yield known


def topology_world(topology: Topology, sizes: tuple[int, ...] = ()) -> World:
    """Return the world of a reduction over a cluster, along one axis or several, outer first."""
    return World(
        topology.platform,
        sizes or (topology.size,),
        topology.hosts,
        device_kind=topology.kind * (topology.platform != "cpu"),
        hosts=topology.hosts if topology.platform == "gpu" else 1,
    )


def abstract_mesh(topology: Topology, axes: tuple[str, ...]) -> AbstractMesh:
    """The mesh that a topology has by itself: one axis, or hosts and what each has."""
    return AbstractMesh(topology.sizes(len(axes)), axes, (AxisType.Auto,) * len(axes))


def fitted_mesh(mesh: Any, topology: Topology) -> AbstractMesh:
    """`mesh` without its devices, and as large as the topology."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            "`mesh` must be a jax.sharding.Mesh or AbstractMesh for a program that is compiled "
            f"for {topology.name!r}; got {type(mesh).__name__}."
        )
    if mesh.size == topology.size:
        return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    if len(mesh.axis_names) == 1:
        return AbstractMesh((topology.size,), mesh.axis_names, mesh.axis_types)
    had = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    raise ValueError(
        f"The mesh ({had}) does not fit {topology}, and which of its axes should grow is not "
        f"known. Pass `mesh=jax.sharding.AbstractMesh(sizes, {tuple(mesh.axis_names)!r})` with "
        f"sizes whose product is {topology.size}."
    )
