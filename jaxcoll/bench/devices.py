"""The devices that a command runs on, chosen before JAX has started a backend."""

from __future__ import annotations

import jax

SIMULATED = 8
"""Simulated CPU devices by default."""


def devices_of(platform: str, count: int | None) -> list[jax.Device]:
    """The devices that `--platform` and `--devices` ask for; those of "cpu" are simulated."""
    if platform == "cpu":
        # Both must be set before the first backend exists; JAX refuses it later.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count or SIMULATED)
        return jax.devices("cpu")
    try:
        devices = jax.devices(None if platform == "auto" else platform)
    except RuntimeError as error:
        there = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ValueError(
            f"--platform {platform}: JAX finds no such device here, only {there}. Install JAX for "
            f"{platform} (`pip install -U 'jax[{'cuda13' if platform == 'gpu' else platform}]'`), "
            "or leave --platform out for simulated CPU devices."
        ) from error
    if count is not None and count > len(devices):
        raise ValueError(
            f"--devices {count}: this machine has {len(devices)} {devices[0].platform} "
            f"device{'s' if len(devices) > 1 else ''}. Ask for fewer, or leave --platform out for "
            "simulated CPU devices."
        )
    return devices[:count]
