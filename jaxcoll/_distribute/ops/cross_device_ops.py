"""Reductions between programs: what every cross-device op checks, and what each must do."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax.core import Tracer

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import run_all
from jaxcoll._distribute.ops.gather import Gather
from jaxcoll._distribute.strategy.replica_context import check_cross_replica
from jaxcoll._distribute.values.assemble import own_devices
from jaxcoll._distribute.values.destinations import (
    copied,
    copy_near,
    delivered,
    destination_devices,
)
from jaxcoll._distribute.values.parts import Held, first_of_each_process, of_all
from jaxcoll._distribute.values.per_replica import Mirrored, PerReplica, is_distributed
from jaxcoll._mesh.mesh import no_mesh, span_processes
from jaxcoll._mesh.placement import host_array, is_array
from jaxcoll._plan.options import CommunicationOptions, ReduceOp, checked, given
from jaxcoll._plan.packs.leaves import check_reducible, flattened, is_reducible, where
from jaxcoll._show.units import counted
from jaxcoll._spmd.sparse import is_sparse


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """One value on its way to its destinations, both checked."""

    value: PerReplica | Mirrored
    destinations: tuple[jax.Device, ...]

    @property
    def is_all_reduce(self) -> bool:
        """Whether several replicas reduce to exactly the devices they lie on, in any order.

        Those of several processes always do: each process then has the copy that it passes on.
        """
        devices = self.value.devices
        wanted = set(devices) == set(self.destinations) or span_processes(devices)
        return len(devices) > 1 and wanted

    def is_in_place(self, reduce_op: ReduceOp) -> bool:
        """Whether the value is its own reduction, where it lies, in the dtype it has."""
        if len(self.value) > 1 or set(self.value.devices) != set(self.destinations):
            return False
        # The mean of integers is a float, for one replica as for many.
        leaves = jax.tree.leaves(self.value.tree, is_leaf=is_sparse)
        dtypes = (x.values.dtype if is_sparse(x) else x.dtype for x in leaves)
        integers = (jax.dtypes.issubdtype(dtype, np.integer) for dtype in dtypes)
        return reduce_op is ReduceOp.SUM or not any(integers)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Reductions that are made together, and how; none of them is in place."""

    reduce_op: ReduceOp
    reductions: Sequence[Reduction]
    options: CommunicationOptions  # those of the call, over those of the object
    name: str
    settings: Hashable = ()  # what all processes must have in common beside the values


class CrossDeviceOps(abc.ABC):
    """How values are reduced and broadcast across devices, between programs.

    Law: `reduce` sums a value over its replicas, or takes their mean, with the arithmetic of
    `jc.all_reduce`, and leaves the result on the destinations. What is in place already is not
    copied: a value of one replica whose device is its destination comes back as it is.

    Values: a `PerReplica` is reduced over its replicas. So is a `Mirrored`: each device holds
    one copy, so a SUM multiplies it by their number and a MEAN leaves it. An array on one
    device, a numpy array (which goes straight to the destination) or a number is a value of
    one replica.

    An `IndexedSlices`, and each one in the tree of a `PerReplica`, is reduced by gathering the
    replicas' rows, duplicates kept; it comes back as one, with the padding that made the lengths
    equal (`without_padding` takes it off).

    Destinations: the devices of a `PerReplica`, `Mirrored` or `jax.Array`; a device; or a
    device string such as "cpu:0" or "/device:GPU:1". Where they are several the result is a
    `Mirrored`, else plain arrays on the one. An all-reduce is asked for by destinations that
    are the value's own devices, in any order.

    Several processes: all of them make the same calls. A class that is for a group of devices
    takes what this process holds: a value over its own devices of the group is its share of one
    over all of the group, and a plain value is one value of each process. Each process gets the
    result on those destinations that are its own; where none is, a copy on one of its devices of
    the value.

    A subclass says how by `_prepare`.
    """

    _options = CommunicationOptions()  # those under the options of every call
    _group: tuple[jax.Device, ...] = ()  # those of every value; (): any

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
            default float type; that of float16 does not overflow where it can be represented.
          per_replica_value: what to reduce; pytrees of arrays stand inside a `PerReplica` or
            `Mirrored`.
          destinations: where the result is wanted.
          options: how to communicate; `timeout_seconds` bounds the call.
          experimental_hints: the older name of `options`.

        Returns:
          A `Mirrored`, or the plain value for one device, in the structure of a replica's value.

        Raises:
          RuntimeError: called in a replica function.
          ValueError: an argument is invalid, or a leaf has no sum.
          DeadlineExceededError: `timeout_seconds` passed.

        Examples:
          >>> value = PerReplica([1.0, 3.0])
          >>> NcclAllReduce().reduce("mean", value, destinations=value)
          Mirrored(float32[] on 2: cpu:0, cpu:1)
          >>> float(NcclAllReduce().reduce("sum", value, destinations="cpu:5"))
          4.0
        """
        pair = (per_replica_value, destinations)
        asked = given(options, experimental_hints)
        return self._reduced("reduce", reduce_op, [("", pair)], asked)[0]

    @final
    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values at once, so that they can travel together.

        Args:
          reduce_op: as in `reduce`.
          value_destination_pairs: any iterable of tuples of a value and its destinations.
          options: as in `reduce`; `timeout_seconds` bounds the entire call.
          experimental_hints: the older name of `options`.

        Returns:
          One result for each pair, in their order; none for no pairs.

        Raises:
          RuntimeError: called in a replica function.
          ValueError: as in `reduce`, naming the pair; or an item is not a pair.
          DeadlineExceededError: `timeout_seconds` passed.

        Examples:
          >>> x, y = PerReplica([1.0, 3.0]), PerReplica([2, 4])
          >>> [z[0].tolist() for z in NcclAllReduce().batch_reduce("sum", [(x, x), (y, y)])]
          [4.0, 6]
        """
        pairs = checked_pairs(value_destination_pairs)
        named = [(f"[{i}]", pair) for i, pair in enumerate(pairs)]
        return self._reduced("batch_reduce", reduce_op, named, given(options, experimental_hints))

    @final
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy one value to every destination.

        To devices of several processes, all of them call it, and what the process of the first
        device passes is copied.

        Args:
          tensor: a number, an array, or a pytree of them; or a `Mirrored`.
          destinations: as in `reduce`.

        Returns:
          A `Mirrored`, or the plain value for one device. Copies that are in place are kept.

        Raises:
          RuntimeError: called in a replica function.
          ValueError: an argument is invalid, or the only destination belongs to another process.

        Examples:
          >>> NcclAllReduce().broadcast(1.0, PerReplica([0, 0, 0]))
          Mirrored(float32[] on 3: cpu:0, cpu:1, cpu:2)
        """
        return self._broadcast(tensor, destinations, self._options)

    @final
    def _broadcast(self, tensor: Any, destinations: Any, options: CommunicationOptions) -> Any:
        """`broadcast`; `timeout_seconds` bounds its exchange with other processes."""
        _check_between_programs("broadcast", tensor)
        devices = destination_devices(destinations, "broadcast")
        if isinstance(tensor, Mirrored):
            tensor = tensor.settled()
            spans = span_processes(tensor.devices)
            # Each process has a copy of its own already: nothing is sent.
            if spans or (set(tensor.devices) == set(devices) and len(devices) > 1):
                return delivered(tensor, devices)
            return copied(copy_near(tensor, devices), devices, options.timeout_seconds)
        for path, leaf in flattened(tensor, is_distributed)[0]:
            if not is_array(leaf):
                raise ValueError(
                    f"`broadcast` expects arrays or numbers, or a Mirrored; {where(path)} is "
                    f"{leaf!r} ({type(leaf).__name__})."
                )
        return copied(jax.tree.map(host_array, tensor), devices, options.timeout_seconds)

    @final
    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Join the replicas' values along one dimension, in replica order.

        Law: the result is `jnp.concatenate` of the parts, to the bit. Every class gathers alike:
        to the value's own devices by one compiled all-gather, to others by copies. Over several
        processes parts may differ in size from process to process, too.

        Args:
          per_replica_value: a `PerReplica` or `Mirrored`, of pytrees too; an array, which is the
            value of one replica; or, for parts whose sizes along `axis` differ, a list or tuple
            with one array for each replica.
          destinations: as in `reduce`.
          axis: the dimension along which each leaf is joined; negative ones count from the last.
          options: what carries the all-gather; `timeout_seconds` bounds the call.

        Returns:
          A `Mirrored`, or the plain value for one device.

        Raises:
          RuntimeError: called in a replica function.
          NotImplementedError: a leaf is an `IndexedSlices`.
          ValueError: an argument is invalid; a leaf has no such dimension; or parts differ in
            dtype, rank or another dimension, and both shapes are named.
          DeadlineExceededError: `timeout_seconds` passed.

        Examples:
          >>> import numpy as np
          >>> uneven = [np.array([1.0]), np.array([2.0, 3.0])]
          >>> NcclAllReduce().gather(uneven, "cpu:0", axis=0).tolist()
          [1.0, 2.0, 3.0]
        """
        return self._gathered(per_replica_value, destinations, axis, checked(options))

    @final
    def _gathered(
        self,
        value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
        path: str = "",
    ) -> Any:
        """`gather` of the value at this path of a tree, the same on all processes."""
        options = self._options.merge(options)
        _check_between_programs("gather", value)
        devices = destination_devices(destinations, "gather")
        name = type(self).__name__
        with no_mesh():
            return Gather(name, devices, axis, options, self._group, path).of(value)

    @abc.abstractmethod
    def _prepare(self, batch: Batch) -> list[tuple[Call, Sequence[Reduction]]]:
        """The calls to make, in this order.

        Each has beside it the reductions whose results it returns as a list: `Mirrored`s, or plain
        trees on one device.
        """

    def _reduced(
        self,
        caller: str,
        reduce_op: ReduceOp | str,
        pairs: Sequence[tuple[str, tuple[Any, Any]]],
        options: CommunicationOptions,
        settings: Hashable = (),
    ) -> list[Any]:
        op, merged = ReduceOp.of(reduce_op), self._options.merge(options)
        _check_between_programs(caller, [pair for _, pair in pairs])
        reductions = [self._checked(caller, name, *pair) for name, pair in pairs]
        moving = [r for r in reductions if not r.is_in_place(op)]
        made: dict[Reduction, Any] = {}
        if moving:
            values = counted(len(moving), "value")
            what = f"`{type(self).__name__}.{caller}` ({op.name} of {values})"
            with no_mesh():
                calls = self._prepare(Batch(op, moving, merged, what, settings))
                returned = run_all([call for call, _ in calls])
                for (_, reduced), results in zip(calls, returned, strict=True):
                    for r, result in zip(reduced, results, strict=True):
                        take = delivered if isinstance(result, Mirrored) else copied
                        made[r] = take(result, r.destinations)
        return [made[r] if r in made else r.value[0] for r in reductions]

    def _checked(self, caller: str, name: str, value: Any, destinations: Any) -> Reduction:
        caller += name
        devices = destination_devices(destinations, caller)
        with no_mesh():
            wrapped = self._of_all(caller, value, devices[0])
        dtypes = dict.fromkeys([leaf.dtype for leaf in jax.tree.leaves(wrapped.tree)])
        if not all(map(is_reducible, dtypes)):
            for path, leaf in flattened(wrapped.tree)[0]:
                check_reducible(name + path, leaf.dtype)
        return Reduction(wrapped, devices)

    def _of_all(self, caller: str, value: Any, device: jax.Device) -> PerReplica | Mirrored:
        """A value of all replicas, from what this process passes of it."""
        if isinstance(value, PerReplica | Mirrored):
            return of_all(type(self).__name__, value, self._group)
        if is_sparse(value):
            value.check(f"`{caller}`")
        elif not is_array(value):
            raise ValueError(
                f"`{caller}` expects a PerReplica, a Mirrored, an array or a number; got {value!r} "
                f"({type(value).__name__}). `PerReplica` takes a list with each replica's value."
            )
        elif isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
            raise ValueError(
                f"`{caller}` got an array over {len(value.sharding.device_set)} devices, which "
                "does not say what it is: `PerReplica.from_global` takes it for one row for each "
                "replica, `Mirrored.from_global` for one copy for each."
            )
        if span_processes(self._group):
            return Held.of_process([value], first_of_each_process(self._group)).assembled()
        if is_sparse(value):  # rows that no other replica shares
            return Mirrored([value], devices=own_devices([value]) or [device])
        if not isinstance(value, jax.Array):
            return Mirrored([value], devices=[device])
        return Mirrored.from_global(value)


def checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Values with their destinations, as `batch_reduce` takes them."""
    expected = "`batch_reduce` expects an iterable of tuples (value, destinations)"
    if not isinstance(pairs, Iterable):
        raise ValueError(f"{expected}; got {pairs!r}.")
    found = list(pairs)
    for i, pair in enumerate(found):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"{expected}; item {i} is a {type(pair).__name__}"
                + (f" of {len(pair)}." if isinstance(pair, tuple) else ".")
            )
    return found


def _check_between_programs(caller: str, tree: Any) -> None:
    """Refuse a call from inside a program, where a value is one replica's, or has none yet."""
    check_cross_replica(caller, "`jc.get_replica_context()` reduces and gathers")
    if any(issubclass(kind, Tracer) for kind in set(map(type, jax.tree.leaves(tree)))):
        raise ValueError(
            f"`{caller}` got a value that is being traced, so it lies on no device. Call it "
            "between programs; inside one, `jc.all_reduce` and its like deal with the value that "
            "the replica holds."
        )
