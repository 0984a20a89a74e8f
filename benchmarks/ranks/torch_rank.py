"""A rank of PyTorch: `torch.distributed` over Gloo, in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when NumPy and PyTorch are imported

import numpy as np
import torch
import torch.distributed as dist
from ranks.data import Exact, block, leaf
from ranks.rank import Rank, serve

ENTRIES = [["torch flat"], [f"torch buckets@{size}MiB" for size in (1, 4, 16, 25)]]
"""The contestants; of several in one entry, only the fastest in a short trial is measured."""


class TorchRank(Rank):
    """`torch flat`: one `all_reduce` of one array that contains all leaves.

    `torch buckets@4MiB`: the same array in buckets of at most 4 MiB, reduced asynchronously, as
    DistributedDataParallel does with `gradient_as_bucket_view`. Neither copies anything while it is
    timed. For a mean, values are divided before the sum, as in DistributedDataParallel.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._rank, self._n = dist.get_rank(), dist.get_world_size()

    def world(self) -> dict[str, Any]:
        """See `Rank`."""
        library = f"torch {torch.__version__}"
        return {
            "devices": self._n,
            "processes": self._n,
            "device": "cpu",
            "library": library,
            "entries": ENTRIES,
        }

    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """Make one flat array, and a view for each leaf. The leaves must share one dtype."""
        (dtype,) = {x["dtype"] for x in leaves}
        self._dtype = getattr(torch, dtype)
        self._shapes = [tuple(x["shape"]) for x in leaves]
        self._mean = reduce_op == "mean"
        self._mine = self._held(self._rank)
        sizes = [int(torch.Size(shape).numel()) for shape in self._shapes]
        self._flat = torch.empty(sum(sizes), dtype=self._dtype)
        self._leaves = self._flat.split(sizes)
        self._buckets = {}

    def describe(self, name: str) -> dict[str, Any]:
        """See `Rank`."""
        exact = Exact((self._held(replica) for replica in range(self._n)), self._mean)
        self.reset(name)
        self.call(name)
        errors = (exact.error(i, x.float().numpy()) for i, x in enumerate(self._leaves))
        return {"error": max(errors, default=0.0), "operands": len(self._runs(name))}

    def barrier(self) -> None:
        """See `Rank`."""
        dist.barrier()

    def reset(self, name: str) -> None:
        """Overwrite the last call's results with the leaves' values."""
        for i, (into, shape) in enumerate(zip(self._leaves, self._shapes, strict=True)):
            into.copy_(torch.from_numpy(leaf(self._mine, i, shape)).reshape(-1))

    def call(self, name: str) -> None:
        """See `Rank`."""
        pending = []
        for run in self._runs(name):
            if self._mean:
                run.div_(self._n)
            pending.append(dist.all_reduce(run, async_op=True))
        for work in pending:
            work.wait()

    def _held(self, replica: int) -> np.ndarray:
        """Return a replica's block, rounded to the leaves' dtype, as float32."""
        return torch.from_numpy(block(replica)).to(self._dtype).float().numpy()

    def _runs(self, name: str) -> list[Any]:
        """Return the parts of the flat array that are reduced separately."""
        if name not in self._buckets:
            mebibytes = name.partition("@")[2].removesuffix("MiB")
            limit = int(mebibytes) << 20 if mebibytes else self._flat.nbytes
            self._buckets[name] = list(self._cut(limit // self._flat.itemsize))
        return self._buckets[name]

    def _cut(self, most: int) -> Iterator[Any]:
        """Yield runs of whole leaves of at most `most` elements; a larger leaf is its own run."""
        start = stop = 0
        for x in self._leaves:
            if stop > start and stop + x.numel() - start > most:
                yield self._flat[start:stop]
                start = stop
            stop += x.numel()
        if stop > start:
            yield self._flat[start:stop]


def main() -> None:
    """Serve requests; PyTorch reads the world from its environment variables."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    serve(TorchRank)
