"""`n_devices_equal_one`, a test for a user's step, and the factor by which results differ."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcoll._mesh.mesh import checked_mesh, given_mesh, takes_mesh
from jaxcoll._mesh.placement import is_array
from jaxcoll._mesh.shard_arrays import cut, joined
from jaxcoll._plan.packs.shard_layout import laid_over
from jaxcoll._show.units import counted
from jaxcoll._spmd.shards import is_shards
from jaxcoll._step.data_parallel import DataParallel
from jaxcoll._train.row_orders import apart, is_rounding, spreads


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
    devices, in what a leaf changed by if the step returns parameters. What rounding alone does is
    no error: the gradient of a key's bias, or of a bias before a batch norm, is zero but for
    rounding, and Adam makes whole steps of it. Where outputs differ, one device runs the step again
    with the rows of the batch in other orders, and what moves as far there is let pass.

    Args:
      step: a `jc.data_parallel` step; or a function that takes `mesh`, and maps itself over it.
      *args: what it is called with, the whole batch among them. They are copied first, so that
        donated ones live on. `Shards` are cut anew for one device, and compared as the tree that
        they are parts of.
      mesh: the devices and axes to compare one device with; None: the step's own, or all devices
        on an axis named "data".
      tolerance: how far a leaf may be off, relative to its largest change from the argument of
        the same path, or where none has it from the nearest one. None: the square root of the
        precision of its dtype, 0.0003 of float32.
      **kwargs: likewise.

    Raises:
      AssertionError: outputs differ; a table names each with its factor and what that means.
      ValueError: `step` does not say how to run it on another mesh, or there is one device only.

    Examples:
      >>> import jax, numpy as np
      >>> @data_parallel
      ... def step(w, x):
      ...     return w - 0.1 * psum(jax.grad(lambda w: (w * x).mean())(w))
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
        run = functools.partial(given_mesh, step)
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
    first = mesh.devices[(slice(1),) * mesh.devices.ndim]
    alone = Mesh(first, mesh.axis_names, axis_types=mesh.axis_types)
    # On the host nothing is donated.
    args, kwargs = jax.tree.map(_on_host, (args, kwargs))
    many = _whole(jax.tree.map(_on_host, run(mesh)(*args, **kwargs)))
    args, kwargs = _cut_for(alone, (args, kwargs))
    one = _whole(jax.tree.map(_on_host, run(alone)(*args, **kwargs)))
    n = mesh.size
    if jax.tree.structure(one) != jax.tree.structure(many):
        raise AssertionError(
            f"on {n} devices the step returns {jax.tree.structure(many)}, on one "
            f"{jax.tree.structure(one)}"
        )
    bases = _bases(*_whole((args, kwargs)))
    outputs = [
        _output(path, np.asarray(a), np.asarray(b), bases, tolerance)
        for (path, a), (_, b) in zip(_leaves(one), _leaves(many), strict=True)
    ]
    wrong = [each for each in outputs if each.is_off]
    if wrong:
        wrong = _not_by_rounding(outputs, wrong, run(alone), args, kwargs)
    if wrong:
        lines = [f"  {each.name}: {_complaint(each, n)}" for each in wrong]
        raise AssertionError(
            f"on {n} devices the step gives other results than on one, in {len(wrong)} of "
            f"{counted(len(outputs), 'output')}:\n" + "\n".join(lines)
        )


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key)


def _on_host(x: Any) -> Any:
    if isinstance(x, jax.Array) and _is_key(x):
        return jax.random.wrap_key_data(jax.numpy.asarray(np.asarray(jax.random.key_data(x))))
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _whole(tree: Any) -> Any:
    """A tree without shards, in the places of which are the trees that they are parts of."""
    return jax.tree.map(lambda x: joined(x) if is_shards(x) else x, tree, is_leaf=is_shards)


def _cut_for(mesh: Mesh, tree: Any) -> Any:
    """The same tree with its shards cut for another mesh."""

    def cut_again(x: Any) -> Any:
        if not is_shards(x):
            return x
        layout = laid_over(x.layout, tuple(mesh.shape[a] for a in x.axes))
        return cut(jax.tree.leaves(joined(x)), layout, None, x.axes, x.stack)

    return jax.tree.map(cut_again, tree, is_leaf=is_shards)


def _not_by_rounding(
    outputs: list[_Output], wrong: list[_Output], alone: Callable[..., Any], args: Any, kwargs: Any
) -> list[_Output]:
    """Of the outputs that are off, those that rounding does not explain."""
    batch: tuple[int | str, ...] = (len(args) - 1,) if args else ()
    if isinstance(alone, DataParallel):
        args, kwargs, batch = alone.signature.call(args, kwargs)

    def numbers(result: Any) -> list[np.ndarray]:
        return [np.asarray(x) for _, x in _leaves(_whole(jax.tree.map(_on_host, result)))]

    moved = spreads(alone, args, kwargs, batch, [each.one for each in outputs], numbers)
    if moved is None:
        return wrong
    spread = dict(zip((each.path for each in outputs), moved, strict=True))
    # If half of the right outputs move too, the step depends on the order: that says nothing.
    calm = [x for x in outputs if x not in wrong and jax.dtypes.issubdtype(x.one.dtype, np.inexact)]
    still = [x for x in calm if np.max(spread[x.path], initial=0.0) <= x.allowed]
    if 2 * len(still) <= len(calm) or not calm:
        return wrong
    return [x for x in wrong if not is_rounding(x.one, x.many, spread[x.path], x.allowed)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Base:
    """What an output may be a change of."""

    name: str  # as a message has it
    path: tuple[Any, ...]  # the keys on the way to it
    value: np.ndarray  # the argument


@dataclasses.dataclass(frozen=True, eq=False)
class _Output:
    """One output: on one device, on many, and what it is measured from."""

    path: tuple[Any, ...]  # the keys on the way to it
    one: np.ndarray  # on one device
    many: np.ndarray  # on many
    # The argument that it is a change of, None: of nothing; then what else it might be a change of,
    # after a large step
    starts: tuple[_Base | None, ...]
    rounding: float  # how far two right results may be apart, however little they changed
    allowed: float  # how far they may be apart

    @property
    def name(self) -> str:
        return f"output {jax.tree_util.keystr(self.path)}" if self.path else "the output"

    @property
    def is_off(self) -> bool:
        if self.one.shape != self.many.shape:
            return True
        return bool(np.max(apart(self.one, self.many), initial=0.0) > self.allowed)


def _bases(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Base]:
    named = {f"args[{i}]": arg for i, arg in enumerate(args)}
    named |= {f"kwargs[{name!r}]": arg for name, arg in kwargs.items()}
    return [
        _Base(name + jax.tree_util.keystr(path), path, np.asarray(x))
        for name, arg in named.items()
        for path, x in _leaves(arg)
    ]


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path, leaf) for path, leaf in flat if is_array(leaf) and not _is_key(leaf)]


def _output(
    path: Any, one: np.ndarray, many: np.ndarray, bases: Sequence[_Base], tolerance: float | None
) -> _Output:
    inexact = jax.dtypes.issubdtype(one.dtype, np.inexact)
    eps = float(jax.numpy.finfo(one.dtype).eps) if inexact else 0.0
    exact = _wide(one)
    starts = _starts(path, one, exact, bases)
    start = 0.0 if starts[0] is None else _wide(starts[0].value)
    rounding = 16 * eps * _largest(exact)
    share = eps**0.5 if tolerance is None else tolerance
    return _Output(path, one, many, starts, rounding, rounding + share * _largest(exact - start))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _complaint(output: _Output, n: int) -> str:
    """How an output that is off differs, by which factor, and what that means."""
    one, many = _wide(output.one), _wide(output.many)
    if one.shape != many.shape:
        return f"has shape {many.shape}, and {one.shape} on one device; is it a value per replica?"
    odd = np.count_nonzero(apart(one, many) == np.inf)
    if odd:
        return (
            f"is infinite or no number on one side only, in {odd:,} of "
            f"{counted(one.size, 'element')}; does a sum overflow?"
        )
    found = []
    # After a large step an output is near no argument, but its change may tell the factor.
    for start in output.starts:
        shift = 0.0 if start is None else start.value.astype(one.dtype)
        factor = _factor(one - shift, many - shift, output.rounding)
        if factor is not None:
            found.append((_meaning(factor, n) is None, len(found), start, factor))
    if found:
        _, _, start, factor = min(found, key=lambda each: each[:2])
        size = f"{factor:.3g}" if factor % 1 else f"{factor:.1f}"
        meaning = _meaning(factor, n) or (
            f"no power of the {n} devices; does it depend on how the batch is split?"
        )
        how = f"{size} times too large: {meaning}"
    else:
        start = output.starts[0]
        how = f"not the same, nor by a factor: off by up to {_largest(many - one):.3g}"
    return f"is {how}" if start is None else f"its change from {start.name} is {how}"


def _starts(
    path: Any, one: np.ndarray, exact: np.ndarray, bases: Sequence[_Base]
) -> tuple[_Base | None, ...]:
    """The argument that an output is a small change of, if any, None for none, and others that fit.

    Only arguments whose path shares the longest named end with the output's are considered.
    """
    shared = [_shared(path, base.path) for base in bases]
    most = max(shared, default=0)
    fits = [
        base
        for base, length in zip(bases, shared, strict=True)
        if length == most and base.value.shape == one.shape
    ]
    alike = [base for base in fits if base.value.dtype == one.dtype]
    near = min(alike, key=lambda b: float(np.sum(np.abs(exact - b.value)) or 0), default=None)
    if near is not None and one.ndim and one.size:
        if np.sum(np.abs(exact - near.value)) < 0.5 * np.sum(np.abs(exact)):
            return near, None, *(base for base in fits if base is not near)
    return None, *fits


def _shared(path: Any, other: Any) -> int:
    """How many keys two paths end with in common; 0 if only positions are."""
    both = zip(reversed(path), reversed(other), strict=False)
    common = [a for a, _ in itertools.takewhile(lambda keys: keys[0] == keys[1], both)]
    positions = all(isinstance(key, jax.tree_util.SequenceKey) for key in common)
    return 0 if positions else len(common)


def _factor(one: np.ndarray, many: np.ndarray, rounding: float) -> float | None:
    """The number that takes one change to the other, if there is one."""
    square = float(np.real(np.vdot(one, one)))
    if not square or not np.isfinite(square):
        return None
    factor = float(np.real(np.vdot(one, many))) / square
    if not np.isfinite(factor):
        return None
    off = _largest(many - factor * one)
    if off > 0.02 * abs(factor) * _largest(one) + 2 * rounding:
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
