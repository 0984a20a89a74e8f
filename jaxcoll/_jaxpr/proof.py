"""The one proof about a traced step: which of its values are the same on every replica.

It is one forward pass over the equations of the program of one replica. The fact about a value is
an integer, a few bits for each mapped axis:

- VARIES: it may differ between the replicas along the axis;
- REDUCED: it comes from a reduction over the axis;
- PART, and MOVED if it was only moved, cast or scaled since: it is this replica's part of a sum of
  which every replica holds another one, as gradients in `Shards` are;
- OWN: it is a number of such a part, as its norm is.

A value varies if an operand varies, unless its equation sums, compares or gathers over the whole
axis. What is not known varies. Facts only grow, so that loops settle, a program is read once for
the same facts of its inputs, and what is refused stays refused. The same pass refuses

- an exchange over an axis inside a branch or loop that replicas choose for themselves;
- gradients, going to be reduced, by leaves that differ between replicas;
- parts that are summed again, or are scaled or chosen by a number of one part alone;

and it finds sums of what a reduction has made the same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, primitives

from jaxcoll import _compat
from jaxcoll._compat import marks, settings
from jaxcoll._jaxpr.dataflow import Dataflow, joined
from jaxcoll._jaxpr.subjaxprs import at_line, called, equations, is_ref, like, opened, programs

_VARIES, _REDUCED, _PART, _MOVED, _OWN = (1 << k for k in range(5))
_BITS = 5

_SUMS = {"psum", "psum_invariant"}
_EQUALIZING = {*_SUMS, "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
_ABORTING = {*_SUMS, "pmax", "pmin", "reduce_scatter"}
_FIRST = {_compat.AS_INVARIANT, "pvary", "pcast", "as_stored", "reshard", "needing"}
"""The result is the first operand, whatever the parameters say."""
_SAME_PLACE = {"optimization_barrier", marks.THROUGH}
"""Result k is operand k."""
_SILENT = {*_FIRST, *_SAME_PLACE, *marks.ALL, "axis_index"}
"""Equations that may name an axis and send nothing."""
_CALLS = {"shard_map", "composite", "core_call", "custom_vmap_call", "linear_call", "remat_opt"}
"""Calls of one program with the equation's own operands, beside those of `subjaxprs`."""
_FROM_ELSEWHERE = ("callback", "infeed", "rng_uniform", "recv")
"""Parts of names of primitives whose results depend on more than their operands."""
_FUNCTIONS = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)}
_FUNCTIONS |= {
    "split", "stack", "unstack", "tile", "broadcast_to", "empty", "scatter-sub", "mulhi",
    "ragged_dot_general", "scaled_matmul", "scaled_matmul_wrapper", "scaled_dot", "to_edtype",
    "from_edtype", "random_wrap", "random_unwrap", "random_clone", "iota_2x32_shape", "philox2x32",
    "philox4x32", "threefry4x32", "geqp3", "geqrf", "ormqr", "cholesky_update", "pin", "unpin",
    "lu_pivots_to_permutation", "symmetric_product", "layout_constraint", "platform_index",
    "with_memory_space_constraint", "dot_product_attention_fwd_wrapper", "dimension_size",
    "dot_product_attention_bwd_wrapper", "dim_as_value", "reduced_vary_cast_p",
    "reduced_vary_cast",
}  # fmt: skip
"""Functions of their operands: JAX's public list, and what JAX 0.10 to 0.12 have beside it."""
_OF_OWN_PLACES = {"get", "swap", "addupdate", "masked_load", "masked_swap", "program_id"}
_OF_OWN_PLACES |= {"num_programs"}
"""In a program that makes its places for itself, as a kernel does, all is of its operands."""
_PLAIN = {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "log", "tanh", "sqrt"}
_PLAIN |= {"rsqrt", "integer_pow", "pow", "sign", "abs", "square", "logistic", "erf", "select_n"}
_PLAIN |= {"dot_general", "transpose", "reshape", "broadcast_in_dim", "convert_element_type"}
_PLAIN |= {"reduce_sum", "reduce_max", "squeeze", "slice", "concatenate", "pad"}
_PLAIN |= {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "iota", "stop_gradient"}
"""The most frequent functions, whose parameters hold neither axes nor programs."""
_MIXING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce", "argmax", "argmin"}
_MIXING |= {"cumsum", "cumprod", "cummax", "cummin", "dot_general", "sort", "top_k"}
"""They make numbers of several elements: a row's mean, of a pack whose rows are no leaf's."""
_MOVES = {"reshape", "squeeze", "transpose", "copy", "neg", "div", "slice"}
_MOVES |= {"convert_element_type", "broadcast_in_dim", "concatenate", "select_n", *_FIRST}

_CHOSEN = """\
{kind} over {axis!r}{at} stands in a {where} that replicas choose for themselves: what decides \
about it{line} differs between them, so that some would wait for others that never come, or \
exchange what does not belong together. Move it out of the {where}; or decide by a number that is \
the same everywhere, such as `lax.pmax(..., {axis!r})` of it; or compute both sides and choose \
with `jnp.where`. If the number is the same although nothing shows it, mark it: `jc.same(...)`."""

_DIFFERENT = """\
`{caller}` over {axis!r}: {leaf} must be the same on every replica, and differs between them, or \
nothing shows that it does not. Its gradients would be those of different values. If it is the \
same, say so with `jc.same`, or make it so with `jc.broadcast`; if it is meant to differ (an \
expert, the batch), take its gradient with `jax.grad`, or pass it as `Shards`."""

_WHOLE = """\
`{caller}` over {axis!r}: {leaf} is said to be one replica's rows, and is the same on every \
replica, so that gathering it would repeat it. Say that it is whole; or cut it over the axis, as \
`jc.shard` does."""

_PARTS_SUMMED = """\
`lax.psum` over {axis!r}{at} of {like}: these are parts of a sum, in shards, which is reduced over \
it already. Each replica holds another part, and a sum or mean adds up what does not belong \
together. Reduce them no more."""

_OWN_NORM = """\
Gradients in shards over {axis!r} are scaled, or chosen, by a number of this replica's part \
alone{at}, such as its norm: each replica would take another one, and none that of the whole \
gradient. Give `jc.sharded_optimizer` an elementwise optimizer and `max_norm`, in place of \
`optax.clip_by_global_norm` and the like; or compute the number over all parts, by \
`jc.global_norm(gradients, {axis!r})` or `jc.all_finite(gradients, {axis!r})`."""

_NARROW = """\
`{name}` over {axis!r}{at} of {like}, beside a mesh axis that is left to the compiler: XLA's CPU \
compiler aborts the process there on sums of 16 bits. Cast to float32 before it and back after \
it; `jc.all_reduce` does so by itself."""


@dataclasses.dataclass(frozen=True)
class RepeatedSum:
    """A sum over an axis of what is the same along it and comes from a reduction over it."""

    axis: str
    like: str  # the type of the value
    line: str  # of the sum
    maker: str  # the line of the reduction before; "" if it is not found


@dataclasses.dataclass(frozen=True)
class Proven:
    """Results of the pass over a program."""

    varying: list[frozenset[str]]  # of each output the axes along which it may differ
    repeated: tuple[RepeatedSum, ...]
    jaxpr: Jaxpr

    def gradient_line(self, k: int) -> str:
        """The user's line where a gradient was taken that output `k` is made of; "" if none."""
        eqns = _behind(self.jaxpr, self.jaxpr.outvars[k])
        return next(filter(None, map(settings.line_of_gradient, eqns)), "")

    def line(self, k: int) -> str:
        """The user's line of the equation that made output `k`; "" if it is not known."""
        return _line_behind(self.jaxpr, self.jaxpr.outvars[k])


def prove(
    program: Any,
    inputs: Sequence[frozenset[str]],
    axes: Mapping[str, int],
    *,
    narrow_sums_abort: bool = False,
) -> Proven:
    """Read a traced program of one replica.

    Args:
      program: its jaxpr.
      inputs: of each input the axes along which it varies.
      axes: the mapped axes that are asked about, with their sizes.
      narrow_sums_abort: refuse reductions of 16-bit floats over them.

    Raises:
      ValueError: it has a collective that would hang or mix values; see the module.
    """
    proof = _Proof(axes, narrow_sums_abort=narrow_sums_abort)
    jaxpr = opened(program)
    facts = [sum(bit for axis, bit in proof.bit.items() if axis in along) for along in inputs]
    facts = proof.outputs(jaxpr, facts)
    # An empty array cannot differ.
    facts = [
        fact if getattr(x.aval, "size", 1) else 0
        for fact, x in zip(facts, jaxpr.outvars, strict=True)
    ]
    varying = [frozenset(a for a, bit in proof.bit.items() if fact & bit) for fact in facts]
    return Proven(varying, tuple(proof.repeated()), jaxpr)


def same_outputs(program: Any, axes: Mapping[str, int]) -> list[frozenset[str]]:
    """Axes along which each output of a program is the same, whatever its inputs are."""
    jaxpr = opened(program)
    proof = _Proof(axes, refuses=False, varying={*jaxpr.constvars})
    facts = proof.outputs(jaxpr, [proof.all] * len(jaxpr.invars))
    return [frozenset(a for a, bit in proof.bit.items() if not fact & bit) for fact in facts]


class _Proof(Dataflow):
    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        narrow_sums_abort: bool = False,
        refuses: bool = True,
        varying: Set[Any] = frozenset(),  # constants of the program that vary
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.bit = {axis: 1 << _BITS * k for k, axis in enumerate(sizes)}
        self.all = sum(self.bit.values())
        # Along an axis of size 1 nobody waits for others, and nothing is counted twice
        self._long = sum(bit for axis, bit in self.bit.items() if sizes[axis] > 1 and refuses)
        self._varying = varying
        self._narrow_sums_abort = narrow_sums_abort
        self._sums: dict[int, tuple[JaxprEqn, Jaxpr, list[int]]] = {}

    def captured(self, var: Any) -> int:
        return self.all if var in self._varying else 0

    def chosen(self, by: int, fact: int, eqn: JaxprEqn) -> int:
        self._check_own(by | fact, eqn)
        return by | fact

    def equation(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in marks.ALL:
            return self._mark(eqn, ins, jaxpr)
        if name in _FIRST:
            return ins[:1]
        if name in _SAME_PLACE:
            return ins
        if name not in _PLAIN:
            if programs(eqn):
                return self.inside(eqn, ins)
            if named := self._named(eqn.params):
                return self._exchange(eqn, ins, named, jaxpr)
            if not self._is_function(eqn):
                return [joined(ins) | self.all] * count
        fact = joined(ins)
        return [self._of_parts(eqn, fact) if fact & self.all * (_PART | _OWN) else fact] * count

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        bodies = programs(eqn)
        if eqn.primitive.name in _CALLS and len(bodies[0].invars) == len(ins):
            return self.outputs(bodies[0], ins)
        # Read in an order that is not known, with any operands: only what is made of these by
        # nothing but functions of them is the same where they are.
        own = set() if any(map(is_ref, eqn.invars)) else _OF_OWN_PLACES
        within = (e for body in bodies for e in equations(body))
        known = all(e.primitive.name in own or self._is_function(e) for e in within)
        return [joined(ins) | self.all * (not known)] * len(eqn.outvars)

    def _named(self, params: Mapping[str, Any]) -> int:
        """The axes that are, or are in, a parameter of an equation, as bits."""
        bits = 0
        for key, p in params.items():
            if isinstance(p, str):
                bits |= self.bit.get(p, 0) if key != "name" else 0  # of a jitted function
            elif isinstance(p, tuple | list | frozenset | set):
                for x in p:
                    if isinstance(x, str):
                        bits |= self.bit.get(x, 0)
        return bits

    def _is_function(self, eqn: JaxprEqn) -> bool:
        """True if results are a function of the operands and of nothing else, axes included."""
        name = eqn.primitive.name
        return (
            (name in _FUNCTIONS or name in _SILENT or bool(programs(eqn)))
            and not any(word in name for word in _FROM_ELSEWHERE)
            and not any("NamedAxis" not in type(e).__name__ for e in eqn.effects)
            and not any(map(is_ref, eqn.invars))
            and not self._named(eqn.params)
        )

    def _mark(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        named = self._named(params)
        if name == marks.PARTS:
            return [ins[0] | named * (_VARIES | _PART | _MOVED)]
        if name == marks.CHECKED:
            self._check_leaves(ins[1:], named, **params)
            return ins[:1]
        count = len(eqn.outvars)
        results, before = ins[:count], ins[count:]
        if params["sums"]:
            self._note_sums(eqn, before, jaxpr)
        results = [fact & ~(named * (_VARIES | _PART | _MOVED | _OWN)) for fact in results]
        if before:
            reduced = [(fact & named | fact >> 1 & named) << 1 for fact in before]
            results = [
                fact & ~(named * _REDUCED) | more
                for fact, more in zip(results, reduced, strict=True)
            ]
        return results

    def _check_leaves(
        self, facts: Sequence[int], named: int, leaves: Any, caller: str, rows: bool, **_: Any
    ) -> None:
        """Refuse leaves that differ and must not, or are the same and should be rows."""
        for leaf, fact in zip(leaves, facts, strict=True):
            if wrong := named & self._long & (~fact if rows else fact):
                words = {"leaf": leaf, "axis": self._first(wrong), "caller": caller}
                raise ValueError((_WHOLE if rows else _DIFFERENT).format(**words))

    def _exchange(self, eqn: JaxprEqn, ins: list[int], named: int, jaxpr: Jaxpr) -> list[int]:
        """The facts of the results of an equation that names an axis."""
        name, params = eqn.primitive.name, eqn.params
        if self._narrow_sums_abort and name in _ABORTING:
            self._check_width(eqn, named)
        clear = ~(named * (_VARIES | _PART | _MOVED | _OWN))
        whole = params.get("axis_index_groups") is None
        if name in _EQUALIZING and whole and len(ins) == len(eqn.outvars):
            gathers = name.startswith("all_gather")
            if not gathers:
                self._check_parts(eqn, ins, named)
            if name in _SUMS and not marks.is_our_reduction(eqn):
                self._note_sums(eqn, ins, jaxpr)
            return [(fact | (0 if gathers else (fact & named) << 1)) & clear for fact in ins]
        reduced = named * _REDUCED if name == "reduce_scatter" else 0
        return [joined(ins) & clear | named | reduced] * len(eqn.outvars)

    def _note_sums(self, eqn: JaxprEqn, ins: Sequence[int], jaxpr: Jaxpr) -> None:
        seen = self._sums.setdefault(id(eqn), (eqn, jaxpr, [0] * len(ins)))[2]
        seen[:] = [a | b for a, b in zip(seen, ins, strict=True)]

    def _check_width(self, eqn: JaxprEqn, named: int) -> None:
        for x in eqn.invars:
            if getattr(x.aval, "dtype", None) == "bfloat16":
                at = at_line(settings.users_line(eqn))
                words = {"name": eqn.primitive.name, "axis": self._first(named), "at": at}
                raise ValueError(_NARROW.format(like=like(x.aval), **words))

    def _check_parts(self, eqn: JaxprEqn, ins: Sequence[int], named: int) -> None:
        for x, fact in zip(eqn.invars, ins, strict=True):
            if moved := fact // _MOVED & named & self._long:
                axis = self._first(moved)
                at = at_line(settings.users_line(eqn))
                raise ValueError(_PARTS_SUMMED.format(axis=axis, at=at, like=like(x.aval)))

    def _of_parts(self, eqn: JaxprEqn, fact: int) -> int:
        """The fact of a function of parts of sums, or of numbers of such parts."""
        self._check_own(fact, eqn)
        name = eqn.primitive.name
        if name in _MIXING or not any(getattr(x.aval, "shape", ()) for x in eqn.outvars):
            numbers = fact & self.all * _PART
            return fact & ~(self.all * (_PART | _MOVED)) | numbers * _OWN // _PART
        return fact if name in _MOVES else fact & ~(self.all * _MOVED)

    def _check_own(self, fact: int, eqn: JaxprEqn) -> None:
        """Refuse what is made of a part and of a number of one part."""
        if both := fact // _PART & fact // _OWN & self._long:
            at = at_line(settings.users_line(eqn))
            raise ValueError(_OWN_NORM.format(axis=self._first(both), at=at))

    def decided(self, by: int, bodies: Sequence[Any], eqn: JaxprEqn) -> None:
        """Refuse an exchange over an axis along which replicas choose for themselves."""
        if not by & self._long:
            return
        where, line = "branch", settings.users_line(eqn)
        if eqn.primitive.name == "while":
            condition = opened(bodies[-1])
            where, line = "loop", _line_behind(condition, condition.outvars[0])
        for inner in (e for body in bodies for e in equations(body)):
            name = inner.primitive.name
            if name in _SILENT or programs(inner):
                continue
            if named := self._named(inner.params) & by & self._long:
                axis, at = self._first(named), at_line(settings.users_line(inner))
                words = {"axis": axis, "at": at, "where": where, "line": at_line(line)}
                raise ValueError(_CHOSEN.format(kind=f"`{name}`", **words))

    def _first(self, bits: int) -> str:
        return next(axis for axis, bit in self.bit.items() if bits & bit)

    def repeated(self) -> Iterator[RepeatedSum]:
        """The sums of what is the same along their axes and comes from reductions over them."""
        for eqn, jaxpr, facts in self._sums.values():
            again = self._named(eqn.params) & self._long
            atoms = eqn.invars[-len(facts) :]  # of ours, what was reduced stands behind the results
            for fact, atom, out in zip(facts, atoms, eqn.outvars, strict=True):
                bits = again & ~fact & fact // _REDUCED
                if not bits or marks.in_backward(eqn):
                    continue
                axis = self._first(bits)
                if not _is_divided(out, jaxpr, self.sizes[axis]):
                    maker = _line_behind(jaxpr, atom, {*_EQUALIZING, marks.SAME})
                    yield RepeatedSum(axis, like(atom.aval), settings.users_line(eqn), maker)


def _is_divided(out: Any, jaxpr: Jaxpr, n: int) -> bool:
    """True if a sum is only used in its quotient by a multiple of `n`, or by a count: a mean."""
    users = [eqn for eqn in jaxpr.eqns if any(x is out for x in eqn.invars)]
    is_result = any(x is out for x in jaxpr.outvars)
    return bool(users) and not is_result and all(_divides(eqn, out, jaxpr, n) for eqn in users)


def _divides(eqn: JaxprEqn, out: Any, jaxpr: Jaxpr, n: int) -> bool:
    name, first, last = eqn.primitive.name, eqn.invars[0], eqn.invars[-1]
    if name == "div":
        return first is out and (_is_multiple(last, n) or _is_count(jaxpr, last))
    if name == "mul":
        return _is_multiple(first, n, inverse=True) or _is_multiple(last, n, inverse=True)
    moves = name in ("convert_element_type", "reshape", "copy", "broadcast_in_dim")
    return moves and _is_divided(eqn.outvars[0], jaxpr, n)


def _is_multiple(atom: Any, n: int, *, inverse: bool = False) -> bool:
    """True if a number in the program is a multiple of `n`, or 1 over one."""
    if not isinstance(atom, Literal) or not atom.val:
        return False
    value = 1 / float(atom.val) if inverse else float(atom.val)
    return round(value) % n == 0 and abs(value - round(value)) < 1e-3 and round(value) != 0


def _is_count(jaxpr: Jaxpr, atom: Any) -> bool:
    """True if a value is a sum of numbers in the program, as `lax.psum(jnp.ones(()), axis)`."""
    eqns = [*_behind(jaxpr, atom)]
    counting = {*_SUMS, "broadcast_in_dim", "convert_element_type", "reshape"}
    return bool(eqns) and all(eqn.primitive.name in counting for eqn in eqns)


def _behind(jaxpr: Jaxpr, atom: Any) -> Iterator[JaxprEqn]:
    """The equations that a value is made by, nearest first, also those of programs called."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    seen: set[int] = set()
    queue = [atom]
    while queue:
        x = queue.pop(0)
        eqn = None if isinstance(x, Literal) else made.get(x)
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        yield eqn
        body = called(eqn)
        if body is not None:
            k = next(k for k, out in enumerate(eqn.outvars) if out is x)
            yield from _behind(body, body.outvars[k])
        queue.extend(eqn.invars)


def _line_behind(jaxpr: Jaxpr, atom: Any, names: set[str] | None = None) -> str:
    """The user's line of the nearest equation behind a value, of these primitives if given."""
    eqns = (e for e in _behind(jaxpr, atom) if names is None or e.primitive.name in names)
    return next(filter(None, map(settings.users_line, eqns)), "")
