"""Meshes and device lists, checked before anything is compiled for them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def checked_devices(devices: Sequence[Any], caller: str) -> tuple[jax.Device, ...]:
    """`devices` as a tuple.

    Raises:
      ValueError: there is none, one is no device, or one is listed twice.
    """
    found = tuple(devices)
    if not found:
        raise ValueError(f"`{caller}` got no devices; it needs at least one.")
    for device in found:
        if not isinstance(device, jax.Device):
            raise ValueError(
                f"`{caller}` expects devices, as in `jax.devices()`; got {device!r} "
                f"({type(device).__name__})."
            )
    twice = [str(device) for device, times in Counter(found).items() if times > 1]
    if twice:
        raise ValueError(f"`{caller}` got a device twice: {', '.join(twice)}.")
    return found


def line_of(devices: Sequence[jax.Device], axis_name: str) -> Mesh:
    """A mesh of one Auto axis over `devices`, in their order."""
    return Mesh(np.array(devices, dtype=object), (axis_name,), axis_types=(AxisType.Auto,))


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh of the caller's `jax.set_mesh`, so that arguments alone place a program.

    Under a mesh JAX refuses every program, eager operations among them, on other devices.

    Raises:
      RuntimeError: a program is being traced, which has its mesh for good.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return contextlib.nullcontext()
    if mesh.manual_axes:
        raise RuntimeError(
            "This works on the values of several devices, between programs; here one is being "
            f"traced that maps {', '.join(map(repr, mesh.manual_axes))}. Pass the value to it as "
            "an argument, of which each replica sees its own part."
        )
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def checked_mesh(mesh: Mesh | None, axis_name: str | tuple[str, ...], caller: str) -> Mesh:
    """`mesh`, or a line of all devices for None.

    Raises:
      ValueError: it is no mesh, has no devices, lists one twice, or lacks an axis.
    """
    axes: tuple[str, ...] = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not axes or not all(isinstance(a, str) for a in axes):
        raise ValueError(
            f"`{caller}` expects `axis_name` to be a string or a non-empty tuple of strings; "
            f"got {axis_name!r}."
        )
    if mesh is None:
        if len(axes) > 1:
            raise ValueError(
                f"`{caller}` over the axes {axis_name!r} needs a `mesh` that has them; without "
                "one it lays all devices on a single axis."
            )
        return line_of(jax.devices(), *axes)
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`{caller}` expects `mesh` to be a jax.sharding.Mesh or None; "
            f"got {type(mesh).__name__}."
        )
    checked_devices(list(mesh.devices.flat), caller)
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"`{caller}` over axis {missing[0]!r}: the mesh has no such axis. "
            f"Its axes: {', '.join(map(repr, mesh.axis_names))}."
        )
    return mesh
