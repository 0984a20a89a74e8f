"""Train in several processes: each passes its own rows, and all have the same parameters."""

import jaxcoll as jc

jc.initialize()  # before anything that uses devices

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

rng = np.random.default_rng(0)
rows = {"x": rng.standard_normal((512, 4)).astype("f")}
rows["y"] = rows["x"] @ np.array([1, -2, 3, 0.5], "f")


def loss(w, batch):
    """Return the mean squared error of a linear model."""
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


@jc.data_parallel
def step(w, batch):
    """Take one step of gradient descent."""
    value, gradient = jc.value_and_grad(loss, "data")(w, batch)
    return w - 0.1 * gradient, value


w, value = np.zeros(4, "f"), np.inf
for _ in range(10):
    for batch in jc.batches(rows, 64, seed=0):
        w, value = step(w, batch)
if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {jax.device_count()} devices, loss {value:.1e}")
