"""A rank of TensorFlow: RING over several workers."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from ranks.data import Exact, block, leaf
from ranks.rank import Rank, serve

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import tensorflow as tf


class TensorFlowRank(Rank):
    """`tensorflow ring@32MB`: `ReplicaContext.all_reduce` of the whole list in a `tf.function`.

    The values are in variables that each replica reads, so that no argument is passed. On CPU the
    call returns when its results are ready.
    """

    def __init__(self) -> None:
        self._options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=32 << 20,
            implementation=tf.distribute.experimental.CommunicationImplementation.RING,
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self._options
        )
        self._n = self._strategy.num_replicas_in_sync
        self._rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        self._barrier = self._step([self._variable(np.ones(1, np.float32))], "sum")

    def world(self) -> dict[str, Any]:
        """See `Rank`."""
        library = f"tensorflow {tf.__version__}"
        return {
            "devices": self._n,
            "processes": self._n,
            "device": "cpu",
            "library": library,
            "entries": [["tensorflow ring@32MB"]],
        }

    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """See `Rank`."""
        self._leaves, self._mean = leaves, reduce_op == "mean"
        self._variables = []
        for i, x in enumerate(leaves):
            values = leaf(self._held(self._rank, x["dtype"]), i, tuple(x["shape"]))
            self._variables.append(self._variable(values))
        self._reduce = self._step(self._variables, reduce_op)
        self._reduce()  # trace it now, as the other libraries compile

    def describe(self, name: str) -> dict[str, Any]:
        """See `Rank`."""
        errors = []
        exact: dict[str, Exact] = {}
        for i, (x, got) in enumerate(zip(self._leaves, self._reduce(), strict=True)):
            if x["dtype"] not in exact:
                blocks = (self._held(replica, x["dtype"]) for replica in range(self._n))
                exact[x["dtype"]] = Exact(blocks, self._mean)
            errors.append(exact[x["dtype"]].error(i, got.numpy()))
        return {"error": max(errors, default=0.0)}

    def barrier(self) -> None:
        """See `Rank`."""
        self._barrier()

    def call(self, name: str) -> None:
        """See `Rank`."""
        self._reduce()

    def _held(self, replica: int, dtype: str) -> np.ndarray:
        return block(replica).astype(tf.as_dtype(dtype).as_numpy_dtype)

    def _variable(self, values: np.ndarray) -> Any:
        """Return a variable with `values` on this rank; its initial value is the first rank's."""
        with self._strategy.scope():
            variable = tf.Variable(
                tf.constant(values),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        variable.values[0].assign(values)
        return variable

    def _step(self, variables: list[Any], reduce_op: str) -> Any:
        op = tf.distribute.ReduceOp[reduce_op.upper()]

        def replica() -> Any:
            values = [variable.read_value() for variable in variables]
            context = tf.distribute.get_replica_context()
            return context.all_reduce(op, values, options=self._options)

        return tf.function(lambda: self._strategy.run(replica))


def main() -> None:
    """Serve requests; TensorFlow reads the cluster from TF_CONFIG."""
    serve(TensorFlowRank)
