"""Cost terms that ship with jaxcoll, for worlds that nobody has calibrated.

Each is a literal of published or measured numbers with its source (docs/cost_model.md lists them);
what is assumed is marked so. A calibration on the machine itself replaces all of it.
"""

from __future__ import annotations

import dataclasses

from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.terms import Key, Link, Terms
from jaxcoll._plan.world import World

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
MICRO = 1e-6


@dataclasses.dataclass(frozen=True)
class Network:
    """How hosts are joined.

    Attributes:
      step: seconds of one hop.
      bandwidth: bytes per second that one NIC carries in practice.
      shared: one NIC serves all devices of a host, rather than one each.
    """

    step: float
    bandwidth: float
    shared: bool = False

    def link(self, per_host: int) -> Link:
        """The link of one device while all `per_host` send."""
        return Link(self.step, (per_host if self.shared else 1) / self.bandwidth)


NETWORKS = {
    # Hop: NCCL's own model (Simple, tuning.cc). Bandwidth: 46-48 GB/s to expect (nccl-tests#290).
    "infiniband-400": Network(14 * MICRO, 47.5e9),
    "efa-400": Network(14 * MICRO, 47.5e9),
    "infiniband-200": Network(14 * MICRO, 23.75e9),
    # Assumed: 92 % of the line, a hop through the kernels' TCP.
    "ethernet-100": Network(50 * MICRO, 11.5e9, shared=True),
    # DCN of TPU slices: 6.4 Tbit/s a pod of 256 v5e, 50 Gbit/s a v5p chip (docs.cloud.google.com);
    # v6e with 4 x 200 Gbit/s a host of 8, and all hops: assumed.
    "dcn-v5e": Network(50 * MICRO, 3.1e9),
    "dcn-v5p": Network(50 * MICRO, 6.25e9),
    "dcn-v6e": Network(50 * MICRO, 12.5e9),
    "dcn-tpu7x": Network(50 * MICRO, 6.25e9),  # 100 Gbit/s a chip of two devices
}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, as JAX names it, and the host it is usually in.

    `peaks` are specified operations a second of dense matrix products, by element type, and
    `reached` is the share of them that large products reach.
    """

    kinds: tuple[str, ...]
    source: str
    within: Link
    call: float
    memory: float
    network: str
    peaks: tuple[tuple[str, float], ...]
    reached: float
    native: tuple[Curve, ...] = ()

    def terms(self, key: Key, network: str) -> Terms:
        """The terms over `network`; curves between hosts hold for the usual network alone."""
        return Terms(
            key,
            f"preset: {self.source}; between hosts {network}",
            self.within,
            NETWORKS[network].link(key.per_island),
            call=self.call,
            array=1.5 * MICRO,  # assumed
            reduce=3 / (0.9 * self.memory),  # two reads and a write
            copy=2 / (0.9 * self.memory),  # a read and a write
            slice=2 * MICRO,  # assumed
            combine=30 * MiB,  # XLA's default
            native=tuple(c for c in self.native if c.islands == 1 or network == self.network),
            rates=tuple((dtype, self.reached * peak) for dtype, peak in self.peaks),
        )


def _peaks(bf16: float, f32: float, f8: float | None = None) -> tuple[tuple[str, float], ...]:
    """Specified TFLOP/s; of float32 at JAX's default precision: TF32 on GPUs, bfloat16 on TPUs."""
    known = (("bf16", bf16), ("f16", bf16), ("f32", f32), ("f8", f8))
    return tuple((dtype, tera * 1e12) for dtype, tera in known if tera)


def _microseconds(replicas: int, *points: tuple[int, float], islands: int = 1) -> Curve:
    return Curve(tuple((size, t * MICRO) for size, t in points), replicas, islands)


def _by_ring(curve: Curve, replicas: int, busbw: float) -> Curve:
    """A curve measured with sums in the switch, as if by the ring that fewer replicas get."""
    *_, (most, longest) = curve.points
    wanted = most * 2 * (replicas - 1) / replicas / busbw
    factor = (wanted - curve.latency) / (longest - curve.latency)
    points = ((s, curve.latency + factor * (t - curve.latency)) for s, t in curve.points)
    return Curve(tuple(points), replicas)


# 8 x H200, NCCL 2.30.7, calls queued (ml-engineering, network/benchmarks/README.md).
_HOPPER = _microseconds(
    8,
    (32 * KiB, 18.2),
    (512 * KiB, 19.06),
    (1 * MiB, 24.61),
    (4 * MiB, 50.57),
    (16 * MiB, 114.7),
    (64 * MiB, 318.4),
    (256 * MiB, 1063.1),
    (1 * GiB, 4033.1),
    (16 * GiB, 62341.1),
)
# 8 x B200, NCCL 2.27.7 from 1 MiB on, one call at a time; 2026-10 at both ends (same repository).
_BLACKWELL = _microseconds(
    8,
    (32 * KiB, 26.4),
    (1 * MiB, 50.9),
    (4 * MiB, 96.0),
    (16 * MiB, 115.2),
    (64 * MiB, 293.2),
    (256 * MiB, 727.1),
    (1 * GiB, 2597.7),
    (16 * GiB, 35834.8),
)
# 4 x 8 B200 over EFA, calls queued, 2026-10 (same repository).
_BLACKWELL_HOSTS = _microseconds(
    32,
    (32 * KiB, 97.7),
    (512 * KiB, 145.3),
    (2 * MiB, 195.4),
    (16 * MiB, 452.7),
    (128 * MiB, 998.3),
    (1 * GiB, 5684.3),
    (16 * GiB, 88359.3),
    islands=4,
)
# 8 x A100, nccl-tests (same repository, network/README.md).
_AMPERE = _microseconds(
    8,
    (32 * KiB, 43.83),
    (256 * KiB, 61.38),
    (1 * MiB, 101.9),
    (8 * MiB, 133.5),
    (32 * MiB, 424.0),
    (128 * MiB, 1327.6),
    (1 * GiB, 8203.9),
    (16 * GiB, 127997.0),
)

# Reached, in bfloat16: the largest of a search over shapes (ml-engineering, MAMF); TPUs: assumed.
ACCELERATORS = (
    # `call` and `step`: 15.2 µs for 8 B on 8 H200; 23.5 µs, and 20.5 µs for a reduce-scatter, on 8
    # B200 (ml-engineering). Rings: 363 and 673 GB/s on 4 devices, 361 and 668 for an all-gather.
    Accelerator(
        ("h100", "h200", "h800", "gh200"),
        "Hopper, NVLink 4, from 8 x H200",
        Link(1 * MICRO, 1 / 361e9),
        9.2 * MICRO,
        4.8e12,
        "infiniband-400",
        _peaks(989.4, 494.7, 1978.9),
        0.803,
        (_HOPPER, _by_ring(_HOPPER, 4, 363.3e9)),
    ),
    Accelerator(
        ("b200", "b300", "gb200", "gb300", "b100"),
        "Blackwell, NVLink 5, from 8 and 4 x 8 B200",
        Link(1 * MICRO, 1 / 668e9),
        17.4 * MICRO,
        8.0e12,
        "efa-400",
        _peaks(2250, 1125, 4500),
        0.776,
        (_BLACKWELL, _by_ring(_BLACKWELL, 5, 677.8e9), _BLACKWELL_HOSTS),
    ),
    Accelerator(
        ("a100", "a800"),
        "Ampere, NVLink 3, from 8 x A100",
        Link(2 * MICRO, 1 / 235e9),
        12 * MICRO,  # assumed
        2.0e12,
        "infiniband-200",
        _peaks(312, 156),
        0.869,
        (_AMPERE,),
    ),
    # Specified link rates, all ports of a chip, one way; 1 µs a hop and 2 µs a call are assumed.
    Accelerator(
        ("v5 lite", "v5e"),
        "TPU v5e, specified 400 GB/s both ways (docs.cloud.google.com/tpu/docs/v5e)",
        Link(1 * MICRO, 1 / 200e9, torus=2),
        2 * MICRO,
        0.819e12,
        "dcn-v5e",
        _peaks(197, 197),
        0.8,
    ),
    Accelerator(
        ("v6 lite", "v6e"),
        "TPU v6e, specified 800 GB/s both ways (docs.cloud.google.com/tpu/docs/v6e)",
        Link(1 * MICRO, 1 / 400e9, torus=2),
        2 * MICRO,
        1.638e12,
        "dcn-v6e",
        _peaks(918, 918),
        0.8,
    ),
    Accelerator(
        ("tpu v5", "v5p"),
        "TPU v5p, specified 1200 GB/s both ways (docs.cloud.google.com/tpu/docs/v5p)",
        Link(1 * MICRO, 1 / 600e9, torus=3),
        2 * MICRO,
        2.765e12,
        "dcn-v5p",
        _peaks(459, 459),
        0.8,
    ),
    Accelerator(  # a chip is two devices, which share its links and its memory
        ("tpu7x",),
        "TPU7x, specified 1200 GB/s both ways (docs.cloud.google.com/tpu/docs/tpu7x)",
        Link(1 * MICRO, 1 / 300e9, torus=3),
        2 * MICRO,
        3.69e12,
        "dcn-tpu7x",
        _peaks(1153.5, 1153.5, 2307),
        0.8,
    ),
)
USUAL = {"gpu": ACCELERATORS[0], "tpu": ACCELERATORS[3]}


def preset(
    world: World, *, cores: int = 2, network: str | None = None, keeps_memory: bool = False
) -> Terms:
    """The terms that ship for a world.

    Args:
      world: where it runs. An unknown kind of GPU is taken for an H100, of TPU for a v5e.
      cores: cores of one host, which its CPU processes or CPU devices share.
      keeps_memory: malloc keeps what is freed (see docs/performance.md), so that arrays of a CPU
        process seldom take fresh pages.
      network: what joins hosts, a name of `NETWORKS`; None: what is usual.

    Raises:
      ValueError: no such network.

    Examples:
      >>> preset(World("gpu", (8,), device_kind="NVIDIA H200")).source
      'preset: Hopper, NVLink 4, from 8 x H200; between hosts infiniband-400'
    """
    if network is not None and network not in NETWORKS:
        raise ValueError(
            f"`network` must be None or one of {', '.join(NETWORKS)}; got {network!r}."
        )
    key = Key.of(world)
    if key.backend == "gloo":
        return _gloo(key, cores, network, keeps_memory)
    if key.backend == "memory":
        return _memory(key, cores)
    kind = world.device_kind.lower()
    known = (a for a in ACCELERATORS if any(name in kind for name in a.kinds))
    accelerator = next(known, USUAL.get(world.platform, USUAL["gpu"]))
    return accelerator.terms(key, network or accelerator.network)


# CPU processes over Gloo on 2 cores, median ms of one all-reduce (docs/performance.md). The last
# column: with pages that malloc keeps, and with pages that every call takes fresh.
_GLOO_CORES = 2
_GLOO = {
    2: (0.45, 0.55, 0.7, 1.4, 3.5, 14.0, (53.0, 98.0)),
    4: (4.5, 5.0, 5.4, 6.0, 10.7, 32.0, (130.0, 214.0)),
    8: (13.0, 15.0, 17.0, 20.0, 31.0, 74.0, (288.0, 450.0)),
}
_GLOO_SIZES = (1 * KiB, 64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB)


def _gloo(key: Key, cores: int, network: str | None, keeps_memory: bool) -> Terms:
    """CPU processes over Gloo: whatever a process does waits for its share of the cores."""
    turns = max(1.0, key.processes / key.hosts / cores)
    between = Link(0.2e-3 * turns, 0.55e-9 * turns)
    native: tuple[Curve, ...] = ()
    if key.hosts > 1:
        far = NETWORKS[network or "ethernet-100"].link(-(-key.processes // key.hosts))
        between = Link(between.step + far.step, max(between.per_byte, far.per_byte))
    elif key.per_island == 1:
        slower = _GLOO_CORES / cores
        native = tuple(
            Curve(
                tuple(
                    (size, ms * 1e-3 * slower)
                    for size, ms in zip(_GLOO_SIZES, (*few, last[not keeps_memory]), strict=True)
                ),
                n,
                n,
            )
            for n, (*few, last) in _GLOO.items()
        )
    pages = "that malloc keeps" if keeps_memory else "taken fresh"
    return dataclasses.replace(
        _memory(key, cores),
        source=f"preset: CPU processes over Gloo, {cores} cores a host, memory {pages}",
        between=between,
        call=0.05e-3 * turns,
        array=0.25e-3 * turns**2,
        reduce=0.2e-9 * turns,
        copy=(0.12e-9 if keeps_memory else 0.4e-9) * turns,
        slice=6 * MICRO * turns,
        combine=0,
        native=native,
    )


def _memory(key: Key, cores: int) -> Terms:
    """Devices of one CPU process, whose copies all go through the same cores.

    Copies, pieces and arrays as calibrated over 8 devices on 2 cores.
    """
    turns = max(1.0, key.per_island / cores)
    link = Link(10 * MICRO, 0.185e-9 * turns)
    return Terms(
        key,
        f"preset: devices of one CPU process, {cores} cores",
        link,
        Link(0.6e-3, 0.75e-9),
        call=100 * MICRO,
        array=50 * MICRO * turns,
        reduce=0.05e-9 * turns,
        copy=0.3e-9 * turns,
        slice=6 * MICRO * turns,
        combine=1 << 40,
    )
