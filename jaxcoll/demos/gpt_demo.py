"""`jaxcoll demo gpt`: a small GPT on real text, the same in every way to exchange gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxcoll as jc
from jaxcoll.demos import gpt, gpt_text
from jaxcoll.demos.gpt_training import MICRO_BATCHES, Mode, Trained, train

STEPS = 100
TEXTS = 32
"""Of one step, about; a whole number for each replica and micro-batch."""
MOST_DIFFERENCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All trainings, the first on one device.

    Attributes:
      devices: how many trained together.
      platform: "cpu", "gpu" or "tpu".
      steps: updates.
      texts: of each step.
      seed: of parameters and batches.
      parameters: how many the model has.
      reference: on one device, without jaxcoll.
      modes: by name, over the devices.
    """

    devices: int
    platform: str
    steps: int
    texts: int
    seed: int
    parameters: int
    reference: Trained
    modes: dict[str, Trained]

    def difference(self, mode: str) -> float:
        """The largest |loss - reference| / reference of any step."""
        one, many = (np.array(t.losses) for t in (self.reference, self.modes[mode]))
        return float(np.max(np.abs(many - one) / one))

    def shortfalls(self) -> list[str]:
        """The modes whose loss curve is not that of one device, in words."""
        return [
            f"{mode}: the losses differ from one device's by {self.difference(mode):.1e}, more "
            f"than {MOST_DIFFERENCE:.0e}"
            for mode in self.modes
            if not self.difference(mode) <= MOST_DIFFERENCE
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        fields = ("devices", "platform", "steps", "texts", "seed", "parameters")
        return {
            "jaxcoll": jc.__version__,
            "jax": jax.__version__,
            **{name: getattr(self, name) for name in fields},
            "losses_one_device": list(self.reference.losses),
            "state_bytes_one_device": self.reference.state_bytes,
            "modes": {name: self._told(name) for name in self.modes},
            "shortfalls": self.shortfalls(),
        }

    def _told(self, mode: str) -> dict[str, Any]:
        trained = self.modes[mode]
        assert trained.report is not None, "what runs on several devices was inspected"
        return {
            "losses": list(trained.losses),
            "largest_relative_difference": self.difference(mode),
            "state_bytes": trained.state_bytes,
            "wire_bytes_per_step": trained.report.wire_bytes,
            "collectives": trained.report.runs,
        }


def batch_size(replicas: int) -> int:
    """Texts of one step: about `TEXTS`, and a whole number for each replica and micro-batch.

    Examples:
      >>> [batch_size(n) for n in (1, 3, 7, 8, 100)]
      [32, 30, 28, 32, 200]
    """
    share = MICRO_BATCHES * replicas
    return share * max(1, round(TEXTS / share))


def demonstrate(
    devices: list[jax.Device],
    modes: dict[str, Mode],
    steps: int,
    seed: int,
    progress: Callable[[str, float], None],
) -> Outcome:
    """Train on the first device alone, then in every mode over all of them.

    Args:
      devices: of one platform.
      modes: by name.
      steps: updates of each training.
      seed: of parameters and batches.
      progress: told at every step the name, "one device" first, and the loss.
    """
    text, texts = gpt_text.load(), batch_size(len(devices))

    def trained(name: str, mode: Mode | None) -> Trained:
        batches = gpt_text.batches(text, texts, gpt.LENGTH, steps, seed)
        return train(mode, devices, steps, seed, batches, lambda loss: progress(name, loss))

    with jax.default_device(devices[0]):
        reference = trained("one device", None)
    found = {name: trained(name, mode) for name, mode in modes.items()}
    parameters = sum(x.size for x in jax.tree.leaves(gpt.initial(seed)))
    return Outcome(
        *(len(devices), devices[0].platform, steps, texts, seed, parameters), reference, found
    )
