"""`NcclAllReduce`: the backend's own all-reduce, which on NVIDIA GPUs is NCCL's."""

from __future__ import annotations

from jaxcoll._distribute.ops.all_reduce_ops import AllReduceCrossDeviceOps


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduces in one compiled program, packed; NCCL carries it on NVIDIA GPUs.

    Law: as of `AllReduceCrossDeviceOps`, which it is with the algorithm "nccl". On other
    platforms their own all-reduce carries it.

    Args:
      num_packs: packs of near-equal bytes to make of all the values together, one for each of
        their dtypes at least; 0: no packing.

    Raises:
      ValueError: `num_packs` is no integer, or negative.

    Examples:
      >>> grads = PerReplica([{"w": [1.0, 2.0], "b": 3.0}, {"w": [5.0, 6.0], "b": 7.0}])
      >>> NcclAllReduce(num_packs=2).reduce("mean", grads, destinations=grads)[1]["b"].tolist()
      5.0
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__("nccl", num_packs)
        self._said = {"num_packs": self._said["num_packs"]}
