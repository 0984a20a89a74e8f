"""One value for each replica, or one value on all of them: views of global arrays."""

from __future__ import annotations

import abc
import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Self, final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll._distribute.values.assemble import assembled, own_devices, part_on, viewed
from jaxcoll._mesh.mesh import checked_devices, line_of, no_mesh
from jaxcoll._show.units import counted

AXIS = "replica"
"""The mesh axis along which every distributed value lies."""


class DistributedValues(abc.ABC):
    """A value on several replicas: a `PerReplica`, one for each, or a `Mirrored`, the same on all.

    It is a pytree of global arrays that lie over a line of devices, one for each replica. Over
    several processes every process holds its own replicas' parts.
    """

    __slots__ = ("_tree",)
    _tree: Any
    _expected: ClassVar[str]

    def __init__(
        self, values: Sequence[Any], *, devices: Sequence[jax.Device] | None = None
    ) -> None:
        name = type(self).__name__
        if not isinstance(values, list | tuple):
            raise ValueError(
                f"`{name}` expects a list or tuple with one value for each replica; got "
                f"{type(values).__name__}. `{name}.from_global` takes arrays that lie over the "
                f"devices already, `{name}.from_function` makes a value from each replica id."
            )
        if not values:
            raise ValueError(f"`{name}` got no values; it needs at least one replica.")
        if devices is None:
            devices = own_devices(values) or _usual_devices(len(values))
        found = checked_devices(devices, name)
        if len(found) != len(values):
            raise ValueError(
                f"`{name}` expects one device for each value; got "
                f"{counted(len(values), 'value')} and {counted(len(found), 'device')}."
            )
        self._tree = self._assembled(found, values.__getitem__)

    @final
    @classmethod
    def from_function(
        cls, fun: Callable[[int], Any], *, devices: Sequence[jax.Device] | None = None
    ) -> Self:
        """The values that `fun` gives for the replica ids 0, 1, ...

        Args:
          fun: from a replica id to that replica's value, called for the replicas of this
            process.
          devices: one a replica; None: all.

        Returns:
          A new value, as from the constructor, with the same errors.

        Examples:
          >>> PerReplica.from_function(lambda i: 10.0 * i)[3].tolist()
          30.0
        """
        found = checked_devices(jax.devices() if devices is None else devices, cls.__name__)
        return cls.of(cls._assembled(found, fun))

    @final
    @classmethod
    def from_global(cls, tree: Any) -> Self:
        """A view of arrays that lie over the devices already: nothing is copied.

        Args:
          tree: a global `jax.Array`, or a pytree of them over the same devices.

        Returns:
          A value with one replica a device.

        Raises:
          ValueError: there is no leaf, one is no global array, or lies differently.
        """
        return cls.of(tree).settled()

    @final
    @classmethod
    def of(cls, tree: Any) -> Self:
        """`tree` wrapped without a look, as JAX's transformations need it."""
        self = object.__new__(cls)
        self._tree = tree
        return self

    @final
    @property
    def tree(self) -> Any:
        """The global arrays, in the structure of one replica's value: nothing is copied."""
        return self._tree

    @final
    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each replica, in the order of their ids."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._tree):
            return self._devices_of(path, leaf)
        raise ValueError(f"`{type(self).__name__}` got a tree without leaves; it needs an array.")

    @final
    @property
    def num_replicas(self) -> int:
        """How many replicas there are, which is also `len(value)`."""
        return len(self.devices)

    @final
    @property
    def values(self) -> tuple[Any, ...]:
        """The value of every replica, as `value[i]` gives it."""
        return tuple(self)

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, replica: int) -> Any:
        devices = self.devices
        try:
            replica = operator.index(replica)
        except TypeError:
            raise TypeError(
                f"{type(self).__name__} is indexed by a replica id, an integer; got {replica!r}."
            ) from None
        if not -len(devices) <= replica < len(devices):
            raise IndexError(f"There are replicas 0 to {len(devices) - 1}; got {replica}.")
        device = devices[replica]
        if device.process_index != jax.process_index():
            raise ValueError(
                f"Replica {replica} lies on {device} of process {device.process_index}, where "
                f"process {jax.process_index()} cannot read it; all-reduce or gather it first."
            )
        with no_mesh():
            return jax.tree.map(lambda leaf: self._component(part_on(leaf, device)), self._tree)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} lies on devices and cannot be pickled; pickle the values, as "
            "in `jax.tree.map(np.asarray, value[0])`, and place them again."
        )

    def __copy__(self) -> Self:
        return type(self).of(self._tree)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self).of(copy.deepcopy(self._tree, memo))

    def __repr__(self) -> str:
        try:
            devices = [str(device) for device in self.devices]
        except ValueError:  # a transformation holds it, or its leaves have moved
            return f"{type(self).__name__}({self._tree!r})"
        tree = jax.tree.map(
            lambda leaf: _Plain(f"{leaf.dtype.name}{[*self._shape(leaf.shape)]}"), self._tree
        )
        where = devices if len(devices) < 5 else [devices[0], devices[1], "…", devices[-1]]
        return f"{type(self).__name__}({tree!r} on {len(devices)}: {', '.join(where)})"

    @final
    def settled(self) -> Self:
        """The same value, each leaf checked, and typed by the one mesh of its devices.

        Returns:
          A view: nothing is copied.

        Raises:
          ValueError: there is no leaf, one is no global array, or lies differently.
        """
        devices = self.devices
        sharding = self._sharding(devices)

        def settle(path: Any, leaf: Any) -> jax.Array:
            if getattr(leaf, "sharding", None) == sharding:
                return leaf
            found = self._devices_of(path, leaf)
            if found != devices:
                raise ValueError(
                    f"`{type(self).__name__}`: leaf {jax.tree_util.keystr(path)} lies on "
                    f"{', '.join(map(str, found))}, but the first leaf on "
                    f"{', '.join(map(str, devices))}; all must lie on the same, in one order."
                )
            return viewed(leaf, sharding)

        return self.of(jax.tree_util.tree_map_with_path(settle, self._tree))

    @final
    def reordered(self, devices: tuple[jax.Device, ...]) -> Self:
        """A view whose replicas are counted in the order of `devices`: nothing is copied."""
        if devices == self.devices:
            return self
        sharding = self._sharding(devices)
        return self.of(jax.tree.map(lambda leaf: viewed(leaf, sharding), self._tree))

    @final
    def _devices_of(self, path: Any, leaf: Any) -> tuple[jax.Device, ...]:
        name = f"leaf {jax.tree_util.keystr(path)}" if path else "the value"
        if isinstance(leaf, Tracer):
            raise ValueError(
                f"`{type(self).__name__}`: {name} is being traced, so it lies on no device. "
                "Use this between programs; inside one, `jc.all_reduce` reduces the value that "
                "the replica holds."
            )
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"`{type(self).__name__}` expects {name} to be a global jax.Array; "
                f"got {type(leaf).__name__}."
            )
        devices = self._layout(leaf)
        if devices is None:
            raise ValueError(
                f"`{type(self).__name__}` expects {name} {self._expected}; got shape "
                f"{leaf.shape} over {counted(len(leaf.sharding.device_set), 'device')}: "
                f"{leaf.sharding}."
            )
        return devices

    @classmethod
    @abc.abstractmethod
    def _assembled(cls, devices: tuple[jax.Device, ...], value_of: Callable[[int], Any]) -> Any:
        """The global arrays made of each replica's value."""

    @staticmethod
    @abc.abstractmethod
    def _sharding(devices: tuple[jax.Device, ...]) -> NamedSharding:
        """How every leaf lies."""

    @staticmethod
    @abc.abstractmethod
    def _layout(leaf: jax.Array) -> tuple[jax.Device, ...] | None:
        """Which device holds each replica's part; None if the leaf lies differently."""

    @staticmethod
    @abc.abstractmethod
    def _component(part: jax.Array) -> jax.Array:
        """A replica's value, from the part of the global array on its device."""

    @staticmethod
    @abc.abstractmethod
    def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        """A replica's shape, from the global one."""


@final
class PerReplica(DistributedValues):
    """One value for each replica: a pytree of arrays, a row on each device.

    Law: a leaf is a global array of shape (n, *shape) with row i on device i, which is what
    `jax.pmap` returns and takes: wrapping one, and taking `tree` out, copies nothing. It passes
    through `jax.jit`; `value[i]` is replica i's part, on its device.

    Args:
      values: a list or tuple with one value for each replica: numbers, numpy arrays,
        single-device arrays, or pytrees of these, all of one structure, shape and dtype.
      devices: one for each value. None: the devices on which the values lie, if each lies on
        its own; else all devices, if there are as many; else the first ones of this process.

    Raises:
      ValueError: the values disagree (replica and leaf are named) or hold what is no array;
        the devices do not match.

    Examples:
      >>> value = PerReplica([{"w": 1.0}, {"w": 2.0}])
      >>> value
      PerReplica({'w': float32[]} on 2: cpu:0, cpu:1)
      >>> value.tree["w"].tolist(), value[1]["w"].tolist()
      ([1.0, 2.0], 2.0)
    """

    __slots__ = ()
    _expected = "to have a leading replica dimension, one row on each of its devices"

    @classmethod
    def _assembled(cls, devices: tuple[jax.Device, ...], value_of: Callable[[int], Any]) -> Any:
        return assembled(cls.__name__, devices, value_of, rows_over(devices), rows=True)

    @staticmethod
    def _sharding(devices: tuple[jax.Device, ...]) -> NamedSharding:
        return rows_over(devices)

    @staticmethod
    def _layout(leaf: jax.Array) -> tuple[jax.Device, ...] | None:
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        if not leaf.ndim or leaf.shape[0] != len(parts):
            return None
        if leaf.sharding.shard_shape(leaf.shape) != (1, *leaf.shape[1:]):
            return None
        row = {device: next(iter(index)).start or 0 for device, index in parts.items()}
        return tuple(sorted(row, key=row.__getitem__))

    @staticmethod
    def _component(part: jax.Array) -> jax.Array:
        return jnp.squeeze(part, 0)

    @staticmethod
    def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[1:]


@final
class Mirrored(DistributedValues):
    """One value with a copy on every replica's device: a pytree of replicated arrays.

    Law: the copies are equal to the bit. The constructor compares them; `from_global` takes
    JAX's word for it, and copies nothing, nor does taking `tree` out. `value[i]` is the copy on
    replica i's device.

    Args:
      values: a list or tuple with the value of each replica, all equal; as in `PerReplica`.
      devices: as in `PerReplica`.

    Raises:
      ValueError: as in `PerReplica`; the copies differ.

    Examples:
      >>> Mirrored.from_function(lambda i: [1, 2.5])
      Mirrored([int32[], float32[]] on 8: cpu:0, cpu:1, …, cpu:7)
    """

    __slots__ = ()
    _expected = "to be replicated over its devices"

    @classmethod
    def _assembled(cls, devices: tuple[jax.Device, ...], value_of: Callable[[int], Any]) -> Any:
        return assembled(cls.__name__, devices, value_of, copies_over(devices), rows=False)

    @staticmethod
    def _sharding(devices: tuple[jax.Device, ...]) -> NamedSharding:
        return copies_over(devices)

    @staticmethod
    def _layout(leaf: jax.Array) -> tuple[jax.Device, ...] | None:
        if not leaf.sharding.is_fully_replicated:
            return None
        return tuple(leaf.sharding.devices_indices_map(leaf.shape))

    @staticmethod
    def _component(part: jax.Array) -> jax.Array:
        return part

    @staticmethod
    def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


for _kind in (PerReplica, Mirrored):
    jax.tree_util.register_pytree_with_keys(
        _kind,
        lambda value: (((jax.tree_util.GetAttrKey("tree"), value.tree),), None),
        lambda _, children, kind=_kind: kind.of(*children),
    )


@functools.lru_cache(maxsize=1024)
def rows_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """One row of the leading dimension on each device."""
    return NamedSharding(line_of(devices, AXIS), PartitionSpec(AXIS))


@functools.lru_cache(maxsize=1024)
def copies_over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    """One whole copy on each device."""
    return NamedSharding(line_of(devices, AXIS), PartitionSpec())


def _usual_devices(count: int) -> Sequence[jax.Device]:
    """All devices if there are as many, else the first ones of this process."""
    every = jax.devices()
    return every if len(every) == count else jax.local_devices()[:count]


class _Plain(str):
    """Text that stands in a `repr` as it is."""

    __slots__ = ()
    __repr__ = str.__str__
