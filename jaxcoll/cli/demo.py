"""`jaxcoll demo`: train a small network on several devices, and show what they send."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcoll as jc
from jaxcoll.cli import flags

EPILOG = """\
Trains a small network on handwritten digits, and compares it with training on one device without
jaxcoll. `jaxcoll launch -n 2 -m jaxcoll demo` trains it in two processes. The exit status is 1 if
the parameters differ by more than 1e-4, or if 600 steps do not reach a test accuracy of 0.96.
"""

STEPS, BATCH, LEAST_ACCURACY, MOST_DIFFERENCE = 600, 256, 0.96, 1e-4
SHAPES = {"first": (64, 256), "second": (256, 64), "scores": (64, 10)}


class Digits(NamedTuple):
    """UCI's handwritten digits: float32 images of 64 pixels from 0 to 1, and int32 labels."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Digits:
    """Load 1,437 images for training and 360 for testing, with the same share of each digit."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    both = (pixels / 16).astype(np.float32), digits.astype(np.int32)
    parts = train_test_split(np.arange(len(digits)), test_size=360, random_state=0, stratify=digits)
    return Digits(*(x[rows] for rows in parts for x in both))


def batches(digits: Digits, size: int, steps: int, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield `steps` batches of images and labels, reproducible from `seed`."""
    rng, n = np.random.default_rng(seed), len(digits.labels)
    epochs = [rng.permutation(n) for _ in range(-(-steps * size // n))]
    for chosen in np.split(np.concatenate(epochs)[: steps * size], steps):
        yield digits.images[chosen], digits.labels[chosen]


def initial(seed: int) -> dict[str, Any]:
    """Return new float32 parameters, reproducible from `seed`."""
    rng = np.random.default_rng(seed)
    return {
        name: {
            "bias": np.zeros(width, np.float32),
            # 1.6 keeps activations at the same scale from layer to layer; gelu would shrink them.
            "kernel": (rng.standard_normal((n, width)) * (1.6 / np.sqrt(n))).astype(np.float32),
        }
        for name, (n, width) in SHAPES.items()
    }


def scores(params: dict[str, Any], images: jax.Array) -> jax.Array:
    """Return logits of shape (n, 10) for images of shape (n, 64)."""
    x = images
    for name in SHAPES:
        x = jax.nn.gelu(x) if x is not images else x
        x = x @ params[name]["kernel"] + params[name]["bias"]
    return x


def loss(params: dict[str, Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of a batch, or of one replica's share of it."""
    logs = jax.nn.log_softmax(scores(params, images))
    return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], axis=1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    flags.add_devices(parser)
    positive, text = flags.minimum(1), f"training steps (default: {STEPS})"
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    """Train on all devices and on one, print a comparison, and return the exit status."""
    if missing := [name for name in ("optax", "sklearn") if not importlib.util.find_spec(name)]:
        raise ValueError(
            f"needs {', '.join(missing)}, not installed here: pip install 'jaxcoll[train]'"
        )
    precision = "jax_default_matmul_precision"
    before = jax.config.values[precision]
    # By default, an accelerator may round the factors of products, depending on the batch size.
    jax.config.update(precision, "highest")
    try:
        return _compare(args)
    finally:
        jax.config.update(precision, before)


def _compare(args: argparse.Namespace) -> int:
    import optax

    rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, min(30, args.steps // 2), args.steps)
    # With momentum, two runs that differ by rounding stay close; Adam would amplify rounding.
    optimizer = optax.sgd(rate, momentum=0.9, nesterov=True)

    def step(value_and_grad: Any, params: Any, state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    devices, processes = flags.choose_devices(args.platform, args.devices), jax.process_count()
    data, size = load(), len(devices) * max(1, round(BATCH / len(devices)))

    def train(step: Any, shares: int, rank: int) -> tuple[Any, list[float], tuple[Any, ...]]:
        params, losses, arguments = initial(0), [], ()
        state = optimizer.init(params)
        for batch in batches(data, size, args.steps, 0):
            arguments = params, state, tuple(np.split(x, shares)[rank] for x in batch)
            params, state, value = step(*arguments)
            losses.append(float(value))  # waits: simulated devices share few cores
        return jax.device_get(params), losses, arguments

    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("data",))
    ours = partial(step, jc.value_and_grad(loss, "data"))
    shared = jc.data_parallel(ours, mesh=mesh, batch_argnums=2)
    params, losses, arguments = train(shared, processes, rank := jax.process_index())
    report = jc.inspect(shared, *arguments)
    if rank:
        return 0
    with jax.default_device(devices[0]):
        reference, _, _ = train(jax.jit(partial(step, jax.value_and_grad(loss))), 1, 0)
        predicted = np.argmax(np.asarray(jax.jit(scores)(params, data.test_images)), axis=1)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(reference), strict=True)
    difference = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)
    accuracy = float(np.mean(predicted == data.test_labels))
    where = f"{len(devices)} devices in {processes} process{'es' * (processes > 1)}"
    print(f"{where}, {args.steps} steps of {size} images of handwritten digits")
    print(f"loss {losses[0]:.4f} … {losses[-1]:.4f}; test accuracy {accuracy:.4f}")
    print(f"largest relative difference from one device's parameters: {difference:.1e}")
    print("", report.plans[0], "", report, sep="\n")
    is_poor = args.steps >= STEPS and accuracy < LEAST_ACCURACY
    return int(is_poor or not difference <= MOST_DIFFERENCE)
