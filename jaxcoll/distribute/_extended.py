"""`strategy.extended`: reductions, broadcasts and updates with explicit destinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import is_array
from jaxcoll._step.mesh.mesh import span_processes
from jaxcoll.distribute._arguments import call_options
from jaxcoll.distribute._cross_device_ops import CrossDeviceOps, list_pairs
from jaxcoll.distribute._per_replica import DistributedValues, is_distributed
from jaxcoll.distribute._replica_axis import check_cross_replica
from jaxcoll.distribute._replica_program import check_call, run_on_replicas


@dataclasses.dataclass(eq=False, repr=False)
class StrategyExtended:
    """Reductions, broadcasts and updates with explicit destinations, as `strategy.extended`.

    Arguments, results and errors are those of `CrossDeviceOps`; the strategy's options are the
    defaults. No method can be called in a replica function.
    """

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

        The MEAN of a plain value is itself; its SUM is refused, unless it is 0. With several
        processes a plain value is one of each process, and is reduced over these.
        """
        options = call_options(options, experimental_hints)
        return self._reduce_pairs("reduce", reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values at once, as `CrossDeviceOps.batch_reduce` does; see `reduce_to`."""
        pairs = list_pairs(value_destination_pairs)
        options = call_options(options, experimental_hints)
        return self._reduce_pairs("batch_reduce", reduce_op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy one value to every destination, as `CrossDeviceOps.broadcast` does."""
        check_cross_replica(f"{self._name}.broadcast_to", "every replica may use the value itself")
        return self._ops._broadcast(tensor, destinations, self._options)

    def update(
        self,
        value: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply `fn` to each component of `value`, on its device.

        Guarantees: component i of the result is `fn(value[i], *args[i], **kwargs[i])`. Nothing is
        assigned, because there are no variables: keep the result.

        Args:
          value: a `Mirrored` or `PerReplica`, or a pytree of them over the same devices.
          fn: a function of one component; it is traced, and compiled once for each shape.
          args: more arguments; `fn` gets the same component of every `Mirrored` or `PerReplica`.
          kwargs: likewise.

        Returns:
          The results of `fn`: one `Mirrored` or `PerReplica` if `value` is one, else a tree with
          one for each array. A result is a `Mirrored` if it is proven the same on every device, as
          it is if only `Mirrored`s and shared values went in.

        Raises:
          ValueError: `value` holds a leaf that is not distributed, or an argument is invalid.

        Examples:
          >>> params = distribute.Mirrored([{"w": 1.0}, {"w": 1.0}])
          >>> MirroredStrategy().extended.update(params, lambda p, g: {"w": p["w"] - g}, (0.5,))
          Mirrored({'w': float32[]} on 2: cpu:0, cpu:1)
        """
        caller = f"{self._name}.update"
        check_cross_replica(caller, "compute the new value and return it")
        check_call(caller, fn, args)
        parts = jax.tree.leaves(value, is_leaf=is_distributed)
        if not parts or not all(map(is_distributed, parts)):
            raise ValueError(
                f"`{caller}` expects a Mirrored or a PerReplica, or a pytree of them; got "
                f"{value!r}. For plain values, call the function itself."
            )
        arguments, one = ((value, *args), dict(kwargs or {})), is_distributed(value)
        over = parts[0].devices, self._options, None
        return run_on_replicas(caller, f"`{caller}`", fn, arguments, *over, as_one=one)

    def _reduce_pairs(
        self,
        method: str,
        reduce_op: ReduceOp | str,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        caller = f"{self._name}.{method}_to"
        check_cross_replica(caller, "call `jc.get_replica_context().all_reduce(...)`")
        op = ReduceOp.of(reduce_op)
        for i, (value, _) in enumerate(pairs):
            number = f"[{i}]" if method == "batch_reduce" else ""
            check_has_sum(caller + number, op, value, self._devices)
        return self._ops._reduce_pairs(method, op, pairs, self._options.merge(options))


def check_has_sum(caller: str, op: ReduceOp, value: Any, devices: tuple[jax.Device, ...]) -> None:
    """Refuse the SUM of a plain value over several replicas: it may be held by one, or by all."""
    # Over several processes a plain value is one of each.
    has_parts = isinstance(value, DistributedValues) or span_processes(devices)
    if op is not ReduceOp.SUM or has_parts or len(devices) == 1:
        return
    # Reading a value that lies on a device would wait for it.
    on_host = isinstance(value, int | float | np.generic | np.ndarray)
    is_zero = on_host and np.ndim(value) == 0 and value == 0  # however many hold it
    if is_sparse(value) or (is_array(value) and not is_zero):
        raise ValueError(
            f"`{caller}` got the plain value {value!r}, whose SUM over {len(devices)} replicas "
            "could be itself or that many times it. Pass a `Mirrored`, held by every replica, or a "
            "`PerReplica`, the parts of a sum."
        )
