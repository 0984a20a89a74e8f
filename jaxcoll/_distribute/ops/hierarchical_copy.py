"""`HierarchicalCopyAllReduce`: within each half of the devices, then between the halves."""

from __future__ import annotations

from jaxcoll._distribute.ops.all_reduce_ops import HIERARCHICAL_COPY, AllReduceCrossDeviceOps


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """All-reduces within each half of the devices, then between the halves.

    Law: every device counts. An even number of devices, from four on, is reduced in two halves
    of neighbours: a reduce-scatter within, an all-reduce of each shard between them, an
    all-gather within. Two devices, and an odd number, which has no halves, take one all-reduce
    over all. (TensorFlow's own, made for the links of a DGX-1, loses the last of an odd number.)

    Args:
      num_packs: as in `NcclAllReduce`.

    Raises:
      ValueError: `num_packs` is no integer, or negative.

    Examples:
      >>> value = PerReplica([1.0, 10.0, 100.0])
      >>> HierarchicalCopyAllReduce().reduce("sum", value, value)[0].tolist()
      111.0
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(HIERARCHICAL_COPY, num_packs)
        self._said = {"num_packs": self._said["num_packs"]}
