"""The problem of every task: a linear model, its data, and the result of one step."""

import numpy as np

RATE, CLIP = 0.1, 0.5
rng = np.random.default_rng(0)
X = rng.standard_normal((64, 16)).astype("f")
Y = X @ rng.standard_normal(16).astype("f")
W = rng.standard_normal(16).astype("f")
REAL = (np.arange(64) < 41).astype("f")  # 1 for real rows; ranks have different numbers of them


def gradient(w, x, y, weight):
    """Return the gradient of the mean squared error, weighted by row."""
    return 2 * x.T @ ((x @ w - y) * weight) / weight.sum()


def expected():
    """Return the parameters after one step, for each task."""
    ones = np.ones_like(REAL)
    full = gradient(W, X, Y, ones)
    adam = full / (np.abs(full) + 1e-8)
    return {
        "train_step": W - RATE * full,
        "accumulate": W - RATE * full,
        "clip": W - RATE * full * CLIP / np.linalg.norm(full),
        "uneven_rows": W - RATE * gradient(W, X, Y, REAL),
        "sharded_optimizer": W - RATE * adam,
        "sharded_parameters": W - RATE * full,
        "tensor_parallel": W - RATE * full,
        "skip_not_finite": W,
    }


def check(result, task):
    """Raise an error if a task's result differs from NumPy's."""
    np.testing.assert_allclose(np.asarray(result), expected()[task], rtol=1e-4, atol=1e-5)
