"""The order of gathers, arithmetic and scatters in both loops of a scan over layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._gradients.layers.exchange import Arrays, Exchange
from jaxcoll._gradients.layers.layer_program import Residuals
from jaxcoll._gradients.proof.retrace import Traced


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of gathers, computation and scatters in both loops."""

    layers: int  # the number of layers
    ahead: int  # the number of layers whose gathers start before the current layer is computed
    unroll: int  # layers in one step of the compiled loop
    program: Traced  # one layer: from carry, parameters and captured values to the next carry
    # By the leaves of the stack that share packs; every replica holds other leaves whole
    gathers: dict[tuple[int, ...], Exchange]
    varying: tuple[str, ...]  # axes that everything in the loops is typed as varying over

    def _fetch(
        self, stack: Arrays, index: Any, after: Mapping[int, jax.Array] = MappingProxyType({})
    ) -> dict[int, jax.Array]:
        """Gather the sharded leaves of one layer."""
        return self._exchange(self.gathers, lambda i: slice_layer(stack[i], index), after)

    def _exchange(
        self,
        exchanges: Mapping[tuple[int, ...], Exchange],
        array: Callable[[int], jax.Array],
        after: Mapping[int, jax.Array],
    ) -> dict[int, jax.Array]:
        """Exchange the array of each leaf, once the arrays in `after` exist."""
        exchanged: dict[int, jax.Array] = {}
        for leaves, exchange in exchanges.items():
            arrays = [*map(array, leaves)]
            # Outside of loops compilers would merge the collectives of two layers, and hide none.
            for other in after.values():
                arrays = [_compat.order_after(x, after=other) for x in arrays]
            exchanged.update(zip(leaves, self._vary(exchange(arrays)), strict=True))
        return exchanged

    def _params(self, stack: Arrays, index: Any, gathered: dict[int, jax.Array]) -> Arrays:
        return [
            gathered[i] if i in gathered else self._vary([slice_layer(x, index)])[0]
            for i, x in enumerate(stack)
        ]

    def _vary(self, arrays: Sequence[Any]) -> list[Any]:
        return [_compat.cast_varying(x, self.varying) for x in arrays]

    def forward(
        self, carry: Arrays, stack: Arrays, captured: Arrays, residuals: Residuals | None = None
    ) -> tuple[Arrays, Arrays, Arrays, list[dict[int, jax.Array]]]:
        """Compute the last carry, all results, the residuals, and the last gathered layers."""
        ahead, program = min(self.ahead, self.layers), (residuals or self).program
        results = range(len(carry), len(self.program.program.out_avals))
        # Positions of the layer's outputs that are stacked over all layers
        stacked = [*results, *(residuals.saved if residuals else ())]

        def step(state: Any, index: Any, fetch: bool) -> Any:
            # The queue has the gathered parameters of this layer and the next ones, oldest first.
            carry, stacks, queue = state
            if fetch:
                queue = [*queue, self._fetch(stack, index + ahead)]
            params = self._params(stack, index, queue[0])
            outs = program.outputs(carry, params, captured)
            stacks = write_layer(stacks, self._vary([outs[k] for k in stacked]), index)
            return outs[: len(carry)], stacks, queue[1:]

        avals: Any = [program.program.out_avals[k] for k in stacked]
        zeros = self._vary([jnp.zeros((self.layers, *a.shape), a.dtype) for a in avals])
        queue: list[dict[int, jax.Array]] = []
        for index in range(ahead):
            queue.append(self._fetch(stack, index, queue[-1] if queue else {}))
        state = carry, zeros, queue
        until = self.layers - ahead
        state = self._loop(lambda s, i: step(s, i, True), state, 0, until, 1)
        last = state[2]
        for index in range(until, self.layers):
            state = step(state, index, False)
        carry, stacks, _ = state
        return carry, stacks[: len(results)], stacks[len(results) :], last

    def backward(
        self,
        residuals: Residuals,
        saved: Arrays,
        last: list[dict[int, jax.Array]],  # the last layers' parameters, gathered
        stack: Arrays,
        captured: Arrays,
        cotangents: Sequence[Arrays],  # of the last carry and of the results, floating arrays only
        # Positions, in the stack and in the captured values, that need a cotangent
        wanted: Sequence[Sequence[int]],
        scatters: Mapping[tuple[int, ...], Exchange],  # by leaves that share packs
    ) -> tuple[Arrays, dict[int, jax.Array], Arrays]:
        """Compute the cotangents of the first carry, of the stack, and of captured values.

        Those of sharded leaves are reduce-scattered one step after their layer; the others are
        this replica's own.
        """
        of_carry, of_results = cotangents
        ahead, top = len(last), self.layers - 1
        cut = {i for leaves in scatters for i in leaves}

        def step(state: Any, index: Any, fetch: bool, after: Any = MappingProxyType({})) -> Any:
            ct, gradients, sums, waiting, queue = state
            # The gather for a layer below and the scatter for the layer above come before this
            # layer's arithmetic, and do not depend on it, so that a compiler can hide both.
            if fetch:
                queue = [*queue, self._fetch(stack, index - ahead)]
            done = self._exchange(scatters, waiting.__getitem__, after) if waiting else {}
            # Of the last layer, the first step, nothing waits: nothing is written above the stack.
            gradients = self._write(gradients, done, index + 1)
            params = self._params(stack, index, queue[0])
            cts = [*ct, *(slice_layer(x, index) for x in of_results)]
            kept = [slice_layer(x, index) for x in saved]
            pulled = iter(residuals.backward(kept, params, captured, cts))
            ct = self._vary([next(pulled) for _ in ct])
            of_layer = self._vary([next(pulled) for _ in wanted[0]])
            # What every layer captures has the sum of their cotangents; the rest of `pulled`.
            sums = [total + x for total, x in zip(sums, pulled, strict=True)]
            both = list(zip(wanted[0], of_layer, strict=True))
            whole = {i: x for i, x in both if i not in cut}
            waiting = {i: x for i, x in both if i in cut}
            return (ct, self._write(gradients, whole, index), sums, waiting, queue[1:]), done

        gradients = {i: self._vary([jnp.zeros_like(stack[i])])[0] for i in wanted[0]}
        sums = [jnp.zeros_like(captured[i]) for i in wanted[1]]
        state = of_carry, gradients, sums, {}, last[::-1]
        state, done = step(state, top, ahead <= top)
        # At layers below `ahead` there is nothing left to fetch.
        state = self._loop(lambda s, i: step(s, i, True)[0], state, top - 1, ahead - 1, -1)
        for index in range(min(ahead, top) - 1, -1, -1):
            state, done = step(state, index, False, done)
        ct, gradients, sums, waiting, _ = state
        done = self._exchange(scatters, waiting.__getitem__, done)
        return ct, self._write(gradients, done, 0), sums

    def _write(
        self, stacks: dict[int, jax.Array], parts: dict[int, jax.Array], index: Any
    ) -> dict[int, jax.Array]:
        """Write one layer's parts into stacked arrays; keep the arrays without a part."""
        placed = write_layer([stacks[i] for i in parts], list(parts.values()), index)
        return {**stacks, **dict(zip(parts, placed, strict=True))}

    def _loop(
        self, step: Callable[[Any, Any], Any], state: Any, start: int, stop: int, stride: int
    ) -> Any:
        indices = jnp.arange(start, stop, stride, dtype=jnp.int32)
        if not len(indices):
            return state
        return lax.scan(lambda s, i: (step(s, i), None), state, indices, unroll=self.unroll)[0]


def slice_layer(x: jax.Array, index: Any) -> jax.Array:
    if isinstance(index, int):
        return lax.index_in_dim(x, index, keepdims=False)
    return lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def write_layer(arrays: Sequence[Any], parts: Sequence[Any], index: Any) -> Arrays:
    return [
        lax.dynamic_update_index_in_dim(x, part, index, 0, allow_negative_indices=False)
        for x, part in zip(arrays, parts, strict=True)
    ]
