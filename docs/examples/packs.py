"""Packs of ours and packs of XLA: kernels and memory around one all-reduce of 16 leaves.

jaxcoll inspect packs:ours --topology h100:8 --against packs:compilers
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxcoll as jc

ONE = jc.CommunicationOptions(bytes_per_pack=1 << 30)


def step(options: jc.CommunicationOptions, params: list[Any], x: jax.Array) -> list[Any]:
    """Gradients that cost next to nothing, their mean, and gradient descent."""
    grads = [jnp.cos(p) * x.mean() for p in params]
    grads = jc.all_reduce("mean", grads, "data", options=options)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]


def _example(options: jc.CommunicationOptions) -> Any:
    leaves = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 16
    rows = jax.ShapeDtypeStruct((8,), jnp.float32)
    return jc.data_parallel(functools.partial(step, options)), (leaves, rows)


def ours() -> Any:
    """One pack of ours."""
    return _example(ONE)


def compilers() -> Any:
    """No options: XLA combines the leaves."""
    return _example(jc.CommunicationOptions())
