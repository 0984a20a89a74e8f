"""The demo: train over several devices and on one, compare the two, and read what was sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxcoll as jc
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
    """The all-reduces of a program: how many, the arrays they carry, bytes that one device adds."""

    all_reduces: int
    operands: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that the demo found out.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      devices: how many devices trained together.
      steps: updates of the parameters.
      batch_size: images per step.
      seed: of parameters and batches.
      parameters: how many the network has.
      training: over the devices, with jaxcoll.
      reference: on one device, without jaxcoll.
      accuracy: on the test images, after `training`.
      reference_accuracy: the same after `reference`.
      difference: between the two sets of parameters; see `largest_relative_difference`.
      plan: how the gradients are packed.
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
    plan: jc.Plan
    requested: Traffic
    compiled: Traffic
    wire_bytes: int

    def shortfalls(self) -> list[str]:
        """The bars that were missed, in words; accuracy counts from the default number of steps."""
        missed = []
        if self.steps >= STEPS and self.accuracy < LEAST_ACCURACY:
            missed.append(f"test accuracy {self.accuracy:.4f} is below {LEAST_ACCURACY}")
        if not self.difference <= MOST_DIFFERENCE:  # also where it is NaN
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

    `progress` gets, at every step, whether the reference trains, and its loss.
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
    report = jc.inspect(step, *example)
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
        requested=_traffic(report.requested or ()),
        compiled=_traffic(report.collectives),
        wire_bytes=report.wire_bytes,
    )


def _traffic(collectives: Sequence[Any]) -> Traffic:
    sums = [c for c in collectives if c.kind == "all-reduce"]
    operands = [operand for c in sums for operand in c.operands]
    return Traffic(
        all_reduces=len(sums),
        operands=len(operands),
        bytes=sum(operand.nbytes for operand in operands),
        dtypes=tuple(sorted({operand.dtype for operand in operands})),
    )
