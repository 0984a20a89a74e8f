"""Prove which values of a traced step are the same on every replica.

The proof is one forward pass over the equations of one replica's program. The fact about a value
is an integer with a few bits for each mapped axis:

- VARIES: it may differ between the replicas along the axis;
- REDUCED: it comes from a reduction over the axis;
- PART: it is this replica's shard of a reduced sum, such as a gradient in `Shards`;
- MOVED: it is a shard that was only moved, cast or scaled since the reduction;
- LOCAL: it is a number computed from one shard alone, such as its norm.

A value varies if an operand varies, unless its equation sums, compares or gathers over the whole
axis. The results of unknown equations vary. Bits are only added, so that loops reach a fixed point,
a program is read once for the same facts of its inputs, and a refusal stays one. The pass refuses

- a collective over an axis inside a branch or loop whose condition varies along it;
- gradients that will be reduced, with respect to leaves that differ between replicas;
- shards that are summed again, or are scaled or selected by a number of one shard alone;

and it finds repeated sums: of values that a reduction has already made the same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, primitives

from jaxcoll import _compat
from jaxcoll._compat import marks, settings
from jaxcoll._proof.dataflow import Dataflow, union
from jaxcoll._proof.subjaxprs import (
    equations,
    find_callee,
    is_ref,
    open_jaxpr,
    programs,
    show_line,
    show_type,
)

_VARIES, _REDUCED, _PART, _MOVED, _LOCAL = (1 << k for k in range(5))
_BITS = 5

_SUMS = {"psum", "psum_invariant"}
_EQUALIZING = {*_SUMS, "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
_ABORTING = {*_SUMS, "pmax", "pmin", "reduce_scatter"}
_FIRST = {_compat.CAST_INVARIANT, "pvary", "pcast", "round_as_stored", "reshard", "depend_on"}
"""The result has the facts of the first operand, whatever the parameters are."""
_SAME_PLACE = {"optimization_barrier", marks.THROUGH}
"""Result k has the facts of operand k."""
_SILENT = {*_FIRST, *_SAME_PLACE, *marks.ALL, "axis_index"}
"""Equations that may name an axis but do not communicate."""
_CALLS = {"shard_map", "composite", "core_call", "custom_vmap_call", "linear_call", "remat_opt"}
"""Calls of one program on the equation's operands, in addition to those of `subjaxprs`."""
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
"""Functions of their operands: JAX's public list, and the others in JAX 0.10 to 0.12."""
_OF_REFS = {"get", "swap", "addupdate", "accum_grad_in_ref", "freeze"}
"""They read or change a mutable reference, their first operand."""
_ON_REFS = {"get", "swap", "addupdate", "masked_load", "masked_swap", "program_id", "num_programs"}
"""Functions of a program's operands if it makes its mutable references itself, as a kernel does."""
_PLAIN = {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "log", "tanh", "sqrt"}
_PLAIN |= {"rsqrt", "integer_pow", "pow", "sign", "abs", "square", "logistic", "erf", "select_n"}
_PLAIN |= {"dot_general", "transpose", "reshape", "broadcast_in_dim", "convert_element_type"}
_PLAIN |= {"reduce_sum", "reduce_max", "squeeze", "slice", "concatenate", "pad"}
_PLAIN |= {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "iota", "stop_gradient"}
"""The most frequent functions; their parameters contain neither axes nor programs."""
_MIXING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce", "argmax", "argmin"}
_MIXING |= {"cumsum", "cumprod", "cummax", "cummin", "dot_general", "sort", "top_k"}
"""They combine several elements, such as a row into its mean; a pack's rows are not a leaf's."""
_MOVES = {"reshape", "squeeze", "transpose", "copy", "neg", "div", "slice"}
_MOVES |= {"convert_element_type", "broadcast_in_dim", "concatenate", "select_n", *_FIRST}

_CHOSEN = """\
{kind} over {axis!r}{at} is in a {where} that replicas decide separately: the condition{line} \
differs between them, so some would wait for others that never arrive, or exchange unrelated \
values. {advice}"""

_MOVE_OUT = """\
Move it out of the {where}; or make the condition the same everywhere, for example with \
`lax.pmax(..., {axis!r})`; or compute both sides and select with `jnp.where`. If the condition is \
the same but jaxcoll cannot prove it, mark it: `jc.same(...)`."""

_SOLVER = """\
This is a backward pass: the cotangents of what the {where} computed come from each replica's own \
loss. If it solves the same problem on every replica, average the cotangent of its solution: use \
`jc.sync_in_backward(solution, {axis!r})` in the solution's place."""

_OWN_GRADIENT = """ \
If the condition depends on a gradient taken inside{gradient}: it is that of each replica's own \
loss, even if the loss is averaged. Take it of `jc.mean_loss(loss, {axis!r})`, or average it."""

_DIFFERENT = """\
`{caller}` over {axis!r}: {leaf} must be the same on every replica, but differs between them, or \
jaxcoll cannot prove that it is the same. Its gradients would belong to different values. If it is \
the same, mark it with `jc.same`, or make it the same with `jc.broadcast`; if it should differ (an \
expert, the batch), take its gradient with `jax.grad`, or pass it as `Shards`."""

_WHOLE = """\
`{caller}` over {axis!r}: {leaf} is declared as one replica's rows, but it is the same on every \
replica, so gathering it would repeat it. Declare it as whole, or shard it over the axis, as \
`jc.shard` does."""

_PARTS_SUMMED = """\
`lax.psum` over {axis!r}{at} of {like}: these are shards of a sum that is already reduced over \
that axis. Each replica holds a different shard, so a sum or mean would add unrelated elements. Do \
not reduce them again."""

_LOCAL_NORM = """\
Gradients in shards over {axis!r} are scaled, or selected, by a number of this replica's shard \
alone{at}, such as its norm: each replica would use a different number, and none would use that of \
the whole gradient. Give `jc.sharded_optimizer` an elementwise optimizer and `max_norm` instead of \
`optax.clip_by_global_norm` and the like; or compute the number over all shards, with \
`jc.global_norm(gradients, {axis!r})` or `jc.all_finite(gradients, {axis!r})`."""

_NARROW = """\
`{name}` over {axis!r}{at} of {like}, in a `shard_map` with a mesh axis that is left to the \
compiler: XLA's CPU compiler aborts the process on such 16-bit sums. Cast to float32 before it and \
back after it; `jc.all_reduce` does so by itself."""


@dataclasses.dataclass(frozen=True)
class RepeatedSum:
    """A sum over an axis of a value that a reduction has already made the same along it."""

    axis: str
    like: str  # the dtype and shape of the value
    line: str  # the user's line of the sum
    maker: str  # the user's line of the earlier reduction; "" if it is not found


@dataclasses.dataclass(frozen=True)
class Proven:
    """The results of `prove`."""

    varying: list[frozenset[str]]  # for each output, the axes along which it may differ
    repeated: tuple[RepeatedSum, ...]
    jaxpr: Jaxpr

    def gradient_line(self, k: int) -> str:
        """Find the user's line that took a gradient that output `k` depends on; "" if none."""
        behind = _behind(self.jaxpr, self.jaxpr.outvars[k])
        # A library's kernel takes it in the body of a loop.
        every = (
            e for eqn in behind for e in (eqn, *(e for p in programs(eqn) for e in equations(p)))
        )
        return next(filter(None, map(settings.line_of_gradient, every)), "")

    def callback_line(self, k: int) -> str:
        """Find the user's line of a host callback that output `k` depends on; "" if none."""
        behind = _behind(self.jaxpr, self.jaxpr.outvars[k])
        every = (
            e for eqn in behind for e in (eqn, *(e for p in programs(eqn) for e in equations(p)))
        )
        return next((settings.users_line(e) for e in every if "callback" in e.primitive.name), "")

    def line(self, k: int) -> str:
        """Find the user's line that computed output `k`; "" if it is not known."""
        return _line_behind(self.jaxpr, self.jaxpr.outvars[k])


def prove(
    program: Any,
    inputs: Sequence[frozenset[str]],
    axes: Mapping[str, int],
    *,
    narrow_sums_abort: bool = False,
) -> Proven:
    """Prove along which axes the outputs of one replica's traced program vary.

    Args:
      program: its jaxpr.
      inputs: for each input, the axes along which it varies.
      axes: the mapped axes to consider, with their sizes.
      narrow_sums_abort: refuse reductions of bfloat16 over them.

    Raises:
      ValueError: a collective would hang or mix unrelated values; see the module's docstring.
    """
    proof = _Proof(axes, narrow_sums_abort=narrow_sums_abort)
    jaxpr = open_jaxpr(program)
    facts = [sum(bit for axis, bit in proof.bit.items() if axis in along) for along in inputs]
    facts = proof.find_fixpoint(jaxpr, facts)
    # An empty array cannot differ.
    facts = [
        fact if getattr(x.aval, "size", 1) else 0
        for fact, x in zip(facts, jaxpr.outvars, strict=True)
    ]
    varying = [frozenset(a for a, bit in proof.bit.items() if fact & bit) for fact in facts]
    return Proven(varying, tuple(proof.find_repeated()), jaxpr)


def same_outputs(program: Any, axes: Mapping[str, int]) -> list[frozenset[str]]:
    """Find the axes along which each output of a program is the same for any inputs."""
    jaxpr = open_jaxpr(program)
    proof = _Proof(axes, refuses=False, varying={*jaxpr.constvars})
    facts = proof.find_fixpoint(jaxpr, [proof.all] * len(jaxpr.invars))
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
        # Along an axis of size 1, no replica waits for others, and nothing is summed twice
        self._checked = sum(bit for axis, bit in self.bit.items() if sizes[axis] > 1 and refuses)
        self._varying = varying
        self._narrow_sums_abort = narrow_sums_abort
        self._sums: dict[int, tuple[JaxprEqn, Jaxpr, list[int]]] = {}
        # By the id of the equation that makes a reference: its number, as a bit above the axes' in
        # the fact of the reference; and the fact of all that it ever holds
        self._refs: dict[int, tuple[int, int]] = {}
        self._first_ref = 1 << _BITS * len(sizes)
        self._functions: dict[int, bool] = {}  # by the id of an equation
        self._around: list[JaxprEqn] = []  # the equations whose programs are being read

    def find_fixpoint(self, jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
        """Read a program until the facts of mutable references do not change."""
        while True:
            before = dict(self._refs)
            facts = self.outputs(jaxpr, inputs)
            if self._refs == before:
                return facts
            self.forget()

    def constant(self, var: Any) -> int:
        return self.all if var in self._varying else 0

    def select(self, by: int, fact: int, eqn: JaxprEqn) -> int:
        self._check_local(by | fact, eqn)
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
                self._around.append(eqn)
                results = self.read_programs(eqn, ins)
                self._around.pop()
                return results
            if named := self._axes_in(eqn.params):
                return self._exchange(eqn, ins, named, jaxpr)
            if name == "new_ref":
                ref, held = self._refs.get(id(eqn), (self._first_ref << len(self._refs), 0))
                self._refs[id(eqn)] = ref, held | union(ins)
                return [ref]
            if name in _OF_REFS:
                return self._use_ref(eqn, *ins)
            if not self._is_function(eqn):
                return self._unknown(ins) * count
        fact = union(ins)
        return [self._combine(eqn, fact) if fact & self.all * (_PART | _LOCAL) else fact] * count

    def _use_ref(self, eqn: JaxprEqn, ref: int, *others: int) -> list[int]:
        """Find the facts of the results of an equation that reads or changes a reference."""
        if eqn.primitive.name not in ("get", "freeze"):
            self._write(ref, union(others))
        held = [held for bit, held in self._refs.values() if ref & bit] or [self.all]
        return [union([*held, *others])] * len(eqn.outvars)

    def _write(self, refs: int, fact: int) -> None:
        for key, (bit, held) in self._refs.items():
            if refs & bit:
                self._refs[key] = bit, held | fact

    def _unknown(self, ins: Sequence[int]) -> list[int]:
        """Find the fact of the result of an unknown equation, which may change references."""
        self._write(union(ins), self.all)
        return [union(ins) % self._first_ref | self.all]

    def opaque(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        bodies = programs(eqn)
        if eqn.primitive.name in _CALLS and len(bodies[0].invars) == len(ins):
            return self.outputs(bodies[0], ins)
        # The order of the programs and their operands are unknown. The results are the same where
        # all operands are, if every equation is a function.
        on_refs = set() if any(map(is_ref, eqn.invars)) else _ON_REFS
        nested = (e for body in bodies for e in equations(body))
        known = all(e.primitive.name in on_refs or self._is_function(e) for e in nested)
        return ([union(ins)] if known else self._unknown(ins)) * len(eqn.outvars)

    def _axes_in(self, params: Mapping[str, Any]) -> int:
        """Collect the axes that an equation's parameters name, as bits."""
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
        """True if the results depend on the operands alone, and not on the replica."""
        name = eqn.primitive.name
        if (
            any(word in name for word in _FROM_ELSEWHERE)
            or any("NamedAxis" not in type(e).__name__ for e in eqn.effects)
            or any(map(is_ref, eqn.invars))
            or self._axes_in(eqn.params)
        ):
            return False
        if name in _FUNCTIONS or name in _SILENT or programs(eqn):
            return True
        if id(eqn) not in self._functions:
            self._functions[id(eqn)] = marks.is_lowered_to_functions(eqn)
        return self._functions[id(eqn)]

    def _mark(self, eqn: JaxprEqn, ins: list[int], jaxpr: Jaxpr) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        named = self._axes_in(params)
        if name == marks.PARTS:
            return [ins[0] | named * (_VARIES | _PART | _MOVED)]
        if name == marks.CHECKED:
            if params["needs"] == "summands":
                self._note_sums(eqn, ins[1:], jaxpr)
            else:
                self._check_leaves(ins[1:], named, **params)
            return ins[:1]
        count = len(eqn.outvars)
        results, before = ins[:count], ins[count:]
        if params["sums"]:
            self._note_sums(eqn, before, jaxpr)
        results = [fact & ~(named * (_VARIES | _PART | _MOVED | _LOCAL)) for fact in results]
        if before:
            reduced = [(fact & named | fact >> 1 & named) << 1 for fact in before]
            results = [
                fact & ~(named * _REDUCED) | more
                for fact, more in zip(results, reduced, strict=True)
            ]
        return results

    def _check_leaves(
        self, facts: Sequence[int], named: int, leaves: Any, caller: str, needs: str, **_: Any
    ) -> None:
        """Refuse leaves that differ but must not, or that are the same but should be rows."""
        rows = needs == "rows"
        for leaf, fact in zip(leaves, facts, strict=True):
            if wrong := named & self._checked & (~fact if rows else fact):
                fields = {"leaf": leaf, "axis": self._axis(wrong), "caller": caller}
                raise ValueError((_WHOLE if rows else _DIFFERENT).format(**fields))

    def _exchange(self, eqn: JaxprEqn, ins: list[int], named: int, jaxpr: Jaxpr) -> list[int]:
        """Find the facts of the results of a collective."""
        name, params = eqn.primitive.name, eqn.params
        if self._narrow_sums_abort and name in _ABORTING:
            self._check_width(eqn, named)
        clear = ~(named * (_VARIES | _PART | _MOVED | _LOCAL))
        whole = params.get("axis_index_groups") is None
        if name in _EQUALIZING and whole and len(ins) == len(eqn.outvars):
            gathers = name.startswith("all_gather")
            if not gathers:
                self._check_parts(eqn, ins, named)
            if name in _SUMS and not marks.is_our_reduction(eqn):
                self._note_sums(eqn, ins, jaxpr)
            return [(fact | (0 if gathers else (fact & named) << 1)) & clear for fact in ins]
        reduced = named * _REDUCED if name == "reduce_scatter" else 0
        if reduced and whole and not marks.is_our_reduction(eqn):
            self._note_sums(eqn, ins, jaxpr)
        return [union(ins) & clear | named | reduced] * len(eqn.outvars)

    def _note_sums(self, eqn: JaxprEqn, ins: Sequence[int], jaxpr: Jaxpr) -> None:
        seen = self._sums.setdefault(id(eqn), (eqn, jaxpr, [0] * len(ins)))[2]
        seen[:] = [a | b for a, b in zip(seen, ins, strict=True)]

    def _check_width(self, eqn: JaxprEqn, named: int) -> None:
        for x in eqn.invars:
            if getattr(x.aval, "dtype", None) == "bfloat16":
                at = show_line(settings.users_line(eqn))
                fields = {"name": eqn.primitive.name, "axis": self._axis(named), "at": at}
                raise ValueError(_NARROW.format(like=show_type(x.aval), **fields))

    def _check_parts(self, eqn: JaxprEqn, ins: Sequence[int], named: int) -> None:
        for x, fact in zip(eqn.invars, ins, strict=True):
            if moved := fact // _MOVED & named & self._checked:
                axis = self._axis(moved)
                at = show_line(settings.users_line(eqn))
                raise ValueError(_PARTS_SUMMED.format(axis=axis, at=at, like=show_type(x.aval)))

    def _combine(self, eqn: JaxprEqn, fact: int) -> int:
        """Find the fact of a function of shards, or of numbers that come from one shard."""
        self._check_local(fact, eqn)
        name = eqn.primitive.name
        if name in _MIXING or not any(getattr(x.aval, "shape", ()) for x in eqn.outvars):
            numbers = fact & self.all * _PART
            return fact & ~(self.all * (_PART | _MOVED)) | numbers * _LOCAL // _PART
        return fact if name in _MOVES else fact & ~(self.all * _MOVED)

    def _check_local(self, fact: int, eqn: JaxprEqn) -> None:
        """Refuse a combination of a shard with a number that comes from one shard."""
        if both := fact // _PART & fact // _LOCAL & self._checked:
            at = show_line(settings.users_line(eqn))
            raise ValueError(_LOCAL_NORM.format(axis=self._axis(both), at=at))

    def check_choice(
        self, by: int, bodies: Sequence[Any], eqn: JaxprEqn, ins: Sequence[int]
    ) -> None:
        """Refuse a collective over an axis along which the condition `by` varies."""
        self._write(union(ins), by)  # only some replicas may change a reference there
        if not by & self._checked:
            return
        where, line = "branch", settings.users_line(eqn)
        if eqn.primitive.name == "while":
            condition = open_jaxpr(bodies[-1])
            where, line = "loop", _line_behind(condition, condition.outvars[0])
        nested = [e for body in bodies for e in equations(body)]
        for inner in nested:
            name = inner.primitive.name
            if name in _SILENT or programs(inner):
                continue
            if named := self._axes_in(inner.params) & by & self._checked:
                fields = {"axis": self._axis(named), "where": where}
                gradient = next(filter(None, map(settings.line_of_gradient, nested)), "")
                backward = any(map(marks.is_backward, self._around))
                takes_gradient = gradient or any(map(marks.is_backward, nested))
                advice = _SOLVER if backward else _MOVE_OUT + _OWN_GRADIENT * bool(takes_gradient)
                fields["advice"] = advice.format(gradient=show_line(gradient), **fields)
                fields |= {"at": show_line(settings.users_line(inner)), "line": show_line(line)}
                raise ValueError(_CHOSEN.format(kind=f"`{name}`", **fields))

    def _axis(self, bits: int) -> str:
        return next(axis for axis, bit in self.bit.items() if bits & bit)

    def find_repeated(self) -> Iterator[RepeatedSum]:
        """Yield the sums of values that a reduction has already made the same along their axis."""
        for eqn, jaxpr, facts in self._sums.values():
            again = self._axes_in(eqn.params) & self._checked
            atoms = eqn.invars[-len(facts) :]  # jaxcoll's marks have the reduced values last
            outs = eqn.outvars if len(eqn.outvars) == len(facts) else eqn.outvars * len(facts)
            for fact, atom, out in zip(facts, atoms, outs, strict=True):
                bits = again & ~fact & fact // _REDUCED
                if not bits or marks.is_backward(eqn):
                    continue
                axis = self._axis(bits)
                if not _is_divided(out, jaxpr, self.sizes[axis]):
                    maker = _line_behind(jaxpr, atom, {*_EQUALIZING, marks.SAME})
                    yield RepeatedSum(axis, show_type(atom.aval), settings.users_line(eqn), maker)


def _is_divided(out: Any, jaxpr: Jaxpr, n: int) -> bool:
    """True if all uses of a sum divide it by a multiple of `n`, or by a count: it is a mean."""
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
    """True if a value is a literal multiple of `n`; with `inverse`, 1 over such a multiple."""
    if not isinstance(atom, Literal) or not atom.val:
        return False
    value = 1 / float(atom.val) if inverse else float(atom.val)
    return round(value) % n == 0 and abs(value - round(value)) < 1e-3 and round(value) != 0


def _is_count(jaxpr: Jaxpr, atom: Any) -> bool:
    """True if a value is a sum of constants, such as `lax.psum(jnp.ones(()), axis)`."""
    eqns = [*_behind(jaxpr, atom)]
    counting = {*_SUMS, "broadcast_in_dim", "convert_element_type", "reshape"}
    return bool(eqns) and all(eqn.primitive.name in counting for eqn in eqns)


def _behind(jaxpr: Jaxpr, atom: Any) -> Iterator[JaxprEqn]:
    """Yield the equations that a value depends on, nearest first, including called programs'."""
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
        body = find_callee(eqn)
        if body is not None:
            k = next(k for k, out in enumerate(eqn.outvars) if out is x)
            yield from _behind(body, body.outvars[k])
        queue.extend(eqn.invars)


def _line_behind(jaxpr: Jaxpr, atom: Any, names: set[str] | None = None) -> str:
    """Find the user's line of the nearest equation that a value depends on, among `names`."""
    eqns = (e for e in _behind(jaxpr, atom) if names is None or e.primitive.name in names)
    return next(filter(None, map(settings.users_line, eqns)), "")
