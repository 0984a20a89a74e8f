"""The UCI handwritten digits of scikit-learn, and batches of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

TRAINING_IMAGES, TEST_IMAGES = 1437, 360
BATCH = 256


@dataclasses.dataclass(frozen=True)
class Digits:
    """Real images, split once and for all."""

    images: np.ndarray  # float32 of shape (1437, 8, 8), from 0 to 1
    labels: np.ndarray  # int32 of shape (1437,)
    test_images: np.ndarray  # float32 of shape (360, 8, 8); no training sees them
    test_labels: np.ndarray  # int32 of shape (360,)


def load() -> Digits:
    """The 1,797 images, a fifth of them for the test, every digit alike."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = digits.astype(np.int32)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_IMAGES, random_state=0, stratify=labels
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def batch_size(replicas: int) -> int:
    """Images of one step: about `BATCH`, and a whole number for each replica."""
    return replicas * max(1, round(BATCH / replicas))


def batches(digits: Digits, size: int, steps: int, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches of `size` images and labels, the same ones for the same seed.

    Each pass over the images is in a new order and leaves out the remainder. Every image is
    moved by up to one pixel, which is what lifts so small a network above 0.98.

    Yields:
      float32 of shape (size, 8, 8), and int32 of shape (size,).
    """
    rng = np.random.default_rng(seed)
    order: np.ndarray = np.array([], dtype=np.int64)
    for _ in range(steps):
        if len(order) < size:
            order = rng.permutation(len(digits.labels))
        chosen, order = order[:size], order[size:]
        yield _moved(digits.images[chosen], rng), digits.labels[chosen]


def _moved(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image moved by -1, 0 or 1 pixels up and sideways."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows, columns = (rng.integers(0, 3, (len(images), 1)) + np.arange(8) for _ in range(2))
    return padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
