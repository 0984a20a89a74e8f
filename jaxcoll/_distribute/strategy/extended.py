"""`strategy.extended`: reductions, broadcasts and updates with explicit destinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxcoll._distribute.ops.cross_device_ops import CrossDeviceOps, checked_pairs
from jaxcoll._distribute.strategy.replica_context import check_cross_replica
from jaxcoll._distribute.strategy.replica_program import run_on_replicas
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica, is_distributed
from jaxcoll._mesh.mesh import no_mesh, span_processes
from jaxcoll._mesh.placement import is_array
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, given
from jaxcoll._spmd.sparse import is_sparse


@dataclasses.dataclass(eq=False, repr=False)
class StrategyExtended:
    """`strategy.extended`: reductions, broadcasts and updates of plain trees."""

    _name: str
    _ops: CrossDeviceOps
    _options: CommunicationOptions
    _devices: tuple[jax.Device, ...]

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value to its destinations, as `CrossDeviceOps.reduce` does.

        Args:
          reduce_op: SUM or MEAN, or their names in any case.
          value: as in `CrossDeviceOps.reduce`; a plain value has a MEAN, itself, but no SUM. With
            several processes it is one of each process, and is reduced over these.
          destinations: as in `CrossDeviceOps.reduce`.
          options: over those of the strategy.
          experimental_hints: the older name of `options`.

        Returns:
          A `Mirrored`, or the plain value for one device.

        Raises:
          RuntimeError: called in a replica function.
          ValueError: an argument is invalid, or there is no sum.
        """
        self._check("reduce_to", "call `jc.get_replica_context().all_reduce(...)`")
        op, asked = ReduceOp.of(reduce_op), given(options, experimental_hints)
        check_has_sum(f"{self._name}.reduce_to", op, value, self._devices)
        return self._ops.reduce(op, value, destinations, self._options.merge(asked))

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values at once, as `CrossDeviceOps.batch_reduce` does.

        Args:
          reduce_op: SUM or MEAN, or their names in any case.
          value_destination_pairs: any iterable of tuples of a value and its destinations.
          options: over those of the strategy.
          experimental_hints: the older name of `options`.

        Returns:
          One result for each pair, in their order.

        Raises:
          RuntimeError: called in a replica function.
          ValueError: as in `reduce_to`; or an item is not a pair.
        """
        self._check("batch_reduce_to", "call `jc.get_replica_context().all_reduce(...)`")
        op, asked = ReduceOp.of(reduce_op), given(options, experimental_hints)
        pairs = checked_pairs(value_destination_pairs)
        for i, (value, _) in enumerate(pairs):
            check_has_sum(f"{self._name}.batch_reduce_to[{i}]", op, value, self._devices)
        return self._ops.batch_reduce(op, pairs, self._options.merge(asked))

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy one value to every destination, as `CrossDeviceOps.broadcast` does.

        Args:
          tensor: a number, an array, a pytree of them, or a `Mirrored`.
          destinations: as in `CrossDeviceOps.reduce`.

        Returns:
          A `Mirrored`, or the plain value for one device; of a Python number too.

        Raises:
          RuntimeError: called in a replica function.
          ValueError: an argument is invalid.
        """
        self._check("broadcast_to", "every replica may use the value itself")
        return self._ops._broadcast(tensor, destinations, self._options)

    def update(
        self,
        value: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The new value that `fn` makes of each component of `value`, where it lies.

        Law: component i is `fn(value[i], *args[i], **kwargs[i])`. There are no variables:
        nothing is assigned, the caller keeps what is returned.

        Args:
          value: a `Mirrored` or `PerReplica`, or a pytree of them over the same devices.
          fn: what is done to one component; it is traced, and compiled once for each shape.
          args: more arguments: of a `Mirrored` or `PerReplica` each component gets its own.
          kwargs: likewise.

        Returns:
          What `fn` returns: as one `Mirrored` or `PerReplica` where `value` was one, else with
          one in the place of each array. It is `Mirrored` where it is proven the same on every
          device, as it is when only `Mirrored`s and shared values went in.

        Raises:
          RuntimeError: called in a replica function.
          ValueError: `value` holds a leaf that is not distributed, or an argument is invalid.

        Examples:
          >>> params = Mirrored([{"w": 1.0}, {"w": 1.0}])
          >>> MirroredStrategy().extended.update(params, lambda p, g: {"w": p["w"] - g}, (0.5,))
          Mirrored({'w': float32[]} on 2: cpu:0, cpu:1)
        """
        self._check("update", "compute the new value and return it")
        caller = f"{self._name}.update"
        parts = jax.tree.leaves(value, is_leaf=is_distributed)
        if not parts or not all(map(is_distributed, parts)):
            raise ValueError(
                f"`{caller}` expects a Mirrored or a PerReplica, or a pytree of them; got "
                f"{value!r}. A function of plain values can simply be called."
            )
        devices = parts[0].devices
        arguments = ((value, *args), dict(kwargs or {}))
        result = run_on_replicas(caller, f"`{caller}`", fn, arguments, devices, self._options, None)
        with no_mesh():
            return _joined(result) if is_distributed(value) else result

    def _check(self, method: str, instead: str) -> None:
        check_cross_replica(f"{self._name}.{method}", instead)


def check_has_sum(
    caller: str, reduce_op: ReduceOp, value: Any, devices: tuple[jax.Device, ...]
) -> None:
    """Refuse the SUM over several replicas of a value that does not say how many hold it."""
    # Over several processes a value is one of each.
    if reduce_op is not ReduceOp.SUM or len(devices) == 1 or span_processes(devices):
        return
    # Reading a value that lies on a device would wait for it.
    on_host = isinstance(value, int | float | np.generic | np.ndarray)
    is_zero = on_host and np.ndim(value) == 0 and value == 0  # however many hold it
    if is_sparse(value) or (is_array(value) and not is_zero):
        raise ValueError(
            f"`{caller}` got the plain value {value!r}, whose SUM over {len(devices)} replicas "
            "could be itself or that many times it. Say which: a value that every replica holds "
            "is a `Mirrored`, parts of a sum are a `PerReplica`."
        )


def _joined(result: Any) -> Mirrored | PerReplica:
    """One value of a tree of them: `Mirrored` if all are."""
    parts = jax.tree.leaves(result, is_leaf=is_distributed)
    kind = Mirrored if all(isinstance(part, Mirrored) for part in parts) else PerReplica

    def arrays(value: Any) -> Any:
        if not isinstance(value, kind):  # a row for each copy
            value = kind.from_function(value.__getitem__, devices=value.devices)
        return value.tree

    return kind.of(jax.tree.map(arrays, result, is_leaf=is_distributed))
