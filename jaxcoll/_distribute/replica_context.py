"""The context of a replica function, by which code knows whether it runs inside one."""

from __future__ import annotations

from typing import Any

import jax

from jaxcoll._api.collectives import all_reduce
from jaxcoll._api.halves import all_gather
from jaxcoll._distribute.hints import given
from jaxcoll._distribute.per_replica import is_distributed
from jaxcoll._distribute.replica_axis import AXIS
from jaxcoll._distribute.replica_axis import context_in_trace as context_in_trace
from jaxcoll._plan.options import CommunicationOptions, ReduceOp


class ReplicaContext:
    """The replica that runs a function of `strategy.run`, as `jc.get_replica_context()` gives it.

    Every replica computes with values that are its own. A constant made inside, an array captured
    from outside and an argument that all replicas share each count once per replica, so that a
    SUM of one is R times it and a MEAN is itself; and a gradient taken inside is the gradient of
    this replica's own result, until it is reduced.

    The replicas lie along the mapped axis "replica", which is the `axis_name` of
    `jc.value_and_grad`, `jc.all_reduce` and `jax.lax` here.
    """

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy whose `run` called the function."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run the function; a Python int."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """This replica's number, from 0; a traced int32 scalar, *varying*."""
        self._check_here()
        return jax.lax.axis_index(AXIS)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce every leaf of a pytree over the replicas, as `jc.all_reduce` does.

        The options are over those of the strategy and of `run`; `timeout_seconds` bounds the call
        of `run` that this is a part of. `experimental_hints` is their older name. The cotangent is
        the `all_reduce` of the replicas' cotangents with the same op.

        Returns:
          A pytree like `value`, *invariant*: as a result of the function it is a `Mirrored`.

        Raises:
          RuntimeError: the function that this context belongs to has returned.
          ValueError: a leaf cannot be reduced (its path is named), or an argument is invalid.
        """
        self._check_here()
        check_own("all_reduce", value)
        options = given(options, experimental_hints)
        return all_reduce(reduce_op, value, AXIS, options=options, invariant="replicated")

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Join every leaf of a pytree with those of the other replicas, as `jc.all_gather` does.

        The arrays are alike on all replicas: what a compiled program holds has one shape. Parts of
        unequal sizes are gathered between programs, with `strategy.gather`. The options are as in
        `all_reduce`. The cotangent is this replica's slice of the summed cotangents.

        Returns:
          A pytree like `value`, with R times the size along `axis`, *invariant*.

        Raises:
          RuntimeError: the function that this context belongs to has returned.
          NotImplementedError: a leaf is an `IndexedSlices`.
          ValueError: a leaf has no such dimension, or an argument is invalid.
        """
        self._check_here()
        check_own("all_gather", value)
        return all_gather(value, AXIS, axis=axis, options=options)

    def __repr__(self) -> str:
        return f"ReplicaContext(num_replicas_in_sync={self.num_replicas_in_sync})"

    def _check_here(self) -> None:
        if get_replica_context() is not self:
            raise RuntimeError(
                "This ReplicaContext was used outside the function that `strategy.run` called, "
                "where it has no replica. Call `jc.get_replica_context()` inside "
                "the function; between programs use `strategy.reduce` and `strategy.gather`."
            )


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica function that is being traced.

    Returns:
      A `ReplicaContext` inside a function that `strategy.run` calls; None elsewhere, where
      `strategy.run`, `reduce` and `gather` may be called: `get_replica_context().all_reduce` is an
      AttributeError of None there, and `strategy.reduce` is meant.

    Examples:
      >>> get_replica_context() is None
      True
    """
    return context_in_trace.value


def check_own(caller: str, value: Any) -> None:
    """Refuse a value of all replicas where a replica's own is meant."""
    for leaf in jax.tree.leaves(value, is_leaf=is_distributed):
        if is_distributed(leaf):
            raise ValueError(
                f"`{caller}` deals with what one replica holds; it has a {type(leaf).__name__}, "
                "which holds the values of all. If the function has it from outside, pass it to "
                "`run` in `args`: each replica then sees its own part."
            )
