"""Strategies: run a function on a set of devices, and communicate between them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from jaxcoll._plan.checks import refuse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, check_options
from jaxcoll._plan.packs.leaves import flatten_with_paths, is_array
from jaxcoll._show.units import pluralize
from jaxcoll._step.mesh.mesh import local_positions, span_processes
from jaxcoll.distribute._all_reduce_ops import NcclAllReduce
from jaxcoll.distribute._along_axis import gather_along, reduce_along
from jaxcoll.distribute._arguments import call_options, check_here, devices_named
from jaxcoll.distribute._cross_device_ops import CrossDeviceOps
from jaxcoll.distribute._dataset import DistributedDataset, distribute_parts, is_one_value
from jaxcoll.distribute._extended import StrategyExtended, check_has_sum
from jaxcoll.distribute._per_replica import DistributedValues, is_distributed
from jaxcoll.distribute._replica_axis import check_cross_replica
from jaxcoll.distribute._replica_program import ReplicaContext, check_call, run_on_replicas

_entered: contextvars.ContextVar[Strategy | None] = contextvars.ContextVar(
    "jaxcoll_strategy", default=None
)


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica that a value is made for: its number, from 0, and the number of replicas."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class Strategy:
    """The methods of `MirroredStrategy` and `MultiWorkerMirroredStrategy`.

    State is an ordinary pytree: `run` takes it as a `Mirrored` and returns it as one. There are no
    variable objects, and nothing has to be created under `scope`.

    The methods that work on the values of all replicas raise `RuntimeError` in a replica function
    and under the scope of another strategy, and `DeadlineExceededError` after the
    `timeout_seconds` of their options.
    """

    def __init__(
        self,
        devices: tuple[jax.Device, ...],
        ops: CrossDeviceOps,
        options: CommunicationOptions,
    ) -> None:
        self._devices = devices
        self._ops = ops
        self._options = options
        self._here = local_positions(devices)
        self._first = devices[self._here[0]]
        self._context = ReplicaContext(self)
        self._extended = StrategyExtended(f"{type(self).__name__}.extended", ops, options, devices)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each replica, in the order of their ids."""
        return self._devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that `run` runs on."""
        return len(self._devices)

    @property
    def extended(self) -> StrategyExtended:
        """Reductions to destinations, broadcasts and updates."""
        return self._extended

    @contextlib.contextmanager
    def scope(self) -> Iterator[Self]:
        """Enter this strategy: until it is left, calls of any other strategy are refused.

        Nothing else happens: values are placed when they are passed, wherever they were created.

        Yields:
          The strategy.

        Raises:
          RuntimeError: called in a replica function, or under another strategy's scope.
        """
        self._check("scope", "this strategy is in scope already")
        token = _entered.set(self)
        try:
            yield self
        finally:
            _entered.reset(token)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Call a function once on every replica, in one compiled program.

        Replica i gets component i of every `PerReplica`, and a copy of everything else. The
        function is traced and compiled once for each shape; so a function that is created anew for
        each call (a lambda in a loop) is compiled on each call.

        Args:
          fn: a function from arrays to a pytree of arrays; inside, `jc.get_replica_context()`
            reduces and gathers over the replicas, and gradients are each replica's own.
          args: positional arguments: trees of `PerReplica`s over the strategy's devices, and of
            `Mirrored`s, arrays and numbers, which are copied to every replica.
          kwargs: likewise.
          options: override those of the strategy, for the reductions inside; `timeout_seconds`
            bounds the call, and so does the shortest timeout of a reduction inside.

        Returns:
          The result of `fn`, with a `Mirrored` for each array that is proven to be the same on
          every replica (it was reduced or gathered, or computed from such values and shared ones),
          and a `PerReplica` for every other array.

        Raises:
          ValueError: an argument is invalid, or lies on other devices.

        Examples:
          >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def step(w, x):
          ...     return w - get_replica_context().all_reduce("mean", x), x * x
          >>> strategy.run(step, args=(1.0, PerReplica([2.0, 4.0])))
          (Mirrored(float32[] on 2: cpu:0, cpu:1), PerReplica(float32[] on 2: cpu:0, cpu:1))
        """
        caller = self._check("run", "call the function itself")
        check_call(caller, fn, args)
        options = self._options if options is None else self._options.merge(check_options(options))
        what = f"`{caller}` of `{getattr(fn, '__name__', type(fn).__name__)}`"
        arguments = (tuple(args), dict(kwargs or {}))
        return run_on_replicas(caller, what, fn, arguments, self._devices, options, self._context)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce over the replicas, and along dimensions of each replica's value.

        Guarantees: with an axis, a mean is the sum of all elements divided by their number, so a
        replica with a smaller share counts for less. With several processes, each calls it with
        what it holds, and gets the result over all.

        Args:
          reduce_op: SUM or MEAN, or their names in any case.
          value: a `PerReplica` or `Mirrored`, or a pytree of them; with an axis also uneven parts.
            The MEAN of a plain value is itself; its SUM is refused, unless it is 0. With several
            processes, a value may lie over only this process's replicas, as its share; a plain
            value is one of each process.
          axis: None: reduce over the replicas only. A dimension, or a tuple or list of them: reduce
            along these too; negative ones count from the last.
          options: override those of the strategy; `timeout_seconds` bounds the call.
          experimental_hints: the older name of `options`.

        Returns:
          Plain arrays, on this process's first device, in the structure of `value`.

        Raises:
          ValueError: a leaf has no such dimension, or no sum; or an argument is invalid.

        Examples:
          >>> import numpy as np
          >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
          >>> float(strategy.reduce("mean", PerReplica([1.0, 2.0]), axis=None))
          1.5
          >>> (rows,) = strategy.experimental_distribute_dataset([np.array([1.0, 2, 3, 4, 5])])
          >>> float(strategy.reduce("mean", rows, axis=0))
          3.0
        """
        caller = self._check("reduce", "call `jc.get_replica_context().all_reduce(...)`")
        op, options = ReduceOp.of(reduce_op), call_options(options, experimental_hints)
        merged = self._options.merge(options)
        flat, treedef = flatten_with_paths(value, is_one_value)
        for _, leaf in flat:
            check_has_sum(caller, op, leaf, self._devices)
        # Without a comparison, processes that pass different trees would add leaves by position.
        paths = [path for path, _ in flat]
        structure = f"{op.name} of {paths} along {axis}" * (len(self._here) < len(self._devices))
        if axis is not None:
            results = reduce_along(self._ops, op, flat, axis, self._first, merged, structure)
        else:
            pairs = [(leaf, self._first) for _, leaf in flat]
            results = self._ops._reduce_pairs("reduce", op, pairs, merged, structure, paths)
        return treedef.unflatten(results)

    def gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Join the replicas' values along one dimension, in replica order.

        Args:
          value: a `PerReplica` or `Mirrored`, or a pytree of them, over all replicas or over
            those of this process, as in `reduce`; or uneven parts.
          axis: the dimension; negative ones count from the last.
          options: as in `reduce`, and so is the result.

        Raises:
          NotImplementedError: a leaf is an `IndexedSlices`.
          ValueError: parts differ in dtype, rank or another dimension (both shapes are named);
            a leaf has no such dimension; or a value is plain.

        Examples:
          >>> import numpy as np
          >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
          >>> strategy.gather(PerReplica([np.array([1, 2]), np.array([3, 4])]), axis=0).tolist()
          [1, 2, 3, 4]
        """
        caller = self._check("gather", "call `jc.get_replica_context().all_gather(...)`")
        name = type(self).__name__
        merged = self._ops._options.merge(self._options.merge(check_options(options)))
        flat, treedef = flatten_with_paths(value, is_one_value)
        for _, leaf in flat:
            if is_array(leaf) and self.num_replicas_in_sync > 1:
                raise ValueError(
                    f"`{caller}` got the plain value {leaf!r}, which belongs to no replica. Pass a "
                    "`PerReplica`, of the parts to join, or a `Mirrored`, held by every replica."
                )
        return treedef.unflatten(gather_along(self._ops, name, flat, axis, self._first, merged))

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas, in the order of replicas, as a tuple.

        Args:
          value: a `PerReplica` or `Mirrored`, or a pytree of them, such as `run` returns. A plain
            value is the only item of the tuple. A value on other devices keeps its own order.

        Raises:
          ValueError: the value has another number of replicas in this process.

        Examples:
          >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
          >>> out = strategy.run(lambda: {"id": get_replica_context().replica_id_in_sync_group})
          >>> [int(result["id"]) for result in strategy.experimental_local_results(out)]
          [0, 1]
        """
        parts = jax.tree.leaves(value, is_leaf=is_distributed)
        if not any(map(is_distributed, parts)):
            return (value,)

        def component(k: int, part: Any) -> Any:
            return part[self._replicas_here(part)[k]] if is_distributed(part) else part

        every = [functools.partial(component, k) for k in range(len(self._here))]
        return tuple([jax.tree.map(of, value, is_leaf=is_distributed) for of in every])

    def _replicas_here(self, value: DistributedValues) -> list[int]:
        """Find the replicas of a value on this process's devices, in the strategy's order."""
        own, devices = [self._devices[i] for i in self._here], value.devices
        if set(own) <= set(devices):
            return [devices.index(device) for device in own]
        here = local_positions(devices)
        if len(here) != len(own):
            has = pluralize(len(own), "replica")
            raise ValueError(
                f"`{type(self).__name__}.experimental_local_results` has {has} in this process, "
                f"and got {value!r}, which has {len(here)} here. Read it by `value[i]`."
            )
        return here

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Return distributed values made by a function that is called for each replica.

        Args:
          value_fn: a function from a `ValueContext`, with `replica_id_in_sync_group` and
            `num_replicas_in_sync`, to a pytree of numbers and arrays; it is called for the replicas
            of this process.

        Returns:
          That tree with a `PerReplica` for each leaf. If the replicas' shapes of a leaf differ, on
          any process, the leaf is uneven parts, for `gather` and for `reduce` along an axis;
          `value[i]` is that of replica i. With several processes all of them call it, and exchange
          shapes in one round trip.

        Raises:
          ValueError: the replicas' values disagree in structure or dtype, or hold no arrays.

        Examples:
          >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
          >>> strategy.experimental_distribute_values_from_function(
          ...     lambda context: 10.0 * context.replica_id_in_sync_group)[1].tolist()
          10.0
        """
        method, replicas = "experimental_distribute_values_from_function", len(self._devices)
        self._check(method, "each replica makes its own value")
        values = {i: value_fn(ValueContext(i, replicas)) for i in self._here}
        return distribute_parts(method, values, self._devices)

    def experimental_distribute_dataset(self, dataset: Iterable[Any]) -> DistributedDataset:
        """Split every batch of an iterable over the replicas.

        Args:
          dataset: pytrees of arrays, whose leading dimension is the global batch; with several
            processes, this process's rows of it, which follow those of the previous process.

        Returns:
          An iterable of the same trees with a `PerReplica` for each array: the replicas (of this
          process) get equal, consecutive shares. If rows do not divide evenly, on any process, the
          first replicas get one row more, and shares are uneven parts, which `run` refuses, and
          `gather` and `reduce` along an axis accept. Nothing is read ahead. Processes exchange the
          shapes of each batch in one round trip, unless its arrays already lie over all of them.

        Raises:
          ValueError: `dataset` is not an iterable; while iterating, a leaf of a batch has no rows.

        Examples:
          >>> import numpy as np
          >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
          >>> batches = strategy.experimental_distribute_dataset([np.arange(4.0)])
          >>> [batch[1].tolist() for batch in batches]
          [[2.0, 3.0]]
        """
        self._check("experimental_distribute_dataset", "each replica has its share already")
        return DistributedDataset(dataset, self._devices)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices=[{', '.join(map(str, self._devices))}])"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it is immutable, and devices cannot be copied

    def _check(self, method: str, instead: str) -> str:
        caller = f"{type(self).__name__}.{method}"
        check_cross_replica(caller, instead)
        other = _entered.get()
        if other not in (None, self):
            raise RuntimeError(
                f"`{caller}` was called under the scope of another strategy, {other!r}. Leave it."
            )
        return caller


class MirroredStrategy(Strategy):
    """Replicas on the devices of one process.

    Args:
      devices: devices or device strings, a replica on each, in this order. None: all of this
        process.
      cross_device_ops: the op that reduces and gathers between programs; None: `NcclAllReduce()`.
        A reduction inside `run` is compiled into its program, and follows options instead.

    Raises:
      ValueError: there is no device, one is listed twice or is not a device, they belong to several
        processes or to another one, or `cross_device_ops` is not a `CrossDeviceOps`.

    Examples:
      >>> strategy = MirroredStrategy()
      >>> shares = strategy.experimental_distribute_values_from_function(
      ...     lambda context: context.replica_id_in_sync_group)
      >>> int(strategy.reduce("sum", shares, axis=None))
      28
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if not isinstance(devices, list | tuple | None):
            refuse("devices", "a list or tuple of devices or device strings, or None", devices)
        if not isinstance(cross_device_ops, CrossDeviceOps | None):
            meaning = "a CrossDeviceOps, such as `jc.NcclAllReduce()`, or None"
            refuse("cross_device_ops", meaning, cross_device_ops)
        given = jax.local_devices() if devices is None else devices
        line = devices_named(given, "MirroredStrategy")
        if span_processes(line):
            raise ValueError(
                f"`MirroredStrategy` has its replicas in one process; {', '.join(map(str, line))} "
                "belong to several. Use `MultiWorkerMirroredStrategy` instead."
            )
        check_here(line[0])
        super().__init__(line, cross_device_ops or NcclAllReduce(), CommunicationOptions())
