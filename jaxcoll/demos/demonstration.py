"""The demo: train over several devices and on one, compare the two, and read what was sent."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

import jaxcoll as jc
from jaxcoll._show.units import counted
from jaxcoll.demos import digits, network

STEPS = 600
LEAST_ACCURACY = 0.96
MOST_DIFFERENCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of a program: how many of each kind, the arrays they carry, their bytes."""

    kinds: dict[str, int]
    all_reduces: int
    operands: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of the demo, named as in its JSON file.

    "One device" trains without jaxcoll, on the same batches. The largest relative difference is
    that of its parameters; traffic and wire bytes are those of one step.
    """

    platform: str
    processes: int
    devices: int
    steps: int
    batch_size: int
    seed: int
    parameters: int
    test_accuracy: float
    test_accuracy_one_device: float
    largest_relative_difference: float
    wire_bytes_per_step: int
    requested: Traffic
    compiled: Traffic
    plan: jc.Plan
    seconds: float
    seconds_one_device: float
    losses: tuple[float, ...]
    losses_one_device: tuple[float, ...]

    def shortfalls(self) -> list[str]:
        """The bars that were missed, in words; accuracy counts from the default number of steps."""
        missed = []
        if self.steps >= STEPS and self.test_accuracy < LEAST_ACCURACY:
            missed.append(f"test accuracy {self.test_accuracy:.4f} is below {LEAST_ACCURACY}")
        if not self.largest_relative_difference <= MOST_DIFFERENCE:  # also where it is NaN
            missed.append(
                f"the parameters differ from one device's by {self.largest_relative_difference:.1e}"
                f", more than {MOST_DIFFERENCE:.0e}"
            )
        return missed

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "jaxcoll": jc.__version__,
            "jax": jax.__version__,
            **vars(self),
            "requested": dataclasses.asdict(self.requested),
            "compiled": dataclasses.asdict(self.compiled),
            "plan": self.plan.to_dict(),
            "shortfalls": self.shortfalls(),
        }


def kinds_in_words(traffic: Traffic) -> str:
    """How many collectives of which kind."""
    return ", ".join(counted(n, kind) for kind, n in traffic.kinds.items()) or "none"


def demonstrate(
    devices: list[jax.Device],
    steps: int,
    seed: int,
    options: jc.CommunicationOptions,
    progress: Callable[[bool, float], None],
) -> Outcome | None:
    """Train over `devices`, train again on the first alone, and read what was compiled.

    `progress` gets, at every step, whether the reference trains, and its loss. Over several
    processes the first one makes the outcome, and others return None.
    """
    data, params = digits.load(), network.initial(seed)
    size = digits.batch_size(len(devices))
    step = network.over_devices(devices, steps, options)

    def trained(step: Any, batches: Iterable[Any], *, is_reference: bool) -> network.Training:
        each = functools.partial(progress, is_reference)
        return network.train(step, params, steps, batches, each)

    shares = map(_share, digits.batches(data, size, steps, seed))
    training = trained(step, shares, is_reference=False)
    one = _share(next(digits.batches(data, size, 1, seed)))
    example = (params, network.optimizer(steps).init(params), one)
    report = jc.inspect(step, *example)
    (plan,) = step.plans(*example)
    if jax.process_index():
        return None
    # The same platform for both, or their rounding would differ by more than the order of sums.
    with jax.default_device(devices[0]):
        batches = digits.batches(data, size, steps, seed)
        reference = trained(network.on_one_device(steps), batches, is_reference=True)
        tests = data.test_images, data.test_labels
        scored = [network.accuracy(t.params, *tests) for t in (training, reference)]
    return Outcome(
        platform=plan.world.platform,
        processes=jax.process_count(),
        devices=len(devices),
        steps=steps,
        batch_size=size,
        seed=seed,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        test_accuracy=scored[0],
        test_accuracy_one_device=scored[1],
        largest_relative_difference=_difference(reference.params, training.params),
        wire_bytes_per_step=report.wire_bytes,
        requested=_traffic(report.requested or ()),
        compiled=_traffic(report.collectives),
        plan=plan,
        seconds=training.seconds,
        seconds_one_device=reference.seconds,
        losses=training.losses,
        losses_one_device=reference.losses,
    )


def _share(batch: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """This process's rows of a batch: all of them, where there is one process."""
    return tuple(np.split(x, jax.process_count())[jax.process_index()] for x in batch)


def _traffic(collectives: Sequence[Any]) -> Traffic:
    operands = [operand for c in collectives for operand in c.operands]
    kinds = Counter(c.kind for c in collectives)
    return Traffic(
        kinds=dict(kinds),
        all_reduces=kinds["all-reduce"],
        operands=len(operands),
        bytes=sum(operand.nbytes for operand in operands),
        dtypes=tuple(sorted({operand.dtype for operand in operands})),
    )


def _difference(one: Any, other: Any) -> float:
    """The largest |a - b| / max |a| of any leaf."""

    def difference(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.max(np.abs(a - b)) / (np.max(np.abs(a)) or 1.0))

    return max(jax.tree.leaves(jax.tree.map(difference, one, other)))
