"""`assert_same_as_one_device`, a test for a user's step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcoll._jaxpr.subjaxprs import equations
from jaxcoll._mesh.mesh import checked_mesh, given_mesh, takes_mesh
from jaxcoll._mesh.placement import is_array
from jaxcoll._mesh.shard_arrays import cut, joined
from jaxcoll._plan.packs.shard_layout import laid_over
from jaxcoll._show.units import counted
from jaxcoll._spmd.shards import is_shards
from jaxcoll._step.arguments import Call, Signature, slots
from jaxcoll._step.data_parallel import DataParallel

_ORDERS, _ROUNDINGS = 3, 12  # runs with reordered rows; and, at most, with arguments moved
_TIMES = 4  # rounding on many devices may be so much more than the most in these runs
_LIKEST = 8  # arguments of an output's shape that it may be a change of
_BY_ORDER = "moves on one device, too, when the rows of the batch are reordered"
_BY_ROUNDING = "moves by rounding alone, and nothing else can be compared; take other arguments"
_ADVICE = """
What goes by the order of the rows cannot be compared: dropout by position, shuffling, `x[0]`. \
Take it out for this test, as with `deterministic=True`; give each row its own random key, as a \
part of the batch; or leave the output out with `ignore`."""
_POWERS = {
    1: "it is summed where a mean is expected, or a sum is reduced again",
    -1: "it is divided by the number of replicas once too often, or a mean taken where a sum is "
    "expected",
    2: "{n} squared: summed twice where a mean is expected, or the square of what is summed",
    -2: "one part in {n} squared: divided twice too often, or the square of what is divided",
}


def assert_same_as_one_device(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    tolerance: float | None = None,
    ignore: str | Sequence[str] = (),
    **kwargs: Any,
) -> None:
    """Run a step on all devices and on one, with the same whole batch, and compare.

    A step that is right does not know on how many devices it runs. A sum that should be a mean, or
    a gradient that is reduced or divided twice, shows as a power of the number of devices.

    One device runs the step with other orders of the rows, too. An output that moves by more than
    rounding cannot be compared, and is an error. Where outputs differ, it runs again with arguments
    that are moved by rounding: what moves as far is equal, as the gradient of a bias before a batch
    norm is, and what Adam makes of it. Cost: five runs, 17 of a wrong step, and three programs.

    Args:
      step: a `jc.data_parallel` step; or a function that takes `mesh`, and maps itself over it.
      *args: its arguments, with the whole batch. They are copied first, so that donated ones live
        on. `Shards` are cut anew for one device, and compared as the tree that they are parts of.
      mesh: the devices and axes to compare one device with; None: the step's own, or all devices
        on an axis named "data".
      batch_argnums: the batch of a function that takes `mesh`, as in `jc.data_parallel`.
      tolerance: the largest norm of a leaf's error, relative to the norm of the leaf, or of its
        change from an argument of its shape if that is less. None: the square root of the
        precision of the leaf's dtype, 0.0003 of float32; or, if more, 8 times the precision of the
        narrowest dtype that the step computes in, 0.06 of bfloat16. Whole numbers must be equal.
      ignore: outputs to leave out, by the beginning or the end of their paths: "[1]", or
        `"['key']['bias']"`.
      **kwargs: likewise.

    Raises:
      AssertionError: outputs differ, or cannot be compared; a table names them and their factors.
      ValueError: `step` does not say how to run it on another mesh, there is one device only, the
        batch is not named or all its rows are the same, or `ignore` fits no output.

    Examples:
      >>> import jax, numpy as np
      >>> @data_parallel
      ... def step(w, x):
      ...     return w - 0.1 * psum(jax.grad(lambda w: (w * x).mean())(w))
      >>> try:
      ...     assert_same_as_one_device(step, np.ones(3, "f"), np.ones((8, 3), "f"))
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[1][:60])
        the output: its change from args[0] is 8.0 times too large
    """
    on, mesh = _runner(step, mesh, batch_argnums, kwargs)
    args, kwargs = jax.tree.map(_on_host, (args, kwargs))  # where nothing is donated
    together = on(mesh)  # once: it keeps the trace that is read
    many, narrowest = _leaves(together(*args, **kwargs)), _narrowest(together, args, kwargs)
    first = mesh.devices[(slice(1),) * mesh.devices.ndim]
    alone = on(Mesh(first, mesh.axis_names, axis_types=mesh.axis_types))
    batch = None if batch_argnums is None else slots("batch_argnums", batch_argnums)
    signature = alone.signature if isinstance(alone, DataParallel) else Signature(alone, batch)
    call = signature.call(*jax.tree.map(_for_one, (args, kwargs), is_leaf=is_shards))
    one, arguments = _leaves(alone(*call.args, **call.kwargs)), _arguments(call)
    if [*one] != [*many]:
        raise AssertionError(
            f"on {mesh.size} devices the step returns {counted(len(many), 'output')}, "
            f"{', '.join(many)}, and on one {counted(len(one), 'output')}, {', '.join(one)}"
        )
    outputs = [
        _Output(path, one[path], many[path], arguments, tolerance, narrowest)
        for path in _without([*one], (ignore,) if isinstance(ignore, str) else ignore)
    ]
    for seed in range(_ORDERS):
        order = _order(call, seed)
        other = call.map(functools.partial(_in_order, order=order), lambda tree: tree)
        result = _leaves(alone(*other.args, **other.kwargs))
        for x in outputs:
            x.moved = max(x.moved, x.moved_by(result[x.path], order))
    for seed in itertools.takewhile(lambda _: any(x.is_wrong for x in outputs), range(_ROUNDINGS)):
        other = call.map(*[functools.partial(_shaken, eps=narrowest, seed=seed)] * 2)
        result, arguments = _leaves(alone(*other.args, **other.kwargs)), _arguments(other)
        for x in outputs:
            change = _wide(result[x.path]) - arguments.get(x.start, 0)
            x.rounding = max(x.rounding, _apart(change, _wide(x.one) - x.base))
    _raise_if_off(outputs, mesh.size)
    rows = _leaves([call.at(slot) for slot in call.batch])
    if all((x == x[:1]).all() for x in rows.values() if x.ndim):
        raise ValueError(
            "`assert_same_as_one_device` needs rows that differ; those of the batch are equal."
        )


class _Output:
    """A leaf of the result, on one device and on many, and the argument that it is a change of."""

    moved = 0.0  # the norm of the most that it moves by when rows are reordered
    rounding = 0.0  # and when arguments are moved by rounding

    def __init__(
        self, path: str, one: Any, many: Any, arguments: Any, tolerance: Any, narrowest: float
    ) -> None:
        eps, nothing = _eps(one.dtype), np.zeros_like(one)
        fits = [k for k, x in arguments.items() if eps and x.shape == one.shape and _eps(x.dtype)]
        fits.sort(key=lambda k: next(i for i in range(len(path) + 1) if k.endswith(path[i:])))
        near = ["", *fits[:_LIKEST]]  # those whose paths end most alike
        self.start = min(near, key=lambda k: _apart(one, arguments.get(k, nothing)))
        self.base = arguments.get(self.start, nothing)
        if tolerance is None:  # less than what half or twice a number is off by
            tolerance = min(max(eps**0.5, 8 * narrowest), 0.25)
        self.path, self.one, self.many = path, one, many
        change, ulps = min(_apart(one, self.base), _norm(one)), 2 * eps * _norm(one)
        self.allowed = tolerance * change + ulps if eps else 0.0
        self.is_new = ulps < change if eps else bool(one.size)
        self.off = math.inf if one.size and np.isnan(_wide(one)).all() else _apart(one, many)

    @property
    def is_wrong(self) -> bool:
        return max(self.off, self.moved) > max(self.allowed, _TIMES * self.rounding)

    def moved_by(self, other: np.ndarray, order: np.ndarray) -> float:
        by_rows = np.ndim(self.one) and len(self.one) % len(order) == 0
        rows = [_in_order(self.one, order)] if by_rows else []
        return min(_apart(x, other) for x in (self.one, *rows))

    def complaint(self, n: int) -> str:
        """Return by which factor it differs, and what that means."""
        if self.one.shape != self.many.shape:
            shapes = f"{self.many.shape}, and {self.one.shape} on one device"
            return f"has shape {shapes}; is it a value per replica?"
        if self.off == math.inf:
            return "is infinite or no number; does a sum overflow?"
        for start, base in ((self.start, self.base), ("", np.zeros_like(self.one))):
            one, many = _wide(self.one) - base, _wide(self.many) - base
            for power, meaning in _POWERS.items():
                times = float(n) ** power
                if _norm(many - times * one) <= 0.02 * _norm(many) + self.rounding:
                    change = f"its change from {start} is" if _norm(base) else "is"
                    return f"{change} {round(times, 4)} times too large: {meaning.format(n=n)}"
        return (
            f"is not the same, nor by a power of the {n} devices: off by {self.off:.3g} of "
            f"{_norm(self.one):.3g} in norm; is it of parts of the batch, as a batch norm is?"
        )


def _raise_if_off(outputs: Sequence[_Output], n: int) -> None:
    wrong = [x for x in outputs if x.is_wrong]
    by_order = [x for x in wrong if x.moved > max(x.allowed, _TIMES * x.rounding)]
    lines = {x.path: _BY_ORDER if x in by_order else x.complaint(n) for x in wrong}
    if not wrong and not any(x.is_new and max(x.off, x.moved) <= x.allowed for x in outputs):
        lines = {x.path: _BY_ROUNDING for x in outputs}
    if lines:
        verb = "gives other results than on" if wrong != by_order else "cannot be compared with"
        rows = (f"\n  {f'output {p}' if p else 'the output'}: {text}" for p, text in lines.items())
        raise AssertionError(
            f"on {n} devices the step {verb} one, in {len(lines)} of "
            f"{counted(len(outputs), 'output')}:{''.join(rows)}{_ADVICE if by_order else ''}"
        )


def _runner(
    step: Any, mesh: Mesh | None, batch_argnums: Any, kwargs: dict[str, Any]
) -> tuple[Callable[[Mesh], Callable[..., Any]], Mesh]:
    """Return what makes the step for a mesh, and the mesh of many devices."""
    if isinstance(step, DataParallel):
        mesh, on = mesh or step.mesh, step.on
        if batch_argnums is not None:
            raise ValueError(
                "`assert_same_as_one_device`: a `jc.data_parallel` step names its own batch."
            )
    elif takes_mesh(step, kwargs):
        mesh = checked_mesh(mesh, mesh.axis_names if mesh else "data", "assert_same_as_one_device")
        on = functools.partial(given_mesh, step)
    else:
        raise ValueError(
            "`assert_same_as_one_device` expects a `jc.data_parallel` step, or a function with a "
            "parameter `mesh` that maps itself over it; what was mapped before over a mesh of "
            "its own cannot be run on one device."
        )
    if mesh.size < 2:
        raise ValueError(
            "`assert_same_as_one_device` compares one device with more, and there is one only. "
            'Simulated ones are made by `jax.config.update("jax_num_cpu_devices", n)` at the '
            "start of a program."
        )
    return on, mesh


def _without(paths: list[str], ignore: Sequence[str]) -> list[str]:
    for part in ignore:
        rest = [path for path in paths if not path.startswith(part) and not path.endswith(part)]
        if not part or rest == paths:
            raise ValueError(
                f"`assert_same_as_one_device`: `ignore` names no output by {part!r}; there are "
                f"{', '.join(paths)}."
            )
        paths = rest
    return paths


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key)


def _on_host(x: Any) -> Any:
    if isinstance(x, jax.Array) and _is_key(x):
        data = jax.numpy.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _leaves(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by their paths; of shards, those that they are parts of."""
    whole = jax.tree.map(lambda x: joined(x) if is_shards(x) else x, tree, is_leaf=is_shards)
    return {
        jax.tree_util.keystr(path): np.asarray(jax.random.key_data(x) if _is_key(x) else x)
        for path, x in jax.tree_util.tree_flatten_with_path(whole)[0]
        if is_array(x)
    }


def _arguments(call: Call) -> dict[str, np.ndarray]:
    named = {f"args[{i}]": x for i, x in enumerate(call.args)}
    named |= {f"kwargs[{name!r}]": x for name, x in call.kwargs.items()}
    return {name + path: x for name, tree in named.items() for path, x in _leaves(tree).items()}


def _for_one(x: Any) -> Any:
    """Cut shards for one device."""
    if not is_shards(x):
        return x
    layout = laid_over(x.layout, (1,) * len(x.axes))
    return cut(jax.tree.leaves(joined(x)), layout, None, x.axes, x.stack)


def _narrowest(run: Any, args: Any, kwargs: Any) -> float:
    """Return the precision of the narrowest dtype that a step computes in."""
    try:
        trace = run.trace if isinstance(run, DataParallel) else jax.jit(run).trace
        program = trace(*args, **kwargs).jaxpr
    except (TypeError, ValueError, RuntimeError):  # It decides by values, so is no one program.
        return 0.0
    atoms = (atom for eqn in equations(program) for atom in (*eqn.invars, *eqn.outvars))
    return max((_eps(getattr(atom.aval, "dtype", int)) for atom in atoms), default=0.0)


def _order(call: Call, seed: int) -> np.ndarray:
    """Return an order of blocks of rows, as many as the number of rows of every leaf allows."""
    leaves = jax.tree.leaves([call.at(slot) for slot in call.batch])
    blocks = math.gcd(*(len(x) for x in leaves if np.ndim(x))) or 1
    return np.random.default_rng(seed).permutation(blocks)


def _in_order(tree: Any, order: np.ndarray) -> Any:
    def moved(x: Any) -> Any:
        return x[np.arange(len(x)).reshape(len(order), -1)[order].ravel()] if np.ndim(x) else x

    return jax.tree.map(moved, tree)


def _shaken(tree: Any, eps: float, seed: int) -> Any:
    """Move the numbers of a tree up or down by their rounding; whole ones may be flags."""
    rng = np.random.default_rng(seed)

    def moved(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or not _eps(x.dtype):
            return x
        factor = np.where(_wide(x) == np.round(_wide(x)), 0, max(eps, _eps(x.dtype)))
        return (_wide(x) * (1 + factor * rng.choice([-1, 1], x.shape))).astype(x.dtype)

    return jax.tree.map(moved, tree)


def _eps(dtype: Any) -> float:
    inexact = jax.dtypes.issubdtype(dtype, np.inexact)
    return float(jax.numpy.finfo(dtype).eps) if inexact else 0.0


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(_wide(x)[np.isfinite(_wide(x))]))


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """Return the norm of the difference; infinite where shapes differ, or what is not finite."""
    if a.shape != b.shape:
        return math.inf
    a, b = _wide(a), _wide(b)
    with np.errstate(invalid="ignore"):
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, a - b)
    return float(np.linalg.norm(gap)) if np.isfinite(gap).all() else math.inf
