"""A function of one replica as one program of all: traced once, and read once.

It means what `jax.pmap` means: every value is one replica's own, and `jax.grad` is the gradient of
this replica's loss. The axes of the mesh that the batch is not split over are left to the compiler.
"""

from __future__ import annotations

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
from jaxcoll._compat import settings
from jaxcoll._jaxpr.proof import Proven, prove
from jaxcoll._jaxpr.subjaxprs import at_line
from jaxcoll._mesh.mesh import mapped_axes
from jaxcoll._mesh.placement import spec_of
from jaxcoll._spmd.scope import Scope, entered, listed
from jaxcoll._spmd.shards import broadcast_prefix, is_shards
from jaxcoll.errors import RepeatedSumWarning

VaryingOutputs = Literal["error", "concatenate"]

_REPEATED = """\
The sum over {axis!r}{at} of {like} is {n} times what every replica holds already: it was made \
from {maker}. Sum it no more, or take the mean; if {n} times is meant, multiply by \
`lax.axis_size({axis!r})`."""

_DIFFERS = """\
`data_parallel`: {name} of the step differs between replicas (it varies over {axes}), so there is \
no one value to return{at}. Reduce it, as with `jc.all_reduce("mean", ...)`; or pass \
varying_outputs="concatenate" to get every replica's rows; or, if it is the same although nothing \
shows it, mark it: `jc.same(...)`."""

_SCALAR = """\
`data_parallel`: {name} of the step differs between replicas and is a scalar, which cannot be \
concatenated{at}. Reduce it, as with `jc.all_reduce("mean", ...)`, or return it with a leading \
dimension, as in `x[None]`."""

_OWN_GRADIENT = """ \
It is made of the gradient that was taken at {line}: `jax.grad` gives each replica's own, also of \
a loss that is averaged inside. Three ways to the gradient of the mean: take the mean of it, \
`lax.pmean(grads, {axis!r})`; or take it by `jc.value_and_grad` or `jc.grad` of this replica's \
own loss, or by `jax.grad` of `jc.mean_loss(loss)`; or pass check_vma=True, where JAX's types sum \
the gradient of a loss that is averaged."""

_LOST = """\
`data_parallel`: the step changes {name} in place{others} and neither returns nor uses what it \
becomes, so the change would be lost: as with `jax.jit`, a step works on copies of the objects \
among its arguments. Return the object from the step, and go on with what it returns; or pass its \
arrays, as of `graph, state = nnx.split(module)`, put it together in the step by \
`nnx.merge(graph, state)`, and return `nnx.state(module)`."""

_AUTOMATIC = """\
jaxcoll: the step runs over {axes}; the other axes of its mesh ({others}) are left to the \
compiler, which splits the work along them by where arrays lie, and have no name inside. To \
communicate over one of them, name it in `axis_name`, or in a `jax.shard_map` of your own inside \
the step."""


def replicated(
    replica: Callable[..., Any],
    mesh: Any,
    axes: tuple[str, ...],
    scope: Scope,
    in_specs: Any,
    out_specs: Any,
    arguments: tuple[Any, ...],
    *,
    check_vma: bool = False,
) -> tuple[Any, Proven | None]:
    """Call `replica` on every device of a mesh, in the program that is being traced.

    Args:
      replica: the function of one replica.
      mesh: devices and axes.
      axes: those that replicas lie along; the others are left to the compiler.
      scope: for the reductions inside.
      in_specs: of the arguments, as in `jax.shard_map`.
      out_specs: of the results, likewise.
      arguments: of `replica`.
      check_vma: as in `jax.shard_map`: JAX's types rule, and nothing is proven here.

    Returns:
      The results, and what is proven of them in the order of their leaves.

    Raises:
      NameError: the function names an axis that is not mapped.
      ValueError: it has a collective that would hang or mix values.
    """
    manual = mapped_axes(mesh, axes)
    mapped = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual,
        check_vma=check_vma,
    )
    jitted = jax.jit(mapped, inline=True)
    others = sorted(set(mesh.axis_names) - manual)
    with entered(scope):
        try:
            program = jitted.trace(*arguments).jaxpr
        except NameError as error:
            if others and any(a in str(error) for a in others):
                error.add_note(_AUTOMATIC.format(axes=listed(axes), others=listed(others)))
            raise
        proven = None if check_vma else _proven(program, mesh, axes, bool(others))
        # The call takes the trace that was read.
        return jitted(*arguments), proven


def _proven(program: Any, mesh: Any, axes: tuple[str, ...], beside_others: bool) -> Proven:
    (eqn,) = (e for e in program.jaxpr.eqns if e.primitive.name == "shard_map")
    inputs = [frozenset(jax.tree.leaves(tuple(spec))) for spec in eqn.params["in_specs"]]
    sizes = {axis: mesh.shape[axis] for axis in axes}
    aborts = beside_others and _platform(mesh) == "cpu"
    proven = prove(eqn.params["jaxpr"], inputs, sizes, narrow_sums_abort=aborts)
    for each in proven.repeated:
        words = _REPEATED.format(
            axis=each.axis,
            at=at_line(each.line),
            like=each.like,
            n=sizes[each.axis],
            maker=f"the reduction at {each.maker}" if each.maker else "the result of a reduction",
        )
        settings.warn(words, RepeatedSumWarning, each.line)
    return proven


def _platform(mesh: Any) -> str:
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else ""


def checked_rule(rule: Any) -> Any:
    """The valid `varying_outputs`, a word or a tree of them."""
    words = get_args(VaryingOutputs)
    odd = [x for x in jax.tree.leaves(rule) if x not in words]
    if odd:
        raise ValueError(
            f"`varying_outputs` must be one of {', '.join(map(repr, words))}, or a tree of them; "
            f"got {odd[0]!r}."
        )
    return rule


class Outputs:
    """Results of a step, grouped by specs that are known before it is traced."""

    def __init__(self, axes: tuple[str, ...], rule: Any) -> None:
        """Arrays are copies of one value, or rows along `axes`, as `rule` says of each."""
        self._rule, self._axes = rule, axes
        several = [c for k in range(len(axes)) for c in itertools.permutations(axes, k + 1)]
        shards = [spec_of(c, stack) for c in several for stack in ((), (1,))]
        self.specs = [*dict.fromkeys([PartitionSpec(), PartitionSpec(axes), *shards])]

    def of(
        self, step: Callable[..., Any], args: Any, kwargs: Any, names: Sequence[str]
    ) -> list[list[Any]]:
        """The leaves of the step's result, in a list for each spec, and what it has changed."""
        named = {**dict(zip(names, args, strict=True)), **kwargs}
        before = _in_mutable_objects(named)
        result = step(*args, **kwargs)
        changed = {
            name: leaf
            for name, leaf in _in_mutable_objects(named).items()
            if leaf is not before.get(name, leaf) and isinstance(leaf, jax.Array)
        }
        self._changed = [*changed]
        flat, self._tree = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_shards)
        unfit = (
            "`data_parallel`: `varying_outputs` is a tree that does not fit what the step returns"
        )
        words = broadcast_prefix(self._rule, result, unfit)
        groups: list[list[Any]] = [[] for _ in self.specs]
        self._order: list[int] = []
        places: list[tuple[int, Any, PartitionSpec, str]] = []
        for word, (path, leaf) in zip(words, flat, strict=True):
            if is_shards(leaf):
                spec = spec_of(leaf.axes, leaf.stack)
                if spec not in self.specs:
                    raise ValueError(
                        f"`data_parallel`: {_name(path)} of the step holds Shards along "
                        f"{listed(leaf.axes)}, and the step runs over {listed(self._axes)}."
                    )
            else:
                rows = word == "concatenate" and np.ndim(leaf)
                spec = PartitionSpec(self._axes) if rows else PartitionSpec()
            k = self.specs.index(spec)
            groups[k].append(leaf)
            self._order.append(k)
            for part in jax.tree.leaves(leaf):
                places.append((k, path, spec, word))
                if _compat.types_tell():
                    self._check(path, spec, word, _compat.varying_axes(part))
        # In the order of the program's outputs: path, spec and rule of each array.
        self._places = [place[1:] for place in sorted(places, key=lambda place: place[0])]
        return [*groups, [*changed.values()]]

    def joined(self, groups: list[list[Any]], proven: Proven | None) -> Any:
        """The step's result again, each of whose arrays is what its spec says.

        Raises:
          ValueError: one is not, or a change of an object would be lost.
        """
        if proven is not None:
            for k, (path, spec, word) in enumerate(self._places):
                self._check(path, spec, word, proven.varying[k], proven, k)
            self._check_changes(proven.jaxpr)
        leaves = [*map(iter, groups)]
        return jax.tree.unflatten(self._tree, [next(leaves[k]) for k in self._order])

    def _check(
        self,
        path: Any,
        spec: PartitionSpec,
        word: str,
        varying: frozenset[str],
        proven: Proven | None = None,
        k: int = 0,
    ) -> None:
        wrong = sorted(varying.difference(jax.tree.leaves(tuple(spec))))
        if not wrong:
            return
        message = _SCALAR if word == "concatenate" else _DIFFERS
        at = at_line(proven.line(k)) if proven else ""
        text = message.format(name=_name(path), axes=listed(wrong), at=at)
        if proven and (line := proven.gradient_line(k)):
            text += _OWN_GRADIENT.format(line=line, axis=wrong[0])
        raise ValueError(text)

    def _check_changes(self, jaxpr: Any) -> None:
        """Refuse a step that loses what it changes in an object, as in a module of flax's nnx."""
        if not self._changed:
            return
        first = len(jaxpr.outvars) - len(self._changed)
        used = {id(x) for eqn in jaxpr.eqns for x in eqn.invars}
        used |= {id(x) for x in jaxpr.outvars[:first]}
        pairs = zip(self._changed, jaxpr.outvars[first:], strict=True)
        lost = [name for name, x in pairs if id(x) not in used]
        if lost:
            others = f" (and {len(lost) - 1} more)" if lost[1:] else ""
            raise ValueError(_LOST.format(name=lost[0], others=others))


def stepped(
    step: Callable[..., Any],
    mesh: Any,
    axes: tuple[str, ...],
    scope: Scope,
    rule: Any,
    in_specs: Any,
    arguments: tuple[Any, ...],
    names: Sequence[str],
    *,
    check_vma: bool,
) -> Any:
    """The result of a step of `data_parallel`, called on every replica with its rows.

    The last of the `arguments` are those by keyword, as a dict; of the others there are names.
    """
    outputs = Outputs(axes, rule)

    @functools.wraps(step, updated=())
    def replica(*given: Any) -> Any:
        return outputs.of(step, given[:-1], given[-1], names)

    # For the messages of JAX: a name of an argument is no index into all of them.
    words = dict.fromkeys(re.sub(r"\W+", "_", name).strip("_") for name in (*names, "kwargs"))
    replica.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in words]
    )
    specs = [*outputs.specs, PartitionSpec()]
    groups, proven = replicated(
        replica, mesh, axes, scope, in_specs, specs, arguments, check_vma=check_vma
    )
    return outputs.joined(groups, proven)


def _name(path: Any) -> str:
    """Name a step's output in a message."""
    return f"output {jax.tree_util.keystr(path)}" if path else "the output"


def _in_mutable_objects(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of those arguments that have objects in them which a step may change, by name."""
    return {
        name + jax.tree_util.keystr(path): leaf
        for name, tree in trees.items()
        if _has_mutable(jax.tree.structure(tree))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _has_mutable(structure: Any) -> bool:
    """True if a tree has nodes that a function may change, other than dicts and lists."""
    node = structure.node_data()
    if node is None:  # a leaf
        return False
    frozen = getattr(getattr(node[0], "__dataclass_params__", None), "frozen", False)
    if not frozen and not issubclass(node[0], dict | list | tuple | type(None)):
        return True
    return any(map(_has_mutable, structure.children()))
