"""`assert_same_as_one_device`: a test for a user's step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcoll._collectives.shards import is_shards
from jaxcoll._gradients.batch import Signature, slots
from jaxcoll._gradients.proof.subjaxprs import equations
from jaxcoll._plan.packs.leaves import flatten_with_paths, is_array, is_key, refuse_tied, reveal_key
from jaxcoll._plan.packs.shard_layout import lay_out_over
from jaxcoll._show.units import pluralize
from jaxcoll._step.mesh.mesh import bind_mesh, check_mesh, takes_mesh
from jaxcoll._step.mesh.shard_arrays import cut, join_shards
from jaxcoll._step.step import DataParallel

_CALLER = "assert_same_as_one_device"
_ORDERS, _ROUNDINGS = 3, 12  # runs with reordered rows; most runs with perturbed arguments
_TIMES = 4  # rounding on many devices may be this many times the largest seen in those runs
_BY_ORDER = "changes on one device too when the rows of the batch are reordered"
_BY_ROUNDING = (
    "changes with other rows no more than by rounding, and nothing else can be compared; use other "
    "arguments"
)
_ADVICE = """
Results that depend on the order of the rows cannot be compared: dropout by position, shuffling, \
`x[0]`. Turn that off for this test, as with `deterministic=True`; give each row its own random \
key, as a part of the batch; or leave out the output with `ignore`."""
_POWERS = {
    1: "it is summed where a mean is expected, or a sum is reduced again",
    -1: "it is divided by the number of replicas once too often, or averaged where a sum is "
    "expected",
    2: "{n} squared: summed twice where a mean is expected, or the square of a sum",
    -2: "1/{n} squared: divided twice too often, or the square of a quotient",
}

Pair = tuple[np.ndarray, np.ndarray]  # a leaf of two results: with the batch, with other rows


def assert_same_as_one_device(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    tolerance: float | None = None,
    ignore: str | Sequence[str] = (),
    **kwargs: Any,
) -> None:
    """Run a step on all devices and on one, with the same whole batch, and compare the outputs.

    The results of a correct step do not depend on the number of devices. A sum that should be a
    mean, or a gradient that is reduced or divided twice, shows as a power of that number.

    Both also run the step with some rows replaced by others; the change of an output is compared,
    however small it is. One device also runs it with other orders of the rows. If that moves an
    output by more than rounding, the output cannot be compared, which is an error. If outputs
    differ, one device runs the step with arguments perturbed by rounding. Outputs that this moves
    as far count as equal, such as the gradient of a bias before a batch norm and what Adam makes
    of it. Cost: 7 runs, 31 for a wrong step, and three compiled programs.

    Args:
      step: a `jc.data_parallel` step; or a function that takes a `mesh` and maps itself over it.
      *args: arguments of the step, with the whole batch. They are copied, so donation does not
        delete them. `Shards` are split anew for one device, and compared as whole trees.
      mesh: the devices and axes to compare with one device; None: the step's mesh, or all devices
        on an axis named "data".
      batch_argnums: the batch of a function with a parameter `mesh`, as in `jc.data_parallel`.
      tolerance: largest norm of a leaf's error, relative to the norm of the leaf, or of its change
        with other rows if that is smaller. None: the square root of the precision of the leaf's
        dtype (0.0003 for float32) or 8 times the precision of the narrowest dtype in the step's
        program (0.06 for bfloat16), whichever is larger. Integers must be equal.
      ignore: outputs to leave out, by the beginning or the end of their paths: "[1]", or
        `"['key']['bias']"`.
      **kwargs: keyword arguments of the step, likewise.

    Raises:
      AssertionError: outputs differ or cannot be compared; a table lists them with their factors.
      ValueError: the step cannot be run on another mesh, there is only one device, the batch is
        not named, or `ignore` fits no output.

    Examples:
      >>> import jax, numpy as np
      >>> @data_parallel
      ... def step(w, x):
      ...     return w - 0.1 * psum(jax.grad(lambda w: (w * x).mean())(w))
      >>> try:
      ...     assert_same_as_one_device(step, np.ones(3, "f"), np.eye(8, 3))
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[1][:60])
        the output: its change by other rows is 8.0 times as large
    """
    on, mesh = _runner(step, mesh, batch_argnums, kwargs)
    refuse_tied((args, kwargs), _CALLER)
    args, kwargs = jax.tree.map(_copy_to_host, (args, kwargs))  # host arrays cannot be donated
    first = mesh.devices[(slice(1),) * mesh.devices.ndim]
    together, alone = on(mesh), on(Mesh(first, mesh.axis_names, axis_types=mesh.axis_types))
    signature = getattr(alone, "signature", None) or _signature(alone, batch_argnums)
    call, narrowest = signature.call(args, kwargs), _narrowest(together, args, kwargs)
    rows = [len(x) for x in jax.tree.leaves([*map(call.get, call.batch)]) if np.ndim(x)]
    # Leaves may have several rows for each example: blocks keep what belongs together.
    rng, blocks = np.random.default_rng(0), math.gcd(*rows) or 1
    others = rng.integers(blocks, size=blocks)  # some repeat, others are missing

    def run(step: Any, order: np.ndarray | None = None, seed: int | None = None) -> Any:
        changed = call
        if order is not None:
            changed = changed.map(functools.partial(_reorder, blocks=order), lambda tree: tree)
        if seed is not None:
            changed = changed.map(*[functools.partial(_perturb, eps=narrowest, seed=seed)] * 2)
        if step is alone:
            for_one = functools.partial(jax.tree.map, _resplit, is_leaf=is_shards)
            changed = changed.map(for_one, for_one)
        return _leaves(step(*changed.args, **changed.kwargs))

    def pairs(step: Any, seed: int | None = None) -> dict[str, Pair]:
        results, by_others = run(step, None, seed), run(step, others, seed)
        return {path: (result, by_others[path]) for path, result in results.items()}

    many, one = pairs(together), pairs(alone)
    if [*one] != [*many]:
        found = [f"{pluralize(len(x), 'output')}, {', '.join(x)}" for x in (many, one)]
        where = f"on {mesh.size} devices the step returns {found[0]}; on one it returns {found[1]}"
        raise AssertionError(where)
    outputs = [
        _Output(path, one[path], many[path], tolerance, narrowest)
        for path in _drop_ignored([*one], (ignore,) if isinstance(ignore, str) else ignore)
    ]
    for order in (rng.permutation(blocks) for _ in range(_ORDERS)):
        result = run(alone, order)
        for x in outputs:
            x.moved = max(x.moved, x.measure_move(result[x.path], order))
    # Only a wrong step pays for these runs: is it off by more than rounding moves it?
    for seed in range(_ROUNDINGS):
        if not any(x.is_wrong for x in outputs):
            break
        shifted = pairs(alone, seed)
        for x in outputs:
            x.rounding = max(x.rounding, _size(_minus(_change(shifted[x.path]), x.change)))
    _raise_if_off(outputs, mesh.size)


class _Output:
    """A leaf of the result on one device and on many, and how other rows change it."""

    moved = 0.0  # norm of the largest change when rows are reordered
    rounding = 0.0  # norm of the largest change when arguments are perturbed by rounding

    def __init__(
        self, path: str, on_one: Pair, on_many: Pair, tolerance: float | None, narrowest: float
    ) -> None:
        self.path, self.one, self.many = path, on_one[0], on_many[0]
        self.change, self.change_on_many = _change(on_one), _change(on_many)
        one, eps = self.one, _eps(self.one.dtype)
        # At most 0.25, so that half or twice a number is an error
        default = min(max(eps**0.5, 8 * narrowest), 0.25)
        relative = default if tolerance is None else tolerance
        # An output that hardly changes is compared by its change: a constant hides errors.
        change, self.ulps = min(_norm(self.change), _norm(one)), 2 * eps * _norm(one)
        self.allowed = relative * change + self.ulps if eps else 0.0
        self.is_changed = self.ulps < change if eps else bool(one.size)
        off = max(_size(_minus(a, b)) for a, b in zip(on_one, on_many, strict=True))
        self.off = math.inf if one.size and np.isnan(_wide(one)).all() else off

    @property
    def limit(self) -> float:
        return max(self.allowed, _TIMES * self.rounding)

    @property
    def is_wrong(self) -> bool:
        return max(self.off, self.moved) > self.limit

    def measure_move(self, other: np.ndarray, order: np.ndarray) -> float:
        by_rows = np.ndim(self.one) and len(self.one) % len(order) == 0
        rows = [_reorder(self.one, order)] if by_rows else []
        return min(_size(_minus(x, other)) for x in (self.one, *rows))

    def complaint(self, n: int) -> str:
        """Name the factor by which it differs, and the probable cause."""
        if self.one.shape != self.many.shape:
            shapes = f"{self.many.shape}, but {self.one.shape} on one device"
            return f"has shape {shapes}; is it a value per replica?"
        if self.off == math.inf:
            return "is infinite or NaN; does a sum overflow?"
        for name, (one, many) in {
            "": (self.one, self.many),
            "its change by other rows ": (self.change, self.change_on_many),
        }.items():
            for power, meaning in _POWERS.items():
                times = float(n) ** power
                error = _size(_minus(many, times * _wide(one)))
                if error <= 0.02 * _norm(many) + self.rounding + self.ulps < _norm(many):
                    factor = f"{name}is {round(times, 4)} times as large as on one device"
                    return f"{factor}: {meaning.format(n=n)}"
        return (
            f"differs, but not by a power of {n}, the number of devices: off by {self.off:.3g} of "
            f"{_norm(self.one):.3g} in norm; is it computed per share, like a batch norm?"
        )


def _raise_if_off(outputs: Sequence[_Output], n: int) -> None:
    wrong = [x for x in outputs if x.is_wrong]
    by_order = [x for x in wrong if x.moved > x.limit]
    lines = {x.path: _BY_ORDER if x in by_order else x.complaint(n) for x in wrong}
    if not wrong and not any(x.is_changed and max(x.off, x.moved) <= x.allowed for x in outputs):
        lines = {x.path: _BY_ROUNDING for x in outputs}
    if lines:
        verb = "gives other results than on" if wrong != by_order else "cannot be compared with"
        rows = (f"\n  {f'output {p}' if p else 'the output'}: {text}" for p, text in lines.items())
        raise AssertionError(
            f"on {n} devices the step {verb} one, in {len(lines)} of "
            f"{pluralize(len(outputs), 'output')}:{''.join(rows)}{_ADVICE if by_order else ''}"
        )


def _runner(
    step: Any, mesh: Mesh | None, batch_argnums: Any, kwargs: dict[str, Any]
) -> tuple[Callable[[Mesh], Callable[..., Any]], Mesh]:
    """Find how the step is made for a mesh, and the mesh of many devices."""
    if isinstance(step, DataParallel):
        mesh, on = mesh or step.mesh, step.on
        if batch_argnums is not None:
            raise ValueError(f"`{_CALLER}`: a `jc.data_parallel` step names its own batch.")
    elif takes_mesh(step, kwargs):
        mesh = check_mesh(mesh, mesh.axis_names if mesh else "data", _CALLER)
        on = functools.partial(bind_mesh, step)
    else:
        raise ValueError(
            f"`{_CALLER}` expects a `jc.data_parallel` step, or a function with a parameter `mesh` "
            "that maps itself over it; one that is mapped already cannot be run on one device."
        )
    if mesh.size < 2:
        raise ValueError(
            f"`{_CALLER}` compares one device with several, but there is only one. Begin with "
            '`jax.config.update("jax_num_cpu_devices", n)`.'
        )
    return on, mesh


def _signature(step: Callable[..., Any], batch_argnums: Any) -> Signature:
    batch = None if batch_argnums is None else slots("batch_argnums", batch_argnums)
    line = f"jc.{_CALLER}({{name}}, *args, batch_argnums={{batch}})"
    return Signature(step, batch, _CALLER, line, "on every device")


def _drop_ignored(paths: list[str], ignore: Sequence[str]) -> list[str]:
    for part in ignore:
        rest = [path for path in paths if not path.startswith(part) and not path.endswith(part)]
        if not part or rest == paths:
            none = f"no output's path begins or ends with {part!r}, which is in `ignore`"
            raise ValueError(f"`{_CALLER}`: {none}; there are {', '.join(paths)}.")
        paths = rest
    return paths


def _copy_to_host(x: Any) -> Any:
    if isinstance(x, jax.Array) and is_key(x):
        data = jax.numpy.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _leaves(tree: Any) -> dict[str, np.ndarray]:
    """Flatten a tree to arrays by path, with whole leaves in the place of shards."""
    whole = jax.tree.map(lambda x: join_shards(x) if is_shards(x) else x, tree, is_leaf=is_shards)
    return {
        path: np.asarray(reveal_key(x)) for path, x in flatten_with_paths(whole)[0] if is_array(x)
    }


def _resplit(x: Any) -> Any:
    """Split shards anew for one device."""
    if not is_shards(x):
        return x
    layout = lay_out_over(x.layout, (1,) * len(x.axes))
    parts = cut(jax.tree.leaves(join_shards(x)), layout, None, x.axes, x.stack).parts
    return dataclasses.replace(x, parts=parts, layout=layout)


def _narrowest(run: Any, args: Any, kwargs: Any) -> float:
    """Find the precision (eps) of the narrowest dtype in a step's program."""
    try:
        trace = run.trace if isinstance(run, DataParallel) else jax.jit(run).trace
        program = trace(*args, **kwargs).jaxpr
    except (TypeError, ValueError, RuntimeError):  # it depends on values and cannot be traced
        return 0.0
    atoms = (atom for eqn in equations(program) for atom in (*eqn.invars, *eqn.outvars))
    return max((_eps(getattr(atom.aval, "dtype", int)) for atom in atoms), default=0.0)


def _reorder(tree: Any, blocks: np.ndarray) -> Any:
    """Split the rows of each leaf into `len(blocks)` blocks, and take those with these indices."""

    def reorder(x: Any) -> Any:
        return x[np.arange(len(x)).reshape(len(blocks), -1)[blocks].ravel()] if np.ndim(x) else x

    return jax.tree.map(reorder, tree)


def _perturb(tree: Any, eps: float, seed: int) -> Any:
    """Move the numbers of a tree up or down by rounding, but not whole numbers, maybe flags."""
    rng = np.random.default_rng(seed)

    def perturb(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or not _eps(x.dtype):
            return x
        factor = np.where(_wide(x) == np.round(_wide(x)), 0, max(eps, _eps(x.dtype)))
        return (_wide(x) * (1 + factor * rng.choice([-1, 1], x.shape))).astype(x.dtype)

    return jax.tree.map(perturb, tree)


def _eps(dtype: Any) -> float:
    inexact = jax.dtypes.issubdtype(dtype, np.inexact)
    return float(jax.numpy.finfo(dtype).eps) if inexact else 0.0


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Subtract: zero where both are NaN, infinite if the shapes differ."""
    if a.shape != b.shape:
        return np.array(np.inf)
    a, b = _wide(a), _wide(b)
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, a - b)


def _change(pair: Pair) -> np.ndarray:
    """Subtract other rows' result; of integers, which are compared exactly, take the value."""
    return _minus(*pair) if _eps(pair[0].dtype) else _wide(pair[0])


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(_wide(x)[np.isfinite(_wide(x))]))


def _size(gap: np.ndarray) -> float:
    return _norm(gap) if np.isfinite(gap).all() else math.inf
