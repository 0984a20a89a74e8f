"""Cost terms of `presets.toml`, for worlds that were not calibrated."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

from jaxcoll._plan.checks import refuse
from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.cost.terms import Key, Link, Terms
from jaxcoll._plan.world import World
from jaxcoll._show import codec

MiB = 1 << 20
MICRO, GIGA, TERA = 1e-6, 1e9, 1e12


@dataclasses.dataclass(frozen=True)
class Network:
    """How hosts are joined: one hop, and what one NIC carries; `shared` by a host's devices."""

    hop_us: float
    gb_per_s: float
    shared: bool = dataclasses.field(default=False, metadata=codec.OPTIONAL)

    def link(self, per_host: int) -> Link:
        """The link of one device while all `per_host` send."""
        bandwidth = self.gb_per_s * GIGA
        return Link(self.hop_us * MICRO, (per_host if self.shared else 1) / bandwidth)


@dataclasses.dataclass(frozen=True)
class Ring:
    """What a ring of fewer devices reaches, which get no sums in the switch."""

    replicas: int
    busbw_gb_per_s: float

    def curve(self, whole: Curve) -> Curve:
        """`whole`, which was measured with sums in the switch, as if by this ring."""
        n = self.replicas
        *_, (most, longest) = whole.points
        wanted = most * 2 * (n - 1) / n / (self.busbw_gb_per_s * GIGA)
        factor = (wanted - whole.latency) / (longest - whole.latency)
        points = ((s, whole.latency + factor * (t - whole.latency)) for s, t in whole.points)
        return Curve(tuple(points), n)


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, as JAX names it, and the host it is usually in."""

    kinds: tuple[str, ...]
    source: str
    hop_us: float
    gb_per_s: float
    call_us: float
    memory_tb_per_s: float
    network: str
    peaks: dict[str, float]
    reached: float
    torus: int = dataclasses.field(default=0, metadata=codec.OPTIONAL)
    # Of the backend's own all-reduce, in microseconds
    curves: tuple[Curve, ...] = dataclasses.field(default=(), metadata=codec.OPTIONAL)
    ring: Ring | None = dataclasses.field(default=None, metadata=codec.OPTIONAL)

    @functools.cached_property
    def native(self) -> tuple[Curve, ...]:
        """The curves as measured, and the ring's."""
        measured = [
            dataclasses.replace(c, points=tuple((size, t * MICRO) for size, t in c.points))
            for c in self.curves
        ]
        ring = [self.ring.curve(measured[0])] if self.ring else []
        return (*measured[:1], *ring, *measured[1:])

    def terms(self, key: Key, network: str) -> Terms:
        """The terms over `network`; curves between hosts hold for the usual network alone."""
        memory = 0.9 * (self.memory_tb_per_s * TERA)
        return Terms(
            key,
            f"preset: {self.source}; between hosts {network}",
            Link(self.hop_us * MICRO, 1 / (self.gb_per_s * GIGA), self.torus),
            NETWORKS[network].link(key.per_island),
            call=self.call_us * MICRO,
            array=1.5 * MICRO,  # assumed
            reduce=3 / memory,  # two reads and a write
            copy=2 / memory,  # a read and a write
            slice=2 * MICRO,  # assumed
            combine=30 * MiB,  # XLA's default
            native=tuple(c for c in self.native if c.islands == 1 or network == self.network),
            rates=tuple((name, self.reached * (tera * TERA)) for name, tera in self.peaks.items()),
        )


@dataclasses.dataclass(frozen=True)
class Gloo:
    """Milliseconds of all-reduces over Gloo; the largest with memory kept, and taken fresh."""

    cores: int
    bytes: tuple[int, ...]
    milliseconds: tuple[tuple[int, tuple[float, ...]], ...]
    largest_bytes: int
    largest_kept: tuple[float, ...]
    largest_fresh: tuple[float, ...]

    def curves(self, cores: int, keeps_memory: bool) -> tuple[Curve, ...]:
        """A curve for each number of processes, on a host with so many cores."""
        slower = self.cores / cores
        largest = self.largest_kept if keeps_memory else self.largest_fresh
        found = []
        for (n, few), last in zip(self.milliseconds, largest, strict=True):
            sizes = (*self.bytes, self.largest_bytes)
            points = zip(sizes, (*few, last), strict=True)
            found.append(Curve(tuple((size, ms * 1e-3 * slower) for size, ms in points), n, n))
        return tuple(found)

    def between_hosts(self, key: Key, far: Link, cores: int, kept: bool) -> Iterator[Curve]:
        """Curves of processes on several hosts of so many cores, by whose links a ring goes."""
        # For each there is one where every process has a host and, as in the reduction of `key`, a
        # part of its link; and one where processes of a host are neighbours: one of them sends.
        for curve in self.curves(self.cores, kept):
            n = curve.replicas
            # A process that waits for a core holds up all others, so that few steps take longest.
            turns = max(1.0, key.per_island / cores) / max(1.0, n / self.cores)
            for islands in sorted({n, key.hosts}):
                if islands <= n:
                    sharing = key.per_island if n > islands else 1
                    wire = 2 * (n - 1) / n * far.per_byte / sharing
                    start = turns**2 * curve.latency + 2 * (n - 1) * far.step
                    points = tuple(
                        (size, start + turns * (t - curve.latency) + size * wire)
                        for size, t in curve.points
                    )
                    yield Curve(points, n, islands)


# Read at import: a trace may ask for a preset, and a trace reads no file.
_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NETWORKS = codec.read(dict[str, Network], _FILE["networks"])
_ACCELERATORS = codec.read(tuple[Accelerator, ...], _FILE["accelerators"])
_GLOO = codec.read(Gloo, _FILE["gloo"])
_USUAL = {"gpu": "h100", "tpu": "v5e"}


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
        refuse("network", f"None or one of {', '.join(NETWORKS)}", network)
    key = Key.of(world)
    if key.backend == "gloo":
        return _gloo(key, cores, network, keeps_memory)
    if key.backend == "memory":
        return _memory(key, cores)
    kind = world.device_kind.lower()
    usual = _USUAL.get(world.platform, _USUAL["gpu"])
    known = [a for a in _ACCELERATORS if any(name in kind for name in a.kinds)]
    accelerator = [*known, *(a for a in _ACCELERATORS if usual in a.kinds)][0]
    return accelerator.terms(key, network or accelerator.network)


def _gloo(key: Key, cores: int, network: str | None, keeps_memory: bool) -> Terms:
    """CPU processes over Gloo: whatever a process does waits for its share of the cores."""
    memory = _memory(key, cores)
    turns = max(1.0, key.processes / key.hosts / cores)
    within, between = memory.within, Link(0.2e-3 * turns, 0.55e-9 * turns)
    native: tuple[Curve, ...] = ()
    pages = "that malloc keeps" if keeps_memory else "taken fresh"
    source = f"preset: CPU processes over Gloo, {cores} cores a host, memory {pages}"
    if key.hosts > 1:
        network = network or "ethernet-10"
        source += f"; between hosts {network}"
        far = NETWORKS[network].link(key.per_island)
        if key.replicas == key.processes:
            native = tuple(_GLOO.between_hosts(key, far, cores, keeps_memory))
        within = between
        between = Link(within.step + far.step, max(within.per_byte, far.per_byte))
    elif key.per_island == 1:
        native = _GLOO.curves(cores, keeps_memory)
    return dataclasses.replace(
        memory,
        source=source,
        within=within,
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
