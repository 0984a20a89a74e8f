"""`NcclAllReduce`: one compiled all-reduce for everything that shares devices."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcoll._host.cross_device_ops import Call, CrossDeviceOps, Reduction
from jaxcoll._host.deadline import prepared
from jaxcoll._host.mesh import line_of
from jaxcoll._host.one_device import ReductionToOneDevice
from jaxcoll._host.values import AXIS, Mirrored, PerReplica
from jaxcoll._host.world import mesh_scope
from jaxcoll._plan.options import UNSET, CommunicationOptions, ReduceOp
from jaxcoll._plan.packing import NumPacks, PackingRule, Unpacked
from jaxcoll._spmd import reduce


class NcclAllReduce(CrossDeviceOps):
    """All-reduces in one compiled program, packed; NCCL carries it on NVIDIA GPUs.

    Law: all values of a batch that share a set of devices travel in one program, one dtype a
    pack, and come back in their order. What is no all-reduce goes to `ReductionToOneDevice`,
    one value at a time. On other platforms their own all-reduce carries it.

    Args:
      num_packs: packs of near-equal bytes to make of all the values together, one for each of
        their dtypes at least; 0: no packing.

    Of the options, `bytes_per_pack` replaces `num_packs` for its call, unless it is 0;
    `implementation` RING writes the ring out in the program; `timeout_seconds` bounds the call.

    Raises:
      ValueError: `num_packs` is no integer, or negative.

    Example:
      >>> grads = PerReplica([{"w": [1.0, 2.0], "b": 3.0}, {"w": [5.0, 6.0], "b": 7.0}])
      >>> NcclAllReduce(num_packs=2).reduce("mean", grads, destinations=grads)[1]["b"].tolist()
      5.0
    """

    def __init__(self, num_packs: int = 1) -> None:
        whole = isinstance(num_packs, numbers.Integral) and not isinstance(num_packs, bool)
        if not whole or num_packs < 0:
            raise ValueError(
                f"`num_packs` must be a non-negative integer (0: no packing); got {num_packs!r}."
            )
        self._num_packs = int(num_packs)
        self._otherwise = ReductionToOneDevice()

    def __repr__(self) -> str:
        return f"NcclAllReduce(num_packs={self._num_packs})"

    def _prepare(
        self,
        reduce_op: ReduceOp,
        reductions: Sequence[Reduction],
        options: CommunicationOptions,
    ) -> Call:
        together: dict[frozenset[jax.Device], list[int]] = {}
        alone: list[int] = []
        for i, r in enumerate(reductions):
            if r.is_all_reduce:
                together.setdefault(frozenset(r.destinations), []).append(i)
            else:
                alone.append(i)
        order = [i for members in together.values() for i in members] + alone
        calls = [
            self._prepare_all_reduce(reduce_op, [reductions[i] for i in members], options)
            for members in together.values()
        ]
        if alone:
            rest = [reductions[i] for i in alone]
            calls.append(self._otherwise._prepare(reduce_op, rest, options))

        def call() -> list[Any]:
            results = dict(zip(order, (x for c in calls for x in c()), strict=True))
            return [results[i] for i in range(len(reductions))]

        return call

    def _prepare_all_reduce(
        self,
        reduce_op: ReduceOp,
        reductions: Sequence[Reduction],
        options: CommunicationOptions,
    ) -> Call:
        # One program has one order of devices, and a sum does not care in which it is made.
        devices = reductions[0].value.devices
        values = [r.value.reordered(devices) for r in reductions]
        packing = NumPacks(self._num_packs) if self._num_packs else Unpacked()
        program = all_reduce_program(
            devices,
            reduce_op,
            options.replace(timeout_seconds=UNSET),
            None if options.bytes_per_pack else packing,
        )

        run = prepared(program, options.timeout_seconds, values)

        def call() -> list[Mirrored]:
            return [s.reordered(r.destinations) for s, r in zip(run(), reductions, strict=True)]

        return call


@functools.lru_cache(maxsize=256)
def all_reduce_program(
    devices: tuple[jax.Device, ...],
    reduce_op: ReduceOp,
    options: CommunicationOptions,
    packing: PackingRule | None,
) -> Callable[[list[PerReplica | Mirrored]], list[Mirrored]]:
    """The all-reduce of a list of values over the same devices, compiled once for each shape.

    Args:
      devices: where it runs, in the order of the values' replicas.
      reduce_op: SUM or MEAN.
      options: what carries it, and how it is packed where `packing` is None.
      packing: a rule that stands whatever the options say.

    Returns:
      A jitted function of the values, which all lie on `devices` in this order.
    """
    mesh = line_of(devices, AXIS)
    scope = dataclasses.replace(mesh_scope(mesh), options=options)

    def reduced(values: list[PerReplica | Mirrored]) -> list[Mirrored]:
        local = [
            jax.tree.map(lambda x: jnp.squeeze(x, 0), v.tree)
            if isinstance(v, PerReplica)
            else v.tree
            for v in values
        ]
        sums = reduce.all_reduce(
            reduce_op, local, AXIS, scope=scope, invariant="replicated", packing=packing
        )
        return [Mirrored.of(s) for s in sums]

    def program(values: list[PerReplica | Mirrored]) -> list[Mirrored]:
        lying = [PartitionSpec(*[AXIS] * isinstance(v, PerReplica)) for v in values]
        return jax.shard_map(
            reduced, mesh=mesh, in_specs=(lying,), out_specs=PartitionSpec(), check_vma=True
        )(values)

    return jax.jit(program)
