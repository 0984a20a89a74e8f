"""The terms of the cost model: what one kind of world costs, measured or published.

All times are in seconds, all sizes in bytes. The model tells two kinds of link apart: within an
island, and between islands. An island is a host, or a slice of TPUs; where CPU processes are all on
one host, it is one process.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jaxcoll._plan.checks import is_number
from jaxcoll._plan.cost.curve import Curve
from jaxcoll._plan.world import World
from jaxcoll._show import codec
from jaxcoll._show.units import counted

FORMAT = "jaxcoll terms"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Key:
    """The kind of world that terms hold for."""

    backend: str  # what carries collectives: "nccl", "tpu", "gloo" or "memory" (one CPU process)
    device_kind: str  # what JAX calls the device; "" where it was not asked
    replicas: int  # devices
    processes: int  # processes they belong to
    hosts: int  # hosts (TPU: slices) they belong to

    @classmethod
    def of(cls, world: World) -> Key:
        """The key of a world.

        Examples:
          >>> str(Key.of(World("cpu", (2, 4), processes=2)))
          'gloo, 8 replicas, 2 processes, 1 host'
        """
        carriers = {"gpu": "nccl", "cpu": "gloo" if world.over_gloo else "memory"}
        backend = carriers.get(world.platform, world.platform)
        return cls(backend, world.device_kind, world.replicas, world.processes, world.hosts)

    @property
    def islands(self) -> int:
        """Islands that the replicas are on."""
        return self.processes if self.backend == "gloo" and self.hosts == 1 else self.hosts

    @property
    def per_island(self) -> int:
        """Replicas of one island."""
        return max(1, -(-self.replicas // self.islands))

    def __str__(self) -> str:
        named = " ".join(filter(None, (self.backend, self.device_kind)))
        replicas, hosts = counted(self.replicas, "replica"), counted(self.hosts, "host")
        return f"{named}, {replicas}, {counted(self.processes, 'process', 'processes')}, {hosts}"


@dataclasses.dataclass(frozen=True)
class Link:
    """What one exchange between neighbours costs."""

    step: float  # seconds from one device to the next before the first byte is there
    per_byte: float  # seconds per byte that leaves a device, while all devices of its island send
    torus: int = 0  # dimensions of the torus that joins the devices; 0: a switch joins them all

    def steps(self, n: int) -> float:
        """Dependent steps of the fastest reduction, or of the fastest broadcast, over n devices.

        Examples:
          >>> Link(0.0, 0.0).steps(8), Link(0.0, 0.0, torus=2).steps(16)
          (3.0, 4.0)
        """
        if self.torus:
            return self.torus * round(n ** (1 / self.torus), 9) / 2
        return float((n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Terms:
    """The measured or published numbers for one kind of world.

    Raises:
      ValueError: a number is negative or not finite, or a rate is zero.
    """

    key: Key  # the world they hold for
    source: str  # which preset or which calibration file they are from
    within: Link  # the link between devices of one island
    between: Link  # the link between devices of different islands
    call: float = 0.0  # seconds that one collective costs before anything moves
    # Seconds for each array that is handed to the backend's own all-reduce, beyond `call`
    array: float = 0.0
    reduce: float = 0.0  # seconds per byte that a device adds to what it holds
    copy: float = 0.0  # seconds per byte copied into a pack, and again per byte copied out of it
    slice: float = 0.0  # seconds for each piece of a leaf that is copied into a pack and out of it
    # Bytes up to which the compiler makes one collective of several of its own all-reduces; 0: the
    # runtime takes them one by one
    combine: int = 0
    # Curves of the backend's own all-reduce; those between islands included
    native: tuple[Curve, ...] = ()
    # For element types, as HLO spells them ("f8" for all of 8 bits), floating-point operations a
    # second that matrix products reach; () where that is not known
    rates: tuple[tuple[str, float], ...] = dataclasses.field(default=(), metadata=codec.OPTIONAL)

    def __post_init__(self) -> None:
        if 0 in dict(self.rates).values():
            raise ValueError(f"`rates` of the cost terms must be above zero; got {self.rates!r}.")
        for name, value in (
            *((f"rates[{dtype!r}]", rate) for dtype, rate in self.rates),
            *((name, getattr(self, name)) for name in _NUMBERS),
            *((f"within.{name}", value) for name, value in vars(self.within).items()),
            *((f"between.{name}", value) for name, value in vars(self.between).items()),
        ):
            if not is_number(value) or value < 0:
                raise ValueError(
                    f"`{name}` of the cost terms must be a finite number that is not negative; "
                    f"got {value!r}."
                )

    def rate(self, dtype: str) -> float | None:
        """Operations a second of products of an element type; None where that is not known."""
        return dict(self.rates).get("f8" if dtype.startswith("f8") else dtype)

    def to_dict(self) -> dict[str, Any]:
        """The terms in plain numbers and strings, with a version and the world's key."""
        return {"format": FORMAT, "version": VERSION, **codec.plain(self)}

    def to_json(self) -> str:
        """`to_dict()` as JSON text, which `parsed` and `terms_of` read back."""
        return json.dumps(self.to_dict(), indent=2)


_NUMBERS = ("call", "array", "reduce", "copy", "slice", "combine")


_AGAIN = "calibrate again, or delete the file to use the preset"


def parsed(text: str) -> Any:
    """What `Terms.to_dict` gave, and whatever was written beside it, from JSON text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"these cost terms cannot be read: expected JSON as a calibration writes it, but "
            f"{error}; {_AGAIN}."
        ) from error


def terms_of(data: Any) -> Terms:
    """The terms whose `to_dict()` is `data`, but for the `measured_on` of a calibration."""
    found = data if isinstance(data, dict) else {"format": type(data).__name__}
    if found.get("format") != FORMAT:
        raise ValueError(
            f"this is no file of cost terms: expected the format {FORMAT!r}, got "
            f"{found.get('format')!r}; {_AGAIN}."
        )
    if found.get("version") != VERSION:
        raise ValueError(
            f"these cost terms are of version {found.get('version')!r}, and this jaxcoll reads "
            f"version {VERSION}: use the jaxcoll that wrote them, or {_AGAIN}."
        )
    beside = ("format", "version", "measured_on")
    try:
        return codec.read(Terms, {name: x for name, x in found.items() if name not in beside})
    except (TypeError, ValueError) as error:
        raise ValueError(f"these cost terms are damaged: {error}; {_AGAIN}.") from error
