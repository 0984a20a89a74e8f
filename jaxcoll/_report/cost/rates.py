"""A table of rates: the published cost of accelerators' links, calls and copies.

Times are in seconds and sizes in bytes, except in the table itself, whose fields name their units.
There are two kinds of link: within an island and between islands. An island is a host, or a slice
of TPUs. docs/clusters.md has the sources.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import NamedTuple

from jaxcoll._plan.world import World

MiB = 1 << 20
MICRO, GIGA, TERA = 1e-6, 1e9, 1e12


@dataclasses.dataclass(frozen=True)
class Link:
    """The cost of one exchange between neighbours."""

    step: float  # seconds until the first byte of one device arrives at the next
    per_byte: float  # seconds per byte that leaves a device, while all devices of its island send
    torus: int = 0  # dimensions of the torus that joins the devices; 0: a switch joins them all

    def steps(self, n: int) -> float:
        """Return the dependent steps of the fastest reduction or broadcast over n devices.

        Examples:
          >>> Link(0.0, 0.0).steps(8), Link(0.0, 0.0, torus=2).steps(16)
          (3.0, 4.0)
        """
        if self.torus:
            return self.torus * round(n ** (1 / self.torus), 9) / 2
        return float((n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Curve:
    """Measured seconds of the backend's own all-reduce of one array, at a few rising sizes.

    One latency and one bandwidth miss published curves by up to a third, because transports change
    their protocol with the size. Between two points a concave curve lies above the chord in bytes
    and below the chord in logarithms, so `seconds` returns the geometric mean of the two. Above the
    largest size the last slope continues; below the smallest only latency is left.

    Examples:
      >>> curve = Curve(((1 << 20, 1e-3), (1 << 22, 3e-3)), replicas=8)
      >>> [round(1e3 * curve.seconds(nbytes), 2) for nbytes in (0, 1 << 21, 1 << 22, 1 << 23)]
      [1.0, 1.7, 3.0, 5.67]
    """

    points: tuple[tuple[int, float], ...]  # bytes and seconds; both rise
    replicas: int  # devices it was measured over
    islands: int = 1  # hosts (TPU: slices) that these devices belonged to

    @property
    def latency(self) -> float:
        """Seconds of the smallest size, and of all sizes below it."""
        return self.points[0][1]

    @property
    def per_byte(self) -> float:
        """Seconds per byte beyond the largest size: the slope between the two largest."""
        (a, start), (b, end) = self.points[-2:]
        return (end - start) / (b - a)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for an array of `nbytes`; never less for more bytes."""
        k = bisect.bisect_right(self.points, nbytes, key=lambda point: point[0])
        if k == 0:
            return self.latency
        if k == len(self.points):
            size, longest = self.points[-1]
            return longest + (nbytes - size) * self.per_byte
        (low, start), (high, end) = self.points[k - 1 : k + 1]
        by_bytes = start + (nbytes - low) / (high - low) * (end - start)
        by_logarithms = start * (end / start) ** (math.log(nbytes / low) / math.log(high / low))
        return math.sqrt(by_bytes * by_logarithms)


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one kind of world."""

    source: str  # the origin of the rates, which a prediction shows
    per_island: int  # replicas of one island
    within: Link  # between devices of one island
    between: Link  # between devices of different islands
    call: float  # seconds that one collective costs before anything moves
    array: float  # seconds for each array handed to the backend's own all-reduce, beyond `call`
    reduce: float  # seconds for each byte that a device adds to another
    copy: float  # seconds per byte copied into a pack, and again per byte copied out of it
    slice: float  # seconds for each piece of a leaf that is copied into a pack and out of it
    # Bytes up to which the compiler combines its own all-reduces into one collective; 0: it does
    # not combine them
    combine: int
    native: tuple[Curve, ...] = ()  # measured on the backend's own all-reduce
    # Operations per second that matrix products reach, by element type as HLO spells it ("f8" for
    # all 8-bit floats); () if that is not known
    products: tuple[tuple[str, float], ...] = ()

    def product_rate(self, dtype: str) -> float | None:
        """Return the operations per second of products of an element type; None if not known."""
        return dict(self.products).get("f8" if dtype.startswith("f8") else dtype)


NETWORKS = {
    "infiniband-400": (14, 47.5),  # NCCL's model (tuning.cc); nccl-tests#290
    "efa-400": (14, 47.5),
    "infiniband-200": (14, 23.75),
    # DCN of TPU slices: 6.4 Tbit/s per pod of 256 v5e, 50 Gbit/s per v5p chip, 100 per chip of two
    # TPU7x devices (docs.cloud.google.com); assumed: 4 × 200 Gbit/s per host of 8 v6e, all hops.
    "dcn-v5e": (50, 3.1),
    "dcn-v5p": (50, 6.25),
    "dcn-v6e": (50, 12.5),
    "dcn-tpu7x": (50, 6.25),
}
"""Microseconds of a hop between hosts, and GB/s for each device."""


class Accelerator(NamedTuple):
    """One kind of accelerator, by JAX's names for it, and the host that it usually belongs to."""

    kinds: tuple[str, ...]
    source: str
    hop_us: float
    gb_per_s: float  # of a link within a host, or of all links of a TPU chip
    call_us: float
    memory_tb_per_s: float
    network: str
    # Specified TFLOP/s of dense products, of float32 at JAX's default precision (TF32 on GPUs,
    # bfloat16 on TPUs), and the share of them that large products reach
    peaks: dict[str, float]
    reached: float
    torus: int = 0
    # Microseconds of the backend's all-reduce: replicas, hosts, and pairs of bytes and time
    curves: tuple[tuple[int, int, tuple[tuple[int, float], ...]], ...] = ()
    # Devices, and GB/s on the bus, of a ring of fewer devices, for which the switch does not sum
    ring: tuple[int, float] | None = None


# `call_us` and `hop_us` of Hopper and Blackwell: 15.2 µs for 8 B on 8 H200; 23.5 µs, and 20.5 µs
# for a reduce-scatter, on 8 B200 (ml-engineering). Of TPUs: specified link rates, all ports of a
# chip, one way; 1 µs a hop, 2 µs a call and 80 % of the peak are assumed.
ACCELERATORS = (
    Accelerator(
        ("h100", "h200", "h800", "gh200"), "Hopper, NVLink 4, from 8 x H200",
        1, 361, 9.2, 4.8, "infiniband-400",
        {"bf16": 989.4, "f16": 989.4, "f32": 494.7, "f8": 1978.9}, 0.803,
        curves=((8, 1, (  # NCCL 2.30.7, calls queued (ml-engineering, network/benchmarks)
            (32_768, 18.2), (524_288, 19.06), (1_048_576, 24.61), (4_194_304, 50.57),
            (16_777_216, 114.7), (67_108_864, 318.4), (268_435_456, 1063.1),
            (1_073_741_824, 4033.1), (17_179_869_184, 62341.1),
        )),),
        ring=(4, 363.3),
    ),
    Accelerator(
        ("b200", "b300", "gb200", "gb300", "b100"),
        "Blackwell, NVLink 5, from 8 and 4 x 8 B200",
        1, 668, 17.4, 8.0, "efa-400",
        {"bf16": 2250, "f16": 2250, "f32": 1125, "f8": 4500}, 0.776,
        curves=(
            (8, 1, (  # NCCL 2.27.7 from 1 MiB on, one call at a time; 2026-10 at both ends
                (32_768, 26.4), (1_048_576, 50.9), (4_194_304, 96.0), (16_777_216, 115.2),
                (67_108_864, 293.2), (268_435_456, 727.1), (1_073_741_824, 2597.7),
                (17_179_869_184, 35834.8),
            )),
            (32, 4, (  # over EFA, calls queued, 2026-10
                (32_768, 97.7), (524_288, 145.3), (2_097_152, 195.4), (16_777_216, 452.7),
                (134_217_728, 998.3), (1_073_741_824, 5684.3), (17_179_869_184, 88359.3),
            )),
        ),
        ring=(5, 677.8),
    ),
    Accelerator(
        ("a100", "a800"), "Ampere, NVLink 3, from 8 x A100",
        2, 235, 12, 2.0, "infiniband-200", {"bf16": 312, "f16": 312, "f32": 156}, 0.869,
        curves=((8, 1, (  # nccl-tests (ml-engineering, network/README.md); the call is assumed
            (32_768, 43.83), (262_144, 61.38), (1_048_576, 101.9), (8_388_608, 133.5),
            (33_554_432, 424.0), (134_217_728, 1327.6), (1_073_741_824, 8203.9),
            (17_179_869_184, 127997.0),
        )),),
    ),
    Accelerator(
        ("v5 lite", "v5e"), "TPU v5e, specified 400 GB/s both ways",
        1, 200, 2, 0.819, "dcn-v5e", {"bf16": 197, "f16": 197, "f32": 197}, 0.8, torus=2,
    ),
    Accelerator(
        ("v6 lite", "v6e"), "TPU v6e, specified 800 GB/s both ways",
        1, 400, 2, 1.638, "dcn-v6e", {"bf16": 918, "f16": 918, "f32": 918}, 0.8, torus=2,
    ),
    Accelerator(
        ("tpu v5", "v5p"), "TPU v5p, specified 1200 GB/s both ways",
        1, 600, 2, 2.765, "dcn-v5p", {"bf16": 459, "f16": 459, "f32": 459}, 0.8, torus=3,
    ),
    Accelerator(  # a chip is two devices, which share its links and its memory
        ("tpu7x",), "TPU7x, specified 1200 GB/s both ways",
        1, 300, 2, 3.69, "dcn-tpu7x", {"bf16": 1153.5, "f16": 1153.5, "f32": 1153.5, "f8": 2307},
        0.8, torus=3,
    ),
)  # fmt: skip


def find_rates(world: World) -> Rates | None:
    """Find the rates of a world; None for CPUs, which differ from machine to machine.

    An unknown GPU has the rates of an H100, an unknown TPU those of a v5e.

    Examples:
      >>> find_rates(World("gpu", (8,), device_kind="NVIDIA H200")).source
      'Hopper, NVLink 4, from 8 x H200; between hosts infiniband-400'
    """
    if world.platform == "cpu":
        return None
    kind, default = world.device_kind.lower(), "v5e" if world.platform == "tpu" else "h100"
    matches = [a for a in ACCELERATORS if any(name in kind for name in a.kinds)]
    chip = [*matches, *(a for a in ACCELERATORS if default in a.kinds)][0]
    memory, (hop_us, gb_per_s) = 0.9 * chip.memory_tb_per_s * TERA, NETWORKS[chip.network]
    return Rates(
        f"{chip.source}; between hosts {chip.network}",
        per_island=-(-world.replicas // world.hosts),
        within=Link(chip.hop_us * MICRO, 1 / (chip.gb_per_s * GIGA), chip.torus),
        between=Link(hop_us * MICRO, 1 / (gb_per_s * GIGA)),
        call=chip.call_us * MICRO,
        array=1.5 * MICRO,  # assumed
        reduce=3 / memory,  # two reads and a write
        copy=2 / memory,  # a read and a write
        slice=2 * MICRO,  # assumed
        combine=30 * MiB,  # XLA's default
        native=tuple(_curves(chip)),
        products=tuple((name, chip.reached * peak * TERA) for name, peak in chip.peaks.items()),
    )


def _curves(chip: Accelerator) -> list[Curve]:
    curves = [
        Curve(tuple((size, us * MICRO) for size, us in points), replicas, hosts)
        for replicas, hosts, points in chip.curves
    ]
    if chip.ring:
        # The switch's curve, stretched to the time of a ring for the largest array.
        n, busbw = chip.ring
        switch = curves[0]
        first, (nbytes, seconds) = switch.latency, switch.points[-1]
        on_ring = nbytes * 2 * (n - 1) / n / (busbw * GIGA)
        factor = (on_ring - first) / (seconds - first)
        points = ((size, first + factor * (t - first)) for size, t in switch.points)
        curves.insert(1, Curve(tuple(points), n))
    return curves
