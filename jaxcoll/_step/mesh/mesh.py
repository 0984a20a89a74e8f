"""Meshes and device lists, and checks of them before anything is compiled."""

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

from jaxcoll._plan.checks import refuse_axes

AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh)


def check_devices(devices: Sequence[Any], caller: str) -> tuple[jax.Device, ...]:
    result = tuple(devices)
    if not result:
        raise ValueError(f"`{caller}` got no devices; it needs at least one.")
    for device in result:
        if not isinstance(device, jax.Device):
            got = f"{device!r} ({type(device).__name__})"
            raise ValueError(f"`{caller}` expects devices, as in `jax.devices()`; got {got}.")
    twice = [str(device) for device, times in Counter(result).items() if times > 1]
    if twice:
        raise ValueError(f"`{caller}` got a device twice: {', '.join(twice)}.")
    return result


def local_positions(devices: Sequence[jax.Device]) -> list[int]:
    return [i for i, d in enumerate(devices) if d.process_index == jax.process_index()]


def span_processes(devices: Sequence[jax.Device]) -> bool:
    return len({d.process_index for d in devices}) > 1


def equal_shares(devices: Sequence[jax.Device]) -> int:
    """Count the processes with `devices`; 0 if some have more devices than others."""
    counts = Counter(d.process_index for d in devices)
    return len(counts) if len(set(counts.values())) == 1 else 0


def make_line(devices: Sequence[jax.Device], axis_name: str) -> Mesh:
    """Lay `devices` on one Auto axis, in their order."""
    return Mesh(np.array(devices, dtype=object), (axis_name,), axis_types=(AxisType.Auto,))


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh of the caller's `jax.set_mesh`, so that only arguments place a program.

    Under a mesh JAX refuses all programs on other devices, even eager operations.

    Raises:
      RuntimeError: a program is being traced, and its mesh cannot be left.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return contextlib.nullcontext()
    if mesh.manual_axes:
        axes = ", ".join(map(repr, mesh.manual_axes))
        raise RuntimeError(
            f"This function works between programs, but a program that maps {axes} is being "
            "traced. Pass the value to the program as an argument; each replica then gets its part."
        )
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def ambient_mesh(axes: tuple[str, ...]) -> Mesh | AbstractMesh | None:
    """Find the mesh of the caller's `jax.set_mesh`, if it has these axes.

    While a program is being traced, JAX returns it without devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not {*axes} <= {*mesh.axis_names}:
        return None
    with contextlib.suppress(ValueError):
        return jax.sharding.get_mesh()
    return mesh


def axis_names(axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    """Make a tuple of a name, or of a tuple of names."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def choose_mapped_axes(mesh: Any, axes: tuple[str, ...]) -> set[str]:
    """Choose the mesh axes that a step over `axes` maps; the others are left to the compiler.

    Nothing can be split over axes of size 1. Explicit axes must be mapped too: the type of a
    captured value names the whole mesh, and could not be used if only some axes were mapped.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {a for a in kinds if a in axes or mesh.shape[a] == 1 or kinds[a] == AxisType.Explicit}


def check_any_mesh(
    mesh: Mesh | AbstractMesh | None, axis_name: str | tuple[str, ...], caller: str
) -> Mesh | AbstractMesh:
    """Check an abstract mesh for the axes, or any other by `check_mesh`, and return it."""
    if isinstance(mesh, AbstractMesh):
        return has_axes(mesh, axis_names(axis_name), caller)
    return check_mesh(mesh, axis_name, caller)


def check_mesh(mesh: Mesh | None, axis_name: str | tuple[str, ...], caller: str) -> Mesh:
    """Check that a mesh has devices, each once, and these axes.

    None: the mesh of `jax.set_mesh`, if it has the axes; else one axis of all devices.

    Raises:
      ValueError: `axis_name` is not made of strings, an axis is missing, or `mesh` is no `Mesh`.
    """
    axes = axis_names(axis_name)
    if not axes or not all(isinstance(a, str) for a in axes):
        refuse_axes(caller, axis_name)
    if mesh is None:
        if isinstance(ambient := ambient_mesh(axes), Mesh):
            return ambient
        if len(axes) > 1:
            needs = "needs a `mesh` that has them, given or by `jax.set_mesh`"
            raise ValueError(f"`{caller}` over the axes {axis_name!r} {needs}.")
        return make_line(jax.devices(), *axes)
    if not isinstance(mesh, Mesh):
        expected = "`mesh` to be a jax.sharding.Mesh or None"
        raise ValueError(f"`{caller}` expects {expected}; got {type(mesh).__name__}.")
    check_devices(list(mesh.devices.flat), caller)
    return has_axes(mesh, axes, caller)


def has_axes(mesh: AnyMesh, axes: Sequence[str], caller: str) -> AnyMesh:
    """Check that `mesh` has all of `axes`."""
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        has = f"the mesh has no such axis. Its axes: {', '.join(map(repr, mesh.axis_names))}"
        raise ValueError(f"`{caller}` over axis {missing[0]!r}: {has}.")
    return mesh


def takes_mesh(fun: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """`mesh` may be a required parameter of `fun` that is not in `kwargs`."""
    try:
        parameter = inspect.signature(fun).parameters.get("mesh")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty and "mesh" not in kwargs


def bind_mesh(fun: Callable[..., Any], mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """Bind `mesh` to `fun`; if that is its only parameter, call it to get the function."""
    only = len(inspect.signature(fun).parameters) == 1
    return fun(mesh) if only else functools.partial(fun, mesh=mesh)
