"""Proof, from its traced programs, that an optimizer treats every element independently."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxcoll._gradients.proof.subjaxprs import find_callee, get_shape, is_ref, open_jaxpr
from jaxcoll._plan.packs.leaves import flatten_with_paths, is_array, is_key

_REFUSED = "`sharded_optimizer` expects an elementwise optimizer"
_ADVICE = (
    "A sharded optimizer sees only packs of one replica's elements, so it must treat every element "
    "independently. Instead of `optax.clip_by_global_norm`, pass `max_norm` to "
    "`sharded_optimizer`. Masks and labels by leaf (`masked`, `multi_transform`, weight decay with "
    "`mask`), norms of leaves (lamb, lars), factored moments (adafactor, shampoo), noise, NaN "
    "flags (`zero_nans`) and skipped steps (`apply_if_finite`, `MultiSteps` with "
    "`should_skip_update_fn`) are not elementwise: use such an optimizer unsharded, with the "
    "gradients of `jc.value_and_grad`."
)
_IDENTITIES = {"broadcast_in_dim", "copy", "copy_p", "optimization_barrier", "pcast", "pvary"}
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "cos", "cosh", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
}  # fmt: skip
_TYPES_ONLY = {"sharding", "weak_type"}


class _Mixed(NamedTuple):
    """Owns what does not belong to the elements of one leaf; `reason` says by what it is mixed."""

    reason: str


_TABLE = _Mixed("an array of numbers")  # of no leaf: mixed only once it meets one


class _Value(NamedTuple):
    """A value of a program: which elements it depends on, and by which formula.

    `owner` is the leaf of the parameters from which the value is computed element by element; None
    for a single number, repeated or not. Values with equal `formula` are computed in the same way,
    whatever their shapes.
    """

    owner: int | _Mixed | None
    formula: int


def check_elementwise(tx: Any, whole: Any, parts: Any, extra: dict[str, Any] | None = None) -> None:
    """Refuse `tx` unless it updates all elements independently and alike, whole and packed.

    Its programs are read, not run. The update of an element may depend on one element each of
    gradients, parameters and state, and on single numbers, by the same formula for all leaves of a
    dtype and for their packs. A single number in the state may depend only on single numbers.

    Args:
      tx: the optimizer.
      whole: the shapes of the parameters.
      parts: the shapes of one replica's `Shards` of the parameters.
      extra: further arguments of `tx.update`.

    Raises:
      ValueError: `tx` is not elementwise, or does not run on these shapes.
    """
    reader, formulas = _Reader(), dict[Hashable, int]()
    # Without axes in their types, for which JAX would add conversions that mean nothing here
    whole, parts = jax.tree.map(_drop_axes, (whole, parts))
    for params in (parts, whole):
        for path, owner, value in _results(tx, params, parts, extra or {}, reader):
            place = "the update of" if path.startswith("[0]") else "its state at"
            place = f"{place} {path[3:] or 'the value'}"
            if value.owner not in (None, owner.leaf):
                owned = value.owner
                reason = owned.reason if isinstance(owned, _Mixed) else "another array"
                raise ValueError(
                    f"{_REFUSED}, but in the program of this one {place} depends on several "
                    f"elements (by {reason}). {_ADVICE}"
                )
            # The packs were read first: a whole leaf must be computed as its pack is.
            if formulas.setdefault((path[:3], owner.role), value.formula) != value.formula:
                raise ValueError(
                    f"{_REFUSED}, but this one depends on names, ranks or sizes of leaves, which "
                    f"packs do not have: {place} is computed differently from others. {_ADVICE}"
                )


def _drop_axes(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class _Owner(NamedTuple):
    """The leaf that an array belongs to, and a key shared by arrays of the same role."""

    leaf: int | _Mixed | None
    role: Hashable


def _results(
    tx: Any, params: Any, parts: Any, extra: dict[str, Any], reader: _Reader
) -> list[tuple[str, _Owner, _Value]]:
    """Read path, owner and value of each leaf of the updates, the next state and the first."""
    more, treedef = jax.tree.flatten(extra)
    at = [i for i, x in enumerate(more) if is_array(x)]
    arrays = [_drop_axes(jax.typeof(more[i])) for i in at]

    def programs(grads: Any, state: Any, params: Any, arrays: Any) -> Any:
        traced = dict(zip(at, arrays, strict=True))
        extra = treedef.unflatten(traced.get(i, x) for i, x in enumerate(more))
        updates, new_state = tx.update(grads, state, params, **extra)
        if jax.tree.structure(updates) != jax.tree.structure(grads):
            raise ValueError(f"expected updates like the gradients; got {type(updates).__name__}")
        return updates, new_state, tx.init(params)

    wanted = jax.tree.structure(parts)

    def is_like_parts(tree: Any) -> bool:
        return jax.tree.structure(tree) == wanted

    try:
        with _default_settings():
            # If the parameters are a single array, a tree like them looks like a number. In the
            # state for parts it does not.
            of_parts = jax.eval_shape(tx.init, parts)
            nodes, nodes_def = jax.tree.flatten(of_parts, is_leaf=is_like_parts)
            state = jax.eval_shape(tx.init, params)
            trees = zip(nodes, nodes_def.flatten_up_to(state), strict=True)
            of_state = [
                _Owner(owner.leaf, (k, owner.role))
                for k, (node, tree) in enumerate(trees)
                for owner in _list_owners(tree, params if is_like_parts(node) else None)
            ]
            program, shapes = jax.make_jaxpr(programs, return_shape=True)(
                params, state, params, arrays
            )
            if jax.tree.structure(shapes[1]) != jax.tree.structure(state):
                raise ValueError("its state after `update` has another structure than before")
    except Exception as error:
        raise ValueError(
            f"{_REFUSED}, whose state holds numbers and trees like the parameters, but this one "
            f"does not run on such shapes ({type(error).__name__}: {error}). If its `update` needs "
            "further arguments, or parameters of certain names, but treats every element "
            f"independently, pass `assume_elementwise=True`. {_ADVICE}"
        ) from error
    of_params, of_extra = _list_owners(params, params), _list_owners(arrays, None)
    groups = {"gradient": of_params, "state": of_state, "parameter": of_params, "extra": of_extra}
    inputs = [
        reader.value(owner.leaf, name, owner.role)
        for name, group in groups.items()
        for owner in group
    ]
    values = reader.outputs(program.jaxpr, inputs, program.consts)
    paths = [path for path, _ in flatten_with_paths(shapes)[0]]
    return [*zip(paths, [*of_params, *of_state, *of_state], values, strict=True)]


def _list_owners(tree: Any, like: Any) -> list[_Owner]:
    """List the owner of each leaf of a tree like the parameters `like`, or of other arrays."""
    leaves = jax.tree.leaves(tree)
    if like is None:
        return [_Owner(_TABLE if x.shape else None, i) for i, x in enumerate(leaves)]
    params = jax.tree.leaves(like)
    shapes, wanted = ([x.shape for x in tree] for tree in (leaves, params))
    if shapes != wanted:
        raise ValueError(f"its state for leaves of shapes {wanted[:5]} has shapes {shapes[:5]}")
    # Empty leaves have roles of their own, as JAX traces other programs for them.
    return [_Owner(i, i if 0 in x.shape else str(x.dtype)) for i, x in enumerate(params)]


class _Reader:
    """Reads programs into values. Formulas of all programs read by one reader are comparable."""

    def __init__(self) -> None:
        self._formulas: dict[Hashable, int] = {}

    def value(self, owner: int | _Mixed | None, *formula: Hashable) -> _Value:
        """Make a value with this formula, which includes the formulas of its operands."""
        return _Value(owner, self._formulas.setdefault(formula, len(self._formulas)))

    def outputs(
        self, jaxpr: Jaxpr, inputs: Sequence[_Value], constants: Sequence[Any] = ()
    ) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values.update(zip(jaxpr.constvars, map(self._constant, constants), strict=True))

        def read(atom: Any) -> _Value:
            return self._constant(atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(x) for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _constant(self, x: Any) -> _Value:
        if isinstance(x, Tracer) or is_key(x) or not is_array(x):
            return self.value(_TABLE if jax.numpy.shape(x) else None, "captured", id(x))
        # An array of equal numbers is a number, as in `ones_like`: it has no places.
        array = np.asarray(x)
        if array.size and (array == array.flat[0]).all():
            array = array.flat[0]
        owner = _TABLE if array.shape else None
        return self.value(owner, "constant", str(array.dtype), array.shape, array.tobytes())

    def _equation(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        name, body = eqn.primitive.name, find_callee(eqn)
        if body is not None and not body.constvars:
            return self.outputs(body, operands)
        if name == "cond":
            # Which branch runs may depend on the number of a step. A result that is computed in the
            # same way by all branches does not.
            by, *operands = operands
            outs = [
                self.outputs(open_jaxpr(x), operands, getattr(x, "consts", ()))
                for x in eqn.params["branches"]
            ]
            return [
                results[0]
                if len(set(results)) == 1
                else self.value(_find_owner([by, *results]), name, by.formula, *_formulas(results))
                for results in zip(*outs, strict=True)
            ]
        owner = _find_owner(operands)
        if name in _IDENTITIES or _keeps_dtype(eqn):
            # A number is the same at all places; an array keeps its places only in its own shape.
            if owner is None or get_shape(eqn.invars[0]) == get_shape(eqn.outvars[0]):
                return operands[: len(eqn.outvars)]
        params = str(sorted((k, str(v)) for k, v in eqn.params.items() if k not in _TYPES_ONLY))
        results = []
        for k, var in enumerate(eqn.outvars):
            # A sum or a reversal of a leaf reads other places than the one it writes: in a pack
            # these hold other leaves.
            if any(map(is_ref, eqn.invars)) or (
                isinstance(owner, int) and name not in _ELEMENTWISE
            ):
                of = _Mixed(f"`{name}`")
            elif owner in (None, _TABLE) and name not in _ELEMENTWISE:
                of = _TABLE if get_shape(var) else None
            else:
                of = owner
            results.append(self.value(of, name, k, params, *_formulas(operands)))
        return results


def _find_owner(values: Sequence[_Value]) -> int | _Mixed | None:
    """Find the owner of a value that is computed element by element from several values."""
    owners = {x.owner for x in values} - {None}
    mixed = sorted(x for x in owners - {_TABLE} if isinstance(x, _Mixed))
    if mixed or len(owners) < 2:
        return mixed[0] if mixed else next(iter(owners), None)
    # A pack has other elements at the places of the table's numbers than the leaf has.
    return _Mixed("numbers that differ by place" if _TABLE in owners else "a mixture of arrays")


def _formulas(values: Sequence[_Value]) -> list[int]:
    return [x.formula for x in values]


def _keeps_dtype(eqn: JaxprEqn) -> bool:
    """True if an equation is a conversion that changes only the weakness of the type."""
    of_operand: Any = eqn.invars[0].aval if eqn.invars else None
    of_result: Any = eqn.outvars[0].aval if eqn.outvars else None
    return eqn.primitive.name == "convert_element_type" and of_operand.dtype == of_result.dtype


@contextlib.contextmanager
def _default_settings() -> Iterator[None]:
    """Leave the caller's mesh and the caller's settings of dtype and rank promotion."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
    ):
        yield
