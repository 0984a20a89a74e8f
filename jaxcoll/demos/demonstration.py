"""The main job: a trained model, the proof that it is the right one, and what was sent for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import jaxcoll as jc
from jaxcoll._observe.parse.collective import Collective, wire_bytes
from jaxcoll._observe.parse.hlo import read_hlo
from jaxcoll._observe.parse.stablehlo import read_stablehlo
from jaxcoll._plan.plan import Plan
from jaxcoll.demos import digits
from jaxcoll.demos.network import accuracy, initial
from jaxcoll.demos.training import (
    Training,
    largest_relative_difference,
    on_one_device,
    optimizer,
    over_devices,
    train,
)

STEPS = 600
LEAST_ACCURACY = 0.96
MOST_DIFFERENCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The all-reduces of a program.

    Attributes:
      all_reduces: how many there are.
      operands: how many arrays they carry between them.
      bytes: what one device puts in.
      dtypes: element types on the wire.
    """

    all_reduces: int
    operands: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that the demonstration found out.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      devices: how many devices trained together.
      steps: updates of the parameters.
      batch_size: images a step.
      seed: of parameters and batches.
      parameters: how many the network has.
      training: over the devices, through jaxcoll.
      reference: on one device, without jaxcoll.
      accuracy: on the test images, after `training`.
      reference_accuracy: the same after `reference`.
      difference: between the two sets of parameters; see `largest_relative_difference`.
      plan: how the gradients travel.
      requested: by the lowered program.
      compiled: by the compiled program.
      wire_bytes: that leave one device each step, counted in the compiled program.
    """

    platform: str
    devices: int
    steps: int
    batch_size: int
    seed: int
    parameters: int
    training: Training
    reference: Training
    accuracy: float
    reference_accuracy: float
    difference: float
    plan: Plan
    requested: Traffic
    compiled: Traffic
    wire_bytes: int

    def shortfalls(self) -> list[str]:
        """The bars that were missed, in words; accuracy counts from the default number of steps."""
        missed = []
        if self.steps >= STEPS and self.accuracy < LEAST_ACCURACY:
            missed.append(f"test accuracy {self.accuracy:.4f} is below {LEAST_ACCURACY}")
        if not self.difference <= MOST_DIFFERENCE:
            missed.append(
                f"the parameters differ from one device's by {self.difference:.1e}, more than "
                f"{MOST_DIFFERENCE:.0e}"
            )
        return missed

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, without the parameters."""
        return {
            "jaxcoll": jc.__version__,
            "jax": jax.__version__,
            **{k: getattr(self, k) for k in ("platform", "devices", "steps", "batch_size", "seed")},
            "parameters": self.parameters,
            "test_accuracy": self.accuracy,
            "test_accuracy_one_device": self.reference_accuracy,
            "largest_relative_difference": self.difference,
            "wire_bytes_per_step": self.wire_bytes,
            "requested": dataclasses.asdict(self.requested),
            "compiled": dataclasses.asdict(self.compiled),
            "plan": self.plan.to_dict(),
            "seconds": self.training.seconds,
            "seconds_one_device": self.reference.seconds,
            "losses": list(self.training.losses),
            "losses_one_device": list(self.reference.losses),
            "shortfalls": self.shortfalls(),
        }


def demonstrate(
    devices: list[jax.Device],
    steps: int,
    seed: int,
    options: jc.CommunicationOptions,
    progress: Callable[[bool, float], None],
) -> Outcome:
    """Train over `devices`, train again on the first alone, and read what was compiled.

    Args:
      devices: of one platform.
      steps: updates.
      seed: of parameters and batches.
      options: how the gradients are to travel.
      progress: told at every step whether it is the reference that trains, and its loss.

    Returns:
      The outcome.
    """
    data, params = digits.load(), initial(seed)
    size = digits.batch_size(len(devices))
    example = (params, optimizer(steps).init(params), next(digits.batches(data, size, 1, seed)))
    step = over_devices(devices, steps, options)

    def trained(step: Any, *, is_reference: bool) -> Training:
        batches = digits.batches(data, size, steps, seed)
        return train(step, params, steps, batches, lambda value: progress(is_reference, value))

    training = trained(step, is_reference=False)
    with jax.default_device(devices[0]):
        reference = trained(on_one_device(steps), is_reference=True)
        scored = [
            accuracy(t.params, data.test_images, data.test_labels) for t in (training, reference)
        ]
    lowered = step.lower(*example)
    compiled = read_hlo(lowered.compile().as_text())
    (plan,) = step.plans(*example)
    return Outcome(
        platform=plan.world.platform,
        devices=len(devices),
        steps=steps,
        batch_size=size,
        seed=seed,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        training=training,
        reference=reference,
        accuracy=scored[0],
        reference_accuracy=scored[1],
        difference=largest_relative_difference(reference.params, training.params),
        plan=plan,
        requested=_traffic(read_stablehlo(lowered.as_text())),
        compiled=_traffic(compiled),
        wire_bytes=wire_bytes(compiled),
    )


def counted(count: int, what: str) -> str:
    """A number of things, in words.

    Examples:
      >>> counted(1, "array"), counted(1200, "step")
      ('1 array', '1,200 steps')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _traffic(collectives: tuple[Collective, ...]) -> Traffic:
    sums = [c for c in collectives if c.kind == "all-reduce"]
    operands = [operand for c in sums for operand in c.operands]
    return Traffic(
        all_reduces=len(sums),
        operands=len(operands),
        bytes=sum(operand.nbytes for operand in operands),
        dtypes=tuple(sorted({operand.dtype for operand in operands})),
    )
