"""Reductions between programs: the base class of cross-device ops."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np
from jax.core import Tracer

from jaxcoll._collectives.sparse import is_sparse
from jaxcoll._plan.options import CommunicationOptions, ReduceOp
from jaxcoll._plan.packs.leaves import (
    check_reducible,
    flatten_with_paths,
    is_array,
    is_reducible,
    where,
)
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.dispatch import run_all
from jaxcoll._show.units import pluralize
from jaxcoll._step.mesh.mesh import no_mesh, span_processes
from jaxcoll._step.mesh.placement import host_array
from jaxcoll.distribute._arguments import (
    broadcast_to,
    call_options,
    deliver,
    destination_devices,
    distribute_value,
)
from jaxcoll.distribute._per_replica import DistributedValues, Mirrored, Uneven, is_distributed
from jaxcoll.distribute._replica_axis import check_cross_replica, refuse_traced

INSTEAD = "`jc.get_replica_context()` reduces and gathers"


@dataclasses.dataclass(eq=False, slots=True)
class Reduction:
    """One value and its destinations, both checked, and the result."""

    value: DistributedValues
    destinations: tuple[jax.Device, ...]
    # None until it is computed; a value of one replica has its result from the start
    result: Any = None


class Batch(NamedTuple):
    """Reductions to make together; none of them has a result yet."""

    reduce_op: ReduceOp
    reductions: Sequence[Reduction]
    options: CommunicationOptions  # the op's options, overridden by those of the call
    name: str  # the name of the calls in messages
    structure: str = ""  # a text about the values' tree that must be equal on all processes


class CrossDeviceOps(abc.ABC):
    """Reductions and broadcasts across devices, between programs.

    Guarantees: `reduce` sums a value over its replicas, or takes their mean, with the arithmetic of
    `jc.all_reduce`, and places the result on the destinations. A value of one replica is its own
    reduction, and is returned without a copy if it already lies on its destination.

    Values: a `PerReplica` is reduced over its replicas. So is a `Mirrored`: each device holds one
    copy, so a SUM multiplies it by the number of devices, and a MEAN does not change it. An array
    on one device, a numpy array (which goes straight to the destination) or a number is a value of
    one replica.

    An `IndexedSlices`, also one in the tree of a `PerReplica`, is reduced by gathering the
    replicas' rows, including duplicates. The result is an `IndexedSlices` with the padding that
    made the lengths equal; `without_padding` removes it.

    Destinations: the devices of a `PerReplica`, `Mirrored` or `jax.Array`; a device; or a
    device string such as "cpu:0" or "/device:GPU:1". The result is a `Mirrored` on several devices,
    and plain arrays on one.

    Several processes: all of them make the same calls. An op for a group of devices takes what
    this process holds: a value over this process's devices of the group is its share of a value
    over the whole group, and a plain value is one value of each process. Each process gets the
    result on its own destinations; a process without any gets a copy on one of its devices that
    hold the value.

    All methods raise `RuntimeError` in a replica function, and `DeadlineExceededError` after the
    `timeout_seconds` of their options. Subclasses implement `_prepare`.
    """

    _options = CommunicationOptions()  # defaults for the options of every call
    _group: tuple[jax.Device, ...] = ()  # the devices of every value; (): any
    _arguments: dict[str, Any]  # constructor arguments, for `repr`

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items())
        return f"{type(self).__name__}({arguments})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it is immutable, and devices cannot be copied

    @final
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value to its destinations.

        Args:
          reduce_op: SUM or MEAN, or their names in any case. The mean of integers has JAX's
            default float type; the mean of float16 does not overflow if it can be represented.
          per_replica_value: the value to reduce; a pytree of arrays must be inside a `PerReplica`
            or `Mirrored`.
          destinations: where to place the result.
          options: how to communicate; `timeout_seconds` bounds the call.
          experimental_hints: the older name of `options`.

        Returns:
          A `Mirrored`, or the plain value for one device, in the structure of a replica's value.

        Raises:
          ValueError: an argument is invalid, or a leaf has no sum.

        Examples:
          >>> value = PerReplica([1.0, 3.0])
          >>> NcclAllReduce().reduce("mean", value, destinations=value)
          Mirrored(float32[] on 2: cpu:0, cpu:1)
          >>> float(NcclAllReduce().reduce("sum", value, destinations="cpu:5"))
          4.0
        """
        check_cross_replica("reduce", INSTEAD)
        pairs, options = (
            [(per_replica_value, destinations)],
            call_options(options, experimental_hints),
        )
        return self._reduce_pairs("reduce", reduce_op, pairs, options)[0]

    @final
    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values at once, so that they can travel together.

        It takes any iterable of tuples (value, destinations), and returns one result for each, in
        order. Otherwise it is like `reduce`: errors name the pair, and `timeout_seconds` bounds the
        entire call.

        Examples:
          >>> x, y = PerReplica([1.0, 3.0]), PerReplica([2, 4])
          >>> [z[0].tolist() for z in NcclAllReduce().batch_reduce("sum", [(x, x), (y, y)])]
          [4.0, 6]
        """
        check_cross_replica("batch_reduce", INSTEAD)
        pairs = list_pairs(value_destination_pairs)
        options = call_options(options, experimental_hints)
        return self._reduce_pairs("batch_reduce", reduce_op, pairs, options)

    @final
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy one value to every destination; destinations and results are as in `reduce`.

        The value is a number, an array, a pytree of these, or a `Mirrored`. Copies that already lie
        on a destination are kept. If destinations lie in several processes, all of these call it,
        since none can copy to another's devices; the value of the first device's process is copied.

        Examples:
          >>> NcclAllReduce().broadcast(1.0, PerReplica([0, 0, 0]))
          Mirrored(float32[] on 3: cpu:0, cpu:1, cpu:2)
        """
        check_cross_replica("broadcast", INSTEAD)
        return self._broadcast(tensor, destinations, self._options)

    @final
    def _broadcast(self, tensor: Any, destinations: Any, options: CommunicationOptions) -> Any:
        devices = destination_devices(destinations, "broadcast")
        with no_mesh():
            if isinstance(tensor, Mirrored):  # each process already has a copy
                return deliver(tensor._validate(), devices)
            for path, leaf in flatten_with_paths(tensor, is_distributed)[0]:
                if isinstance(leaf, Tracer):
                    refuse_traced(f"`broadcast`: {where(path)}")
                if not is_array(leaf):
                    got = f"{where(path)} is {leaf!r} ({type(leaf).__name__})"
                    raise ValueError(
                        f"`broadcast` expects arrays or numbers, or a Mirrored; {got}."
                    )
            tree = jax.tree.map(host_array, tensor)
            return broadcast_to(tree, devices, options.timeout_seconds)

    @abc.abstractmethod
    def _prepare(self, batch: Batch) -> list[tuple[Call, Sequence[Reduction]]]:
        """Return the calls to make, in this order, each with its reductions.

        A call returns a list with a tree for each of its reductions, on its only device or
        replicated over all of its devices.
        """

    @final
    def _reduce_pairs(
        self,
        caller: str,
        reduce_op: ReduceOp | str,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
        structure: str = "",
        paths: Sequence[str] = (),
    ) -> list[Any]:
        """Reduce pairs of values and destinations; `structure` describes the values' tree.

        Messages name a value by its number in a batch, or by its path in a tree, from `paths`.
        """
        op, merged = ReduceOp.of(reduce_op), self._options.merge(options)
        reductions: list[Reduction] = []
        with no_mesh():
            for i, (value, destinations) in enumerate(pairs):
                number = paths[i] if paths else f"[{i}]" * (caller == "batch_reduce")
                reductions.append(self._check_pair(caller, number, op, value, destinations))
            moving = [r for r in reductions if r.result is None]
            if moving:
                values = pluralize(len(moving), "value")
                name = f"`{type(self).__name__}.{caller}` ({op.name} of {values})"
                calls = self._prepare(Batch(op, moving, merged, name, structure))
                returned = run_all([call for call, _ in calls])
                for (call, of_call), totals in zip(calls, returned, strict=True):
                    for r, total in zip(of_call, totals, strict=True):
                        if len(call.devices) > 1:
                            total = Mirrored._wrap(total, tuple(call.devices))
                        r.result = deliver(total, r.destinations)
            return [r.result for r in reductions]

    def _check_pair(
        self, caller: str, number: str, op: ReduceOp, value: Any, destinations: Any
    ) -> Reduction:
        caller += number
        wanted = destination_devices(destinations, caller)
        if isinstance(value, Uneven):
            raise ValueError(
                f"`{caller}` got parts of unequal shapes. Pad them, or use `strategy.gather` or "
                "`strategy.reduce` along an axis."
            )
        name = type(self).__name__
        whole = distribute_value(caller, name, value, self._group, wanted[0])._make_global()
        devices = whole.devices
        if not all(map(is_reducible, {leaf.dtype for leaf in jax.tree.leaves(whole.tree)})):
            # Paths are only made for the message: a batch may have thousands of leaves.
            for path, leaf in flatten_with_paths(whole.tree)[0]:
                check_reducible(number + path, leaf.dtype)
        if not span_processes(devices):
            check_own_devices(wanted)
        # The mean of integers is a float, even of one replica.
        if len(devices) > 1 or (op is ReduceOp.MEAN and _has_integers(whole.tree)):
            return Reduction(whole, wanted)
        return Reduction(whole, wanted, deliver(whole[0], wanted))


def check_own_devices(devices: Sequence[jax.Device]) -> None:
    """Refuse to copy to devices of other processes, which would get other values."""
    for device in devices:
        if device.process_index != jax.process_index():
            raise ValueError(
                f"This reduction copies between the devices of one process; {device} belongs to "
                f"process {device.process_index}. Reduce to the value's devices by `NcclAllReduce`."
            )


def _has_integers(tree: Any) -> bool:
    leaves = (x.values if is_sparse(x) else x for x in jax.tree.leaves(tree, is_leaf=is_sparse))
    return any(jax.dtypes.issubdtype(leaf.dtype, np.integer) for leaf in leaves)


def list_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Check the pairs of a value and its destinations that `batch_reduce` gets."""
    expected = "`batch_reduce` expects an iterable of tuples (value, destinations)"
    if not isinstance(pairs, Iterable):
        raise ValueError(f"{expected}; got {pairs!r}.")
    items = list(pairs)
    for i, pair in enumerate(items):
        if not isinstance(pair, tuple) or len(pair) != 2:
            of = f" of {len(pair)}" if isinstance(pair, tuple) else ""
            raise ValueError(f"{expected}; item {i} is a {type(pair).__name__}{of}.")
    return items
