"""Meshes and device lists, checked before anything is compiled for them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh)


def checked_devices(devices: Sequence[Any], caller: str) -> tuple[jax.Device, ...]:
    """`devices` as a tuple: at least one, all of them devices, none twice."""
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


def of_this_process(devices: Sequence[jax.Device]) -> list[int]:
    """Positions in `devices` of those that this process can reach."""
    return [i for i, d in enumerate(devices) if d.process_index == jax.process_index()]


def span_processes(devices: Sequence[jax.Device]) -> bool:
    """True if some of `devices` belong to other processes than others do."""
    return len({d.process_index for d in devices}) > 1


def equal_shares(devices: Sequence[jax.Device]) -> int:
    """Return the number of processes with `devices`; 0: some have more of them than others."""
    counts = Counter(d.process_index for d in devices)
    return len(counts) if len(set(counts.values())) == 1 else 0


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


def ambient_mesh(axes: tuple[str, ...]) -> Mesh | AbstractMesh | None:
    """Return the mesh of the caller's `jax.set_mesh`, if it has these axes.

    While a program is being traced JAX shows it without its devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not {*axes} <= {*mesh.axis_names}:
        return None
    with contextlib.suppress(ValueError):
        return jax.sharding.get_mesh()
    return mesh


def axis_names(axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name, or a tuple of them, as a tuple."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def mapped_axes(mesh: Any, axes: tuple[str, ...]) -> set[str]:
    """The axes of a mesh that a step over `axes` maps; the others are left to the compiler.

    Nothing can be split over those of size 1. Explicit ones are mapped, too: a value from outside,
    whose type names the whole mesh, could not be used where some are mapped and others not.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {a for a in kinds if a in axes or mesh.shape[a] == 1 or kinds[a] == AxisType.Explicit}


def checked_any_mesh(
    mesh: Mesh | AbstractMesh | None, axis_name: str | tuple[str, ...], caller: str
) -> Mesh | AbstractMesh:
    """`mesh` if it is abstract, else as `checked_mesh` has it."""
    if isinstance(mesh, AbstractMesh):
        return has_axes(mesh, axis_names(axis_name), caller)
    return checked_mesh(mesh, axis_name, caller)


def checked_mesh(mesh: Mesh | None, axis_name: str | tuple[str, ...], caller: str) -> Mesh:
    """Return `mesh`, which must have devices, each once, and these axes.

    None: that of `jax.set_mesh`, if it has them; else a line of all devices.

    Raises:
      ValueError: an axis is no name or is missing, or it is no mesh of devices.
    """
    axes = axis_names(axis_name)
    if not axes or not all(isinstance(a, str) for a in axes):
        raise ValueError(
            f"`{caller}` expects `axis_name` to be a string or a non-empty tuple of strings; "
            f"got {axis_name!r}."
        )
    if mesh is None:
        if isinstance(around := ambient_mesh(axes), Mesh):
            return around
        if len(axes) > 1:
            raise ValueError(
                f"`{caller}` over the axes {axis_name!r} needs a `mesh` that has them; without "
                "one, or one around of `jax.set_mesh`, it lays all devices on a single axis."
            )
        return line_of(jax.devices(), *axes)
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`{caller}` expects `mesh` to be a jax.sharding.Mesh or None; "
            f"got {type(mesh).__name__}."
        )
    checked_devices(list(mesh.devices.flat), caller)
    return has_axes(mesh, axes, caller)


def has_axes(mesh: AnyMesh, axes: Sequence[str], caller: str) -> AnyMesh:
    """`mesh` itself, which must have all of `axes`."""
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"`{caller}` over axis {missing[0]!r}: the mesh has no such axis. "
            f"Its axes: {', '.join(map(repr, mesh.axis_names))}."
        )
    return mesh


def takes_mesh(fun: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """True if `fun` cannot be called without a `mesh`, and the caller gives none."""
    try:
        parameter = inspect.signature(fun).parameters.get("mesh")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty and "mesh" not in kwargs


def given_mesh(fun: Callable[..., Any], mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """`fun` with its `mesh`; what takes nothing else makes the function that is meant."""
    only = len(inspect.signature(fun).parameters) == 1
    return fun(mesh) if only else functools.partial(fun, mesh=mesh)
