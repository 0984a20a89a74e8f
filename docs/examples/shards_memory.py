r"""Compare the peak memory of a train step with Adam on 8 devices, with and without shards.

    python docs/examples/shards_memory.py [--topology h100:8]

The figure is the memory of the compiled program: arguments, results that do not reuse an argument's
buffer, and temporary arrays. Without --topology it is compiled for 8 simulated CPU devices. Nothing
runs.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType

import jaxcoll as jc

LAYERS, WIDTH, TEXTS, DEVICES = 24, 1024, 8, 8
LAYER_BYTES = 8 * WIDTH * WIDTH * 4


def layers() -> Any:
    """Return the shapes of a stack of float32 feed-forward layers, 32 MiB each."""
    shape = jax.ShapeDtypeStruct
    return {
        "up": shape((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
        "down": shape((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
        "norm": shape((LAYERS, WIDTH), jnp.float32),
    }


def loss(params: Any, x: jax.Array, scan: Any = jax.lax.scan) -> jax.Array:
    """Return the loss of a stack of layers that `scan` applies."""

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x * weights["norm"] @ weights["up"]) @ weights["down"], None

    return jnp.mean(scan(layer, x, params)[0] ** 2)


def step_of(value_and_grad: Any, optimizer: Any) -> Any:
    """Return a train step that donates its parameters and state."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jc.data_parallel(step, batch_argnums="x", donate_argnums=("params", "state"))


def steps() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return each train step with the shapes of its arguments."""
    adam, x = optax.adam(1e-3), jax.ShapeDtypeStruct((TEXTS * DEVICES, WIDTH), jnp.float32)
    mesh = AbstractMesh((DEVICES,), ("data",), (AxisType.Auto,))
    sharded = jc.sharded_optimizer(adam, "data", mesh=mesh)
    checkpointed = functools.partial(loss, scan=lambda f, *a: jax.lax.scan(jax.checkpoint(f), *a))
    shards = jc.shard(layers(), "data", stacked=True, mesh=mesh)

    def of(ahead: int) -> Any:
        scan = functools.partial(jc.scan_layers, axis_name="data", ahead=ahead)
        return step_of(jc.value_and_grad(functools.partial(loss, scan=scan), "data"), sharded)

    plain = step_of(jc.value_and_grad(checkpointed, "data"), adam)
    scattered = step_of(jc.value_and_grad(checkpointed, "data", scatter=True), sharded)
    in_shards = (shards, sharded.init(shards), x)
    return {
        "replicated": (plain, (layers(), jax.eval_shape(adam.init, layers()), x)),
        "sharded_optimizer": (scattered, (layers(), sharded.init(layers()), x)),
        "scan_layers, ahead=0": (of(0), in_shards),
        "scan_layers, ahead=1": (of(1), in_shards),
    }


def peak(step: Any, args: tuple[Any, ...], topology: str | None) -> int:
    """Return the bytes on one device."""
    nbytes = jc.inspect(step, *args, topology=topology).memory_bytes
    assert nbytes is not None
    return nbytes


def main() -> None:
    """Print a row for each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", help="a cluster to compile for, such as h100:8")
    args = parser.parse_args()
    if args.topology is None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
    replicated = 0
    for name, (step, shapes) in steps().items():
        nbytes = peak(step, shapes, args.topology)
        replicated = replicated or nbytes
        print(
            f"{name:22} {nbytes / 2**20:8,.0f} MiB  {nbytes / replicated:5.3f}  without two layers "
            f"{(nbytes - 2 * LAYER_BYTES) / replicated:5.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
