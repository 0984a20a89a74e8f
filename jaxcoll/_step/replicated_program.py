"""Makes one program of all replicas from a function of one, and checks its trace.

It has the semantics of `jax.pmap`: every value is one replica's, and `jax.grad` is the gradient of
this replica's loss. Mesh axes that the batch is not split over are left to the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxcoll import _compat
from jaxcoll._collectives.scope import Scope, entered, show_axes
from jaxcoll._collectives.shards import broadcast_prefix, is_shards
from jaxcoll._compat import settings
from jaxcoll._gradients.proof.proof import Proven, prove
from jaxcoll._gradients.proof.subjaxprs import show_line
from jaxcoll._step.mesh.mesh import choose_mapped_axes
from jaxcoll._step.mesh.placement import make_spec
from jaxcoll.errors import RepeatedSumWarning

VaryingOutputs = Literal["error", "concatenate"]

_REPEATED = """\
The sum over {axis!r}{at} of {like} is {n} times a value that every replica already holds: it was \
made from {maker}. Do not sum it again, or take the mean. For {n} times the value, multiply by \
`lax.axis_size({axis!r})`."""

_DIFFERS = """\
`data_parallel`: {name} of the step differs between replicas (it varies over {axes}), so there is \
no single value to return{at}. Reduce it, as with `jc.all_reduce("mean", ...)`; or pass \
varying_outputs="concatenate" to get every replica's rows; or, if it is the same on all replicas \
although the program does not prove it, mark it: `jc.same(...)`."""

_SCALAR = """\
`data_parallel`: {name} of the step differs between replicas and is a scalar, which cannot be \
concatenated{at}. Reduce it, as with `jc.all_reduce("mean", ...)`, or return it with a leading \
dimension, as in `x[None]`."""

_OWN_GRADIENT = """ \
It depends on the gradient taken at {line}: `jax.grad` gives the gradient of each replica's own \
loss, even if the loss is averaged inside. Three ways to get the gradient of the mean: average it, \
`lax.pmean(grads, {axis!r})`; or compute it by `jc.value_and_grad` or `jc.grad` of this replica's \
own loss, or by `jax.grad` of `jc.mean_loss(loss)`; or pass check_vma=True, so that JAX's types \
sum the gradient of an averaged loss. If a library takes the gradient of a sum over replicas, such \
as a log-density, write `lax.axis_size({axis!r}) * jc.mean_loss(share)(x)` in the sum's place."""

_OF_HOST = """ \
It depends on the host callback at {line}, which may return another value on another process; if \
it is the same on all, mark it: `jc.same(...)`."""

_LOST = """\
`data_parallel`: the step changes {name} in place{others} and neither returns nor uses the new \
value, so the change would be lost: as with `jax.jit`, a step works on copies of the objects among \
its arguments. Return the object from the step, and continue with the returned one; or pass its \
arrays, as from `graph, state = nnx.split(module)`, rebuild it in the step by \
`nnx.merge(graph, state)`, and return `nnx.state(module)`."""

_AUTOMATIC = """\
jaxcoll: the step runs over {axes}; the other axes of its mesh ({others}) have no name in it: the \
compiler splits the work along them as the arrays are sharded. To communicate over one of them, \
name it in `axis_name`, or in your own `jax.shard_map` inside the step."""


@dataclasses.dataclass(frozen=True)
class ReplicaMapping:
    """Maps a function of one replica over a mesh, in the program that is being traced.

    Args:
      mesh: devices and axes; those that are not the scope's are left to the compiler.
      scope: the scope of the reductions inside.
      in_specs: specs of the arguments, as in `jax.shard_map`.
      check_vma: as in `jax.shard_map`; True: JAX's types check the program, and no proof is made.
    """

    mesh: Any
    scope: Scope
    in_specs: Any
    check_vma: bool = False

    def call(
        self, replica: Callable[..., Any], out_specs: Any, arguments: tuple[Any, ...]
    ) -> tuple[Any, Proven | None]:
        """Call `replica` on every device, and prove over which axes each of its results varies.

        Raises:
          NameError: the function names an axis that is not mapped.
          ValueError: it has a collective that would hang or mix values.
        """
        axes = self.scope.axes
        manual = choose_mapped_axes(self.mesh, axes)
        specs: Any = {"in_specs": self.in_specs, "out_specs": out_specs, "axis_names": manual}
        mapped = jax.shard_map(replica, mesh=self.mesh, check_vma=self.check_vma, **specs)
        jitted = jax.jit(mapped, inline=True)
        others = sorted(set(self.mesh.axis_names) - manual)
        with entered(self.scope):
            try:
                program = jitted.trace(*arguments).jaxpr
            except NameError as error:
                if others and any(a in str(error) for a in others):
                    names = {"axes": show_axes(axes), "others": show_axes(others)}
                    error.add_note(_AUTOMATIC.format(**names))
                raise
            proven = None if self.check_vma else _prove(program, self.mesh, axes, bool(others))
            # The call uses the cached trace that the proof has read.
            return jitted(*arguments), proven


def _prove(program: Any, mesh: Any, axes: tuple[str, ...], beside_others: bool) -> Proven:
    (eqn,) = (e for e in program.jaxpr.eqns if e.primitive.name == "shard_map")
    inputs = [frozenset(jax.tree.leaves(tuple(spec))) for spec in eqn.params["in_specs"]]
    sizes = {axis: mesh.shape[axis] for axis in axes}
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    proven = prove(eqn.params["jaxpr"], inputs, sizes, narrow_sums_abort=beside_others and on_cpu)
    for repeated in proven.repeated:
        maker = f"the reduction at {repeated.maker}" if repeated.maker else "a reduced value"
        facts = {"axis": repeated.axis, "like": repeated.like, "n": sizes[repeated.axis]}
        message = _REPEATED.format(at=show_line(repeated.line), maker=maker, **facts)
        settings.warn(message, RepeatedSumWarning, repeated.line)
    return proven


def check_rule(rule: Any) -> Any:
    """Check `varying_outputs`: one of its values, or a tree of them."""
    values = get_args(VaryingOutputs)
    invalid = [x for x in jax.tree.leaves(rule) if x not in values]
    if invalid:
        must = f"one of {', '.join(map(repr, values))}, or a tree of them"
        raise ValueError(f"`varying_outputs` must be {must}; got {invalid[0]!r}.")
    return rule


class Outputs:
    """The results of a step, grouped by specs that are known before it is traced."""

    def __init__(self, axes: tuple[str, ...], rule: Any) -> None:
        """Make groups for arrays that are replicated or are rows along `axes`, as in `rule`."""
        self._rule, self._axes = rule, axes
        # `shard_map` asks for the specs of results before it traces the step, and only the trace
        # tells which results are Shards: along some of the axes, in any order, of stacked layers or
        # not.
        several = [c for k in range(len(axes)) for c in itertools.permutations(axes, k + 1)]
        shards = [make_spec(c, stack) for c in several for stack in ((), (1,))]
        self.specs = [*dict.fromkeys([PartitionSpec(), PartitionSpec(axes), *shards])]

    def call(
        self, step: Callable[..., Any], args: Any, kwargs: Any, names: Sequence[str]
    ) -> list[list[Any]]:
        """Call the step; return its result's leaves in a list for each spec, and changed arrays."""
        named = {**dict(zip(names, args, strict=True)), **kwargs}
        # A module that is changed in place keeps tracers, which the trace would leak: its changes
        # come back as results, and are checked by `_check_changes`.
        before = _find_in_mutable(named)
        result = step(*args, **kwargs)
        changed = {
            name: leaf
            for name, leaf in _find_in_mutable(named).items()
            if leaf is not before.get(name, leaf) and isinstance(leaf, jax.Array)
        }
        self._changed = [*changed]
        flat, self._tree = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_shards)
        unfit = "`data_parallel`: `varying_outputs` is a tree that does not fit the step's result"
        rules = broadcast_prefix(self._rule, result, unfit)
        groups: list[list[Any]] = [[] for _ in self.specs]
        self._order: list[int] = []
        places: list[tuple[int, Any, PartitionSpec, str]] = []
        for rule, (path, leaf) in zip(rules, flat, strict=True):
            if is_shards(leaf):
                spec = make_spec(leaf.axes, leaf.stack)
                if spec not in self.specs:
                    along, over = show_axes(leaf.axes), show_axes(self._axes)
                    has = f"{_name(path)} of the step holds Shards along {along}"
                    raise ValueError(f"`data_parallel`: {has}, but the step runs over {over}.")
            else:
                rows = rule == "concatenate" and np.ndim(leaf)
                spec = PartitionSpec(self._axes) if rows else PartitionSpec()
            k = self.specs.index(spec)
            groups[k].append(leaf)
            self._order.append(k)
            for part in jax.tree.leaves(leaf):
                places.append((k, path, spec, rule))
                if _compat.types_tracked():
                    self._check(path, spec, rule, _compat.varying_axes(part))
        # Path, spec and rule of each array, in the order of the program's outputs
        self._places = [place[1:] for place in sorted(places, key=lambda place: place[0])]
        return [*groups, [*changed.values()]]

    def join(self, groups: list[list[Any]], proven: Proven | None) -> Any:
        """Join the step's result from its groups, after a check that its arrays fit their specs.

        Raises:
          ValueError: an array does not fit, or a change of an object would be lost.
        """
        if proven is not None:
            for k, (path, spec, rule) in enumerate(self._places):
                self._check(path, spec, rule, proven.varying[k], proven, k)
            self._check_changes(proven.jaxpr)
        leaves = [*map(iter, groups)]
        return jax.tree.unflatten(self._tree, [next(leaves[k]) for k in self._order])

    def _check(
        self,
        path: Any,
        spec: PartitionSpec,
        rule: str,
        varying: frozenset[str],
        proven: Proven | None = None,
        k: int = 0,
    ) -> None:
        wrong = sorted(varying.difference(jax.tree.leaves(tuple(spec))))
        if not wrong:
            return
        message = _SCALAR if rule == "concatenate" else _DIFFERS
        at = show_line(proven.line(k)) if proven else ""
        text = message.format(name=_name(path), axes=show_axes(wrong), at=at)
        if proven and (line := proven.gradient_line(k)):
            text += _OWN_GRADIENT.format(line=line, axis=wrong[0])
        if proven and (line := proven.callback_line(k)):
            text += _OF_HOST.format(line=line)
        raise ValueError(text)

    def _check_changes(self, jaxpr: Any) -> None:
        """Refuse a step that changes an object, such as a flax nnx module, and loses the change."""
        if not self._changed:
            return
        first = len(jaxpr.outvars) - len(self._changed)
        used = {id(x) for eqn in jaxpr.eqns for x in eqn.invars}
        used |= {id(x) for x in jaxpr.outvars[:first]}
        pairs = zip(self._changed, jaxpr.outvars[first:], strict=True)
        # A new value that is also returned, or goes into something that may be, is not lost.
        lost = [name for name, x in pairs if id(x) not in used]
        if lost:
            others = f" (and {len(lost) - 1} more)" if lost[1:] else ""
            raise ValueError(_LOST.format(name=lost[0], others=others))


def call_step(
    mapping: ReplicaMapping,
    step: Callable[..., Any],
    rule: Any,
    arguments: tuple[Any, ...],
    names: Sequence[str],
) -> Any:
    """Call a step of `data_parallel` on every replica with its rows, and return its result.

    The last of the `arguments` is a dict of those passed by keyword; `names` has the other names.
    """
    outputs = Outputs(mapping.scope.axes, rule)

    @functools.wraps(step, updated=())
    def replica(*args: Any) -> Any:
        return outputs.call(step, args[:-1], args[-1], names)

    # So that JAX's messages name the arguments
    parameters = dict.fromkeys(re.sub(r"\W+", "_", n).strip("_") for n in (*names, "kwargs"))
    replica.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in parameters]
    )
    specs = [*outputs.specs, PartitionSpec()]
    groups, proven = mapping.call(replica, specs, arguments)
    return outputs.join(groups, proven)


def _name(path: Any) -> str:
    return f"output {jax.tree_util.keystr(path)}" if path else "the output"


def _find_in_mutable(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Find by name the arrays of arguments that contain mutable objects, such as modules."""
    return {
        name + jax.tree_util.keystr(path): leaf
        for name, tree in trees.items()
        if _has_mutable(jax.tree.structure(tree))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _has_mutable(structure: Any) -> bool:
    """Dicts and lists are mutable, too, but are rebuilt from their leaves."""
    node = structure.node_data()
    if node is None:  # a leaf
        return False
    frozen = getattr(getattr(node[0], "__dataclass_params__", None), "frozen", False)
    if not frozen and not issubclass(node[0], dict | list | tuple | type(None)):
        return True
    return any(map(_has_mutable, structure.children()))
