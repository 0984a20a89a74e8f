"""Values, destinations and options that users pass to an op or a strategy; and copies."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from jaxcoll._collectives.broadcast import send_tree
from jaxcoll._collectives.scope import Scope
from jaxcoll._collectives.sparse import check_slices, is_sparse
from jaxcoll._plan.checks import refuse
from jaxcoll._plan.options import CommunicationOptions, check_options
from jaxcoll._plan.packs.leaves import is_array
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.dispatch import run
from jaxcoll._step.mesh.mesh import check_devices, local_positions, make_line, span_processes
from jaxcoll._step.mesh.placement import host_array
from jaxcoll.distribute._assemble import own_devices
from jaxcoll.distribute._per_replica import DistributedValues, Mirrored, Uneven
from jaxcoll.distribute._replica_axis import AXIS, copies_over, make_program, refuse_traced

# TensorFlow calls the only task of a program that is not distributed "localhost".
_SPELLING = re.compile(
    r"(?:/job:(?P<job>worker|localhost)(?:/replica:\d+)?/task:(?P<task>\d+)(?=/|$))?"
    r"(?:/?(?:device:)?(?P<platform>(?!job|task|replica)[a-z]+):(?P<number>\d+))?",
    re.IGNORECASE,
)


def distribute_value(
    caller: str,
    name: str,
    value: Any,
    group: tuple[jax.Device, ...],
    device: jax.Device,
) -> DistributedValues:
    """Convert what a user passes into a value of all replicas, or this process's parts of one.

    `value` is a `PerReplica`, `Mirrored` or `Uneven` over the devices of `group` (one for each
    replica; (): any), over this process's devices of the group, or over the first of each process.
    Or it is a plain value: that of one replica, or, with several processes, one of each process. A
    plain value goes to `device` if it lies on none. Messages name `caller`, and `name` of the op.

    Raises:
      ValueError: it is something else, or lies on other devices.
    """
    if isinstance(value, DistributedValues):
        return fit_to_group(name, value, group)
    if isinstance(value, Tracer):
        refuse_traced(f"`{caller}`: the value")
    if is_sparse(value):
        check_slices(value, f"`{caller}`")
    elif not is_array(value):
        raise ValueError(
            f"`{caller}` expects a PerReplica, a Mirrored, an array or a number; got {value!r} "
            f"({type(value).__name__}). `PerReplica` takes a list with each replica's value."
        )
    elif isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        raise ValueError(
            f"`{caller}` got an array over {len(value.sharding.device_set)} devices, which may be "
            "rows or copies: pass `PerReplica.from_global` or `Mirrored.from_global` of it."
        )
    if span_processes(group):
        firsts = first_of_each_process(group)
        (replica,) = local_positions(firsts)
        return Uneven._wrap({replica: value if is_sparse(value) else host_array(value)}, firsts)
    if isinstance(value, jax.Array):
        return Mirrored.from_global(value)
    if device.process_index != jax.process_index():  # the op refuses or handles this device later
        device = jax.local_devices()[0]
    return Mirrored([value], devices=own_devices([value]) or [device])


def fit_to_group(
    name: str, value: DistributedValues, group: tuple[jax.Device, ...]
) -> DistributedValues:
    """Check that `value` lies over all of `group`, or make it this process's parts of one.

    As in TensorFlow, each worker passes its own part, and gets the result over all. A `Mirrored` of
    one process counts as one row per replica: the copies of other processes may differ from it.

    Raises:
      ValueError: it lies on other devices.
    """
    value = value._validate()
    devices = value.devices
    if not group or devices == group:
        return value
    lies_on, spans = set(devices), span_processes(group)
    if lies_on == set(group) or (spans and lies_on == set(first_of_each_process(group))):
        return value
    here = local_positions(group)
    if spans and lies_on == {group[i] for i in here}:
        part_on = dict(zip(devices, value, strict=True))
        return Uneven._wrap({i: part_on[group[i]] for i in here}, group)
    raise ValueError(
        f"`{name}` reduces over its own {len(group)} devices, {', '.join(map(str, group))}; got a "
        f"value over {', '.join(map(str, devices))}."
        + " Or pass this process's share of these devices."
        * spans
    )


def first_of_each_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    first = {device.process_index: device for device in reversed(devices)}
    return tuple(device for device in devices if first[device.process_index] == device)


def destination_devices(destinations: Any, caller: str) -> tuple[jax.Device, ...]:
    """List the devices of a result, in the order of the replicas."""
    if isinstance(destinations, DistributedValues):
        return destinations.devices
    if isinstance(destinations, jax.Array) and not isinstance(destinations, Tracer):
        return tuple(destinations.sharding.devices_indices_map(destinations.shape))
    if isinstance(destinations, jax.Device):
        return (destinations,)
    if isinstance(destinations, str):
        return (device_named(destinations, caller),)
    raise ValueError(
        f"`{caller}` expects destinations to be a PerReplica, a Mirrored, a jax.Array, a device or "
        f'a device string such as "cpu:0"; got {destinations!r} ({type(destinations).__name__}). '
        "Several devices: a value on them, as `Mirrored.from_function(lambda i: 0, devices=...)`."
    )


def devices_named(devices: Sequence[Any], caller: str) -> tuple[jax.Device, ...]:
    """Look up device strings; refuse a device that is listed twice."""
    named = [device_named(d, caller) if isinstance(d, str) else d for d in devices]
    return check_devices(named, caller)


def device_named(name: str, caller: str) -> jax.Device:
    """Find the device with this name, in any process.

    A name is `str(device)`, which is unique among all processes; or a platform and a number, in
    any case, in TensorFlow's spellings: "/gpu:1", "/device:GPU:1" of this process,
    "/job:worker/task:2/device:GPU:1" of process 2. A task alone means its first device.

    Raises:
      ValueError: no device has that name; the message lists those there are.
    """
    for device in jax.devices():
        if str(device) == name:
            return device
    spelled = _SPELLING.fullmatch(name)
    if spelled is None or not (spelled["platform"] or spelled["job"]):
        raise ValueError(
            f'`{caller}` expects a device string such as "cpu:0", "gpu:1", "/device:GPU:1" or '
            f'"/job:worker/task:0/device:GPU:1"; got {name!r}.'
        )
    platform, number = (spelled["platform"] or "").lower(), int(spelled["number"] or 0)
    try:
        devices = jax.devices(platform or None)
    except RuntimeError:
        devices = []
    # TensorFlow counts the devices of each task from 0; JAX's ids continue across processes.
    is_worker = (spelled["job"] or "").lower() == "worker"
    process = int(spelled["task"]) if is_worker else jax.process_index()
    of_task = [device for device in devices if device.process_index == process]
    if number < len(of_task):
        return of_task[number]
    listed = ", ".join(map(str, of_task or devices or jax.devices()))
    raise ValueError(f"`{caller}` got {name!r}, but there is no such device. There are: {listed}.")


def deliver(result: Any, devices: tuple[jax.Device, ...]) -> Any:
    """Place a result on `devices`: a `Mirrored` over several, a plain value on one.

    A result that already lies there is not copied. Otherwise each process copies the `Mirrored` or
    plain result that it has to those of `devices` that it owns; a process that owns none keeps its
    copy.
    """
    if isinstance(result, Mirrored):
        if len(devices) > 1 and set(devices) == set(result.devices):
            return result if result.devices == devices else result._reorder(devices)
        result = copy_near(result, devices)
    here = [devices[i] for i in local_positions(devices)]
    if not here:
        return result
    if len(devices) == 1:
        # Put on a device itself, an array of an Explicit mesh would keep the type of that mesh.
        return jax.device_put(result, SingleDeviceSharding(devices[0]))
    sharding = copies_over(devices)

    def copy_to_all(leaf: Any) -> jax.Array:
        parts = jax.device_put([leaf] * len(here), here)
        return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, parts)

    return Mirrored._wrap(jax.tree.map(copy_to_all, result))


def broadcast_to(
    tree: Any, devices: tuple[jax.Device, ...], timeout_seconds: float | None = None
) -> Any:
    """Copy a plain tree to `devices`, from the process of the first if there are several."""
    if not span_processes(devices):
        check_here(devices[0])
        return deliver(tree, devices)
    # Rows, not copies, because processes may pass different values here.
    rows = Uneven._wrap(dict.fromkeys(local_positions(devices), tree), devices)._make_global()
    program = make_program("broadcast", make_line(devices, AXIS), _broadcast_first, (False,))
    options = CommunicationOptions(timeout_seconds=timeout_seconds)
    call = Call(program, (rows.tree,), devices, "`broadcast`", options)
    return Mirrored._wrap(run(call), devices)


def _broadcast_first(trees: Sequence[Any], scope: Scope) -> Any:
    return send_tree(trees[0], AXIS, source=0, scope=scope)


def check_here(device: jax.Device) -> None:
    """Refuse a device of another process, where this one can place nothing."""
    if device.process_index != jax.process_index():
        raise ValueError(
            f"{device} belongs to process {device.process_index}, and this is another, whose "
            f"devices are {', '.join(map(str, jax.local_devices()))}. Pass one of these, or a "
            "value that lies on the devices of all processes."
        )


def copy_near(value: DistributedValues, devices: tuple[jax.Device, ...]) -> Any:
    """Take this process's copy of `value` on one of `devices`, or else any copy that it has."""
    here = local_positions(value.devices)
    return value[next((i for i in here if value.devices[i] in devices), here[0])]


def call_options(options: Any, experimental_hints: Any) -> CommunicationOptions:
    """The options of a call may be passed under either name."""
    if experimental_hints is None:
        return check_options(options)
    if options is not None:
        raise ValueError("`experimental_hints` is the older name of `options`: pass only one.")
    if not isinstance(experimental_hints, CommunicationOptions):
        what = "a CollectiveHints, a CommunicationOptions or None"
        refuse("experimental_hints", what, experimental_hints)
    return experimental_hints


@jax.tree_util.register_static
class CollectiveHints(CommunicationOptions):
    """Deprecated spelling of `CommunicationOptions`, without `implementation`.

    It is one, with both options set: it compares equal, raises alike, and works wherever one does.

    Warns:
      DeprecationWarning: always.

    Examples:
      >>> import warnings
      >>> with warnings.catch_warnings(action="ignore"):
      ...     hints = CollectiveHints(timeout_seconds=120)
      >>> isinstance(hints, CollectiveHints), isinstance(hints, CommunicationOptions)
      (True, True)
    """

    __slots__ = ()

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> None:
        warnings.warn(
            "CollectiveHints is deprecated; use CommunicationOptions, which takes the same "
            "arguments.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(bytes_per_pack, timeout_seconds)
