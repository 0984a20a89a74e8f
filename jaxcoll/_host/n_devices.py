"""A test for a user's step: n devices equal one, and if they do not, by which factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcoll._host.data_parallel import DataParallel
from jaxcoll._host.mesh import checked_mesh, given_mesh, takes_mesh
from jaxcoll._host.placement import is_array


def n_devices_equal_one(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    tolerance: float | None = None,
    **kwargs: Any,
) -> None:
    """Run a step on all devices and on one, with the same whole batch, and compare.

    Law: a step that is right does not know on how many devices it runs. A sum that should be a
    mean, a gradient that is reduced twice or divided twice, shows as a power of the number of
    devices, in what a leaf changed by if the step returns parameters.

    Args:
      step: a `jc.data_parallel` step; or a function that takes `mesh`, and maps itself over it.
      *args: what it is called with, the whole batch among them. They are copied first, so that
        donated ones live on.
      mesh: the devices and axes to compare one device with; None: the step's own, or all devices
        on an axis named "data".
      tolerance: how far a leaf may be off, relative to its largest change. None: the square
        root of the precision of its dtype, 0.0003 of float32.
      **kwargs: likewise.

    Raises:
      AssertionError: outputs differ; a table names each with its factor and what that means.
      ValueError: `step` does not say how to run it on another mesh, or there is one device only.

    Examples:
      >>> import jax, numpy as np
      >>> @data_parallel
      ... def step(w, x):
      ...     mine = jax.lax.pcast(w, "data", to="varying")
      ...     return w - 0.1 * all_reduce("sum", jax.grad(lambda w: (w * x).mean())(mine), "data")
      >>> try:
      ...     n_devices_equal_one(step, np.ones(3, "f"), np.ones((8, 3), "f"))
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[1][:60])
        the output: its change from args[0] is 8.0 times too large
    """
    if isinstance(step, DataParallel):
        mesh = mesh or step.mesh
        run = step.on
    elif takes_mesh(step, kwargs):
        mesh = checked_mesh(mesh, mesh.axis_names if mesh else "data", "n_devices_equal_one")

        def run(mesh: Mesh) -> Callable[..., Any]:
            return given_mesh(step, mesh)
    else:
        raise ValueError(
            "`n_devices_equal_one` expects a `jc.data_parallel` step, or a function with a "
            "parameter `mesh` that maps itself over it; what was mapped before over a mesh of "
            "its own cannot be run on one device."
        )
    if mesh.size < 2:
        raise ValueError(
            "`n_devices_equal_one` compares one device with more, and there is one only. "
            'Simulated ones are made by `jax.config.update("jax_num_cpu_devices", n)` at the '
            "start of a program."
        )
    alone = Mesh(mesh.devices.reshape(-1)[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names,
                 axis_types=mesh.axis_types)  # fmt: skip
    # On the host nothing is donated.
    args, kwargs = jax.tree.map(_on_host, (args, kwargs))
    many, one = (jax.tree.map(_on_host, run(m)(*args, **kwargs)) for m in (mesh, alone))
    _compare(one, many, _bases(args, kwargs), mesh.size, tolerance)


def _on_host(x: Any) -> Any:
    key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    if key:
        return jax.random.wrap_key_data(jax.numpy.asarray(np.asarray(jax.random.key_data(x))))
    return np.asarray(x) if isinstance(x, jax.Array) else x


@dataclasses.dataclass(frozen=True)
class _Base:
    """What an output may be a change of."""

    name: str
    value: np.ndarray


def _bases(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Base]:
    flat = [
        *((f"args[{i}]", leaf) for i, arg in enumerate(args) for leaf in _leaves(arg)),
        *((f"kwargs[{name!r}]", leaf) for name, arg in kwargs.items() for leaf in _leaves(arg)),
    ]
    return [_Base(name + path, np.asarray(x)) for name, (path, x) in flat]


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat if _has_numbers(leaf)]


def _has_numbers(x: Any) -> bool:
    key = jax.dtypes.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key)
    return is_array(x) and not key


def _compare(one: Any, many: Any, bases: Sequence[_Base], n: int, tolerance: float | None) -> None:
    if jax.tree.structure(one) != jax.tree.structure(many):
        raise AssertionError(
            f"on {n} devices the step returns {jax.tree.structure(many)}, on one "
            f"{jax.tree.structure(one)}"
        )
    pairs = [(path, a, b) for (path, a), (_, b) in zip(_leaves(one), _leaves(many), strict=True)]
    found = {
        path: complaint
        for path, a, b in pairs
        if (complaint := _complaint(np.asarray(a), np.asarray(b), bases, n, tolerance))
    }
    if found:
        lines = [f"  {f'output {p}' if p else 'the output'}: {why}" for p, why in found.items()]
        raise AssertionError(
            f"on {n} devices the step gives other results than on one, in {len(found)} of "
            f"{len(pairs)} outputs:\n" + "\n".join(lines)
        )


def _complaint(
    one: np.ndarray, many: np.ndarray, bases: Sequence[_Base], n: int, tolerance: float | None
) -> str | None:
    """What is wrong with an output, or None."""
    if one.shape != many.shape:
        return f"has shape {many.shape}, and {one.shape} on one device; is it one value a replica?"
    inexact = jax.dtypes.issubdtype(one.dtype, np.inexact)
    eps = float(jax.numpy.finfo(one.dtype).eps) if inexact else 0.0
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    exact_one, exact_many = one.astype(wide), many.astype(wide)
    base = _base_of(one, exact_one, bases)
    start = 0.0 if base is None else base.value.astype(wide)
    rounding = 16 * eps * _largest(exact_one)
    allowed = rounding + (eps**0.5 if tolerance is None else tolerance) * _largest(
        exact_one - start
    )
    if np.array_equal(np.isnan(exact_one), np.isnan(exact_many)) and (
        _largest(exact_many - exact_one) <= allowed
    ):
        return None
    return _explained(exact_one, exact_many, base, bases, rounding, n)


def _explained(
    one: np.ndarray,
    many: np.ndarray,
    base: _Base | None,
    bases: Sequence[_Base],
    rounding: float,
    n: int,
) -> str:
    """In words: what of the output differs, by which factor, and what that means."""
    # After a large step an output is near no argument, but its change may tell the factor.
    others = [b for b in bases if b.value.shape == one.shape and b is not base]
    found = []
    for start in (base, None, *others) if base else (None, *others):
        shift = 0.0 if start is None else start.value.astype(one.dtype)
        factor = _factor(one - shift, many - shift, rounding)
        if factor is not None:
            found.append((_meaning(factor, n) is None, len(found), start, factor))
    if not found:
        what = "is" if base is None else f"its change from {base.name} is"
        return f"{what} not the same, nor by a factor: off by up to {_largest(many - one):.3g}"
    _, _, start, factor = min(found, key=lambda each: each[:2])
    what = "is" if start is None else f"its change from {start.name} is"
    size = f"{factor:.3g}" if factor % 1 else f"{factor:.1f}"
    meaning = _meaning(factor, n) or (
        f"no power of the {n} devices; does it depend on how the batch is split?"
    )
    return f"{what} {size} times too large: {meaning}"


def _base_of(one: np.ndarray, exact: np.ndarray, bases: Sequence[_Base]) -> _Base | None:
    """The argument that an output is a small change of, if it is of any."""
    fits = [b for b in bases if b.value.shape == one.shape and b.value.dtype == one.dtype]
    near = min(fits, key=lambda b: float(np.sum(np.abs(exact - b.value)) or 0), default=None)
    if near is None or not one.ndim or not one.size:
        return None
    return near if np.sum(np.abs(exact - near.value)) < 0.5 * np.sum(np.abs(exact)) else None


def _factor(one: np.ndarray, many: np.ndarray, rounding: float) -> float | None:
    """The number that takes one change to the other, if there is one."""
    square = float(np.real(np.vdot(one, one)))
    if not square or not np.isfinite(square):
        return None
    factor = float(np.real(np.vdot(one, many))) / square
    apart = _largest(many - factor * one)
    if not np.isfinite(factor) or apart > 0.02 * abs(factor) * _largest(one) + 2 * rounding:
        return None
    near = round(factor)
    return float(near) if near and abs(factor - near) < 0.01 * abs(factor) else factor


def _meaning(factor: float, n: int) -> str | None:
    known = {
        float(n): "it is summed where a mean is expected, or a sum is reduced again",
        1.0 / n: "it is divided by the number of replicas once too often, or a mean taken "
        "where a sum is expected",
        float(n * n): f"{n} squared: summed twice where a mean is expected, or the square of "
        "what is summed",
        1.0 / (n * n): f"one part in {n} squared: divided twice too often, or the square of "
        "what is divided",
    }
    for value, words in known.items():
        if abs(factor - value) <= 0.02 * value:
            return words
    return None


def _largest(x: Any) -> float:
    finite = np.abs(x[np.isfinite(x)]) if np.ndim(x) else np.abs(np.nan_to_num(x))
    return float(np.max(finite, initial=0.0))
