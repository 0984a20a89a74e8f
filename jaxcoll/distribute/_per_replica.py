"""One value for each replica, or one value on all of them: views of global arrays."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, final

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jaxcoll._plan.packs.leaves import where
from jaxcoll._show.units import pluralize
from jaxcoll._step.mesh.mesh import check_devices, local_positions, no_mesh
from jaxcoll._step.mesh.placement import view
from jaxcoll.distribute._assemble import assemble, own_devices
from jaxcoll.distribute._replica_axis import copies_over, drop_row, refuse_traced, rows_over


class DistributedValues:
    """A value on several replicas: a `PerReplica`, one for each, or a `Mirrored`, the same on all.

    It is a pytree of global arrays over a line of devices, one for each replica; `tree` has them in
    the structure of one replica's value, without a copy. With several processes, each holds the
    parts of its own replicas, and all of them construct the value: they exchange shapes (and
    digests of copies) in one round trip, and all refuse values that disagree.

    Args:
      values: a list or tuple with one value for each replica: numbers, numpy arrays,
        single-device arrays, or pytrees of these, all of one structure, shape and dtype. A
        `PerReplica` of unequal shapes is uneven parts, for `gather` and for `reduce` along an axis.
      devices: one for each value. None: the devices of the values, if each lies on a different
        one; else all devices, if there are as many; else the first ones of this process.

    Raises:
      ValueError: the values disagree (the message names replica and leaf), or one is not an array;
        the devices do not match.
    """

    tree: Any
    """The global arrays, in the structure of one replica's value."""
    _rows: ClassVar[bool]  # true if each device holds one row of the arrays, false if all of them

    def __init_subclass__(cls, *, rows: bool, of_parts: bool = False) -> None:
        cls._rows = rows
        # Global arrays know their devices, even after a transformation; parts do not.
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda value: (
                ((jax.tree_util.GetAttrKey("tree"), value.tree),),
                value.devices if of_parts else None,
            ),
            lambda devices, children: cls._wrap(next(iter(children)), devices),
            lambda value: ((value.tree,), value.devices if of_parts else None),
        )

    if TYPE_CHECKING:  # for readers; a constructor may return an `Uneven`

        def __init__(
            self, values: Sequence[Any], *, devices: Sequence[jax.Device] | None = None
        ) -> None: ...

    def __new__(cls, values: Sequence[Any], *, devices: Sequence[jax.Device] | None = None) -> Any:
        if cls is DistributedValues:
            raise TypeError("`DistributedValues` is the base class of `PerReplica` and `Mirrored`.")
        name = cls.__name__
        if not isinstance(values, list | tuple):
            raise ValueError(
                f"`{name}` expects a list or tuple with one value for each replica; got "
                f"{type(values).__name__}. `{name}.from_global` takes arrays over the devices."
            )
        if not values:
            raise ValueError(f"`{name}` got no values; it needs at least one replica.")
        if devices is None:
            count, every = len(values), jax.devices()
            default = every if len(every) == count else jax.local_devices()[:count]
            devices = own_devices(values) or default
        line = check_devices(devices, name)
        if len(line) != len(values):
            got = f"{pluralize(len(values), 'value')} and {pluralize(len(line), 'device')}"
            raise ValueError(f"`{name}` expects one device for each value; got {got}.")
        return cls._make(values.__getitem__, line)

    @final
    @classmethod
    def from_function(
        cls, fun: Callable[[int], Any], *, devices: Sequence[jax.Device] | None = None
    ) -> Self:
        """Make a value from `fun(0)`, `fun(1)`, ..., one for each replica.

        `fun` is called for the replicas of this process. `devices` has one for each replica; None:
        all devices. Errors are those of the constructor.

        Examples:
          >>> PerReplica.from_function(lambda i: 10.0 * i)[3].tolist()
          30.0
        """
        line = check_devices(jax.devices() if devices is None else devices, cls.__name__)
        return cls._make(fun, line)

    @final
    @classmethod
    def _make(cls, value_of: Callable[[int], Any], line: tuple[jax.Device, ...]) -> Any:
        """Make the value of replicas; an `Uneven` if their rows differ in shape."""
        uneven = Uneven._wrap if cls._rows else None
        tree = assemble(cls.__name__, line, value_of, rows=cls._rows, uneven=uneven)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_distributed)
        if not any(map(is_distributed, leaves)):
            return cls._wrap(tree, line)
        values = [x if is_distributed(x) else cls._wrap(x, line) for x in leaves]
        here = local_positions(line)
        return Uneven._wrap({i: treedef.unflatten(x[i] for x in values) for i in here}, line)

    @final
    @classmethod
    def from_global(cls, tree: Any) -> Self:
        """Wrap arrays that already lie over the devices, one replica on each; nothing is copied.

        Args:
          tree: a global `jax.Array`, or a pytree of them over the same devices.

        Raises:
          ValueError: there is no leaf; a leaf is not a global array, or has another layout.
        """
        return cls._wrap(tree)._validate()

    @final
    @classmethod
    def _wrap(cls, tree: Any, devices: tuple[jax.Device, ...] | None = None) -> Self:
        """Wrap `tree` without a check, as JAX's transformations need it."""
        self = object.__new__(cls)
        self.tree = tree
        if devices is not None:
            self.devices = devices
        return self

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each replica, in the order of their ids."""
        paths_and_leaves = jax.tree_util.tree_leaves_with_path(self.tree)
        if not paths_and_leaves:
            name = type(self).__name__
            raise ValueError(f"`{name}` got a tree without leaves; it needs an array.")
        return self._find_devices(*paths_and_leaves[0])

    @final
    @property
    def num_replicas(self) -> int:
        """The number of replicas, which is also `len(value)`."""
        return len(self.devices)

    @final
    @property
    def values(self) -> tuple[Any, ...]:
        """The tuple of `value[i]` for every replica."""
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
            what = f"{type(self).__name__} is indexed by a replica id, an integer"
            raise TypeError(f"{what}; got {replica!r}.") from None
        if not -len(devices) <= replica < len(devices):
            raise IndexError(f"There are replicas 0 to {len(devices) - 1}; got {replica}.")
        device = devices[replica]
        if device.process_index != jax.process_index():
            lies = f"Replica {replica} lies on {device} of process {device.process_index}"
            here = f"process {jax.process_index()}"
            raise ValueError(f"{lies}, where {here} cannot read it; all-reduce or gather it first.")
        with no_mesh():
            part = self._part(device)
            return drop_row(part) if self._rows else part

    def _part(self, device: jax.Device) -> Any:
        """Return the part on `device`; a row still has its leading dimension."""

        def here(leaf: jax.Array) -> jax.Array:
            return next(shard.data for shard in leaf.addressable_shards if shard.device == device)

        return jax.tree.map(here, self.tree)

    def __reduce__(self) -> NoReturn:
        what = f"A {type(self).__name__} lies on devices and cannot be pickled"
        raise TypeError(f"{what}; pickle `jax.tree.map(np.asarray, value[0])`, and place it again.")

    def __copy__(self) -> Self:
        return jax.tree.map(lambda leaf: leaf, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), self)

    def __repr__(self) -> str:
        try:
            devices = [str(device) for device in self.devices]
        except ValueError:  # inside a transformation, or with leaves that were moved
            return f"{type(self).__name__}({self.tree!r})"
        shown = devices if len(devices) < 5 else [devices[0], devices[1], "…", devices[-1]]
        tree = _show(self.tree, int(self._rows))
        return f"{type(self).__name__}({tree} on {len(devices)}: {', '.join(shown)})"

    def _make_global(self) -> DistributedValues:
        """Only an `Uneven` has to be converted to global arrays."""
        return self

    def _validate(self) -> Self:
        """Check every leaf, and make a view typed by one mesh of the devices."""
        devices = self.devices
        sharding = self._sharding_over(devices)
        for leaf in jax.tree.leaves(self.tree):
            if getattr(leaf, "sharding", None) != sharding or leaf.is_deleted():
                break
        else:
            return self

        def settle(path: Any, leaf: Any) -> jax.Array:
            if getattr(leaf, "sharding", None) == sharding:
                return leaf
            if (of_leaf := self._find_devices(path, leaf)) != devices:
                mine, first = (", ".join(map(str, line)) for line in (of_leaf, devices))
                raise ValueError(
                    f"`{type(self).__name__}`: leaf {jax.tree_util.keystr(path)} lies on {mine}, "
                    f"but the first leaf on {first}; all must lie on the same, in the same order."
                )
            return view(leaf, sharding)

        return self._wrap(jax.tree_util.tree_map_with_path(settle, self.tree), devices)

    @final
    def _reorder(self, devices: tuple[jax.Device, ...]) -> Self:
        """View the replicas in the order of `devices`; nothing is copied."""
        sharding = self._sharding_over(devices)
        return self._wrap(jax.tree.map(lambda leaf: view(leaf, sharding), self.tree), devices)

    def _sharding_over(self, devices: tuple[jax.Device, ...]) -> NamedSharding:
        return (rows_over if self._rows else copies_over)(devices)

    @final
    def _find_devices(self, path: Any, leaf: Any) -> tuple[jax.Device, ...]:
        # The fast path for results of programs: one comparison, not an index for each device.
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and not isinstance(leaf, Tracer):
            devices = tuple(mesh.devices.flat)
            if leaf.sharding == self._sharding_over(devices):
                if not self._rows or leaf.shape[:1] == (len(devices),):
                    return devices
        name = where(jax.tree_util.keystr(path))
        if isinstance(leaf, Tracer):
            refuse_traced(f"`{type(self).__name__}`: {name}")
        expects = f"`{type(self).__name__}` expects {name}"
        if not isinstance(leaf, jax.Array):
            raise ValueError(f"{expects} to be a global jax.Array; got {type(leaf).__name__}.")
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        if not self._rows:
            fits, expected = leaf.sharding.is_fully_replicated, "to be replicated over its devices"
        else:
            is_row = leaf.sharding.shard_shape(leaf.shape) == (1, *leaf.shape[1:])
            fits = leaf.shape[:1] == (len(parts),) and is_row
            expected = "to have a leading replica dimension, one row on each of its devices"
        if not fits:
            over = pluralize(len(parts), "device")
            raise ValueError(
                f"{expects} {expected}; got shape {leaf.shape} over {over}: {leaf.sharding}."
            )
        if not self._rows:
            return tuple(parts)
        # A row may lie on any device: replicas are counted by rows, not by devices.
        return tuple(sorted(parts, key=lambda device: parts[device][0].start or 0))


@final
class PerReplica(DistributedValues, rows=True):
    """One value for each replica: a pytree of arrays, a row on each device.

    Guarantees: a leaf of `tree` is a global array of shape (n, *shape) with row i on device i,
    which is the layout of `jax.pmap`: wrapping its result, and passing `tree` to it, copies
    nothing. A `PerReplica` passes through `jax.jit`; `value[i]` is replica i's part, on its device.
    Arguments and errors are those of `DistributedValues`; IndexedSlices are padded to the longest.

    Examples:
      >>> value = PerReplica([{"w": 1.0}, {"w": 2.0}])
      >>> value
      PerReplica({'w': float32[]} on 2: cpu:0, cpu:1)
      >>> value.tree["w"].tolist(), value[1]["w"].tolist()
      ([1.0, 2.0], 2.0)
    """


@final
class Mirrored(DistributedValues, rows=False):
    """One value with a copy on every replica's device: a pytree of replicated arrays.

    Guarantees: the copies are equal bit for bit. The constructor compares them; `from_global`
    trusts the sharding of its arrays. `value[i]` is the copy on replica i's device. Arguments and
    errors are those of `DistributedValues`; copies that differ are refused.

    Examples:
      >>> Mirrored.from_function(lambda i: [1, 2.5])
      Mirrored([int32[], float32[]] on 8: cpu:0, cpu:1, …, cpu:7)
    """


@final
class Uneven(DistributedValues, rows=False, of_parts=True):
    """One value for each replica; their shapes may differ, so no global array can hold them.

    `tree` has the parts of this process's replicas, by replica number. `strategy.gather` accepts
    an `Uneven`, and so does `strategy.reduce` along an axis.
    """

    def _part(self, device: jax.Device) -> Any:
        return self.tree[self.devices.index(device)]

    def _validate(self) -> Self:
        return self

    def _make_global(self) -> PerReplica:
        """Only an `Uneven` has to be converted to global arrays."""
        name, part_of = PerReplica.__name__, self.tree.__getitem__
        return PerReplica._wrap(assemble(name, self.devices, part_of, rows=True, exchange=False))

    def __repr__(self) -> str:
        return f"Uneven({_show(self.tree)} of {len(self.devices)})"


def is_distributed(value: Any) -> bool:
    """A value with a part for every replica is one argument, not a tree."""
    return isinstance(value, DistributedValues)


def _show(tree: Any, skipped: int = 0) -> str:
    """Describe the arrays of a tree, without the first `skipped` dimensions; or count many."""
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) > 16:
        return f"{len(leaves)} arrays"
    return repr(treedef.unflatten(_Plain(f"{x.dtype.name}{[*x.shape[skipped:]]}") for x in leaves))


class _Plain(str):
    """Text whose `repr` has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__
