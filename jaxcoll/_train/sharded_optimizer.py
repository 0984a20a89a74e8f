"""An optimizer that keeps 1/n of its state on every replica (ZeRO, stages 1 and 2)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcoll import _compat
from jaxcoll._collectives.common_over_replicas import check_same
from jaxcoll._collectives.parts import all_parts, check_fits, describe_tree
from jaxcoll._collectives.reduce_scatter import gather_shards, local_part, scatter_tree
from jaxcoll._collectives.scope import count, resolve_axes, scope_here
from jaxcoll._collectives.shards import Shards, is_shards, shards_in
from jaxcoll._gradients.norms import clip_shards
from jaxcoll._plan.checks import is_number
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import flatten_with_paths, where
from jaxcoll._plan.packs.shard_layout import ShardLayout, lay_out
from jaxcoll._step.mesh.mesh import ambient_mesh, axis_names, check_any_mesh, no_mesh
from jaxcoll._step.mesh.placement import make_specs, place
from jaxcoll._step.mesh.shard_arrays import abstract, cut, make_shards, part_shapes, whole_shapes
from jaxcoll._train.elementwise import check_elementwise
from jaxcoll._train.shard import unshard

CALLER = "sharded_optimizer"
# Large enough that an optimizer with factored moments would factor them
_PROBE = {
    "matrix": jax.ShapeDtypeStruct((128, 256), "float32"),
    "vector": jax.ShapeDtypeStruct((130,), "float32"),
}


def sharded_optimizer(
    tx: Any,
    axis_name: str | tuple[str, ...],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
    max_norm: float | None = None,
    options: CommunicationOptions | None = None,
    assume_elementwise: bool = False,
) -> ShardedOptimizer:
    """Divide the state and work of an elementwise optimizer over the replicas (ZeRO).

    Guarantee: n devices equal one device. Updates are those of `tx` on whole gradients and
    parameters, to rounding. Each replica holds 1/n of the elements of the state and of the reduced
    gradients.

    Args:
      tx: an optax transformation, or any object with such an `init` and `update`, that treats every
        element independently: sgd, adam, adamw, lion, rmsprop ..., with schedules. Its traced
        program is checked: updates may not depend on several elements or differ between leaves.
      axis_name: the mapped axis, or a tuple of mesh axes, outer to inner.
      mesh: the mesh on which `init` and `shard` place a state between programs; None: as in
        `jc.data_parallel`. An `AbstractMesh` gives shapes, for `jc.inspect` with a topology.
      reduce_op: how `update` reduces each replica's own gradients, if they are a plain tree.
      max_norm: largest norm of the gradients over all replicas' shards; larger ones are clipped.
        `optax.clip_by_global_norm` would see only its replica's shards.
      options: as in `all_reduce`. Gradients that come as `Shards` must have been made with the same
        `bytes_per_pack`.
      assume_elementwise: skip the checks, if you know that `tx` is elementwise.

    Returns:
      A `ShardedOptimizer`, with optax's `init` and `update`, and `unshard` and `shard` for
      checkpoints.

    Raises:
      ValueError: `tx` is not an optimizer or not elementwise, or another argument is invalid.

    Examples:
      >>> import optax, numpy as np
      >>> optimizer = sharded_optimizer(optax.adam(0.1), "data")
      >>> @data_parallel(batch_argnums="batch")
      ... def step(params, state, batch):
      ...     loss = lambda w, x: ((w * x) ** 2).mean()
      ...     value, grads = value_and_grad(loss, "data", scatter=True)(params, batch)
      ...     updates, state = optimizer.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, value
      >>> params = np.ones(3, "f")
      >>> params, state, value = step(params, optimizer.init(params), np.ones((8, 3), "f"))
      >>> float(value), [round(float(p), 3) for p in params]
      (1.0, [0.9, 0.9, 0.9])
    """
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        expected = "an optax transformation, an object with `init` and `update`"
        raise ValueError(f"`sharded_optimizer` expects {expected}; got {type(tx).__name__}.")
    if mesh is not None:
        check_any_mesh(mesh, axis_name, CALLER)
    if max_norm is not None and not (is_number(max_norm) and max_norm > 0):
        raise ValueError(f"`max_norm` must be None or a positive number; got {max_norm!r}.")
    if not assume_elementwise:
        treedef, leaves = describe_tree(_PROBE, {"probe": 2}, CALLER)
        parts = part_shapes(abstract(lay_out(treedef, leaves, 2), ("probe",)))
        check_elementwise(tx, _PROBE, parts)
    op, options = ReduceOp.of(reduce_op), check_options(options)
    return ShardedOptimizer(tx, axis_name, mesh, op, max_norm, options, assume_elementwise)


@dataclasses.dataclass(eq=False, repr=False)
class ShardedOptimizer:
    """An optimizer with its state divided over the replicas; made by `sharded_optimizer`.

    Its state is that of `tx`, with `Shards` instead of every tree like the parameters.
    """

    _tx: Any
    _axis_name: str | tuple[str, ...]
    _mesh: Mesh | AbstractMesh | None
    _reduce_op: ReduceOp
    _max_norm: float | None
    _options: CommunicationOptions
    _assumed: bool

    @property
    def _axes(self) -> tuple[str, ...]:
        return axis_names(self._axis_name)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh on which states are placed between programs."""
        ambient = ambient_mesh(self._axes) if self._mesh is None else None
        return ambient or check_any_mesh(self._mesh, self._axis_name, CALLER)

    def init(self, params: Any) -> Any:
        """Make the state before the first update.

        Args:
          params: the whole parameters: between programs numpy arrays, `jax.Array`s that this
            process can read, or `jax.ShapeDtypeStruct`s; in a program that maps the axis, arrays
            that are the same on all replicas. Or parameters in shards: `Shards` made by
            `jc.shard`, or a tree of them. `init` works under `jax.jit` and `jax.eval_shape` too.

        Returns:
          The state of `tx` with `Shards` in it. Between programs they are global arrays over the
          mesh; each device gets only its part, and `jc.data_parallel` takes them without a copy. In
          a program they are this replica's part, *varying*. Cost: nothing is sent.

        Raises:
          ValueError: a leaf cannot be split or is known to differ between replicas; or `tx`
            depends on names or ranks of leaves; or `params` mixes arrays and Shards.
        """
        mapped = set(self._axes) <= set(_compat.axes_in_scope())
        if shards_in(params):
            _check_all_in_shards(params)
        else:
            params = self._split(params, mapped)
        shapes = jax.eval_shape(lambda: params)
        if not self._assumed:
            parts = shapes if mapped else jax.tree.map(part_shapes, shapes, is_leaf=is_shards)
            check_elementwise(self._tx, _whole(shapes), parts)
        if mapped:
            return _varying(self._tx.init(params))
        leaves = jax.tree.leaves(params)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._lay_out(self._tx.init(params))
        state = jax.eval_shape(self._tx.init, shapes)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return state
        mesh = leaves[0].sharding.mesh if leaves else self.mesh
        if isinstance(mesh, AbstractMesh):
            return state
        with no_mesh():
            # Compiled with its results in place: a state that is made first, and cut then, would
            # have to fit on one device.
            over = jax.tree.map(functools.partial(NamedSharding, mesh), make_specs(state))
            return jax.jit(self._tx.init, out_shardings=over)(params)

    def _split(self, params: Any, mapped: bool) -> Shards:
        """Put whole parameters in shards: this replica's if the axis is `mapped`, else all."""
        if mapped:
            scope = scope_here().merge(self._options)
            return local_part(params, self._axis_name, CALLER, scope=scope)
        layout, leaves = self._layout(params)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return all_parts(params, layout, self._axes)
        return make_shards(leaves, layout, self.mesh, self._axes)

    def update(
        self, grads: Any, state: Any, params: Any = None, *, reduced: bool = False, **extra: Any
    ) -> tuple[Any, Any]:
        """Compute the updates of the parameters and the next state, inside a program.

        Args:
          grads: `Shards` from `value_and_grad(..., scatter=True)` or `reduce_scatter`; or a plain
            tree of each replica's own gradients, which is reduce-scattered first. For parameters
            in shards, the gradients that `value_and_grad` returns in the same shards.
          state: the result of `init`, `shard` or the last `update`.
          params: the parameters in the form that `init` got: whole, needed only if `tx` uses them;
            or in shards, always needed.
          reduced: True if `grads` is a plain tree that is the same on all replicas, as
            `value_and_grad` returns it without `scatter`; it is not sent again.
          **extra: passed on to `tx.update`; the same on all replicas, like a reduced loss.

        Returns:
          `(updates, state)`. Updates are a tree like the parameters, whole and *invariant*, or in
          the same shards; the `Shards` in the state are *varying*. Cost: a reduce-scatter, unless
          `grads` are shards; an all-gather, unless the parameters are shards; with `max_norm`, an
          all-reduce of one number.

        Raises:
          NameError: the axis is not mapped here.
          ValueError: the state was made for other gradients or parameters (the first difference is
            named) or by another optimizer; gradients, parameters or `extra` are known to differ
            between replicas; or `extra` makes `tx` depend on several elements.
          AlreadyReducedError: a plain tree is the same on all replicas and `reduced` is False.
        """
        axes = resolve_axes(self._axis_name, f"{CALLER}.update")
        scope = scope_here().merge(self._options)
        state_shards, in_shards = shards_in(state), bool(shards_in(params))
        layout = state_shards[0].layout if state_shards else None
        if in_shards:
            _check_gradients_in_shards(grads, params)
        elif is_shards(grads):
            _check_like(grads, layout, count(axes))
        elif reduced:
            grads = local_part(grads, self._axis_name, CALLER, scope=scope, layout=layout)
        else:
            of = self._reduce_op, grads, self._axis_name
            grads = scatter_tree(*of, scope=scope, layout=layout)
        self._check_state(grads, state)
        # The proof of the step finds the mark; it stands on a leaf of the gradients.
        arrays = {path: x for path, x in flatten_with_paths(extra)[0] if isinstance(x, jax.Array)}
        if arrays and (leaves := jax.tree.leaves(grads)):
            leaves[0] = check_same(leaves[0], arrays, axes, f"{CALLER}.update")
            grads = jax.tree.unflatten(jax.tree.structure(grads), leaves)
        if extra and not self._assumed:
            parts = jax.eval_shape(lambda: grads)
            check_elementwise(self._tx, _whole(parts), parts, extra)
        if self._max_norm is not None:
            grads = clip_shards(grads, tuple(axes), self._max_norm, scope=scope)
        if params is not None and not in_shards:
            params = local_part(params, self._axis_name, CALLER, scope=scope, layout=grads.layout)
        updates, state = self._tx.update(grads, state, params, **extra)
        # Gathering updates, not parameters, sends as many bytes and rounds where optax rounds.
        if not in_shards:
            updates = gather_shards(updates, self._axis_name, scope=scope)
        return updates, _varying(state)

    def unshard(self, state: Any) -> Any:
        """Return the state of the unsharded `tx`, for checkpoints that fit any number of replicas.

        Args:
          state: a state between programs.

        Returns:
          The same tree of numpy arrays, with whole leaves instead of `Shards`. Cost: host memory
          for the whole state. If several processes hold parts, all of them must call.
        """
        return unshard(state)

    def shard(self, state: Any, params: Any) -> Any:
        """Invert `unshard` for the replicas of this optimizer's mesh.

        Args:
          state: a state of the unsharded `tx`, in arrays that this process can read whole.
          params: the parameters, or their shapes; whole or in shards.

        Returns:
          A state like that of `init`, with these values.

        Raises:
          ValueError: the state is not that of `tx` for such parameters.
        """
        parts = params if shards_in(params) else abstract(self._layout(params)[0], self._axes)
        template = jax.eval_shape(self._tx.init, parts)
        nodes, treedef = jax.tree.flatten(template, is_leaf=is_shards)
        try:
            values = treedef.flatten_up_to(state)
        except (ValueError, TypeError) as error:
            expected = "a state of the unsharded optimizer for these parameters"
            raise ValueError(
                f"`shard` expects {expected}; this one has another structure: {error}"
            ) from error
        mesh = self.mesh
        assert isinstance(mesh, Mesh), "an abstract mesh holds no values"
        with no_mesh():
            whole = NamedSharding(mesh, PartitionSpec())
            placed = [
                self._cut(value, node, mesh) if is_shards(node) else place(value, whole)
                for node, value in zip(nodes, values, strict=True)
            ]
        return treedef.unflatten(placed)

    def _cut(self, tree: Any, like: Shards, mesh: Mesh) -> Shards:
        leaves, treedef = jax.tree.flatten(tree)
        shapes = [jax.numpy.shape(leaf) for leaf in leaves]
        layout, stack = like.layout, like.stack
        wanted = {leaf.path: (*stack, *leaf.shape) for leaf in layout.leaves}
        if treedef != layout.treedef or shapes != list(wanted.values()):
            has = f"It has leaves of shapes {shapes[:5]}; these have {list(wanted.items())[:5]}"
            raise ValueError(f"`shard`: a part of the state is not like the parameters. {has}.")
        return cut(leaves, layout, mesh, self._axes, stack)

    def _lay_out(self, state: Any) -> Any:
        """Constrain each part of a traced state to its sharding."""
        if isinstance(self._mesh, AbstractMesh):
            return state
        mesh = self.mesh
        over = jax.tree.map(functools.partial(NamedSharding, mesh), make_specs(state))
        # Each of the two is refused, or has no effect, on axes of the other type.
        explicit = AxisType.Explicit in mesh.axis_types
        constrain = jax.device_put if explicit else jax.lax.with_sharding_constraint
        return jax.tree.map(lambda sharding, node: constrain(node, sharding), over, state)

    def _layout(self, params: Any) -> tuple[ShardLayout, list[Any]]:
        axes = {a: self.mesh.shape[a] for a in self._axes}
        treedef, leaves = describe_tree(params, axes, CALLER)
        layout = lay_out(treedef, leaves, count(axes), self._options.bytes_per_pack)
        return layout, treedef.flatten_up_to(params)

    def _check_state(self, grads: Shards, state: Any) -> None:
        """Refuse a state whose structure is not that of `tx` for such gradients."""
        expected = jax.eval_shape(self._tx.init, grads)
        if jax.tree.structure(expected) == jax.tree.structure(state):
            return
        like = f"like {jax.tree.structure(expected)}; got {jax.tree.structure(state)}"
        if shards_in(expected) and not shards_in(state):
            like = "with Shards in it, but this one has none"
        raise ValueError(
            f"`{CALLER}.update` expects a state {like}. Make it with this optimizer's `init` or "
            "`shard` the state of the unsharded optimizer."
        )


def _varying(state: Any) -> Any:
    """Type all shards of a state as varying, even those that are constants."""

    def retype(x: Any) -> Any:
        cast = _compat.cast_varying
        return x.replace([cast(part, x.axes) for part in x.parts]) if is_shards(x) else x

    return jax.tree.map(retype, state, is_leaf=is_shards)


def _whole(tree: Any) -> Any:
    return jax.tree.map(whole_shapes, tree, is_leaf=is_shards)


def _check_like(grads: Shards, layout: ShardLayout | None, replicas: int) -> None:
    """Refuse gradient shards with another layout than the state's."""
    if layout is None or grads.layout == layout:
        return
    check_fits(layout, grads.layout.treedef, grads.layout.leaves, replicas, f"{CALLER}.update")
    raise ValueError(
        f"`{CALLER}.update`: the gradients are packed differently from the state ({grads.layout} "
        f"and {layout}). Set the same `bytes_per_pack` in the options of both, or in neither."
    )


def _check_all_in_shards(params: Any) -> None:
    """Refuse a tree of `Shards` and arrays: it is unknown which replica holds the arrays."""
    for path, x in flatten_with_paths(params, is_shards)[0]:
        if not is_shards(x):
            raise ValueError(
                f"`{CALLER}`: {where(path)} of the parameters is an array, while others are "
                "`Shards`. Make Shards of it too, by `jc.shard`, or use another optimizer for it."
            )


def _check_gradients_in_shards(grads: Any, params: Any) -> None:
    _check_all_in_shards(params)
    if jax.tree.structure(grads) == jax.tree.structure(params):
        return
    if not shards_in(grads):
        raise ValueError(
            f"`{CALLER}.update` got parameters in `Shards` and whole gradients, which are those of "
            "the gathered tree. Differentiate the Shards, and gather them in the loss."
        )
    both = f"{jax.tree.structure(grads)} and {jax.tree.structure(params)}"
    raise ValueError(
        f"`{CALLER}.update`: the gradients are not in the shards of the parameters: {both}."
    )
