"""The automatic choice: how to pack and which algorithm, from the options and the world."""

from __future__ import annotations

import dataclasses

from jaxcoll._plan.options import CommunicationImplementation, CommunicationOptions
from jaxcoll._plan.packing import BytesPerPack, PackingRule, Unpacked
from jaxcoll._plan.world import World

GLOO_PACK = 4 << 20
"""Bytes of a pack between CPU processes, near the fastest measured (docs/performance.md)."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What will be done, and why, in words a plan can show."""

    packing: PackingRule
    algorithm: str
    reasons: tuple[str, ...]


def choose(
    options: CommunicationOptions, world: World, packing: PackingRule | None = None
) -> Choice:
    """Turn what was asked into what is done.

    Args:
      options: what the user asked for.
      world: where it runs.
      packing: a rule that was asked for by other means (`num_packs`), which then stands.

    Returns:
      The rule, the algorithm's name, and one sentence for each decision.
    """
    if packing is not None:
        why_packing = "packs: as the cross-device ops were told"
    elif options.bytes_per_pack:
        packing = BytesPerPack(options.bytes_per_pack)
        why_packing = f"packs: at most {options.bytes_per_pack} bytes, as asked"
    elif world.platform == "cpu" and world.processes > 1:
        packing = BytesPerPack(GLOO_PACK)
        why_packing = (
            f"packs: at most {GLOO_PACK} bytes, because Gloo pays for every array it is handed"
        )
    else:
        packing = Unpacked()
        why_packing = (
            "packs: none, because inside one process and on accelerators the compiler "
            "combines all-reduces itself and a copy would only cost time"
        )
    algorithm, why_algorithm = _algorithm(options.implementation, world)
    return Choice(packing, algorithm, (why_packing, why_algorithm))


def _algorithm(implementation: CommunicationImplementation, world: World) -> tuple[str, str]:
    if implementation is CommunicationImplementation.RING:
        return "ring", "algorithm: a ring of neighbour exchanges, as asked"
    carrier = {
        "gpu": "NCCL (RCCL on AMD)",
        "tpu": "the TPU interconnect",
        "cpu": "Gloo" if world.processes > 1 else "memory shared by the devices of this process",
    }.get(world.platform, f"the {world.platform} backend")
    if implementation is CommunicationImplementation.NCCL and world.platform != "gpu":
        return "native", f"algorithm: NCCL was asked for, but {carrier} carries it here"
    return "native", f"algorithm: the compiler's own all-reduce, carried by {carrier}"
